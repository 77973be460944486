"""[topology]: where the topology of the site is read from."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError

OWN = "file"
"""Name of [topology] path as a source."""
AGENTS = "agents"
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_NAME = constraint(
    "a name of letters, digits, _ and -, other than 'agents'",
    lambda value: not value or (_KIND.fullmatch(value) is not None and value != AGENTS),
)
_KINDS = constraint("kinds, such as 'rack'", lambda table: all(map(_KIND.fullmatch, table.values())))


@dataclass(frozen=True)
class TopologySource:
    """[[topology.sources]]: a file, or a folder of files, that describes a part of the site.

    name: in answers; by default the format.  kinds: renames kinds.  labels: Kubernetes label -> kind.
    roles: NetBox role -> kind.  short_names: names of nodes end before the first dot.
    """

    format: typing.Literal["toml", "csv", "netbox", "slurm", "slurm_yaml", "kubernetes", "ibnetdiscover", "lldp"]
    path: Path
    name: str = field(default="", metadata=_NAME)
    kinds: Mapping[str, str] = field(default_factory=dict, metadata=_KINDS)
    labels: Mapping[str, str] = field(default_factory=dict, metadata=_KINDS)
    roles: Mapping[str, str] = field(default_factory=dict, metadata=_KINDS)
    short_names: bool = False


@dataclass(frozen=True)
class TopologyFiles:
    """[topology]: a topology.toml, and further sources; the first that names a parent of a kind decides."""

    path: Path | None = None
    sources: tuple[TopologySource, ...] = ()

    def __post_init__(self) -> None:
        names = [source.name or source.format for source in self.sources]
        names += [OWN] if self.path is not None else []
        if again := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"sources: two are named {again[0]!r}; expected a different name for each")
