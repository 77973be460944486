"""HTML of the page Jobs, and the chart of the step time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from textwrap import shorten

import altair as alt

from dashboards import linked, links
from dashboards.answers import Node, TimelineItem
from dashboards.cause_and_impact import effect_text
from dashboards.evidence import time_tooltip
from dashboards.jobs import checkpoints
from dashboards.jobs.answers import Harm, Job, JobDetail, Pace, Strip
from dashboards.links import Link, as_markup, entity_link, incident_link
from dashboards.markup import SEVERITY_OF, TONES, badge, simulated_badge
from dashboards.routes import entity_href, href
from dashboards.theme import Palette
from dashboards.words import (
    NODE_STATE,
    age,
    ago,
    amount,
    axis_label,
    chart_time,
    clock,
    joined,
    plain,
    with_entity_names,
)
from pipeline.model.entity_names import entity_name
from pipeline.model.loss_owner import find_owner
from pipeline.model.records import SECOND
from pipeline.runtime.guides import guide

SLOWER = 0.03
"""Slowdown that counts. Same as in the API."""
LATE_S = 60.0
"""Age of the newest report of a job's steps (s) from which the page says so: as of a node without data."""
MAX_ROWS = 200
"""Jobs listed. Chosen: running and slow ones come first; the filter finds any."""
MAX_NODES = 24
"""Nodes named. Chosen."""
MAX_INCIDENTS = 20
HEIGHT = 170


def job_name(job: Job) -> str:
    """Returns the id of a job with its name."""
    own = entity_name(job.job)
    return f"{own} ({job.name})" if job.name and job.name != job.job.partition(":")[2] else own


def is_slow(job: Job) -> bool:
    """Returns whether a running job is slower than usual."""
    return job.state == "running" and job.slowdown is not None and job.slowdown >= SLOWER


def sort_jobs(jobs: Iterable[Job]) -> list[Job]:
    """Returns hanging jobs, then slow ones, the costliest first, then running ones by size, then ended ones."""
    return sorted(
        jobs,
        key=lambda j: (
            j.state == "ended",
            j.state != "hanging",
            not is_slow(j),
            -j.lost_gpu_hours_per_hour,
            -j.gpus,
            -(j.ended or j.started),
        ),
    )


def find_jobs(jobs: Sequence[Job], text: str) -> list[Job]:
    """Returns the jobs whose id, name, user, account or node contains a text."""
    wanted = text.strip().lower()
    if not wanted:
        return list(jobs)
    return [
        j
        for j in jobs
        if wanted in f"{j.job}\n{j.name}\n{j.user}\n{j.account}".lower() or any(wanted in n.lower() for n in j.nodes)
    ]


def headline(jobs: Sequence[Job]) -> str:
    """Returns how many jobs run, hang and are slow."""
    running = [j for j in jobs if j.state != "ended"]
    if not running:
        return "No job is running"
    texts = [amount(len(running), "running job", "running jobs")]
    for number, word in ((sum(j.state == "hanging" for j in running), "hanging"), (sum(map(is_slow, running)), "slow")):
        if number:
            texts.append(f"{number:,} {word}")
    return ", ".join(texts) if len(texts) > 1 else f"{texts[0]}, none slow"


