"""The leading finding as a short story: measured against what, how far off, since when, and what would end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dashboards import words
from dashboards.answers import Detail
from dashboards.words import quantity
from pipeline.model.entity_names import entity_name
from pipeline.model.records import Finding
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
