"""[[impact.objectives]] and the prices of energy: what a fleet, a tenant or a job is promised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.config.settings import constraint

SCOPES = ("fleet", "account", "job")
_TARGET = constraint("a share above 0 and below 1, such as 0.95", lambda value: 0 < value < 1)
_DAYS = constraint("days, 1 to 90", lambda value: 1 <= value <= 90)


def _is_scope(text: str) -> bool:
    kind, _, name = text.partition(":")
    return text == "fleet" or (kind in SCOPES[1:] and bool(name))


_SCOPE = constraint("fleet, account:NAME, job:NAME, or account:* and job:* for each of them", _is_scope)


@dataclass(frozen=True)
class Objective:
    """One objective. goodput: share of the allocated GPU-hours that made progress. availability: of the node-hours in
    service.

    scope: `fleet`, `account:NAME` (a Slurm account or a Kubernetes namespace), `job:NAME`; NAME `*`: each one.
    days: length of the window, which ends now.   page: a fast burn pages; false: it opens a ticket.
    """

    name: str
    kind: Literal["goodput", "availability"] = "goodput"
    scope: str = field(default="fleet", metadata=_SCOPE)
    target: float = field(default=0.95, metadata=_TARGET)
    days: float = field(default=30.0, metadata=_DAYS)
    page: bool = False
