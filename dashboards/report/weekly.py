"""The weekly report: one HTML file without scripts or links to files, from `GET /api/v1/objectives`."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from dashboards.report.markup import table, write_document
from pipeline.model.records import iso

MOSTLY = 0.95
"""Share of the time that jobs held GPUs from which its energy counts as measured. Chosen."""
MOST = 20
"""Rows of a table. Chosen: two pages of A4."""


def write_html(found: Mapping[str, Any], now: int) -> str:
    """Returns the report as one HTML document. now: when it is written (UTC us)."""
    title = f"Report {found['from'][:10]} to {found['to'][:10]}"
    note = " All of it is SIMULATED." if found["simulated"] else ""
    about = f"{found['nodes']:,} nodes. Printed {iso(now)[:19].replace('T', ' ')}Z.{note}"
    warning = "" if found["evaluated"]["complete"] else f"<p><b>{escape(found['evaluated']['note'])}</b></p>"
    sections = (_summary, _objectives, _losses, _energy, _failures, _nodes, _spares)
    return write_document(title, about, [warning, *(write(found) for write in sections)])


def percent(share: float | None, digits: int = 2) -> str:
    """Returns a share as people read it: "98.93 %"."""
    return "no data" if share is None else f"{100 * share:.{digits}f} %"


def hours(value: float | None) -> str:
    """Returns hours with a separator, whole from 100 on."""
    return "no data" if value is None else f"{value:,.0f} h" if abs(value) >= 100 else f"{value:,.1f} h"


def amount(row: Mapping[str, Any]) -> str:
    """Returns money, energy and carbon of a row, as far as they are known."""
    said = [f"{row['kwh']:,.0f} kWh"] if row.get("kwh") is not None else []
    said += [f"{row['cost']:,.0f} {row['currency']}"] if row.get("cost") is not None else []
    said += [f"{row['kg_co2e']:,.0f} kg CO2e"] if row.get("kg_co2e") is not None else []
    return ", ".join(said) or "not priced"


def _summary(found: Mapping[str, Any]) -> str:
    incidents, evaluated = found["incidents"], found["evaluated"]
    times = [evaluated[name] and f"{evaluated[name][:16].replace('T', ' ')}Z" for name in ("from", "to")]
    rows = [
        ("Evaluated", f"{times[0]} to {times[1]}" if times[1] else "nothing"),
        ("Goodput", f"{percent(found['goodput'])} of {hours(found['gpu_hours'])} GPU time that jobs held"),
        ("Availability", f"{percent(found['availability'])} of node time"),
        ("Lost", f"{hours(found['lost']['gpu_hours'])} of GPU time: {amount(found['lost'])}"),
        ("Energy", amount(found["energy"])),
        ("Incidents", ", ".join(f"{incidents[n]:,} {n}" for n in ("opened", "pages", "resolved", "unresolved"))),
        ("Measured", f"{percent(found['measured_share'], 0)} of GPU time belongs to jobs that report their steps"),
    ]
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<h2>Summary</h2><table>{body}</table>"


def objective_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns an objective as cells: name, scope, target, achieved, budget left, fast burn, alert."""
    burns = row["burn_rates"].get("fast") or row["burn_rates"].get("medium") or [None, None]
    burn = "no data" if burns[0] is None else f"{burns[0]:.1f}x"
    left = "no data" if row["left_share"] is None else percent(row["left_share"], 0)
    target = f"{percent(row['target'])} {row['kind']}, {row['days']:g} d"
    alert = f"{row['alert']} burn" if row["alert"] else "none"
    return (row["name"], row["scope"], target, percent(row["achieved"]), left, burn, alert)


NO_OBJECTIVE = "None has jobs yet."
"""Shown instead of objectives: those of each tenant or job begin with the first one."""
OBJECTIVE_HEAD = ("Objective", "Scope", "Target", "Now", "Budget left", "Burn, 1 h", "Alert")


def _objectives(found: Mapping[str, Any]) -> str:
    rows = [objective_cells(row) for row in found["objectives"]]
    default = bool(found["objectives"]) and not found["objectives"][0]["configured"]
    note = "<p>None is configured: examples.</p>" if default else ""
    return f"<h2>Objectives</h2>{note}{table(OBJECTIVE_HEAD, rows[:MOST], NO_OBJECTIVE)}"


def loss_cells(row: Mapping[str, Any], by: str) -> tuple[str, ...]:
    """Returns lost hours of a cause, tenant or job as cells."""
    return (str(row[by]).removeprefix("job:"), hours(row["gpu_hours"]), percent(row["share"], 0), amount(row))


LOSS_HEAD = ("GPU-hours lost", "Share", "Energy and cost")
LOST_BY = (("cause", "Cause"), ("account", "Account or namespace"), ("job", "Job"))


