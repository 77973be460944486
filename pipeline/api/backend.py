"""What the API needs of the pipeline service: a cursor to read with, what persons may say, and how it feels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict

import duckdb

from pipeline.model.topology import Topology


class Sources(TypedDict):
    """How many agents are known, how many of them are silent, and what was lost or unreadable so far."""

    agents: int
    silent: int
    gaps: int
    dead_letters: int


class Health(TypedDict):
    """Where the pipeline stands. `watermark` is in microseconds; `lag_s` is the age of the oldest unread input.

    stalled: nothing new would be found, for one of the reasons in `unready`: no telemetry comes in, or none is judged.
    """

    watermark: int | None
    backlog: bool
    lag_s: float | None
    stalled: bool
    sources: Sources


class Backend(Protocol):
    """The pipeline service as the API sees it; every method may be called from several threads at once.

    Notes and mutes raise KeyError for an unknown id and return the incident or mute as its `as_json` writes it.
    `counters` maps Prometheus names to values; a name may carry labels: `fleetpulse_rows_total{class="gpu"}`.
    """

    @property
    def topology(self) -> Topology:
        """The one that the pipeline judges by, inventory and [topology] file together; the API only reads `parents`."""
        ...

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A new cursor on the store; the caller closes it."""
        ...

    def acknowledge(self, incident: str, user: str, comment: str) -> Mapping[str, Any]: ...

    def comment(self, incident: str, user: str, comment: str) -> Mapping[str, Any]: ...

    def resolve(self, incident: str, user: str, comment: str) -> Mapping[str, Any]: ...

    def not_a_fault(self, incident: str, user: str, comment: str) -> Mapping[str, Any]: ...

    def mute(self, detector: str, scope: str, seconds: float, reason: str, user: str) -> Mapping[str, Any]: ...

    def unmute(self, mute: str, user: str) -> Mapping[str, Any]: ...

    def detectors(self) -> Sequence[Mapping[str, Any]]:
        """One row per detector as `models.Detector` has it."""
        ...

    def modes(self) -> Sequence[Mapping[str, Any]]:
        """The rules of [[modes]] in their order."""
        ...

    def health(self) -> Health: ...

    def unready(self) -> list[str]:
        """Reasons why the pipeline does not do its work now; empty when it does."""
        ...

    def counters(self) -> Mapping[str, float]: ...
