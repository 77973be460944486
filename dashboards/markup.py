"""HTML fragments. All text is escaped, since names of jobs and nodes come from outside."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from dashboards.answers import NODE_STATES, Detector, Fleet
from dashboards.budget_text import plain_budget
from dashboards.evidence import Vote
from dashboards.links import SIMULATED, Link, Text, as_markup
from dashboards.words import NODE_STATE, SEVERITY, STATE, age, amount, clock, joined
from pipeline.model.entity_names import entity_name
from pipeline.model.records import Severity, State, from_iso

_CODE = re.compile(r"`([^`\n]{1,120})`")
_TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?Z")  # as the API writes it
_SECONDS = re.compile(r"\b(\d{3,9}) s\b")

MAX_VOTERS = 256
"""Voters drawn as squares; with more, only the results are shown. Chosen."""
SEVERITY_OF: Mapping[str, str] = {str(name): word.lower() for name, word in SEVERITY.items()}
"""Severity of the API -> its word in a sentence."""
TONES: Mapping[str, str] = {"page": "critical", "ticket": "degraded", "watch": "watch"}

STACKED_COLUMNS = 3
"""Most columns of a table that stays one on a phone. Chosen: 390 pixels hold three texts."""


def badge(text: str, tone: str) -> str:
    """Returns a small label; `tone` is a colour name of the palette."""
    return f'<span class="fp-badge fp-tone-{escape(tone)}">{escape(text)}</span>'


def severity_badge(severity: Severity) -> str:
    """Returns the badge CRITICAL, WARNING or WATCH."""
    return badge(SEVERITY[severity], TONES[severity])


def state_badge(state: State) -> str:
    """Returns the badge of a state: filled for open, quiet for all others."""
    return badge(STATE[state].upper(), "open" if state == "open" else "quiet")


def simulated_badge(simulated: bool) -> str:
    """Returns the badge of simulated data, empty for real data."""
    return SIMULATED if simulated else ""


def simulated_part(fleet: Fleet) -> str:
    """Returns the badge of a page about the fleet: all or some of its nodes are simulated; empty if none is."""
    if not fleet.simulated or fleet.simulated == fleet.total:
        return simulated_badge(bool(fleet.simulated))
    return badge(f"{fleet.simulated:,} OF {fleet.total:,} NODES SIMULATED", "simulated")


def tiles(fleet: Fleet) -> str:
    """Returns the number of nodes per state, worst first, with the number of simulated ones."""
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
    """Returns the state of the fleet in one sentence; nodes without data never count as healthy."""
    count = {state: sum(node.state == state for node in fleet.nodes) for state in NODE_STATES}
    total = len(fleet.nodes)
    if not total:
        return "No node has sent data yet"
    bad = [f"{count[s]:,} {NODE_STATE[s]}" for s in ("critical", "degraded") if count[s]]
    no_data = f", {count['no_data']:,} without data" if count["no_data"] else ""
    if bad:
        return f"{joined(bad)} of {amount(total, 'node', 'nodes')}{no_data}"
    if count["no_data"] == total:
        return "No data from any node"
    if count["no_data"]:
        return f"No data from {count['no_data']:,} of {amount(total, 'node', 'nodes')}, no problems on the others"
    return f"No problems on {amount(total, 'node', 'nodes')}"


def unready(fleet: Fleet) -> str:
    """Returns the banner of a pipeline that is not ready: the reasons and the time of the newest data."""
    reasons = "; ".join(_readable(reason, fleet.as_of) for reason in fleet.unready)
    if not fleet.stalled:
        return notice(f"{reasons}.", "degraded", "Pipeline degraded:")
    newest = "No data is stored yet."
    if fleet.newest is not None:
        newest = f"Data as of {clock(min(fleet.newest, fleet.as_of), fleet.as_of)}."
    heading = "Pipeline not ready yet:" if fleet.unready[0].startswith("starting") else "Pipeline stalled:"
    return notice(f"{reasons}. {newest}", "degraded", heading)


def _readable(reason: str, now: int) -> str:
    """Returns a reason of the API with its times as `clock` has them, and durations from 2 min on as `age` has them."""

    def time_of(found: re.Match[str]) -> str:
        try:
            return clock(from_iso(found[0]), now)
        except ValueError:  # such as day 31 of a short month, in a text of another part
            return found[0]

    timed = _TIME.sub(time_of, reason)
    return _SECONDS.sub(lambda found: age(int(found[1])) if int(found[1]) >= 120 else found[0], timed)


def present_statement(text: str) -> str:
    """Returns a statement about the present. If the server stops answering, the browser shows the second half with
    the time of the last answer (freshness.js)."""
    current = escape(text)
    then = f'Unknown since <span class="fp-since"></span>. Last known: {current}'
    return f'<span class="fp-now">{current}</span><span class="fp-then" hidden>{then}</span>'


def title(text: str, badges: Iterable[str] = (), below: str = "", of_now: bool = False) -> str:
    """Returns a page's headline with badges above and a small line below. `badges` is markup, the others are text.

    of_now: the headline is a statement about the present.
    """
    small = f'<p class="fp-below">{escape(below)}</p>' if below else ""
    marks = "".join(badges)
    row = f'<div class="fp-badges">{marks}</div>' if marks else ""
    return f'{row}<h1 class="fp-title">{present_statement(text) if of_now else escape(text)}</h1>{small}'


def section(name: str, note: str = "") -> str:
    """Returns the heading of a section."""
    return f'<h2 class="fp-section">{escape(name)}{f"<span>{escape(note)}</span>" if note else ""}</h2>'


def notice(text: str, tone: str = "quiet", heading: str = "", of_now: bool = False) -> str:
    """Returns a message box: `critical` for failures, `degraded` for warnings, `quiet` for empty states.

    of_now: the message is a statement about the present.   text: what is between backticks is shown as code.
    """
    strong = f"<b>{escape(heading)}</b> " if heading else ""
    role = "alert" if tone == "critical" else "status"
    content = present_statement(text) if of_now else _CODE.sub(r"<code>\1</code>", escape(text))
    return f'<div class="fp-notice fp-notice-{escape(tone)}" role="{role}">{strong}{content}</div>'


def notice_of(heading: str, content: str, tone: str = "quiet") -> str:
    """Returns a message box around markup."""
    strong = f"<b>{escape(heading)}</b> " if heading else ""
    return f'<div class="fp-notice fp-notice-{escape(tone)}" role="status">{strong}{content}</div>'


def tabs(label: str, links: Sequence[Link], chosen: str) -> str:
    """Returns links as tabs; the one with the text `chosen` is marked."""
    made = "".join(
        f'<a class="fp-tab{" fp-tab-on" * (link.text == chosen)}" href="{escape(link.href)}" target="_self"'
        f"{' aria-current=page' * (link.text == chosen)}>{escape(link.text)}</a>"
        for link in links
    )
    return f'<nav class="fp-tabs" aria-label="{escape(label)}">{made}</nav>'


def quoted(text: str) -> str:
    """Returns a text as the value of an attribute."""
    return escape(text)


def empty(text: str) -> str:
    """Returns a quiet line."""
    return f'<p class="fp-empty">{escape(text)}</p>'


def table(head: Sequence[str], rows: Iterable[Sequence[Text]], empty: str) -> str:
    """Returns a table of texts and links, or `empty` without rows. The first column does not wrap.

    On a phone each cell of a table of more than three columns is a line with the name of its column.
    """
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-head="{escape(name)}"{"" if cell else " data-empty"}><span>{as_markup(cell)}</span></td>'
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    if not body:
        return f'<p class="fp-empty">{escape(empty)}</p>'
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    kind = "fp-table fp-stacked" if len(head) > STACKED_COLUMNS else "fp-table"
    return f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def facts(rows: Iterable[tuple[str, Text]], empty: str = "") -> str:
    """Returns label and value per line."""
    body = "".join(f"<div><dt>{escape(label)}</dt><dd>{as_markup(value)}</dd></div>" for label, value in rows)
    return f'<dl class="fp-facts">{body}</dl>' if body else f'<p class="fp-empty">{escape(empty)}</p>'


def comparison(rows: Iterable[tuple[str, Text]]) -> str:
    """Returns label and sentence per line, in larger type."""
    body = "".join(f"<div><dt>{escape(label)}</dt><dd>{as_markup(text)}</dd></div>" for label, text in rows)
    return f'<dl class="fp-story">{body}</dl>'


def detector(one: Detector, links: Sequence[Text] = ()) -> str:
    """Returns one detector with its blind spots and false alarm budget; method and settings are collapsed.

    links: what else there is about it.
    """
    marks = [badge(one.family.upper(), "quiet"), *(badge(text, "degraded") for text in _limits(one))]
    lines = [("Blind spots", one.blind)]
    if one.off:
        lines.insert(0, ("Disabled, missing signals", ", ".join(one.off)))
    notes = "".join(f"<p><i>{escape(label)}:</i> {code(text)}</p>" for label, text in lines)
    costs = "<br>".join(escape(plain_budget(line)) for line in one.budget)
    notes += f"<p><i>False alarm budget:</i> {costs}</p>" if costs else ""
    settings = "\n".join(f"{key} = {value}" for key, value in one.settings.items())
    more = f"Device class: {one.device_class}\nRequired signals: {', '.join(one.needs)}\n"
    more += f"Optional signals: {', '.join(one.wants) or 'none'}"
    folded = escape(f"{one.about}\n\n{more}\n\n[detector.{one.name}]\n{settings}")
    more_links = f"<p>{' · '.join(map(as_markup, links))}</p>" if links else ""
    off = " fp-detector-off" if one.off or one.errors else ""
    return (
        f'<div class="fp-detector{off}"><div><b>{escape(one.name)}</b>{"".join(marks)}</div>{notes}{more_links}'
        f"<details><summary>Method and settings</summary><pre>{folded}</pre></details></div>"
    )


def code(text: str) -> str:
    """Returns text in which parts between backquotes are commands."""
    return "".join(f"<code>{escape(part)}</code>" if i % 2 else escape(part) for i, part in enumerate(text.split("`")))


def _limits(one: Detector) -> list[str]:
    """Returns the texts of the badges: disabled, errors, and the rules of [[modes]] for this detector."""
    own = [r for r in one.modes if one.name == r.detector or r.scope == "*"]  # the table above lists the others
    rules = [f"{r.mode} {'everywhere' if r.scope == '*' else f'on {entity_name(r.scope)}'}" for r in own]
    errors = [f"failed on {amount(one.errors, 'frame', 'frames')}"] if one.errors else []
    return [*(["DISABLED"] if one.off else []), *errors, *rules]


def chips(texts: Sequence[Text], most: int = 24) -> str:
    """Returns names in a row; those beyond `most` are counted."""
    shown = "".join(f'<span class="fp-chip">{as_markup(text)}</span>' for text in texts[:most])
    more = f'<span class="fp-chip fp-more">and {len(texts) - most:,} more</span>' if len(texts) > most else ""
    return f'<div class="fp-chips">{shown}{more}</div>'


def vote_results(vote: Vote) -> str:
    """Returns both results of a vote, and a square per voter if the number of agreeing voters is known."""
    device = entity_name(vote.entity)
    others = amount(vote.others, "other", "others")
    voters = f"All {others}" if vote.agreeing == vote.others else f"Most of {others}"
    rows = (
        ("", voters, vote.expected),
        ("fp-own", device, vote.own),
    )
    lines = "".join(
        f'<div class="{name}"><dt>{escape(who)}</dt><dd>{_digest(text, vote)}</dd></div>' for name, who, text in rows
    )
    return f'{_squares(vote)}<dl class="fp-digests">{lines}</dl>'


def _squares(vote: Vote) -> str:
    if vote.agreeing is None or not 0 < vote.agreeing <= vote.others <= MAX_VOTERS:
        return ""
    squares = '<i class="fp-vote-yes"></i>' * vote.agreeing
    squares += '<i class="fp-vote-other"></i>' * (vote.others - vote.agreeing) + '<i class="fp-vote-no"></i>'
    label = f"{vote.agreeing:,} of {vote.others:,} others agree; {entity_name(vote.entity)} differs"
    return f'<div class="fp-vote" role="img" aria-label="{escape(label)}">{squares}</div>'


def _digest(text: str, vote: Vote) -> str:
    """Returns a result in groups of four characters; groups that differ are marked."""
    pairs = zip(_groups(vote.own), _groups(vote.expected), strict=False)
    differ = [a != b for a, b in pairs]
    groups = enumerate(_groups(text))
    return " ".join(
        f"<mark>{escape(group)}</mark>" if i >= len(differ) or differ[i] else escape(group) for i, group in groups
    )


def _groups(text: str) -> list[str]:
    return [text[i : i + 4] for i in range(0, len(text), 4)]