def overview(jobs: Sequence[Job]) -> str:
    """Returns the figures at the top."""
    running = [j for j in jobs if j.state != "ended"]
    slow = [j for j in running if is_slow(j)]
    hanging = [j for j in running if j.state == "hanging"]
    unknown = sum(j.slowdown is None and j.state == "running" for j in running)
    rate = sum(j.lost_gpu_hours_per_hour for j in running)
    lost = sum(j.lost_gpu_hours for j in running)
    worst = max(slow, key=lambda j: j.slowdown or 0, default=None)
    return linked.tiles(
        (
            linked.tile(f"{len(running):,}", "running", f"{sum(j.gpus for j in running):,} GPUs", "none"),
            linked.tile(f"{len(hanging):,}", "hanging", "no step is made", "critical" if hanging else "none"),
            linked.tile(
                f"{len(slow):,}",
                "slow",
                "" if worst is None else f"worst: {entity_name(worst.job)} {percent(worst.slowdown)}",
                "degraded" if slow else "none",
            ),
            linked.tile(
                f"{unknown:,}", "pace unknown", "report no steps, or too few", "no-data" if unknown else "none"
            ),
            linked.tile(
                f"{rate:,.1f}", "GPU-h lost per hour", f"{lost:,.1f} GPU-h so far", "degraded" if rate else "none"
            ),
        )
    )


def percent(share: float | None) -> str:
    """Returns a slowdown as `+31 %`, or that it is not known."""
    if share is None:
        return "not known"
    rounded = round(100 * share)
    return f"{rounded:+,} %" if rounded else "0 %"  # not -0 %


def seconds(value: float | None) -> str:
    """Returns a step time."""
    if value is None:
        return "not known"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.3g} s"


def state_badge(job: Job) -> str:
    """Returns the badge of a job's state."""
    if job.state == "hanging":
        return badge("HANGING", "critical")
    if is_slow(job):
        return badge("SLOW", "degraded")
    return badge(job.state.upper(), "quiet")


def table(jobs: Sequence[Job], now: int) -> str:
    """Returns the list of jobs."""
    rows = [
        (
            f"{as_markup(Link(job_name(j), entity_href(j.job)))} {state_badge(j)} {simulated_badge(j.simulated)}",
            escape(_pace(j)),
            escape(percent(j.slowdown)) if j.state == "running" else "",
            f"{amount(j.gpus, 'GPU', 'GPUs')}{_on_nodes(j.node_count)}",
            f"{j.lost_gpu_hours:,.1f} GPU-h" if j.lost_gpu_hours else "0",
            escape(" / ".join(filter(None, (j.user, j.account)))),
            escape(ago(j.started, now) if j.ended is None else f"ended {ago(j.ended, now)}"),
            ", ".join(as_markup(incident_link(i)) for i in j.incidents[:3])
            + (f" and {len(j.incidents) - 3:,} more" if len(j.incidents) > 3 else ""),
        )
        for j in jobs[:MAX_ROWS]
    ]
    head = ("Job", "Step time", "Slowdown", "Size", "Lost", "User / account", "Started", "Open incidents")
    return linked.table(head, rows, "No job matches.", "Jobs")


def _on_nodes(number: int) -> str:
    return f" on {amount(number, 'node', 'nodes')}" if number else ", nodes not known"


def _pace(job: Job) -> str:
    if job.step_time is None:
        return "reports no steps" if job.state != "ended" else ""
    usual = f", usually {seconds(job.usual_step_time)}" if job.usual_step_time is not None else ""
    return f"{seconds(job.step_time)}{usual}"


# --- one job ----------------------------------------------------------------------------------------


def job_headline(job: Job, strip: Strip | None) -> str:
    """Returns the state of one job: slowdown, and its latest rank."""
    name = job_name(job)
    name = f"{name[:1].upper()}{name[1:]}"
    if job.state == "ended":
        return f"{name} has ended"
    if job.state == "hanging":
        return f"{name} hangs: no step is made"
    late = f", {entity_name(strip.slow[0].rank).partition(' of ')[0]} is late" if strip and strip.slow else ""
    if job.slowdown is None:
        return f"{name}: pace not known{late}"
    if is_slow(job):
        return f"{name}: {percent(job.slowdown).removeprefix('+')} slower than usual{late}"
    return f"{name}: usual pace{late}"


