"""The whole answer of a moment: objectives, losses by cause, energy, time to failure, nodes, spares; also of a week."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from pipeline.config.objectives import Objective
from pipeline.config.sections import Config, Impact
from pipeline.model.records import SECOND, iso
from pipeline.objectives import failures
from pipeline.objectives.budget import DAY, Standing, judge
from pipeline.objectives.loss_energy import EnergyRates, Loss, find_rates
from pipeline.objectives.outages import NodeOf, read_outages
from pipeline.objectives.published import PUBLISHED
from pipeline.objectives.recorder import IDLE
from pipeline.objectives.usage import UsageReader, read_start

HOUR = 3600 * SECOND
MOST_ROWS = 100
"""Rows of a list by job or tenant. Chosen."""
FLEET: tuple[Objective, ...] = (
    Objective("fleet goodput", "goodput", "fleet", 0.95),
    Objective("fleet availability", "availability", "fleet", 0.99),
)
"""Objectives of a site that configured none: shown, and never alerting. Chosen: published fleets have 90 to 97 %."""
_LOST = """
SELECT i.detector, split_part(i.cause, ':', 1), l.job, a.account, sum(l.gpu_hours), count(DISTINCT l.incident)
FROM job_loss l LEFT JOIN incidents i ON i.id = l.incident
LEFT JOIN (SELECT job, arg_max(account, started) AS account FROM jobs GROUP BY job) a ON a.job = l.job
WHERE l.time >= make_timestamptz($1::BIGINT) AND l.time < make_timestamptz($2::BIGINT) GROUP BY ALL
"""
_ENERGY = """
SELECT e.job, a.account, a.name, sum(e.kwh), sum(e.gpu_hours)
FROM job_energy e LEFT JOIN (SELECT job, arg_max(account, started) AS account, arg_max(name, started) AS name
                             FROM jobs GROUP BY job) a USING (job)
WHERE e.hour >= make_timestamptz($1::BIGINT) AND e.hour < make_timestamptz($2::BIGINT) GROUP BY ALL ORDER BY 4 DESC
"""
_COUNTS = """
SELECT count(*) FILTER (onset >= make_timestamptz($1::BIGINT)),
       count(*) FILTER (onset >= make_timestamptz($1::BIGINT) AND severity = 'page'),
       count(*) FILTER (resolved >= make_timestamptz($1::BIGINT)),
       count(*) FILTER (resolved IS NULL OR resolved >= make_timestamptz($2::BIGINT))
FROM incidents WHERE onset < make_timestamptz($2::BIGINT)
  AND coalesce(json_extract_string(life, '$.merged_into'), '') = ''
"""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the pipeline knows of the fleet. nodes: names without `node:`."""

    nodes: Sequence[str]
    node_of: NodeOf
    simulated: bool = False


def judge_objectives(
    cursor: duckdb.DuckDBPyConnection, config: Config, fleet: Fleet, now: int
) -> list[tuple[Objective, str, Standing]]:
    """Returns each objective with its scope and standing; those of the configuration, else FLEET."""
    chosen = config.impact.objectives or FLEET
    longest = max(round(objective.days * DAY) for objective in chosen)
    reader = _reader(cursor, fleet, now - longest, now)
    found = []
    for objective in chosen:
        window = round(objective.days * DAY)
        for scope in reader.list_scopes(objective, now - window, now):
            measure = reader.measure(objective.kind, scope)
            found.append((objective, scope, judge(objective.target, window, now, measure)))
    return found


def _reader(cursor: duckdb.DuckDBPyConnection, fleet: Fleet, start: int, end: int) -> UsageReader:
    outages = read_outages(cursor, start, end, fleet.node_of)
    return UsageReader(cursor, outages, fleet.nodes, read_start(cursor, end))


