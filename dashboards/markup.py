"""Pieces of HTML from data. Every text from outside goes through `escape`: job and node names are not ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from dashboards.answers import NODE_STATES, Detector, Fleet
from dashboards.evidence import Ballot
from dashboards.words import NODE_STATE, SEVERITY, STATE, amount, clock, joined
from pipeline.model.entity_names import entity_name
from pipeline.model.records import Severity, State

MOST_SQUARES = 256
"""Voters drawn one by one; of more, only the results are shown. Chosen."""
TONES: Mapping[Severity, str] = {"page": "critical", "ticket": "degraded", "watch": "watch"}


def badge(text: str, tone: str) -> str:
    """A small label; `tone` is a colour's name of the palette."""
    return f'<span class="fp-badge fp-tone-{escape(tone)}">{escape(text)}</span>'


def severity_badge(severity: Severity) -> str:
    """CRITICAL, WARNING or WATCH."""
    return badge(SEVERITY[severity], TONES[severity])


def state_badge(state: State) -> str:
    """Open is filled; everything that somebody took care of is quiet."""
    return badge(STATE[state].upper(), "open" if state == "open" else "quiet")


def simulated_badge(simulated: bool) -> str:
    """The mark without which nothing simulated is shown."""
    return badge("SIMULATED", "simulated") if simulated else ""


def tiles(fleet: Fleet) -> str:
    """Nodes by state, the worst first; each count says how many of it are simulated."""
    worst_first = ("critical", "degraded", "watch", "no_data", "ok")
    return f'<div class="fp-tiles" role="list">{"".join(_tile(fleet, state) for state in worst_first)}</div>'


def _tile(fleet: Fleet, state: str) -> str:
    nodes = [node for node in fleet.nodes if node.state == state]
    simulated = sum(node.simulated for node in nodes)
    tone = "none" if not nodes else state.replace("_", "-")
    below = f"{badge('SIMULATED', 'simulated')} {simulated:,}" if simulated else "&nbsp;"
    return (
        f'<div class="fp-tile fp-tile-{tone}" role="listitem"><span class="fp-swatch fp-{state.replace("_", "-")}">'
        f"</span><b>{len(nodes):,}</b><span class='fp-word'>{NODE_STATE[state]}</span>"
        f'<span class="fp-sub">{below}</span></div>'
    )


def headline(fleet: Fleet) -> str:
    """The answer to "is anything wrong?" in one sentence; silence is never called healthy."""
    count = {state: sum(node.state == state for node in fleet.nodes) for state in NODE_STATES}
    total = len(fleet.nodes)
    if not total:
        return "No node has reported yet"
    bad = [f"{count[s]:,} {NODE_STATE[s]}" for s in ("critical", "degraded") if count[s]]
    silent = f", {count['no_data']:,} silent" if count["no_data"] else ""
    if bad:
        return f"{joined(bad)}{silent} of {amount(total, 'node', 'nodes')}"
    if count["no_data"] == total:
        return "No node reports"
    if count["no_data"]:
        return f"{count['no_data']:,} of {amount(total, 'node', 'nodes')} silent, nothing wrong on the others"
    return f"Nothing {'was ' if fleet.stalled else ''}wrong on {amount(total, 'node', 'nodes')}"


def unready(fleet: Fleet) -> str:
    """The banner that says why the pipeline does not do its work, and how old the picture is."""
    why = "; ".join(fleet.unready)
    if not fleet.stalled:
        return notice(f"{why}.", "degraded", "The pipeline does not do all of its work:")
    newest = "Nothing is stored yet."
    if fleet.newest is not None:
        newest = f"What is shown is as of {clock(min(fleet.newest, fleet.as_of), fleet.as_of)}."
    return notice(f"{why}. {newest}", "degraded", "The pipeline does not take in telemetry:")


def present(text: str) -> str:
    """A sentence about the present. When the server falls silent the browser shows the other half, with the time of
    the last answer in it (freshness.js)."""
    said = escape(text)
    then = f'Unknown since <span class="fp-since"></span>. Last known: {said}'
    return f'<span class="fp-now">{said}</span><span class="fp-then" hidden>{then}</span>'


def title(text: str, badges: Iterable[str] = (), below: str = "", of_now: bool = False) -> str:
    """A page's headline with badges over it and a quiet line under it. `badges` is markup, the others are text.

    of_now: whether the headline is about the present.
    """
    small = f'<p class="fp-below">{escape(below)}</p>' if below else ""
    marks = "".join(badges)
    row = f'<div class="fp-badges">{marks}</div>' if marks else ""
    return f'{row}<h1 class="fp-title">{present(text) if of_now else escape(text)}</h1>{small}'


def section(name: str, note: str = "") -> str:
    """A heading over a part of the page."""
    return f'<h2 class="fp-section">{escape(name)}{f"<span>{escape(note)}</span>" if note else ""}</h2>'


