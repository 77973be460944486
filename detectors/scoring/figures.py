"""Figures of a score, from the records of one run or of many, with confidence intervals of counts and shares.

Nothing is point-adjusted: the unit is the event. Delays count events that were not found as still waiting.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from detectors.scoring.answer_rules import CLASSES, GOAL_S, HOLD_S, NOT_FOUND
from detectors.scoring.matching import answer_rule, row_name
from detectors.scoring.records import EventRecord, FalseRecord, Records, RunRecord


def time_until_share(waits: Iterable[tuple[float, bool]], share: float) -> float | None:
    """Returns the time after which `share` of the events is found, None if never.

    waits: for each event its time, and whether that ended with its finding (else with the event).
    Source: Kaplan and Meier (1958), J. Am. Stat. Assoc. 53, 457-481.
    """
    left, waiting = 1.0, sorted(waits, key=lambda w: (w[0], not w[1]))
    for place, (time, known) in enumerate(waiting):
        if known:
            left *= 1 - 1 / (len(waiting) - place)
        if left <= 1 - share or math.isclose(left, 1 - share):
            return time
    return None


_Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution
_STEPS = 100  # bisections: far beyond the precision of a float
_LEAST = 1e-18  # share of the sum below which a term changes no float


def wilson_interval(hits: int, of: int, z: float = _Z95) -> tuple[float, float] | None:
    """Returns the 95 % interval of a share; Wilson (1927), J. Am. Stat. Assoc. 22, 209-212. None without trials."""
    if not of:
        return None
    share, square = hits / of, z * z
    middle = (share + square / (2 * of)) / (1 + square / of)
    half = z * math.sqrt(share * (1 - share) / of + square / (4 * of * of)) / (1 + square / of)
    return 0.0 if hits == 0 else middle - half, 1.0 if hits == of else middle + half


def poisson_interval(count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the exact interval of the mean of a Poisson count; Garwood (1936), Biometrika 28, 437-442."""
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else _poisson_mean(count - 1, 1 - tail, count)
    return low, _poisson_mean(count, tail, count)


def _poisson_mean(most: int, chance: float, around: int) -> float:
    """Returns the mean at which P(X <= most) is `chance`, by bisection within 10 standard deviations of `around`."""
    width = 10.0 + 10.0 * math.sqrt(around + 1)
    low, high = max(0.0, around - width), around + width
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(most, middle) > chance else (low, middle)
    return (low + high) / 2


def _at_most(count: int, mean: float) -> float:
    """Returns P(X <= count) of a Poisson variable, summed outwards from the largest term until nothing is added."""
    if mean <= 0:
        return 1.0
    if count < mean:
        return _tail(count, mean, -1)
    return 1 - _tail(count + 1, mean, 1)


def _tail(first: int, mean: float, step: int) -> float:
    """Returns P(first) + P(first + step) + ..., where each term is smaller than the one before."""
    total, k = 0.0, first
    term = math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
    while k >= 0 and term > _LEAST * total:
        total += term
        term *= k / mean if step < 0 else mean / (k + 1)
        k += step
    return total


Events = Sequence[EventRecord]
DECILES = 10


def compute_figures(records: Records) -> dict[str, Any]:
    """Returns all figures, with the records that they are computed from."""
    labelled = [e for e in records.events if e.detectability in ("hard", "soft")]
    counted, small = split_by_size(labelled)
    kinds = {_row(e): answer_rule(e.kind, e.detectability).level for e in labelled}
    large = [e for e in labelled if _is_visible(e)]
    pages = [f for f in records.false if f.level == "page"]
    found, paged = recall_block(counted), _alert_figures("page", records, counted)
    return {
        **found,
        **paged,
        "f1": _f1(paged["precision"], found["recall"]),
        "missed": [e.id for e in counted if not e.found],
        "small": recall_block(small),
        "large": recall_block(large),
        "page_kinds": recall_block([e for e in counted if answer_rule(e.kind, e.detectability).level == "page"]),
        "not_sought": _not_sought(records),
        "tickets": _alert_figures("ticket", records, counted),
        "false_by_detector": _count_names(f.detector for f in pages),
        "false_tickets_by_detector": _count_names(f.detector for f in records.false if f.level == "ticket"),
        "false_by_reason": _count_names(f.why for f in pages),
        "false_by_benign": _by_benign(records.events, pages),
        "false_beside_faults": _count_names(f.beside for f in pages if f.beside and f.why != "benign"),
        **_compression(records.runs),
        "kinds": {row: _kind(row, level, counted, small, large) for row, level in kinds.items()},
        "severity": _severity(counted),
        "scales": [_scale(gpus, records, counted) for gpus in _sizes(records.runs)],
        "attribution": _confusion(counted),
        "attribution_right": _attribution_right(counted),
        "records": records.as_json(),
    }