def _losses(found: Mapping[str, Any]) -> str:
    lost = found["lost"]
    parts = [
        f"<h3>By {title.lower()}</h3>"
        + table((title, *LOSS_HEAD), [loss_cells(row, by) for row in lost[f"by_{by}"][:MOST]], "None.")
        for by, title in LOST_BY
    ]
    return f"<h2>GPU-hours lost</h2>{''.join(parts)}"


def energy_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the energy of a job as cells."""
    job, name = row["job"].removeprefix("job:"), row["name"] or row["account"]
    return (job, name, hours(row["gpu_hours"]), amount(row), f"{row['lost_kwh']:,.1f} kWh")


ENERGY_HEAD = ("Job", "Name", "GPU-hours", "Energy and cost", "While time was lost")


def measured_note(found: Mapping[str, Any]) -> str:
    """Returns for how much of the time that jobs held energy was measured; empty if for nearly all of it."""
    measured, held = found["energy"].get("gpu_hours"), found["gpu_hours"]
    if measured is None or measured >= MOSTLY * held:
        return ""
    return f"; measured for {hours(measured)} of {hours(held)} of GPU time, so lost hours may count more"


def _energy(found: Mapping[str, Any]) -> str:
    energy = found["energy"]
    factor = "GPUs alone" if energy["factor"] == 1 else f"GPUs times {energy['factor']:g} for hosts and cooling"
    text = (
        f"{energy['kwh']:,.1f} kWh ({factor}), {energy['idle_kwh']:,.1f} kWh of it without a job{measured_note(found)}."
    )
    rows = [energy_cells(row) for row in energy["by_job"][:MOST]]
    return f"<h2>Energy</h2><p>{escape(text)}</p>{table(ENERGY_HEAD, rows, 'None.')}"


def failure_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns time to failure of a type and cause as cells, with the bounds at 90 %."""
    if row["mttf_days"] is None:
        middle = f"above {row['mttf_low_days']:,.1f} d"
    else:
        middle = f"{row['mttf_days']:,.1f} d ({row['mttf_low_days']:,.1f} to {row['mttf_high_days']:,.1f})"
    rate = row["per_million_gpu_hours"]
    return (row["type"], row["cause"], str(row["failures"]), middle, "no data" if rate is None else f"{rate:,.1f}")


def published_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a published rate as cells: the time is of a node of 8 GPUs."""
    rate = row["per_million_gpu_hours"]
    return (row["fleet"], row["cause"], "published", f"{1e6 / rate / 192:,.1f} d", f"{rate:,.1f}")


FAILURE_HEAD = ("Node type", "Cause", "Failures", "Mean time to failure of a node", "Per 1M GPU-hours")


def _failures(found: Mapping[str, Any]) -> str:
    rows = [failure_cells(row) for row in found["failures"][:MOST]] + [published_cells(r) for r in found["published"]]
    return f"<h2>Failures since {escape(found['since'][:10])}</h2>{table(FAILURE_HEAD, rows, 'None.')}"


def node_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a node of the ranking as cells."""
    causes = ", ".join(f"{cause} {count}" for cause, count in row["causes"].items())
    burn = f"burn-in until {row['burn_in_until'][:10]}" if row["burn_in_until"] else ""
    frailty = f"{row['frailty']:.1f}x"
    return (row["node"], str(row["failures"]), causes, frailty, percent(row["p_lemon"], 0), row["suggestion"] or burn)


NODE_HEAD = ("Node", "Failures", "Causes", "Beside the average", "At least 3x", "Suggestion")


def _nodes(found: Mapping[str, Any]) -> str:
    rows = [node_cells(row) for row in found["ranking"][:MOST]]
    return f"<h2>Nodes that fail most</h2>{table(NODE_HEAD, rows, 'No node failed.')}"


SPARE_HEAD = ("Part", "Failures so far", "Expected", "Spares")


def spare_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the spares of a part as cells."""
    spares = "too early" if row["spares"] is None else str(row["spares"])
    expected = "too early" if row["expected"] is None else f"{row['expected']:.1f}"
    return (row["part"], str(row["failures"]), expected, spares)


def spare_note(found: Mapping[str, Any]) -> str:
    """Returns what the numbers of spares mean, or why there are none yet."""
    spares = found["spares"]
    if any(row["spares"] is None for row in spares["parts"]):
        return f"Failures are known since {found['since'][:10]}: too early to plan {spares['days']:g} days ahead."
    return f"Enough for {spares['days']:g} days with a probability of {spares['level']:.0%}.".replace("%", " %")


def _spares(found: Mapping[str, Any]) -> str:
    rows = [spare_cells(row) for row in found["spares"]["parts"]]
    return f"<h2>Spares</h2><p>{escape(spare_note(found))}</p>{table(SPARE_HEAD, rows, 'None.')}"