def job_tiles(job: Job, harms: Sequence[Harm], now: int) -> str:
    """Returns step time, slowdown, loss, and the age of the last step and checkpoint."""
    open_ = [h for h in harms if h.resolved is None]
    return linked.tiles(
        (
            linked.tile(seconds(job.step_time), "per step", f"usually {seconds(job.usual_step_time)}", "none", "#pace"),
            linked.tile(
                percent(job.slowdown), "slowdown", _cause(open_), "degraded" if is_slow(job) else "none", "#harm"
            ),
            linked.tile(
                f"{job.lost_gpu_hours:,.1f}",
                "GPU-h lost",
                f"{job.lost_gpu_hours_per_hour:,.1f} per hour now",
                "degraded" if job.lost_gpu_hours_per_hour else "none",
                "#harm",
            ),
            linked.tile(
                "never" if job.last_step is None else age((now - job.last_step) / SECOND),
                "since the last step",
                _known_until(job, now),
                "critical" if job.state == "hanging" else "none",
                "#pace",
            ),
            checkpoints.tile(job, harms, now),
            linked.tile(f"{job.gpus:,}", "GPUs", amount(job.node_count, "node", "nodes"), "none", "#nodes"),
        )
    )


def _known_until(job: Job, now: int) -> str:
    """Returns that steps are not known up to now, as reports of the ranks or their evaluation are late; else empty."""
    if job.last_report is None or now - job.last_report <= LATE_S * SECOND:
        return ""
    return f"no report of its steps for {age((now - job.last_report) / SECOND)}"


def _cause(open_: Sequence[Harm]) -> str:
    counts = [h for h in open_ if not find_owner(h.basis)]  # the others name the one that counts the loss
    worst = max(counts or open_, key=lambda h: h.slowdown or 0, default=None)
    return "no incident reaches it" if worst is None else f"cause: {shorten(plain(worst.summary), 60, placeholder='…')}"


def _severity(harm: Harm) -> str:
    return badge(SEVERITY_OF.get(harm.severity, harm.severity).upper(), TONES.get(harm.severity, "quiet"))


def harms(found: Sequence[Harm], now: int) -> str:
    """Returns the incidents that reached a job, with what each costs it."""
    rows = [
        (
            f"{as_markup(incident_link(h.id))} {_severity(h)}",
            escape(plain(h.summary)),
            escape(effect_text(h.state, h.slowdown, h.basis, now)),
            escape(
                f"since {ago(h.onset, now)}"
                if h.resolved is None
                else f"{clock(h.onset, now)} to {clock(h.resolved, now)}"
            ),
            f"{h.lost_gpu_hours:,.2f} GPU-h",
        )
        for h in found[:MAX_INCIDENTS]
    ]
    head = ("Incident", "What", "Effect on this job", "When", "Lost")
    return linked.table(head, rows, "No incident reached this job.", "Incidents of the job", numbers=1)


def slow_ranks(strip: Strip) -> str:
    """Returns the late ranks with stage, GPU and node: the strip as a table."""
    rows = [
        (
            as_markup(entity_link(r.rank)),
            "" if r.stage is None else escape(entity_name(r.stage).partition(" of ")[0]),
            "not known" if r.gpu is None else as_markup(entity_link(r.gpu)),
            "" if r.node is None else as_markup(entity_link(r.node, r.node.partition(":")[2])),
            escape(percent(r.now)),
            f"{r.share * 100:.0f} %",
        )
        for r in strip.slow
    ]
    head = ("Rank", "Stage", "GPU", "Node", "Late now", "Of the time")
    empty = "No rank is late: all are within 3 % of their stage."
    if strip.measured is None:
        empty = (
            "The ranks report no compute time, so none can be called late: see "
            f"{guide('training.md')} for the training hook."
        )
    return linked.table(head, rows, empty, "Late ranks", numbers=2)


