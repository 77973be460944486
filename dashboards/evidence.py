"""What an incident's page shows of its findings: which comes first, which curve, which figures, who is hurt.

The leading finding as a short story: measured against what, how far off, since when, and what would end it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards import words
from dashboards.answers import Detail, Happening, Mute
from dashboards.words import quantity
from pipeline.model.entity_names import entity_name
from pipeline.model.records import LEVELS, SECOND, Finding, Incident
from pipeline.model.signals import CATALOGUE

COMPARED = ("value", "expected", "spread", "cohort", "peers", "effect", "unit")
"""Names in the evidence of a finding that compares a device with others or with its own past."""
SAID = ("clears", "corroborated_by", "muted", "mode")
"""Names that are told here or above the evidence, whatever was compared."""
WITNESSES = 4
"""Other findings of the incident that are named; more are counted. Chosen."""
_DECADE = "decade"


def compares(finding: Finding) -> bool:
    """Whether its evidence holds a comparison as numbers with a unit."""
    facts = finding.evidence
    return isinstance(facts.get("unit"), str) and all(_number(facts.get(k)) is not None for k in ("value", "expected"))


def told(finding: Finding) -> tuple[str, ...]:
    """Names of the evidence that the story tells, so that the figures need not."""
    return (*COMPARED, *SAID) if compares(finding) else SAID


def story(finding: Finding, detail: Detail, now: int) -> list[tuple[str, str]]:
    """Label and text, line by line, in the order in which one asks."""
    lines = [("Seen on", entity_name(finding.entity))]
    if compares(finding):
        lines += _compared(finding)
    lines.append(("Began", words.ago(finding.onset, now)))
    lines.append(("Borne out by", _witnesses(finding, detail)))
    return [*lines, *_end(finding.evidence.get("clears"))]


def _compared(finding: Finding) -> list[tuple[str, str]]:
    facts = finding.evidence
    value, expected, spread = float(facts["value"]), float(facts["expected"]), _number(facts.get("spread"))
    unit, level = facts["unit"], _level_unit(finding)
    wanted = _level(expected, level)
    if spread is not None:
        wanted += f", spread {quantity(spread, 'K' if level == 'Cel' else unit)}"
    return [
        ("Measured", _level(value, level)),
        ("Expected", wanted),
        ("Compared with", _against(facts)),
        ("Off by", _off(value, expected, level)),
    ]


def _against(facts: Mapping[str, Any]) -> str:
    """Who the peers are and how many."""
    cohort, peers = words.named(str(facts.get("cohort") or "")), facts.get("peers")
    if not isinstance(peers, int) or peers < 1:
        return f"its {cohort}" if cohort.startswith("own past") else cohort or "not told"
    return f"the median of {words.amount(peers, 'peer', 'peers')}" + (f": {cohort}" if cohort else "")


def _level_unit(finding: Finding) -> str:
    """The unit of value and expected; that of a rise is K where the level is in degrees."""
    unit = str(finding.evidence["unit"])
    first = next((CATALOGUE[name] for name in finding.signals if name in CATALOGUE), None)
    return "Cel" if unit == "K" and first is not None and first.unit == "Cel" else unit


def _level(value: float, unit: str) -> str:
    return f"{10**value:.1e}" if unit == _DECADE else quantity(value, unit)


def _off(value: float, expected: float, unit: str) -> str:
    """The difference in the unit, and as a share where a share means something."""
    off = value - expected
    more = "more" if off >= 0 else "less"
    if unit == _DECADE:
        return f"{quantity(10 ** abs(off))} times {more}"
    text = f"{quantity(abs(off), 'K' if unit == 'Cel' else unit)} {more}"
    if unit == "Cel" or expected <= 0:
        return text
    if value >= 2 * expected:
        return f"{text}: {quantity(value / expected)} times as much"
    return f"{text}: {100 * abs(off) / expected:.3g} %"


def _witnesses(finding: Finding, detail: Detail) -> str:
    """What the detectors name, else what else was found of the same cause."""
    named = finding.evidence.get("corroborated_by")
    if isinstance(named, Mapping):
        return f"{named.get('detector')} on {entity_name(str(named.get('entity')))}"
    if isinstance(named, Sequence) and not isinstance(named, str) and named:
        return words.joined([words.signal_name(str(name)) for name in named])
    others = [f for f in detail.findings if f.detector != finding.detector]
    pairs = list(dict.fromkeys(f"{f.detector} on {entity_name(f.entity)}" for f in others))
    if not pairs:
        return "nothing else so far"
    more = [f"{len(pairs) - WITNESSES:,} more"] if len(pairs) > WITNESSES else []
    return "found beside it: " + words.joined([*pairs[:WITNESSES], *more])


def _end(clears: Any) -> list[tuple[str, str]]:
    if not isinstance(clears, str) or not clears:
        return []
    for lead in ("ends when ", "over when ", "over with "):
        clears = clears.removeprefix(lead)
    if clears.endswith("it is over"):
        return [("Now", "it is over")]
    return [("Ends when", words.named(clears))]


def held_back(finding: Finding) -> str:
    """The sentence for a finding that a mute or a mode keeps from telling anybody; empty where nothing does."""
    muted, mode = finding.evidence.get("muted"), finding.evidence.get("mode")
    if isinstance(muted, Mapping):
        until = words.fact(muted.get("until"))
        return f"Muted until {until}: {muted.get('reason')}. It is stored, and tells nobody."
    return "Only recorded: the mode of this detector is `record` here. It tells nobody." if mode == "record" else ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


BEFORE = 30 * 60 * SECOND
"""Least that is shown before the onset: enough to see what was usual. Chosen."""
GRID = 10 * SECOND
"""Moments asked for are rounded to this, so that viewers share one answer. Chosen."""
CURVES = 4
"""Signals tried until one is served; each is a question to the API. Chosen."""
LINES = 40
"""Lines of the timeline. Chosen."""
OWN = 12
"""Findings of the incident in its timeline, the earliest: a wide fault has hundreds alike. Chosen."""
_BALLOT = ("digest", "expected", "peers", "agreeing")
"""Names in a vote's evidence: own result, the majority's, how many others voted, how many of them agree (optional)."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """A vote over one computation. `agreeing` is how many of the others gave the expected result, if it is told."""

    entity: str
    own: str
    expected: str
    others: int
    agreeing: int | None


def leading(detail: Detail) -> Finding | None:
    """The finding that explains the incident: of its first entity if there is one, then the gravest, then the first."""
    incident = detail.incident
    return min(
        detail.findings,
        key=lambda f: (f.entity != incident.entity, f.detector != incident.detector, -LEVELS.index(f.level), f.onset),
        default=None,
    )


def candidates(detail: Detail) -> list[tuple[str, str]]:
    """(entity, signal) in the order in which a curve is worth showing."""
    first = leading(detail)
    ordered = [first, *(f for f in detail.findings if f is not first)] if first else []
    pairs = dict.fromkeys((f.entity, signal) for f in ordered for signal in f.signals)
    return list(pairs)[:CURVES]


def span(incident: Incident, now: int) -> tuple[int, int]:
    """From well before the onset until now, or until a little after the end."""
    end = now if incident.resolved is None else min(now, incident.resolved + BEFORE // 3)
    end = max(end, incident.onset + GRID)
    start = incident.onset - max(BEFORE, (end - incident.onset) // 2)
    return start // GRID * GRID, end // GRID * GRID


def vote_of(finding: Finding) -> Ballot | None:
    """The vote that the evidence describes, else None."""
    facts = finding.evidence
    own, expected, others, agreeing = (facts.get(name) for name in _BALLOT)
    if not isinstance(own, str) or not isinstance(expected, str) or not isinstance(others, int):
        return None
    return Ballot(finding.entity, own, expected, others, agreeing if isinstance(agreeing, int) else None)


def rows(finding: Finding) -> list[tuple[str, str]]:
    """The finding's further figures in words, with their units, without those that the vote or the story shows."""
    hidden = (*told(finding), *(_BALLOT if vote_of(finding) else ()))
    found: list[tuple[str, str]] = []
    for key, value in finding.evidence.items():
        if key in hidden:
            continue
        if isinstance(value, Mapping):
            found += [(f"{words.label(key)}: {words.label(str(k)).lower()}", words.fact(v)) for k, v in value.items()]
        else:
            found.append((words.label(key), _with_unit(key, value, finding)))
    return found


