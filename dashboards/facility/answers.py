"""Response of GET /api/v1/facility as types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.answers import NODE_STATES, parse_time, require_list
from pipeline.model.records import from_iso

Value = float | str


@dataclass(frozen=True, slots=True)
class Hanging:
    """How many racks, nodes or jobs hang on a unit, and the first of them."""

    count: int
    first: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """When the first GPU reaches its limit. minutes: None if `reason` says why not. left: K; rate, error: K/min, over
    the last `over_s`."""

    minutes: float | None
    gpu: str | None
    temperature: float | None
    left: float | None
    rate: float | None
    error: float | None
    gpus: int
    reason: str
    over_s: float | None = None


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly the power of a PDU is drawn: over phases, and over the feeds of the same racks. None: not known."""

    phases: float | None
    circuit: str | None
    share: float | None
    feeds: int


@dataclass(frozen=True, slots=True)
class UnevenNode:
    """A node whose power supplies share its load unevenly. excess: of `supply` over their mean.  loads: W."""

    node: str
    supply: str
    excess: float
    loads: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Supplies:
    """The load of the power supplies of nodes: nodes where it is known, where it is uneven, and the worst."""

    nodes: int
    uneven: int
    limit: float
    worst: tuple[UnevenNode, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of cooling or power."""

    entity: str
    kind: str
    parents: tuple[str, ...]
    state: str
    simulated: bool
    last_seen: int | None
    values: Mapping[str, Value]
    abnormal: tuple[str, ...]
    incidents: tuple[str, ...]
    racks: Hanging
    nodes: Hanging
    jobs: Hanging
    throttle: Prediction | None
    balance: Balance | None

    def number(self, signal: str) -> float | None:
        """Returns a measured value, None without one."""
        value = self.values.get(signal)
        return value if isinstance(value, float) else None


@dataclass(frozen=True, slots=True)
class Facility:
    """Units, the worst first; counts: kind -> state -> number. supplies: None if the API does not compare them."""

    as_of: int
    units: tuple[Unit, ...]
    more: int
    counts: Mapping[str, Mapping[str, int]]
    window_s: float
    point_s: float
    supplies: Supplies | None


def parse_facility(table: Mapping[str, Any]) -> Facility:
    """Parses GET /api/v1/facility. An unknown state is `no_data`, never `ok`."""
    return Facility(
        as_of=from_iso(table["as_of"]),
        units=tuple(_unit(u) for u in require_list(table["units"])),
        more=int(table["more"]),
        counts={str(k): {str(s): int(n) for s, n in c.items()} for k, c in table["counts"].items()},
        window_s=float(table["window_s"]),
        point_s=float(table["point_s"]),
        supplies=_supplies(table.get("supplies")),
    )


def _supplies(row: Mapping[str, Any] | None) -> Supplies | None:
    if row is None:
        return None
    worst = tuple(
        UnevenNode(
            str(w["node"]), str(w["supply"]), float(w["excess"]), {str(k): float(v) for k, v in w["loads"].items()}
        )
        for w in require_list(row["worst"])
    )
    return Supplies(int(row["nodes"]), int(row["uneven"]), float(row["limit"]), worst)


def _unit(row: Mapping[str, Any]) -> Unit:
    return Unit(
        entity=str(row["entity"]),
        kind=str(row["kind"]),
        parents=_texts(row["parents"]),
        state=row["state"] if row["state"] in NODE_STATES else "no_data",
        simulated=bool(row["simulated"]),
        last_seen=parse_time(row["last_seen"]),
        values={str(k): v if isinstance(v, str) else float(v) for k, v in row["values"].items()},
        abnormal=_texts(row["abnormal"]),
        incidents=_texts(row["incidents"]),
        racks=_hanging(row["below"]["racks"]),
        nodes=_hanging(row["below"]["nodes"]),
        jobs=_hanging(row["below"]["jobs"]),
        throttle=None if row["throttle"] is None else Prediction(**row["throttle"]),
        balance=None if row.get("balance") is None else Balance(**row["balance"]),
    )


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, require_list(value)))


def _hanging(row: Mapping[str, Any]) -> Hanging:
    return Hanging(int(row["count"]), _texts(row["first"]))