def summarize(cursor: duckdb.DuckDBPyConnection, config: Config, fleet: Fleet, start: int, end: int) -> dict[str, Any]:
    """Returns the report of a time in the form of the API. Failure rates are of [store] history_days, not of a week."""
    impact = config.impact
    standings = [
        {
            "name": objective.name,
            "kind": objective.kind,
            "scope": scope,
            "target": objective.target,
            "days": objective.days,
            "configured": bool(impact.objectives),
            **standing.as_json(),
        }
        for objective, scope, standing in judge_objectives(cursor, config, fleet, end)
    ]
    lost = cursor.execute(_LOST, [start, end]).fetchall()
    energy = cursor.execute(_ENERGY, [start, end]).fetchall()
    lost_hours = _sum_by_job(lost)
    rates = find_rates(((j, raw * impact.energy_factor, h) for j, _, _, raw, h in energy if j != IDLE))
    reader = _reader(cursor, fleet, start, end)
    usage = {kind: reader.measure(kind, "fleet")(start, end) for kind in ("goodput", "availability")}
    opened, pages, resolved, unresolved = cursor.execute(_COUNTS, [start, end]).fetchone() or (0, 0, 0, 0)
    return {
        "from": iso(start),
        "to": iso(end),
        "simulated": fleet.simulated,
        "nodes": len(fleet.nodes),
        "goodput": usage["goodput"].achieved,
        "gpu_hours": round(usage["goodput"].total, 3),
        "measured_share": round(usage["goodput"].measured, 4),
        "availability": usage["availability"].achieved,
        "incidents": {"opened": opened, "pages": pages, "resolved": resolved, "unresolved": unresolved},
        "objectives": standings,
        "lost": list_losses(lost, impact, rates),
        "energy": list_energy(energy, impact, lost_hours, rates),
        **read_reliability(cursor, config, fleet, end),
    }


def _sum_by_job(lost: Sequence[tuple[Any, ...]]) -> dict[str, float]:
    """Returns job -> lost GPU-hours, of rows of _LOST."""
    hours: dict[str, float] = {}
    for _detector, _kind, job, _account, own, _incidents in lost:
        hours[job] = hours.get(job, 0.0) + own
    return hours


def list_losses(rows: Sequence[tuple[Any, ...]], impact: Impact, rates: EnergyRates) -> dict[str, Any]:
    """Returns lost GPU-hours by cause, tenant and job, the largest first, with energy and money of each."""
    sums: dict[str, dict[str, Loss]] = {"cause": {}, "account": {}, "job": {}}
    counts: dict[str, int] = {}
    whole = Loss()
    for detector, _kind, job, account, hours, incidents in rows:
        cause = "unknown" if detector is None else failures.name_cause(detector)
        counts[cause] = counts.get(cause, 0) + incidents
        for name, key in (("cause", cause), ("account", account or "none"), ("job", job)):
            sums[name][key] = sums[name].get(key, Loss()).plus(hours, rates.of(job))
        whole = whole.plus(hours, rates.of(job))
    by = {
        name: [
            {
                name: key,
                "gpu_hours": round(loss.hours, 3),
                "share": round(loss.hours / whole.hours, 4) if whole.hours else None,
            }
            | _price_loss(loss, impact)
            | ({"incidents": counts[key]} if name == "cause" else {})
            for key, loss in sorted(found.items(), key=lambda item: (-item[1].hours, item[0]))[:MOST_ROWS]
            if abs(loss.hours) > 5e-4
        ]
        for name, found in sums.items()
    }
    return {"gpu_hours": round(whole.hours, 3), **_price_loss(whole, impact), **{f"by_{n}": r for n, r in by.items()}}


def _price_loss(loss: Loss, impact: Impact) -> dict[str, Any]:
    """Returns what lost GPU-hours used and cost: energy at the mean power of their job."""
    priced, used = impact.price_per_gpu_hour > 0, loss.kwh
    return {
        "kwh": None if used is None else round(used, 3),
        "cost": round(loss.hours * impact.price_per_gpu_hour, 2) if priced else None,
        "currency": impact.currency if priced else None,
        "kg_co2e": round(used * impact.carbon_kg_per_kwh, 3) if used is not None and impact.carbon_kg_per_kwh else None,
    }


