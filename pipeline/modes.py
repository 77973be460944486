"""[[modes]]: what a detector may do, by scope. Only the words; pipeline/voice.py applies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.settings import wants

Mode = Literal["record", "notify", "act"]
ANY = "*"
_SCOPE = wants("an entity such as rack:r12, or * for everywhere", lambda v: v == ANY or ":" in v.strip(":"))


@dataclass(frozen=True)
class ModeRule:
    """What a detector (* for all) may do on a scope (an entity and all below it, * for everywhere)."""

    mode: Mode
    detector: str = ANY
    scope: str = field(default=ANY, metadata=_SCOPE)