def _with_unit(key: str, value: Any, finding: Finding) -> str:
    if key.endswith("_s") and isinstance(value, (int, float)):
        return words.age(value)
    return words.fact(value, _unit(key, finding))


def _unit(key: str, finding: Finding) -> str:
    """A figure's unit: the guiltiest signal's for `value` and `expected`, else that of the signal it is named after."""
    first = next((CATALOGUE[name] for name in finding.signals if name in CATALOGUE), None)
    if key in ("value", "expected"):
        return first.unit if first else ""
    if key.endswith("_rise"):
        return "K"
    named = CATALOGUE.get(key) or (CATALOGUE.get(f"{first.device_class}.{key}") if first else None)
    return named.unit if named else ""


def blast(detail: Detail) -> list[str]:
    """Who is hurt: what the API counts below the cause and the jobs there, else what can be told from the members."""
    entities, jobs = detail.blast_radius.get("entities"), detail.blast_radius.get("jobs")
    if not isinstance(entities, dict) or not entities:
        return words.counted(Counter(e.partition(":")[0] for e in {detail.incident.cause, *detail.incident.members}))
    others = {kind: number for kind, number in entities.items() if kind != "job" or not jobs}
    return [*words.counted(others), *(entity_name(str(job)) for job in jobs or ())]


