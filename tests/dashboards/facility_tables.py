"""Answers of GET /api/v1/facility for tests: a CDU that fails, one that is well, PDUs, and leak detectors."""

from __future__ import annotations

from typing import Any

from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW, series_table

HOSTILE = '<b>c3</b> "Ω" 節'


def names(kind: str, count: int, name: str = "") -> dict[str, Any]:
    """Returns how many of a kind hang on a unit, with the first."""
    return {"count": count, "first": [f"{kind}:{name or kind[0]}{i:03}" for i in range(min(count, 24))]}


def unit(entity: str, state: str = "ok", racks: int = 2, **changes: Any) -> dict[str, Any]:
    """Returns one unit."""
    return {
        "entity": entity,
        "kind": entity.partition(":")[0],
        "parents": [],
        "state": state,
        "simulated": True,
        "last_seen": iso(NOW - 3 * SECOND),
        "values": {},
        "abnormal": [],
        "incidents": [],
        "below": {"racks": names("rack", racks), "nodes": names("node", racks * 16), "jobs": names("job", 1)},
        "throttle": None,
        "balance": None,
        **changes,
    }


def cooling_values(flow: float, back: float, speed: float) -> dict[str, Any]:
    """Returns the values of a CDU."""
    return {
        "coolant.flow": flow,
        "coolant.supply_temperature": 32.4,
        "coolant.return_temperature": back,
        "coolant.pressure": 1.98,
        "pump.speed": speed,
        "coolant.status": "ok",
        "reservoir.level": 0.85,
    }


def prediction(**changes: Any) -> dict[str, Any]:
    """Returns a prediction of 9 minutes."""
    own = {"minutes": 9.2, "gpu": "gpu:n042.3", "temperature": 81.0, "left": 6.0, "rate": 0.65, "error": 0.02}
    return {**own, "over_s": 600.0, "gpus": 12, "reason": "", **changes}


def units() -> list[dict[str, Any]]:
    """Returns all units, the worst first."""
    nothing = {"minutes": None, "rate": None, "error": None, "reason": "its GPUs do not warm"}
    below = {"racks": names("rack", 1), "nodes": names("node", 16), "jobs": names("job", 0)}
    return [
        unit("cdu:c2", "critical", values=cooling_values(193.4, 50.3, 1063.2), incidents=["A1"], throttle=prediction()),
        unit(
            "pdu:p7",
            "degraded",
            values={"power.draw": 191_000.0, "power.limit": 200_000.0, "power.breaker": "tripped"},
            abnormal=["power.breaker"],
            incidents=["B2"],
            below=below,
        ),
        unit("cdu:c3", "no_data", last_seen=None),
        unit("cdu:c1", values=cooling_values(328.5, 39.7, 3205.3), throttle=prediction(**nothing)),
        unit(f"loop:{HOSTILE}", values=cooling_values(331.0, 39.9, 3201.0)),
        *(
            unit(f"pdu:p{i}", values={"power.draw": 105_000.0 + i, "power.voltage": 415.2}, below=below)
            for i in range(6)
        ),
        unit(
            "leak_detector:r12",
            "degraded",
            values={"leak.state": "warning"},
            abnormal=["leak.state"],
            parents=["cdu:c2"],
        ),
        unit("leak_detector:r13", values={"leak.state": "ok"}),
    ]


def facility_table(found: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """Returns GET /api/v1/facility."""
    listed = units() if found is None else found
    counts: dict[str, dict[str, int]] = {}
    for one in listed:
        of_kind = counts.setdefault(one["kind"], {})
        of_kind[one["state"]] = of_kind.get(one["state"], 0) + 1
    own = {"as_of": iso(NOW), "units": listed, "more": 0, "counts": counts, "window_s": 600.0, "point_s": 30.0}
    return {**own, "supplies": supplies(), **changes}


def supplies() -> dict[str, Any]:
    """Returns the supplies of 64 nodes, of which one lost a supply."""
    loads = {f"psu:n042.{i}": 0.0 if i == 2 else 1600.0 for i in range(4)}
    worst = {"node": "node:n042", "supply": "psu:n042.0", "excess": 1 / 3, "loads": loads}
    return {"nodes": 64, "uneven": 1, "limit": 0.2, "worst": [worst]}


def answers() -> dict[str, Any]:
    """Returns the answers by path."""
    return {"facility": facility_table(), "series": series_table("cdu:c2", "coolant.flow")}
