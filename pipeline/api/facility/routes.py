"""GET /api/v1/facility: units of cooling and power with their values, what depends on them and predicted throttling."""

from __future__ import annotations

from typing import Annotated, Any

import duckdb
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.facility.balance import SUPPLY_COLUMNS, add_balance, find_uneven_supplies
from pipeline.api.facility.prediction import BUCKET, COLUMNS, WINDOW, find_margins, predict, read_temperatures
from pipeline.api.facility.units import KINDS, LISTED, find_below, list_units
from pipeline.api.models import Time
from pipeline.api.service import ApiContext, get_context, json_response
from pipeline.model.records import SECOND, iso
from pipeline.model.topology import kind_of

facility_router = APIRouter(prefix="/api/v1/facility")
KEPT, KEPT_RATES = 5 * SECOND, 10 * SECOND
"""How long the values, and the warming rates, are kept (us). Chosen: a refresh, and one point of a line."""
MAX_UNITS = 2000
"""Most units of an answer. Chosen: the cooling and power units of 12,500 nodes, about 1,500."""


class Strict(BaseModel):
    """A model without other fields."""

    model_config = ConfigDict(extra="forbid")


class Names(Strict):
    """How many there are, and the first names."""

    count: int
    first: list[str]


class Hanging(Strict):
    """What depends on a unit."""

    racks: Names
    nodes: Names
    jobs: Names


class Prediction(Strict):
    """When the first GPU behind a cooling unit reaches the limit that it reports.

    minutes: null if it cannot be predicted; `reason` says why.  left: K to the limit.  rate: how fast the GPUs that are
    followed warm (K/min), with its standard `error`, over the last `over_s`.  gpus: how many are followed, those with
    the least margin.
    """

    minutes: float | None
    gpu: str | None
    temperature: float | None
    left: float | None
    rate: float | None
    error: float | None
    over_s: float | None
    gpus: int
    reason: str


class Balance(Strict):
    """How evenly the power of a PDU is drawn.

    phases: deviation of a phase's current from the mean of all, as a share of it, in the worst `circuit`.  share: of
    the power of all `feeds` PDUs that supply the same racks. Each is null if it is not measured, or there is nothing
    to compare with.
    """

    phases: float | None
    circuit: str | None
    share: float | None
    feeds: int


class UnevenNode(Strict):
    """A node whose power supplies share its load unevenly. supply: the one with the most, `excess` above their mean.
    loads: supply -> W."""

    node: str
    supply: str
    excess: float
    loads: dict[str, float]


class Supplies(Strict):
    """The load of the power supplies of nodes. nodes: those with two or more that report it.  uneven: those with a
    supply more than `limit` above the mean of its node; `worst` names at most 10."""

    nodes: int
    uneven: int
    limit: float
    worst: list[UnevenNode]


class Unit(Strict):
    """One unit. values: signal -> current value, states in words.  abnormal: signals whose state is not normal."""

    entity: str
    kind: str
    parents: list[str]
    state: str
    simulated: bool
    last_seen: Time | None
    values: dict[str, Any]
    abnormal: list[str]
    incidents: list[str]
    below: Hanging
    throttle: Prediction | None
    balance: Balance | None


class Facility(Strict):
    """Units, the worst first. counts: kind -> state -> number.  more: units that are left out.

    window_s, point_s: time over which warming rates are measured, and the length of a point.
    """

    as_of: Time
    units: list[Unit]
    more: int
    counts: dict[str, dict[str, int]]
    supplies: Supplies
    window_s: float
    point_s: float


_STATES = ("critical", "degraded", "watch", "no_data", "ok")


@facility_router.get("", response_model=Facility)
def facility(
    request: Request,
    within: Annotated[str | None, Query(max_length=300, description="a unit: it and its parts, of all kinds")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_UNITS)] = MAX_UNITS,
) -> Response:
    """Units of cooling and power, the worst first; parts of PDUs and shelves only with `within`."""
    service = get_context(request)
    every: list[dict[str, Any]] = service.remember("facility", service.now() // KEPT, lambda: _find_units(service))
    if within is None:
        chosen = [u for u in every if u["kind"] in LISTED]
    else:
        if kind_of(within) not in KINDS:
            raise HTTPException(400, f"within = {within!r}: expected one of {', '.join(KINDS)}")
        parts = {within, *service.topology_copy.get().descendants(within)}
        chosen = [u for u in every if u["entity"] in parts]
        if not any(u["entity"] == within for u in chosen):
            raise HTTPException(404, f"unit {within!r} is not known")
    counts: dict[str, dict[str, int]] = {}
    for unit in chosen:
        of_kind = counts.setdefault(unit["kind"], {})
        of_kind[unit["state"]] = of_kind.get(unit["state"], 0) + 1
    ordered = sorted(chosen, key=_order)
    return json_response(
        {
            "as_of": iso(service.now()),
            "units": ordered[:limit],
            "more": max(0, len(ordered) - limit),
            "counts": counts,
            "supplies": service.remember("facility supplies", service.now() // KEPT, lambda: _find_supplies(service)),
            "window_s": WINDOW / SECOND,
            "point_s": BUCKET / SECOND,
        }
    )


def _order(unit: dict[str, Any]) -> tuple[Any, ...]:
    throttle = unit["throttle"]
    minutes = throttle["minutes"] if throttle is not None and throttle["minutes"] is not None else 1e9
    return _STATES.index(unit["state"]), minutes, KINDS.index(unit["kind"]), unit["entity"]


def _find_units(service: ApiContext) -> list[dict[str, Any]]:
    backend, now = service.backend, service.now()
    topology = service.topology_copy.get()
    below = service.remember("facility below", topology.parents, lambda: find_below(topology))
    incidents = service.remember("facility incidents", backend.read_revision(), lambda: _list_open(service))
    units = list_units(backend.read_current, backend.devices, topology, below, incidents, now)
    add_balance(units, topology)
    margins = find_margins(backend.read_current("gpu", COLUMNS), backend.devices, topology, now)
    gpus = sorted({margin.gpu for found in margins.values() for margin in found})
    lines = service.remember(
        "facility rates",
        now // KEPT_RATES,
        lambda: service.reads.run(lambda cursor: read_temperatures(cursor, gpus, now)),
    )
    for unit in units:
        known = margins.get(unit["entity"])
        unit["throttle"] = None if known is None else predict(known, lines)
    return units


def _find_supplies(service: ApiContext) -> dict[str, Any]:
    backend = service.backend
    current = backend.read_current("psu", SUPPLY_COLUMNS)
    return find_uneven_supplies(current, backend.devices, service.topology_copy.get(), service.now())


_OPEN = "SELECT id, severity, cause, members FROM incidents WHERE state <> 'resolved' ORDER BY opened, id"


def _list_open(service: ApiContext) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns (id, severity, entities) of the unresolved incidents."""

    def read(cursor: duckdb.DuckDBPyConnection) -> list[tuple[str, str, tuple[str, ...]]]:
        rows = cursor.execute(_OPEN).fetchall()
        return [(identity, severity, tuple({cause, *members})) for identity, severity, cause, members in rows]

    with service.cursor() as cursor:
        return read(cursor)