def _held_back(finding: Finding) -> str:
    muted, mode = finding.evidence.get("muted"), finding.evidence.get("mode")
    return " (muted)" if muted else " (only recorded)" if mode == "record" else ""


def covering(detail: Detail, mutes: Iterable[Mute], now: int) -> list[Mute]:
    """Mutes that stand and keep the incident's detectors from speaking of its entity."""
    incident = detail.incident
    around = {"*", incident.entity, incident.cause, *detail.above}
    speakers = {"*", incident.detector, *(f.detector for f in detail.findings)}
    return [m for m in mutes if m.stands(now) and m.detector in speakers and m.scope in around]


def scopes(detail: Detail) -> list[str]:
    """Where one may want to mute what is found here, the narrowest first; * for everywhere is the last."""
    incident = detail.incident
    return list(dict.fromkeys([incident.entity, *detail.above, incident.cause, "*"]))


def speakers(detail: Detail) -> list[str]:
    """The detectors of the incident, the one that first spoke first; * for all is the last."""
    return list(dict.fromkeys(filter(None, [detail.incident.detector, *(f.detector for f in detail.findings), "*"])))


def sent(detail: Detail, now: int) -> list[tuple[str, str, str, str]]:
    """Notifications with their fate, the newest first."""
    ordered = sorted(detail.notifications, key=lambda n: n.created or 0, reverse=True)
    return [(_when(n.created, now), n.receiver, n.kind, _fate(n.state, n.attempts, n.answer)) for n in ordered]


def _when(time: int | None, now: int) -> str:
    return "" if time is None else words.clock(time, now)


def _fate(state: str, attempts: int, answer: str) -> str:
    tries = "" if attempts <= 1 else f" after {attempts} attempts"
    return f"{state}{tries}" + (f": {answer}" if answer else "")


def timeline(detail: Detail, items: Iterable[Happening], now: int) -> list[tuple[str, str, str, str]]:
    """Events around the incident and its own findings in one table, the newest first, each said once."""
    found = {(i.time, i.entity, i.text): i.kind for i in items}
    for finding in sorted(detail.findings, key=lambda f: f.onset)[:OWN]:
        said = f"{finding.level} {finding.detector}{_held_back(finding)}: {finding.summary}"  # as the API says it
        found.setdefault((finding.onset, finding.entity, said), "finding")
    ordered = sorted(found.items(), reverse=True)[:LINES]
    return [
        (words.clock(time, now), kind.replace("_", " "), entity_name(entity), words.plain(text))
        for (time, entity, text), kind in ordered
    ]