def notice(text: str, tone: str = "quiet", heading: str = "", of_now: bool = False) -> str:
    """A box with a message: `critical` for what failed, `degraded` for a warning, `quiet` for empty states.

    of_now: whether the message is about the present.
    """
    strong = f"<b>{escape(heading)}</b> " if heading else ""
    role = "alert" if tone == "critical" else "status"
    said = present(text) if of_now else escape(text)
    return f'<div class="fp-notice fp-notice-{escape(tone)}" role="{role}">{strong}{said}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> str:
    """A plain table of texts, or the sentence that says why there is none. The first column never wraps."""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return f'<p class="fp-empty">{escape(empty)}</p>'
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return f'<table class="fp-table"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def facts(rows: Iterable[tuple[str, str]], empty: str = "") -> str:
    """Label and value, line by line."""
    body = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in rows)
    return f'<dl class="fp-facts">{body}</dl>' if body else f'<p class="fp-empty">{escape(empty)}</p>'


def story(rows: Iterable[tuple[str, str]]) -> str:
    """Label and sentence, line by line, to be read from above."""
    body = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>" for label, text in rows)
    return f'<dl class="fp-story">{body}</dl>'


def detector(one: Detector) -> str:
    """One detector: what it cannot see and what it costs in false alarms; the rest folded away."""
    marks = [badge(one.family.upper(), "quiet"), *(badge(text, "degraded") for text in _limits(one))]
    lines = [("Cannot see", one.blind)]
    if one.off:
        lines.insert(0, ("Off: the input lacks", ", ".join(one.off)))
    said = "".join(f"<p><i>{escape(label)}:</i> {escape(text)}</p>" for label, text in lines)
    costs = "<br>".join(map(escape, one.budget))
    said += f"<p><i>False alarms, by arithmetic:</i> {costs}</p>" if costs else ""
    settings = "\n".join(f"{key} = {value}" for key, value in one.settings.items())
    more = f"Judges: {one.device_class}\nNeeds: {', '.join(one.needs)}\nWants: {', '.join(one.wants) or 'nothing more'}"
    folded = escape(f"{one.about}\n\n{more}\n\n[detector.{one.name}]\n{settings}")
    off = " fp-detector-off" if one.off or one.errors else ""
    return (
        f'<div class="fp-detector{off}"><div><b>{escape(one.name)}</b>{"".join(marks)}</div>{said}'
        f"<details><summary>How it judges, and its settings</summary><pre>{folded}</pre></details></div>"
    )


def _limits(one: Detector) -> list[str]:
    """What keeps it from speaking as a reader would expect, each as a badge."""
    own = [r for r in one.modes if one.name == r.detector or r.scope == "*"]  # others stand above, once for all
    rules = [f"{r.mode} {'everywhere' if r.scope == '*' else f'on {entity_name(r.scope)}'}" for r in own]
    errors = [f"failed on {amount(one.errors, 'frame', 'frames')}"] if one.errors else []
    return [*(["OFF"] if one.off else []), *errors, *rules]


def chips(texts: Sequence[str], most: int = 24) -> str:
    """Names in a row; more than `most` are counted, not listed."""
    shown = "".join(f'<span class="fp-chip">{escape(text)}</span>' for text in texts[:most])
    more = f'<span class="fp-chip fp-more">and {len(texts) - most:,} more</span>' if len(texts) > most else ""
    return f'<div class="fp-chips">{shown}{more}</div>'


def vote(ballot: Ballot) -> str:
    """A vote over one computation: the two results one under the other, and a square per voter where that is told."""
    device = entity_name(ballot.entity)
    others = amount(ballot.others, "other", "others")
    voters = f"All {others}" if ballot.agreeing == ballot.others else f"Most of {others}"
    rows = (
        ("", voters, ballot.expected),
        ("fp-own", device, ballot.own),
    )
    lines = "".join(
        f'<div class="{name}"><dt>{escape(who)}</dt><dd>{_digest(text, ballot)}</dd></div>' for name, who, text in rows
    )
    return f'{_squares(ballot)}<dl class="fp-digests">{lines}</dl>'


def _squares(ballot: Ballot) -> str:
    if ballot.agreeing is None or not 0 < ballot.agreeing <= ballot.others <= MOST_SQUARES:
        return ""
    squares = '<i class="fp-vote-yes"></i>' * ballot.agreeing
    squares += '<i class="fp-vote-other"></i>' * (ballot.others - ballot.agreeing) + '<i class="fp-vote-no"></i>'
    label = f"{ballot.agreeing:,} of {ballot.others:,} others agree; {entity_name(ballot.entity)} differs"
    return f'<div class="fp-vote" role="img" aria-label="{escape(label)}">{squares}</div>'


def _digest(text: str, ballot: Ballot) -> str:
    """A result in groups of four, those that differ marked."""
    pairs = zip(_groups(ballot.own), _groups(ballot.expected), strict=False)
    differ = [a != b for a, b in pairs]
    groups = enumerate(_groups(text))
    return " ".join(
        f"<mark>{escape(group)}</mark>" if i >= len(differ) or differ[i] else escape(group) for i, group in groups
    )


def _groups(text: str) -> list[str]:
    return [text[i : i + 4] for i in range(0, len(text), 4)]