def split_by_size(labelled: Events) -> tuple[list[EventRecord], list[EventRecord]]:
    """Returns (events that recall counts, events that are too small).

    Small are effects below delta_min and events that are never visible; soft events also if they are shorter than the
    hold plus the median delay of their kind. That delay counts up to GOAL_S: a late detector must not reduce its own
    task. A hard event is a logged fact and stays in the log, however short it was.
    """
    delays: dict[str, list[float]] = {}
    for e in labelled:
        if e.large and e.delay_s is not None:
            delays.setdefault(_row(e), []).append(e.delay_s)
    least = {kind: HOLD_S + min(GOAL_S, statistics.median(found)) for kind, found in delays.items()}

    def counts(e: EventRecord) -> bool:
        return _is_visible(e) and (e.detectability == "hard" or e.length_s >= least.get(_row(e), HOLD_S))

    return [e for e in labelled if counts(e)], [e for e in labelled if not counts(e)]


def _is_visible(e: EventRecord) -> bool:
    """Returns whether its effect is large enough, and visible at all."""
    return e.large and e.length_s >= 0.0


def recall_block(events: Events) -> dict[str, Any]:
    """Returns recall, delay and localisation of some events."""
    found = [e for e in events if e.found]
    delays = sorted(e.delay_s for e in events if e.delay_s is not None)
    waits = [(max(0.0, e.length_s) if e.delay_s is None else e.delay_s, e.found and not e.late) for e in events]
    return {
        "events": len(events),
        "found": len(found),
        "recall": _share(len(found), len(events)),
        "recall_95": wilson_interval(len(found), len(events)),
        "delay_median_s": statistics.median(delays) if delays else None,
        "delay_p90_s": delays[math.ceil(0.9 * len(delays)) - 1] if delays else None,
        "half_known_after_s": time_until_share(waits, 0.5),
        "ninety_percent_known_after_s": time_until_share(waits, 0.9),
        "top1": _share(sum(e.top1 for e in found), len(found)),
        "top3": _share(sum(e.top3 for e in found), len(found)),
    }


def rate_per_1000(count: int, node_days: float | None) -> dict[str, float] | None:
    """Returns the count per 1,000 node-days with its exact 95 % interval; None if the time is unknown."""
    if not node_days:
        return None
    low, high = poisson_interval(count)
    return {"value": 1000 * count / node_days, "low": 1000 * low / node_days, "high": 1000 * high / node_days}


def _alert_figures(level: str, records: Records, counted: Events) -> dict[str, Any]:
    """Returns the figures of pages, or tickets: an incident is one, however many events it answers.

    Right ones answer a hard or soft event, small ones too; excused ones answer invisible events only.
    """
    answering = _incidents(e for e in records.events if e.level == level and e.detectability in ("hard", "soft"))
    excused = _incidents(e for e in records.events if e.level == level and e.detectability == "invisible")
    right = len(answering)
    false = [f for f in records.false if f.level == level]
    days = _sum(r.node_days for r in records.runs)
    return {
        f"{level}s": right + len(false),
        "right": right,
        "right_small": len(answering - _incidents(e for e in counted if e.level == level)),
        "excused": len(excused - answering),
        "false": len(false),
        "duplicates": sum(f.why == "duplicate" for f in false),
        "precision": _share(right, right + len(false)),
        "precision_95": wilson_interval(right, right + len(false)),
        "node_days": days,
        f"false_{level}s_per_1000_node_days": rate_per_1000(len(false), days),
    }


def _incidents(events: Iterable[EventRecord]) -> set[tuple[int, str | None]]:
    return {(e.run, e.incident) for e in events}


def _not_sought(records: Records) -> dict[str, Any]:
    """Returns events of the classes that need not be found; an invisible one that was found is not false."""
    classes = {}
    for name in ("invisible", "benign"):
        some = [e for e in records.events if e.detectability == name]
        if some:
            classes[name] = {"events": len(some), "found": sum(e.found for e in some)}
    return classes


