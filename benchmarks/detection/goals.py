"""The goals that detectors are held to, beside what the suites measured of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.detection.tables import interval, number, share

UNMEASURED = "not yet measured"
LINKS_PER_NODE = 8
Score = Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """What the goals are read from.

    clean, raised: merged scores, None where no run of that suite is finished.
    events: (line of the truth, what came of it) of each fault that counts, of the raised suite.
    """

    clean: Score | None
    raised: Score | None
    events: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]

    def kind(self, *names: str) -> Score | None:
        """Figures of the first of the kinds that there are events of."""
        kinds = self.raised["kinds"] if self.raised else {}
        return next((kinds[name] for name in names if name in kinds and kinds[name]["events"]), None)

    def effect(self, unit: str, low: float, high: float, least_s: float) -> list[Mapping[str, Any]]:
        """What came of faults with an effect within [low, high) that last at least so long."""
        return [
            record
            for line, record in self.events
            if line["parameters"].get("effect_unit") == unit
            and low <= abs(line["parameters"].get("effect", 0.0)) < high
            and record["length_s"] >= least_s
        ]


def found_of(records: Iterable[Mapping[str, Any]]) -> str:
    """Recall of some records, with their median delay."""
    mine = list(records)
    delays = [r["delay_s"] for r in mine if r["delay_s"] is not None]
    if not mine:
        return UNMEASURED
    median = f"; median {number(statistics.median(delays))} s" if delays else ""
    return f"R {share(len(delays) / len(mine))} ({len(delays)} of {len(mine)}){median}"


def recall(block: Score | None) -> str:
    """Recall with its interval, and delays, of a kind."""
    if block is None:
        return UNMEASURED
    delays = "" if block["delay_median_s"] is None else f"; median {number(block['delay_median_s'])} s, "
    delays += "" if block["delay_p90_s"] is None else f"p90 {number(block['delay_p90_s'])} s"
    return f"R {share(block['recall'])} ({block['found']} of {block['events']}){delays}"


def _pages(seen: Seen) -> str:
    return interval(seen.clean["false_pages_per_1000_node_days"]) if seen.clean else UNMEASURED


def _mixed(seen: Seen) -> str:
    if seen.raised is None or not seen.raised["events"]:
        return UNMEASURED
    return f"P {share(seen.raised['precision'])}, R {share(seen.raised['recall'])}, F1 {share(seen.raised['f1'])}"


def _attribution(seen: Seen) -> str:
    """Right among the faults of nodes and jobs about which anything was said; what jobs made and nodes got."""
    rows = {row: seen.raised["attribution"].get(row, {}) for row in ("NODE", "JOB")} if seen.raised else {}
    told = {row: sum(n for c, n in columns.items() if c != "not found") for row, columns in rows.items()}
    if not sum(told.values()):
        return UNMEASURED
    right = sum(rows[row].get(row, 0) for row in rows)
    blamed = f"; {rows['JOB'].get('NODE', 0)} of {told['JOB']} job-made on a node" if told["JOB"] else ""
    return f"{share(right / sum(told.values()))} ({right} of {sum(told.values())}){blamed}"


def _link_pages(seen: Seen) -> str:
    if seen.clean is None or not seen.clean["node_days"]:
        return UNMEASURED
    count = seen.clean["false_by_detector"].get("link", 0)
    return f"{number(1e4 * count / (seen.clean['node_days'] * LINKS_PER_NODE))} ({count} pages)"


def _sdc(seen: Seen) -> str:
    block, clean = seen.kind("sdc"), seen.clean
    if block is None:
        return UNMEASURED
    false = f", {clean['false_by_detector'].get('sdc', 0)} false pages in the clean runs" if clean else ""
    return f"{block['found']} of {block['events']} broken GPUs{false}"


def _collapse(seen: Seen) -> str:
    found = seen.raised
    if found is None or found["compression"] is None:
        return UNMEASURED
    return f"root top-1 {share(found['top1'])}; {number(found['compression'])} conditions an incident, all faults"


def _cost(seen: Seen) -> str:
    """2 million samples are 100,000 GPUs x 20 metrics."""
    found = seen.clean or seen.raised
    cost = found["cpu_s_per_million_samples"] if found else None
    return UNMEASURED if cost is None else f"{2 * cost:.1g} s of a core per tick, scaled up from these fleets"


Goal = tuple[str, str, str, str, Callable[[Seen], str]]
_unmeasured: Callable[[Seen], str] = lambda _: UNMEASURED  # noqa: E731
GOALS: tuple[Goal, ...] = (
    ("False pages, all families", "not published", "<= 0.3 per 1,000 node-days (limit 1.0)", "0.1", _pages),
    (
        *("Faulty node, mixed faults", "Minder P .904 R .883 F1 .893"),
        *("event P >= 0.95, R >= 0.93, F1 >= 0.94", "F1 0.97", _mixed),
    ),
    (
        *("Fail-slow >= 10 % lasting >= 20 min", "Greyhound 99.8 % of jobs, 0 % FPR on 6-49 events"),
        "R >= 0.97, P >= 0.95; PAGE <= 5 min corroborated, <= 17 min uncorroborated",
        *("PAGE <= 10 min", lambda seen: found_of(seen.effect("time", 0.10, 9.0, 1200.0))),
    ),
    (
        *("Fail-slow 5 %", "none", "R >= 0.90 within 30 min", "0.97"),
        lambda seen: found_of(seen.effect("time", 0.04, 0.07, 1800.0)),
    ),
    (
        *("Localise in the collective library", "Holmes 97.2 %, 30 s; Mycroft 15 s"),
        *("top-1 >= 0.95 within 60 s when its timing is ingested", "30 s", _unmeasured),
    ),
    (
        *("NODE or JOB attribution", "none numeric"),
        *(">= 0.95; under 1 % of job-made stragglers blamed on a node", "0.99", _attribution),
    ),
    (
        *("Link bit error rate 1e-12 / 1e-13", "vendor window 12 min", "<= 90 s / <= 5 min, R >= 0.98"),
        *("60 s / 3 min", lambda seen: recall(seen.kind("link_degradation"))),
    ),
    (
        *("Link false pages", "vendor rule 4.7 per 10,000 links and day", "<= 0.1 per 10,000 links and day"),
        *("0.03", _link_pages),
    ),
    (
        *("Flap page", "gpud 3 in 12 h", "<= 60 s after the third flap, R >= 0.99", "-"),
        lambda seen: recall(seen.kind("link_flap")),
    ),
    (
        *("Optic precursor", "CorrOpt +60 % repair accuracy", ">= 60 % ticketed >= 24 h ahead, ticket P >= 0.8"),
        *("80 %", lambda seen: recall(seen.kind("optic_degradation"))),
    ),
    (
        *("SDC, bit-exact mismatch", "AEGIS 8/8, SDCHunter 91 % injected"),
        *("100 % of injected mismatches, < 0.004 false pages per 1,000 node-days", "-", _sdc),
    ),
    ("SDC population coverage, canary only", "< 40 % (stress), 25-70 % EUD", ">= 30 % in 7 days", "40 %", _unmeasured),
    ("SDC with replica hooks", "91-100 %", ">= 90 % of injected within 1,000 steps", "95 %", _unmeasured),
    (
        *("Coolant pump loss", "none", "incident <= 30 s", "2 s"),
        lambda seen: recall(seen.kind("coolant")),
    ),
    (
        *("R_th +15 % on one GPU", "none", "<= 10 min, R >= 0.95", "5 min"),
        lambda seen: recall(seen.kind("cold_plate")),
    ),
    (
        *("Correlated fault collapse", "Flock 1.19-11x less error", "root top-1 >= 0.95; >= 50 alerts an incident"),
        *("0.99", _collapse),
    ),
    (
        *("Engine cost, 100,000 GPUs x 20 metrics at 10 s", "ARGUS 2.7 GB/min at 10,000 GPUs (tracing)"),
        *("<= 0.25 s of a core per tick", "0.2", _cost),
    ),
)
"""Quantity, the best that is published, our goal, more than the goal, what the suites say."""


def rows(seen: Seen) -> list[tuple[str, ...]]:
    return [(*words, measured(seen)) for *words, measured in GOALS]