def list_energy(
    rows: Sequence[tuple[Any, ...]], impact: Impact, lost_hours: Mapping[str, float], rates: EnergyRates
) -> dict[str, Any]:
    """Returns the energy of all GPUs and of each job, of lost hours, and its money and carbon.

    rows: of _ENERGY.  kwh has [impact] energy_factor in it.   gpu_hours: for which the energy of jobs was measured.
    lost_kwh: the energy that a job used while it lost time, whether it was measured then or not.
    """
    jobs = []
    kwh = sum(row[3] for row in rows) * impact.energy_factor
    idle = sum(row[3] for row in rows if row[0] == IDLE) * impact.energy_factor
    hours = sum(row[4] for row in rows if row[0] != IDLE)
    lost = sum(lost * (rates.of(job) or 0.0) for job, lost in lost_hours.items())
    for job, account, name, raw, own_hours in rows:
        if job == IDLE:
            continue
        own, wasted = raw * impact.energy_factor, max(0.0, lost_hours.get(job, 0.0)) * (rates.of(job) or 0.0)
        shown = {"job": job, "account": account or "", "name": name or "", "gpu_hours": round(own_hours, 3)}
        jobs.append(shown | {"kwh": round(own, 3), "lost_kwh": round(wasted, 3)} | _price_energy(own, impact))
    return {
        "kwh": round(kwh, 3),
        "idle_kwh": round(idle, 3),
        "lost_kwh": round(lost, 3),
        "gpu_hours": round(hours, 3),
        "kwh_per_gpu_hour": round((kwh - idle) / hours, 5) if hours else None,
        "factor": impact.energy_factor,
        **_price_energy(kwh, impact),
        "lost": _price_energy(lost, impact),
        "by_job": jobs[:MOST_ROWS],
    }


def _price_energy(kwh: float, impact: Impact) -> dict[str, Any]:
    return {
        "cost": round(kwh * impact.price_per_kwh, 2) if impact.price_per_kwh else None,
        "currency": impact.currency if impact.price_per_kwh else None,
        "kg_co2e": round(kwh * impact.carbon_kg_per_kwh, 3) if impact.carbon_kg_per_kwh else None,
    }


def read_reliability(cursor: duckdb.DuckDBPyConnection, config: Config, fleet: Fleet, now: int) -> Mapping[str, Any]:
    """Returns time to failure by type and cause beside published fleets', nodes by frailty, burn-ins and spares."""
    start = max(now - round(config.store.history_days * DAY), read_start(cursor, now))
    hours = (now - start) / HOUR
    present = frozenset(fleet.nodes)  # the exposure is that of the nodes of today
    found = [f for f in failures.read_failures(cursor, start, now, fleet.node_of) if f.node in present]
    types = failures.read_types(cursor, fleet.nodes)
    burn_in = failures.read_burn_ins(cursor, now, config.acts.burn_in_days)
    spares = failures.list_spares(found, len(fleet.nodes), hours, config.impact.spare_days, config.impact.spare_level)
    return {
        "since": iso(start),
        "failures": failures.list_rates(found, types, hours),
        "published": list(PUBLISHED),
        "ranking": failures.rank_nodes(found, types, burn_in),
        "burn_in": [
            {
                "node": node,
                "until": iso(until),
                "incidents": [f.incident for f in found if f.node == node and f.time >= until - burn_us(config)],
            }
            for node, until in sorted(burn_in.items())
        ],
        "spares": {"days": config.impact.spare_days, "level": config.impact.spare_level, "parts": spares},
    }


def burn_us(config: Config) -> int:
    """Returns the length of a burn-in (us)."""
    return round(config.acts.burn_in_days * DAY)
