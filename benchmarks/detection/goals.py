"""The goals of the detectors, with the measurements of the suites."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.sim.faults.kind import DAY, Fault
from agents.sim.faults.link import OpticDegradation
from agents.sim.kinds import KINDS
from benchmarks.detection.tables import interval, number, share
from pipeline.model.records import SECOND, from_iso

UNMEASURED = "not yet measured"
LINKS_PER_NODE = 8
SHARED = frozenset({"leaf", "power", "coolant", "rack"})
"""Entities with many devices below: a fault of one is correlated."""
RESISTANCE, RESISTANCE_S = 0.15, 600.0  # the goal's rise of thermal resistance, and time from there to the answer
PAGE_S, FLAP_S, FLAPS = 1020.0, 60.0, 3  # goals: 17 min for a page uncorroborated; a minute after the third flap
AHEAD_S = DAY  # before the cliff, as the goal of optics requires
Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
Score = Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """What the goals are read from.

    clean, raised: merged scores, None where no run of that suite is finished.
    events: (line of the truth, what came of it) of each fault that counts, of the raised suite.
    trials: lines of benchmarks.detection.trials by name.
    """

    clean: Score | None
    raised: Score | None
    events: Sequence[Pair]
    trials: Mapping[str, str] = field(default_factory=dict)

    def trial(self, name: str) -> str:
        """Returns the result of a separate trial."""
        return self.trials.get(name, UNMEASURED)

    def results_of(self, *names: str) -> list[Pair]:
        """Lines and records of some kinds, where their effect is as large as must be found."""
        return [pair for pair in self.events if pair[1]["kind"] in names and pair[1]["large"]]

    def kind(self, *names: str) -> Score | None:
        """Returns figures of the first of the kinds that has events."""
        kinds = self.raised["kinds"] if self.raised else {}
        return next((kinds[name] for name in names if name in kinds and kinds[name]["events"]), None)

    def effect(self, unit: str, low: float, high: float, least_s: float) -> list[Mapping[str, Any]]:
        """Returns results of faults with an effect within [low, high) that last at least `least` seconds."""
        return [
            record
            for line, record in self.events
            if line["parameters"].get("effect_unit") == unit
            and low <= abs(line["parameters"].get("effect", 0.0)) < high
            and record["length_s"] >= least_s
        ]


def found_of(records: Iterable[Mapping[str, Any]], within: float | None = None) -> str:
    """Returns the recall of some records, with their median delay; an answer after `within` s does not count."""
    mine = list(records)
    delays = [r["delay_s"] for r in mine if r["delay_s"] is not None and (within is None or r["delay_s"] <= within)]
    if not mine:
        return UNMEASURED
    limit = "" if within is None else f" within {number(within)} s"
    median = f"; median {number(statistics.median(delays))} s" if delays else ""
    return f"R {share(len(delays) / len(mine))} ({len(delays)} of {len(mine)}){limit}{median}"


def recall(block: Score | None) -> str:
    """Returns recall with its interval, and delays, of a kind."""
    if block is None:
        return UNMEASURED
    delays = "" if block["delay_median_s"] is None else f"; median {number(block['delay_median_s'])} s, "
    delays += "" if block["delay_p90_s"] is None else f"p90 {number(block['delay_p90_s'])} s"
    return f"R {share(block['recall'])} ({block['found']} of {block['events']}){delays}"


def _pages(seen: Seen) -> str:
    return interval(seen.clean["false_pages_per_1000_node_days"]) if seen.clean else UNMEASURED


def _mixed(seen: Seen) -> str:
    """Returns raised recall with the page rate of clean runs, at the rates of real fleets."""
    field = (seen.raised or {}).get("precision_at_field_rates")
    if not field or field["recall"] is None:
        return UNMEASURED
    found, lines = field["recall"], []
    for line in field["precision"]:
        p = line["value"]
        f1 = None if p is None else 2 * p * found / (p + found) if p + found else 0.0
        lines.append(f"P {share(p)}, F1 {share(f1)} at {line['faults_per_1000_node_days']:g}")
    return f"R {share(found)}; {'; '.join(lines)} faults per 1,000 node-days"


def _seconds(line: Mapping[str, Any], name: str) -> float:
    """Returns the time from the onset to another time of a line of the truth."""
    later = line["parameters"].get("detectable", line["onset"]) if name == "detectable" else line[name]
    return (from_iso(later) - from_iso(line["onset"])) / SECOND


def _answered(pair: Pair) -> float | None:
    """Returns the seconds from the onset to the answer."""
    line, record = pair
    return None if record["delay_s"] is None else _seconds(line, "detectable") + float(record["delay_s"])


def _share_by(due: Iterable[tuple[Pair, float]], what: str) -> str:
    """Returns how many were answered by the second that each was due."""
    mine = [(_answered(pair), limit) for pair, limit in due]
    found = sum(answer is not None and answer <= limit for answer, limit in mine)
    return f"R {share(found / len(mine))} ({found} of {len(mine)} {what})" if mine else UNMEASURED


def _optic(seen: Seen) -> str:
    """Returns the share ticketed that long before error correction fails, of those that got that far."""
    due = []
    for pair in seen.results_of("optic_degradation"):
        parameters, end = pair[0]["parameters"], _seconds(pair[0], "end")
        kind = OpticDegradation(slope=parameters["slope"], start=parameters["start"])
        cliff = kind.cliff_time(Fault(0, kind, pair[0]["entity"], 0, 0.0, end, ()))
        if cliff < end:
            due.append((pair, cliff - AHEAD_S))
    found = _share_by(due, "that came to the cliff, 24 h ahead of it")
    return f"{found}; {_ticket_precision(seen)}"


def _ticket_precision(seen: Seen) -> str:
    """Returns the share of `link_optic` tickets on a port that degrades."""
    right = sum(
        r["detector"] == "link_optic" and r["level"] == "ticket" for _, r in seen.results_of("optic_degradation")
    )
    scores = [score for score in (seen.raised, seen.clean) if score]
    wrong = sum(score["false_tickets_by_detector"].get("link_optic", 0) for score in scores)
    return f"ticket P {share(right / (right + wrong))} ({wrong} false)" if right + wrong else f"ticket P {UNMEASURED}"


def _resistance(seen: Seen) -> str:
    """Returns the cold plates that rose enough, and long enough before the end for an answer in time."""
    due = []
    for pair in seen.results_of("cold_plate"):
        parameters = pair[0]["parameters"]
        limit = RESISTANCE / max(parameters["rise"], 1e-9) * parameters["days"] * DAY + RESISTANCE_S
        if parameters["rise"] >= RESISTANCE and limit <= _seconds(pair[0], "end"):
            due.append((pair, limit))
    slow = _share_by(due, "that rose so far within days, at most 10 min after")
    return f"step: {seen.trial('resistance')}; slow wear: {slow}"


def _attribution(seen: Seen) -> str:
    """Returns the share of right attributions among faults of nodes and jobs with a finding."""
    rows = {row: seen.raised["attribution"].get(row, {}) for row in ("NODE", "JOB")} if seen.raised else {}
    parameters = {row: sum(n for c, n in columns.items() if c != "not found") for row, columns in rows.items()}
    if not sum(parameters.values()):
        return UNMEASURED
    right = sum(rows[row].get(row, 0) for row in rows)
    blamed = f"; {rows['JOB'].get('NODE', 0)} of {parameters['JOB']} job-made on a node" if parameters["JOB"] else ""
    return f"{share(right / sum(parameters.values()))} ({right} of {sum(parameters.values())}){blamed}"


def _flap(seen: Seen) -> str:
    """The truth has only the episode of the third flap, so the share is between two bounds."""
    found = recall(seen.kind("link_flap"))
    if found == UNMEASURED:
        return found
    soon = []
    for parts in (2, 3):  # the third flap begins when two parts are over at the earliest, and ends within the third
        mine = [(pair, pair[0]["parameters"].get("flaps", 0)) for pair in seen.results_of("link_flap")]
        due = [(pair, parts * _seconds(pair[0], "end") / flaps + FLAP_S) for pair, flaps in mine if flaps >= FLAPS]
        soon.append(_share_by(due, f"within {FLAP_S:g} s of the {'end' if parts == 3 else 'start'} of its third part"))
    return f"{found}, from the first flap on; {'; '.join(soon)}"


def _fail_slow(seen: Seen) -> str:
    """Returns the share paged within 17 min, and the share of right pages of the detectors for it."""
    mine = seen.effect("time", 0.10, 9.0, 1200.0)
    found = found_of(mine)
    if found == UNMEASURED or seen.raised is None:
        return found
    delays = [r["delay_s"] for r in mine if r["delay_s"] is not None]
    soon, right = sum(delay <= PAGE_S for delay in delays) / len(mine), len(delays)
    wrong = sum(n for name, n in seen.raised["false_by_detector"].items() if name.startswith("straggler"))
    parameters = share(right / (right + wrong) if right + wrong else None)
    return f"{found}; {share(soon)} within {number(PAGE_S)} s; P {parameters} ({wrong} false)"


def _link_errors(seen: Seen) -> str:
    """The suites have none of these rates alone: a trial measures them."""
    found = recall(seen.kind("link_degradation"))
    return seen.trial("link_errors") + ("" if found == UNMEASURED else f"; acute degradation: {found}")


def _link_pages(seen: Seen) -> str:
    if seen.clean is None or not seen.clean["node_days"]:
        return UNMEASURED
    count = sum(n for name, n in seen.clean["false_by_detector"].items() if name.startswith("link"))
    rate = number(1e4 * count / (seen.clean["node_days"] * LINKS_PER_NODE))
    return f"{rate} ({count} pages) in the clean runs; {seen.trial('link_alarms')}"


def _sdc(seen: Seen) -> str:
    block, clean = seen.kind("sdc"), seen.clean  # hard events alone: others show no bit-exact mismatch
    pages = sum(n for name, n in clean["false_by_detector"].items() if name.startswith("sdc")) if clean else 0
    false = f", {pages} false pages in the clean runs" if clean else ""
    return f"{block['found']} of {block['events']} GPUs with wrong digests{false}" if block else UNMEASURED


def _collapse(seen: Seen) -> str:
    """Returns faults of entities with many devices below; the size of an incident is only known over all faults."""
    names = [name for name, kind in KINDS.items() if kind.target in SHARED]
    tops = [bool(record["top1"]) for _, record in seen.results_of(*names) if record["delay_s"] is not None]
    if not tops:
        return UNMEASURED
    size = (seen.raised or {}).get("compression")
    parameters = f"of all faults {number(size)} conditions an incident" if size is not None else UNMEASURED
    return f"root top-1 {share(sum(tops) / len(tops))} of {len(tops)} found; alerts an incident: {parameters}"


def _cost(seen: Seen) -> str:
    """2 million samples are 100,000 GPUs x 20 metrics."""
    found = seen.clean or seen.raised
    cost = found["cpu_s_per_million_samples"] if found else None
    whole = "" if cost is None else f"; all detectors, frames and Desk, scaled up from these fleets: {2 * cost:.1g} s"
    return f"common kernel: {seen.trial('engine_cost')}{whole}"


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
        *("PAGE <= 10 min", _fail_slow),
    ),
    (
        *("Fail-slow 5 %", "none", "R >= 0.90 within 30 min", "0.97"),
        lambda seen: found_of(seen.effect("time", 0.04, 0.07, 1800.0), 1800.0),
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
        *("60 s / 3 min", _link_errors),
    ),
    (
        *("Link false pages", "vendor rule 4.7 per 10,000 links and day", "<= 0.1 per 10,000 links and day"),
        *("0.03", _link_pages),
    ),
    ("Flap page", "gpud 3 in 12 h", "<= 60 s after the third flap, R >= 0.99", "-", _flap),
    (
        *("Optic precursor", "CorrOpt +60 % repair accuracy", ">= 60 % ticketed >= 24 h ahead, ticket P >= 0.8"),
        *("80 %", _optic),
    ),
    (
        *("SDC, bit-exact mismatch", "AEGIS 8/8, SDCHunter 91 % injected"),
        *("100 % of injected mismatches, < 0.004 false pages per 1,000 node-days", "-", _sdc),
    ),
    (
        *("SDC population coverage, canary only", "< 40 % (stress), 25-70 % EUD", ">= 30 % in 7 days", "40 %"),
        lambda s: s.trial("canary_coverage"),
    ),
    (
        *("SDC with replica hooks", "91-100 %", ">= 90 % of injected within 1,000 steps", "95 %"),
        lambda seen: seen.trial("replica_digests"),
    ),
    (
        *("Coolant pump loss", "none", "incident <= 30 s", "2 s"),
        lambda seen: found_of((record for _, record in seen.results_of("coolant")), 30.0),
    ),
    ("R_th +15 % on one GPU", "none", "<= 10 min, R >= 0.95", "5 min", _resistance),
    (
        *("Correlated fault collapse", "Flock 1.19-11x less error", "root top-1 >= 0.95; >= 50 alerts an incident"),
        *("0.99", _collapse),
    ),
    (
        *("Engine cost, 100,000 GPUs x 20 metrics at 10 s", "ARGUS 2.7 GB/min at 10,000 GPUs (tracing)"),
        *("<= 0.25 s of a core per tick", "0.2", _cost),
    ),
)
"""Returns quantity, best published value, our goal, stricter than the goal, and the result of the suites."""


def rows(seen: Seen) -> list[tuple[str, ...]]:
    return [(*words, measured(seen)) for *words, measured in GOALS]
