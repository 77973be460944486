"""HTML of the page Data quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from dashboards import linked
from dashboards.data_quality import explain
from dashboards.data_quality.answers import Destination, Loss, Member, Problem, Quality, Sight, Version
from dashboards.links import as_markup, detector_link, incident_link
from dashboards.markup import badge, chips, code
from dashboards.routes import href
from dashboards.words import age, ago, amount, clock, signal_name
from pipeline.model.entity_names import KINDS
from pipeline.model.records import SECOND

TONES = {"agent": "critical", "clock": "degraded", "bmc": "degraded", "exporter": "degraded", "tool": "degraded"}
LITTLE = 0.1
"""Share of the disk below which the space for the store is little. Chosen: a day to act at ten days of retention."""
SOON_S = 7 * 86_400
"""Time until the disk is full from which it is little (s). Chosen: a week to free or add space."""
MAX_SIGNALS = 8
"""Signals named in a row; more are counted. Chosen."""


def headline(quality: Quality) -> str:
    """Returns how many sources do not report, the worst first."""
    if not quality.agents.known:
        return "No agent has sent data yet"
    failing: dict[str, int] = {}
    for problem in quality.problems:
        if not problem.expected:
            failing[problem.kind] = failing.get(problem.kind, 0) + problem.count
    silent = failing.pop("agent", 0)
    texts = [f"{silent:,} of {amount(quality.agents.known, 'agent', 'agents')} not reporting"] if silent else []
    if other := sum(failing.values()):
        texts.append(f"{amount(other, 'other source fails', 'other sources fail')}")
    return ", ".join(texts) or f"All {amount(quality.agents.known, 'agent', 'agents')} report, no source fails"


def overview(quality: Quality) -> str:
    """Returns the figures at the top; each leads to its section."""
    agents, lost = quality.agents, sum(quality.gap_hours)
    failing = [p for p in quality.problems if not p.expected and p.kind != "agent"]
    failed = sum(p.count for p in failing)
    blind = [s for s in quality.sights if s.blind or s.off or s.errors]
    rejected, late = sum(quality.rejected_total.values()), sum(quality.late.values())
    ages = "no telemetry" if agents.age_p50 is None else f"newest data p50 {age(agents.age_p50)} old"
    if agents.age_p99 is not None:
        ages += f", p99 {age(agents.age_p99)}"
    return linked.tiles(
        (
            linked.tile(
                f"{agents.reporting:,}/{agents.known:,}", "agents report", ages, _tone(agents.silent), "#sources"
            ),
            linked.tile(f"{failed:,}", "other sources fail", _kinds(failing), _tone(failed, "degraded"), "#sources"),
            linked.tile(
                f"{len(blind):,}/{len(quality.sights):,}",
                "detectors partly blind",
                not_judged(blind) if blind else "all devices judged",
                _tone(len(blind), "degraded"),
                "#blind",
            ),
            linked.tile(f"{lost:,}", "messages lost", "in 24 h", _tone(lost, "degraded"), "#lost"),
            linked.tile(
                f"{rejected:,}",
                "rejected",
                f"since start; {amount(late, 'row', 'rows')} late",
                _tone(rejected, "watch"),
                "#rejected",
            ),
            _lag_tile(quality),
            _room_tile(quality.disk),
        )
    )


def not_judged(sights: Sequence[Sight]) -> str:
    """Returns the devices that a detector cannot judge, by kind: each once, though several detectors may miss it. Which
    they are is not known, so that several detectors of one kind give the least number.

    sights: those with a fault; without a device that lacks signals a detector is disabled, or fails.
    """
    counts: dict[str, int] = {}
    for sight in sights:
        if sight.blind:
            counts[sight.kind] = max(sight.blind, counts.get(sight.kind, 0))
    if not counts:
        return "disabled or failing, see below"
    least = "at least " if sum(s.blind > 0 for s in sights) > len(counts) else ""
    return f"{least}{linked.kinds(counts, KINDS)} not judged"


def _lag_tile(quality: Quality) -> str:
    lag, tone = quality.backlog.lag_s, _tone(int(quality.backlog.backlog or quality.backlog.stalled), "degraded")
    text = "unknown" if lag is None else age(lag)
    return linked.tile(text, "lag of the pipeline", _backlog(quality), tone, "#waiting")


def _kinds(problems: Sequence[Problem]) -> str:
    counts: dict[str, int] = {}
    for problem in problems:
        counts[problem.kind] = counts.get(problem.kind, 0) + problem.count
    return linked.kinds(counts, {**KINDS, "tool": ("tool", "tools"), "clock": ("clock", "clocks")}) or "none"


def _backlog(quality: Quality) -> str:
    if quality.backlog.stalled:
        return "nothing is evaluated"
    if quality.backlog.unsent:
        return f"{quality.backlog.unsent:,} messages wait at agents"
    return "processing a backlog" if quality.backlog.backlog else "no backlog"


def _tone(number: int, tone: str = "critical") -> str:
    return tone if number else "none"


def problem(one: Problem, now: int) -> str:
    """Returns one row: what, where, since when, why, what it blinds, and what to do."""
    tone = TONES.get(one.kind, "watch")
    since = "" if one.since is None else f"since {ago(one.since, now)}"
    if one.since is not None and one.until is not None and one.until - one.since > 60 * SECOND:
        since = f"since {clock(one.since, now)} to {ago(one.until, now)}"
    reason = f"<code>{escape(one.reason)}</code> " if one.reason and one.kind != "clock" else ""
    why = f"{reason}{escape(explain.meaning(one))}".strip() or "The source reported no reason."
    lines = [("Why", why), ("Blinds", _blinds(one)), ("Do", code(explain.advice(one)))]
    if one.incidents:
        lines.insert(1, ("Incident", ", ".join(as_markup(incident_link(i)) for i in one.incidents)))
    lines.append(("Where", _where(one)))
    body = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in lines if text)
    return (
        f'<article class="fp-row fp-row-{tone}"><h3>{escape(explain.title(one))}<span>{escape(since)}</span></h3>'
        f'<dl class="fp-lines">{body}</dl></article>'
    )


def _blinds(one: Problem) -> str:
    if not one.detectors and not one.signals:
        return "" if one.kind == "clock" else "No signal is missing that a detector uses."
    names = ", ".join(as_markup(detector_link(d)) for d in one.detectors) or "no detector"
    devices = linked.kinds(one.devices, KINDS)
    signals = ", ".join(escape(signal_name(s)) for s in one.signals[:MAX_SIGNALS])
    more = f" and {len(one.signals) - MAX_SIGNALS:,} more" if len(one.signals) > MAX_SIGNALS else ""
    return f"{names} cannot judge {escape(devices)}. Missing: {signals}{more}."


def _where(one: Problem) -> str:
    shared = f"{linked.entity_link(one.shared)}: " if one.shared else ""
    shown = one.examples[:6]
    names = linked.entity_links([_source(e) for e in shown], one.count, short=one.kind != "collector")
    every = linked.link(f"all {one.count:,}", href("data", group=one.id)) if one.count > len(shown) else ""
    return f"{shared}{names}{f' · {every}' if every else ''}"


def _source(entity: str) -> str:
    """Returns what a source leads to: the node of a collector."""
    return f"node:{explain.node_of(entity)}" if entity.startswith("collector:") else entity


def expected(problems: Sequence[Problem]) -> str:
    """Returns the collectors that have nothing to read, folded."""
    rows = [
        (
            escape(p.part),
            f"<code>{escape(p.reason)}</code>" if p.reason else "",
            linked.link(f"{p.nodes:,}", href("data", group=p.id), f"{p.nodes} nodes of {p.part}"),
        )
        for p in problems
    ]
    inside = linked.table(("Collector", "Reason", "Nodes"), rows, "", "Collectors without data", numbers=1)
    text = f"{amount(len(problems), 'collector has', 'collectors have')} nothing to read on some nodes, as expected"
    return f'<details class="fp-fold"><summary>{text}</summary>{inside}</details>'


def sights(found: Sequence[Sight]) -> str:
    """Returns the detectors that cannot judge all of their devices."""
    rows = [
        (
            as_markup(detector_link(s.detector)),
            _sight_state(s),
            escape(", ".join(map(signal_name, s.off)) or (signal_name(s.missing) if s.blind else "")),
            f"{s.blind:,} of {amount(s.devices, *KINDS.get(s.kind, (s.kind, s.kind)))}",
        )
        for s in sorted(found, key=lambda s: (-bool(s.errors), -bool(s.off), -s.blind))
        if s.blind or s.off or s.errors
    ]
    head = ("Detector", "State", "Missing", "Not judged now")
    return linked.table(head, rows, "Every detector judges all of its devices.", "Blind detectors", numbers=1)


def _sight_state(sight: Sight) -> str:
    if sight.errors:
        return badge(f"FAILED ON {sight.errors:,} FRAMES", "critical")
    if sight.off:
        return badge("DISABLED", "quiet")
    return badge("PARTLY BLIND" if sight.blind < sight.devices else "BLIND", "degraded")


def gap_hours(hours: Sequence[int]) -> str:
    """Returns the messages lost per hour of the last day, as bars."""
    most = max(hours, default=0)
    if not most:
        return ""
    bars = "".join(f'<i style="height:{max(4, round(100 * n / most)) if n else 0}%"></i>' for n in hours)
    text = f"messages lost per hour in the last 24 h, at most {most:,} in one hour"
    axis = f"<span>24 h ago</span><span>at most {most:,} messages/h</span><span>now</span>"
    return f'<div class="fp-bars" role="img" aria-label="{text}">{bars}</div><p class="fp-axis">{axis}</p>'


def gaps(found: Sequence[Loss], now: int) -> str:
    """Returns lost messages by cause."""
    rows = [
        (
            escape(g.what),
            escape(g.topic),
            linked.entity_links([f"node:{s}" for s in g.senders[:3]], g.total_senders, short=True),
            escape(ago(g.last, now)),
            f"{g.last_day or 0:,}",
            f"{g.messages:,}",
        )
        for g in found
    ]
    head = ("Cause", "Topic", "Senders", "Newest", "24 h", "All")
    return linked.table(head, rows, "No message was lost.", "Lost messages", numbers=2)


def rejected(quality: Quality, now: int) -> str:
    """Returns rejected messages by rule and sender."""
    rows = [
        (
            escape(r.what),
            f"<code>{escape(r.reason)}</code>",
            linked.entity_links([f"node:{s}" for s in r.senders], short=True) or "unknown",
            escape(ago(r.last, now)),
            f"{r.messages:,}",
        )
        for r in quality.rejected
    ]
    head = ("Rule", "Newest reason", "Sender", "Newest", "Kept")
    text = linked.table(head, rows, "No rejected message is kept.", "Rejected messages", numbers=1)
    counted = [f"{rule} {number:,}" for rule, number in sorted(quality.rejected_total.items(), key=lambda p: -p[1])]
    return text + (chips(counted) if counted else "") + _duplicates(quality.duplicates)


def _duplicates(number: int | None) -> str:
    if number is None:
        return ""
    came = f"{amount(number, 'message', 'messages')} arrived again" if number else "No message arrived again"
    return f'<p class="fp-empty">{came} since the start{"; each is stored once" if number else ""}.</p>'


def late(quality: Quality) -> str:
    """Returns how many rows came too late to be evaluated."""
    rows = [(escape(name), f"{number:,}") for name, number in sorted(quality.late.items(), key=lambda p: -p[1])]
    empty = "No row came too late to be evaluated since the start."
    return linked.table(("Device class", "Rows since the start"), rows, empty, "Late rows", numbers=1)


def versions(found: Sequence[Version]) -> str:
    """Returns the versions that differ from those of most nodes; what all nodes share is one line."""
    names = list(dict.fromkeys(v.name for v in found))
    rows, same = [], []
    for name in names:
        own = [v for v in found if v.name == name]
        if len(own) == 1:
            same.append(f"{name.replace('_', ' ')} {own[0].version}")
            continue
        for i, v in enumerate(own):
            part = f"{v.nodes:,} of {sum(o.nodes for o in own):,}"
            who = "" if i == 0 else linked.entity_links(v.examples[:3], v.nodes, short=True)
            mark = badge("MOST", "quiet") if i == 0 else badge("DIFFERS", "watch")
            rows.append((escape(name.replace("_", " ")), f"{escape(v.version)} {mark}", who, part))
    text = linked.table(("Software", "Version", "Nodes that differ", "Nodes"), rows, "", "Versions", numbers=1)
    if not found:
        return '<p class="fp-empty">No node reports versions.</p>'
    alike = f'<p class="fp-empty">The same everywhere: {escape(", ".join(same))}</p>' if same else ""
    return (text if rows else "") + alike


NO_RECEIVER = "No receiver is configured: alerts are shown here only. Add [[notify.webhooks]] to the configuration."


def destinations(found: Sequence[Destination], now: int, empty: str = NO_RECEIVER) -> str:
    """Returns the receivers of alerts with messages that wait and that were not delivered; `empty` without any."""
    tones = {"ok": "quiet", "unknown": "quiet", "failing": "degraded", "down": "critical"}
    rows = [
        (
            escape(d.receiver),
            badge(d.state.upper(), tones.get(d.state, "degraded")),
            escape(d.answer),
            "never" if d.delivered is None else escape(ago(d.delivered, now)),
            f"{d.pending:,}",
            f"{d.dead:,}",
        )
        for d in found
    ]
    head = ("Receiver", "State", "Last answer", "Last delivered", "Waiting", "Dead")
    return linked.table(head, rows, empty, "Receivers of alerts", numbers=2)


def waiting(quality: Quality) -> str:
    """Returns what waits to be sent or evaluated, and the space of the store."""
    backlog = quality.backlog
    lines = [
        ("Evaluated up to", "nothing yet" if backlog.watermark is None else ago(backlog.watermark, quality.as_of)),
        ("Oldest unread input", "none" if backlog.lag_s is None else f"{age(backlog.lag_s)} old"),
    ]
    body = [(name, escape(text)) for name, text in lines]
    unsent = "none" if not backlog.unsent else f"{backlog.unsent:,} messages at "
    body.append(("Waiting at agents", unsent + linked.entity_links(backlog.examples[:3], backlog.agents, short=True)))
    if quality.agents.worst and quality.agents.age_worst is not None:
        worst = f"{escape(age(quality.agents.age_worst))}: {linked.entity_link(quality.agents.worst)}"
        body.append(("Oldest data of a reporting agent", worst))
    if quality.disk is not None:
        body.append(("Disk of the store", _disk(quality.disk)))
    return f'<dl class="fp-facts">{"".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in body)}</dl>'


def lags(quality: Quality) -> str:
    """Returns how long messages took from the reading to the store, by topic."""
    if quality.lags is None:
        return '<p class="fp-empty">This API does not measure the lag of topics.</p>'
    rows = [
        (escape(one.topic), f"{one.messages:,}", seconds(one.p50), seconds(one.p99), seconds(one.longest))
        for one in quality.lags
    ]
    empty = f"No message was stored in the last {age(quality.lag_window_s)}."
    return linked.table(("Topic", "Messages", "p50", "p99", "Longest"), rows, empty, "Lag by topic", numbers=4)


def seconds(value: float) -> str:
    """Returns a lag: below 10 s with a decimal, from ten minutes on as an age."""
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s" if value < 600 else age(value)


def head_room(disk: Mapping[str, int]) -> int:
    """Returns the bytes that the store may still use before it keeps events only; 0 if it does so already."""
    return max(0, disk["free"] - disk["minimum"])


def _disk(disk: Mapping[str, int]) -> str:
    left = f"{disk['free'] / 1e9:,.1f} of {disk['total'] / 1e9:,.1f} GB free"
    if not head_room(disk):
        return f"{badge('FULL', 'critical')} {left}: only events are stored, if at all. Free space or lower hot_hours"
    if "full_s" in disk:
        rate = f"{disk['per_day'] / 1e9:,.1f} GB a day"
        return f"{left}; only events are stored in about {age(disk['full_s'])}, at {rate} of history"
    text = f"{left}; only events are stored after at least {head_room(disk) / 1e9:,.1f} GB more"
    if "per_day" not in disk:
        return text
    return f"{text}; history of {disk['per_day'] / 1e9:,.1f} GB a day fits for [store] telemetry_days"


def _room_tile(disk: Mapping[str, int] | None) -> str:
    if disk is None:
        return linked.tile("unknown", "space for the store", "its disk cannot be read", "no-data", "#waiting")
    room = head_room(disk)
    full = disk.get("full_s")
    soon = room < LITTLE * disk["total"] or (full is not None and full < SOON_S)
    tone = "critical" if not room else "degraded" if soon else "none"
    below = f"of a disk of {disk['total'] / 1e9:,.0f} GB"
    if full is not None and room:
        below += f"; full in {age(full)}"
    return linked.tile(f"{room / 1e9:,.0f} GB", "space for the store", below, tone, "#waiting")


def members(found: Sequence[Member], now: int) -> str:
    """Returns the sources of one row."""
    rows = [
        (
            linked.entity_link(m.entity),
            linked.entity_link(m.node, short=True),
            linked.entity_link(m.rack, short=True) if m.rack else "",
            "unknown" if m.since is None else escape(ago(m.since, now)),
            f"<code>{escape(m.reason)}</code>" if m.reason else "",
        )
        for m in found
    ]
    return linked.table(("Source", "Node", "Rack", "Since", "Reason"), rows, "No source is left.", "Sources")