def nodes(job: Job, fleet: Sequence[Node] | None) -> str:
    """Returns the nodes of a job that are not well as links, and numbers by state."""
    of_job = {n if n.startswith("node:") else f"node:{n}" for n in job.nodes}
    known = {n.entity: n for n in fleet or () if n.entity in of_job}
    counts: dict[str, int] = {}
    for name in of_job:
        found = known[name].state if name in known else "no_data"
        counts[found] = counts.get(found, 0) + 1
    order: tuple[str, ...] = ("critical", "degraded", "watch", "no_data", "ok")
    texts = [f"{counts[state]:,} {NODE_STATE[state]}" for state in order if state in counts]
    bad = sorted((n for n in known.values() if n.state != "ok"), key=lambda n: (order.index(n.state), n.entity))
    rows = [
        (
            as_markup(entity_link(n.entity)),
            badge(NODE_STATE[n.state].upper(), n.state if n.state in ("critical", "degraded", "watch") else "quiet"),
            "" if not n.rack else as_markup(entity_link(n.rack)),
            ", ".join(as_markup(incident_link(i)) for i in n.incidents[:3]),
        )
        for n in bad[:MAX_NODES]
    ]
    more = f'<p class="fp-empty">{linked.link("All nodes on the map", href("fleet", within=job.job))}</p>'
    states = "unknown: the fleet's state is not available" if fleet is None else joined(texts) or "none"
    text = f'<p class="fp-empty">{escape(amount(job.node_count, "node", "nodes"))}: {escape(states)}.</p>'
    return text + (linked.table(("Node", "State", "Rack", "Incidents"), rows, "", "Nodes") if rows else "") + more


def events(detail: JobDetail, items: Sequence[TimelineItem], now: int) -> str:
    """Returns starts, ends, restarts and events of a job, newest first."""
    rows = [(i.time, i.kind, i.text) for i in items if i.kind != "finding"]
    for run in (detail.job, *detail.runs):
        rows.append((run.started, "run", "run started"))
        if run.ended is not None:
            rows.append((run.ended, "run", f"run ended after {age((run.ended - run.started) / SECOND)}"))
    counts = Counter(rows)  # each node of a job reports its start
    cells = [
        (escape(ago(time, now)), escape(kind), escape(_short(text)) + (f" ({count:,} times)" if count > 1 else ""))
        for (time, kind, text), count in sorted(counts.items(), reverse=True)[:40]
    ]
    return linked.table(("Time", "Kind", "What"), cells, "No events in this time.", "Events of the job")


def _short(text: str) -> str:
    """Returns a text of an event, of 160 characters at most."""
    named = with_entity_names(text)
    return named if len(named) <= 160 else f"{named[:160]}…"


def crumbs(name: str) -> list[links.Text]:
    """Returns the way to a job."""
    return [Link("Jobs", href("jobs")), name]


def pace_chart(history: Sequence[Pace], usual: float | None, palette: Palette) -> alt.LayerChart:
    """Returns the step time by minute, with the usual one as a dashed line."""
    rows = [{"time": chart_time(p.time), "value": p.step_time, "text": seconds(p.step_time)} for p in history]
    axis = alt.Axis(format="%H:%M", grid=False, tickCount=8, labelExpr=axis_label())
    x = alt.X("time:T", title=None, scale=alt.Scale(type="utc", nice=False), axis=axis)
    y = alt.Y("value:Q", title="s per step", scale=alt.Scale(zero=False, nice=True))
    tooltip = [
        time_tooltip(history[-1].time if history else 0),
        alt.Tooltip("text:N", title="step time"),
    ]
    own = alt.Chart(alt.InlineData(values=rows)).mark_line(color=palette.device, strokeWidth=2)
    layers = [own.encode(x=x, y=y, tooltip=tooltip)]
    if usual is not None:
        base = alt.Chart(alt.InlineData(values=[{"value": usual}]))
        layers.insert(0, base.mark_rule(color=palette.median, strokeDash=[4, 3], strokeWidth=1.5).encode(y=y))
    return alt.LayerChart(layer=layers).properties(height=HEIGHT)