def _by_benign(events: Events, pages: Sequence[FalseRecord]) -> dict[str, Any]:
    """Returns for each harmless kind its events, those with a page, the pages, and their detectors and classes."""
    found = {}
    for kind in sorted({e.kind for e in events if e.detectability == "benign"}):
        mine = [f for f in pages if f.why == "benign" and f.beside == kind]
        found[kind] = {
            "events": sum(e.kind == kind and e.detectability == "benign" for e in events),
            "fooled": len({(f.run, f.beside_id) for f in mine}),
            "pages": len(mine),
            "detectors": _count_names(f.detector for f in mine),
            "said": _count_names(f.said for f in mine),
        }
    return found


def _compression(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Returns conditions per incident that paged, of all levels and of pages alone; None without incidents."""
    known = [r for r in runs if r.incidents is not None]
    incidents = sum(r.incidents or 0 for r in known)
    return {
        "incidents": incidents if known else None,
        "compression": _share(sum(r.conditions for r in known), incidents),
        "compression_of_pages": _share(sum(r.page_conditions for r in known), incidents),
        "pages_in_no_incident": sum(r.stray for r in runs),
        "cpu_s_per_million_samples": _cost(runs),
    }


def _cost(runs: Sequence[RunRecord]) -> float | None:
    known = [(r.cpu_seconds, r.samples) for r in runs if r.cpu_seconds is not None and r.samples]
    return 1e6 * sum(c for c, _ in known) / sum(s for _, s in known) if known else None


def _row(e: EventRecord) -> str:
    return row_name(e.kind, e.detectability)


def _kind(row: str, level: str, counted: Events, small: Events, large: Events) -> dict[str, Any]:
    little = [e for e in small if _row(e) == row]
    mine = [e for e in counted if _row(e) == row]
    tail = {"small": len(little), "small_found": sum(e.found for e in little)}
    return {"level": level, **recall_block(mine), **tail, **_large(e for e in large if _row(e) == row)}


def _large(events: Iterable[EventRecord]) -> dict[str, Any]:
    """Returns how many events were found, however short they were."""
    found = [e.found for e in events]
    return {"large": len(found), "large_found": sum(found), "large_recall": _share(sum(found), len(found))}


def _severity(counted: Events) -> dict[str, Any]:
    """Returns recall by tenth of the kind's range of severity: "0.0-0.1" and so on; for events that have one."""
    tenths: dict[int, list[EventRecord]] = {}
    for e in counted:
        if e.severity is not None:
            tenths.setdefault(min(DECILES - 1, int(e.severity * DECILES)), []).append(e)
    return {f"{d / DECILES:.1f}-{(d + 1) / DECILES:.1f}": recall_block(tenths[d]) for d in sorted(tenths)}


def _sizes(runs: Sequence[RunRecord]) -> list[float | None]:
    return sorted({r.gpus for r in runs}, key=lambda g: (g is None, g or 0.0))


def _scale(gpus: float | None, records: Records, counted: Events) -> dict[str, Any]:
    """Returns the figures of all runs of one size."""
    runs = {i for i, r in enumerate(records.runs) if r.gpus == gpus}
    mine = Records(
        tuple(e for e in records.events if e.run in runs),
        tuple(f for f in records.false if f.run in runs),
        tuple(records.runs[i] for i in sorted(runs)),
    )
    found = [e for e in counted if e.run in runs]
    paged, compressed = _alert_figures("page", mine, found), _compression(mine.runs)
    return {"gpus": gpus, "runs": len(runs), **recall_block(found), **paged, **compressed}


def _confusion(counted: Events) -> dict[str, dict[str, int]]:
    """Returns the confusion matrix: class of the fault -> class of the answering or blaming alert -> events."""
    columns = (*CLASSES, NOT_FOUND)
    rows = [row for row in CLASSES if any(e.row == row for e in counted)]
    return {row: {c: sum(e.row == row and e.said == c for e in counted) for c in columns} for row in rows}


def _attribution_right(counted: Events) -> dict[str, Any]:
    """Returns the share of the diagonal among events with an answering or blaming alert."""
    named = [e for e in counted if e.said != NOT_FOUND]
    right = sum(e.said == e.row for e in named)
    interval = wilson_interval(right, len(named))
    return {"told": len(named), "right": right, "share": _share(right, len(named)), "share_95": interval}


def _count_names(names: Iterable[Any]) -> dict[str, int]:
    return dict(sorted(Counter(map(str, names)).items()))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _sum(values: Iterable[float | None]) -> float | None:
    """Returns the sum; None where a value is unknown: a rate over half the time would be twice too high."""
    known = list(values)
    return None if not known or None in known else math.fsum(v for v in known if v is not None)


def _f1(precision: float | None, recall: float | None) -> float | None:
    """Returns the harmonic mean."""
    if precision is None or recall is None:
        return None
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
