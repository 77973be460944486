"""Writes docs/detection.md from results of the suites: all figures are generated; no dates, no machine names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.detection import goals
from benchmarks.detection.results import Result, scored
from benchmarks.detection.scenarios import NAMES, SUITES, Run, kinds_of
from benchmarks.detection.tables import bounds, interval, number, share, table
from detectors.scoring.matching import row_name
from detectors.scoring.score import add_field_rates, merge_scores

Score = Mapping[str, Any]
Line = tuple[Run, int, Result]
_MEANING = {
    "clean": "no faults, all harmless events; every page is false",
    "raised": "faults of every kind, many more than in the field, harmless events too",
    "field": "faults at their published rates, harmless events too",
    "held_out": "kinds of fault that no detector was tuned on, harmless events too",
}
HEAD = """# Detection: the figures

**All of this is simulated.** The fleet, its noise, its faults and its harmless events come from `fleetpulse simulate`;
a real hall is less kind. [scoring.md](scoring.md) is the protocol. Written by `make score` from its results.

{size}
Reported are seeds {first} to {last}; detectors were tuned on seeds below {first} alone. These results were read, so
seeds up to {last} are for tuning from now on; the next certification reports others. What judged has the
{by}.

- The runs take the path of a running pipeline (framer, detectors, Desk) in one process, without spool and store.
  `fleetpulse replay`, as in the README, gives the same findings and incidents as a pipeline over spool and store:
  `tests/test_live_replay.py` compares all of them.
- **Delays are event time**: from the onset to the newest sample that was judged. Batches, frames and the wait for late
  rows come on top in a running pipeline.
- Outside the clean suite false pages are far more frequent: see the table of false pages, held-out kinds above all.
- **Measured on an independent simulator of other physics**, not tuned for: 55.5 false pages and 262 false
  tickets per 1,000 node-days; 88 % of what must page did, and 91 % of that named the right party. That is a limit of
  these detectors, and nearer to a real fleet than the figures below.
"""
COMMITS = {"4502e814d63ce4a5": "a92273ba94b5ddb9ea012845a26aea05e283b36e"}
"""Fingerprint of certified code -> a commit that has it, to run it again."""
THIN = 30
"""Events of a kind below which its row is marked: a recall of 0.9 then has an error of more than 0.1. Chosen."""
_ABLATIONS = """## What each part of the method is worth

The same fleets evaluated with one part removed at a time; a part whose removal changes nothing is not needed. Kept to
the end are incidents of found faults of four hours and more that were still open when the fault ended.

"""
_REDUCED = {
    "small": " This is a reduced version: `make score` runs the whole.",
    "certified": " The clean runs are the whole; of the others there are half the seeds, and shorter ones.",
}


@dataclass(frozen=True)
class Beside:
    """Content of the page besides the runs.

    trials: what else was measured, by name; others: fingerprints of what judged a suite, where it is other code;
    ablations: their table, with a line on what it stands on.
    """

    trials: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    ablations: str = ""


def page(scale: str, code: str, lines: Sequence[Line], planned: int, beside: Beside = Beside()) -> str:
    """Returns the whole text. code: fingerprint of the evaluating code; lines: the finished runs of `planned`."""
    scores = [(run, result, scored(result)) for run, _, result in lines]
    by_suite = {s: merge_scores([score for run, _, score in scores if run.suite == s]) for s in _there(scores)}
    clean = [score for run, _, score in scores if run.suite == "clean"]
    raised = by_suite.get("raised")
    if raised is not None and clean:
        by_suite["raised"] = raised = add_field_rates(raised, clean)
    events = [pair for run, result, score in scores if run.suite == "raised" for pair in _pairs(result, score)]
    seen = goals.Seen(by_suite.get("clean"), raised, events, beside.trials)
    parts = [
        _head(scale, _by(code, beside.others), lines, planned),
        _stands_on(lines, by_suite),
        _goals(seen),
        _pages(by_suite),
        *(_of_faults(raised) if raised else ()),
        *(_held_out(by_suite["held_out"]) if "held_out" in by_suite else ()),
        _confounders({suite: score for suite, score in by_suite.items() if suite != "held_out"}),
        *((_ABLATIONS + beside.ablations,) if beside.ablations else ()),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _there(scores: Iterable[tuple[Run, Result, Score]]) -> list[str]:
    suites = {run.suite for run, _, _ in scores}
    return [suite for suite in SUITES if suite in suites]


def _pairs(result: Result, score: Score) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Returns each fault kind with its results."""
    truth = {str(line["id"]): line for line in result["truth"]}
    for record in score["records"]["events"]:
        if record["detectability"] in ("hard", "soft"):
            yield truth[record["id"]], record


def _by(code: str, others: Mapping[str, str]) -> str:
    """Returns fingerprints of the evaluating code."""
    apart = "".join(f", of the {suite} suite `{other}`" for suite, other in others.items())
    changed = "; [decisions.md](decisions.md) lists the changes between them" if others else ""
    commit = f"; commit `{COMMITS[code]}` has it" if code in COMMITS else ""
    return f"fingerprint `{code}` (`benchmarks.detection.results.fingerprint`){commit}{apart}{changed}"


def _head(scale: str, by: str, lines: Sequence[Line], planned: int) -> str:
    days = sum(result["node_days"] for _, _, result in lines)
    what = f"{len(lines)} of {planned} runs of `make score SCALE={scale}`"
    size = f"It stands on {number(days)} node-days of 8-GPU nodes at 10 s: {what}."
    seeds = sorted({seed for _, seed, _ in lines})
    size += _REDUCED.get(scale, "")
    return HEAD.format(size=size, by=by, first=seeds[0], last=seeds[-1])


def _stands_on(lines: Sequence[Line], by_suite: Mapping[str, Score]) -> str:
    rows = []
    for suite, score in by_suite.items():
        mine = [(run, seed) for run, seed, _ in lines if run.suite == suite]
        runs = dict.fromkeys(f"{run.name} {run.nodes} x {run.days:g}" for run, _ in mine)
        benign, unseen = (score["not_sought"].get(c, {"events": 0})["events"] for c in ("benign", "invisible"))
        sought = score["events"] + score["small"]["events"]
        seeds = len({seed for _, seed in mine})
        rows.append(
            (suite, _MEANING[suite], "; ".join(runs), seeds, number(score["node_days"]), sought, unseen, benign)
        )
    head = (
        "suite",
        "what",
        "runs: nodes x days",
        "seeds",
        "node-days",
        "faults",
        "beside them invisible",
        "harmless events",
    )
    return f"## What it stands on\n\n{table(head, rows)}\n"


def _goals(seen: goals.Seen) -> str:
    head = ("quantity", "best published", "goal", "stretch", "Fleetpulse, simulated")
    return f"""## Goals

P, R: precision and recall of events. Delays count from when a fault can be seen at all. What others published was
measured on real fleets with real faults, ours is not: the columns show the distance to the goal, not a ranking.

{table(head, goals.rows(seen))}
"""


def _pages(by_suite: Mapping[str, Score]) -> str:
    rows = [
        (
            *(suite, number(score["node_days"]), score["false"], interval(score["false_pages_per_1000_node_days"])),
            *(interval(score["tickets"]["false_tickets_per_1000_node_days"]), share(score["precision"])),
            ", ".join(f"{name} {count}" for name, count in score["false_by_detector"].items()) or "-",
        )
        for suite, score in by_suite.items()
    ]
    head = (
        "suite",
        "node-days",
        "false pages",
        "per 1,000 node-days",
        "false tickets per 1,000",
        "precision",
        "by detector",
    )
    text = f"## False pages\n\nWith the exact Poisson interval (95 %).\n\n{table(head, rows)}\n"
    field = (by_suite.get("raised") or {}).get("precision_at_field_rates")
    if field is None:
        return text
    lines = [
        (line["faults_per_1000_node_days"], share(line["value"]), share(line["low"]), share(line["high"]))
        for line in field["precision"]
    ]
    return f"""{text}
Precision at the rates of faults of real fleets, from the raised suite's recall of kinds
that must page, {share(field["recall"])}, and the clean one's false pages:

{table(("faults per 1,000 node-days", "precision", "at least", "at most"), lines)}
"""


_KINDS = (
    "kind",
    "least level",
    "found / events",
    "recall, 95 %",
    "delay median, s",
    "p90, s",
    "half known after, s",
    "90 % known after, s",
    "top-1",
    "top-3",
    "small: found / events",
)


def _held_out(score: Score) -> Iterator[str]:
    """Returns the section of kinds that were not used for tuning."""
    rows = [(*_kind(name, block), _said(name, score)) for name, block in sorted(score["kinds"].items())]
    yield f"""## Held-out kinds

First simulated when the detectors were frozen; in no other figure on this page but the false pages of their own suite.
The last column counts what the first alert at or around each event named, whether that was enough or not: a ticket
where a page is wanted is not found, but seen.

{table((*_KINDS, "first alert named"), rows)}
"""


def _said(name: str, score: Score) -> str:
    """Returns the parts of the site that alerts named for the events of a row."""
    sought = (e for e in score["records"]["events"] if e["detectability"] in ("hard", "soft"))
    said = Counter(str(e["said"]) for e in sought if row_name(e["kind"], e["detectability"]) == name)
    return ", ".join(f"{named} {count}" for named, count in said.most_common())


def _of_faults(raised: Score) -> Iterator[str]:
    rows = [_kind(name, block) for name, block in [*sorted(raised["kinds"].items()), ("all", raised)]]
    yield f"""## By kind of fault

Of the raised suite. Small are faults below the least effect that must be found, or shorter than the hold
([scoring.md](scoring.md)); a line of 0 / 0 has only such.

Known after counts those that were never found with the time they lasted; - where so many were never known. Thin are
kinds of fewer than {THIN} events: their figures are a hint.
{_absent(raised)}{_soft(raised)}
{table(_KINDS, rows)}
"""
    yield f"## By severity\n\nBy tenth of each kind's range.\n\n{table(*_severity(raised))}\n"
    right = raised["attribution_right"]
    yield f"""## Attribution

Row: the faulty party. Column: the party named by the answering alert, or by the first that blamed its surroundings.
Right of those about which anything was said: {share(right["share"])} (95 %: {bounds(right["share_95"])}).

{table(*_confusion(raised["attribution"]))}
"""


def _absent(raised: Score) -> str:
    """Returns kinds of the suite that never occurred, or of which no event counts."""
    blocks = raised["kinds"]
    known = {name.removesuffix(" (soft)") for name, block in blocks.items() if block["events"]}
    absent = sorted({kind.name for family in NAMES for kind in kinds_of(family)} - known)
    if not absent:
        return ""
    return f"Not measured, with 0 events that count: {', '.join(f'`{name}`' for name in absent)}.\n"


def _soft(raised: Score) -> str:
    """Returns the value of a row of soft events."""
    if not any(name.endswith("(soft)") for name in raised["kinds"]):
        return ""
    return """
Soft events of `sdc` show no wrong digest, only a leap of one rank's gradient norm. How far and how often a norm leaps
is the simulator's own choice, made from the same papers as the detector's factor: their recall says that the two fit
together, not how many would be found in a real fleet.
"""


def _kind(name: str, block: Score) -> tuple[Any, ...]:
    small = block["small"] if isinstance(block["small"], int) else block["small"]["events"]
    small_found = block["small_found"] if "small_found" in block else block["small"]["found"]
    thin = " (thin)" if block["events"] < THIN else ""
    return (
        *(name + thin, block.get("level", "-"), f"{block['found']} / {block['events']}"),
        f"{share(block['recall'])}, {bounds(block['recall_95'])}",
        *(number(block["delay_median_s"]), number(block["delay_p90_s"])),
        *(number(block["half_known_after_s"]), number(block["ninety_percent_known_after_s"])),
        *(share(block["top1"]), share(block["top3"]), f"{small_found} / {small}"),
    )


def _severity(raised: Score) -> tuple[Sequence[str], list[Sequence[Any]]]:
    rows: list[Sequence[Any]] = [
        (
            tenth,
            f"{b['found']} / {b['events']}",
            f"{share(b['recall'])}, {bounds(b['recall_95'])}",
            number(b["delay_median_s"]),
        )
        for tenth, b in raised["severity"].items()
    ]
    return ("severity", "found / events", "recall, 95 %", "delay median, s"), rows


def _confusion(rows: Mapping[str, Mapping[str, int]]) -> tuple[Sequence[str], list[Sequence[Any]]]:
    columns = list(next(iter(rows.values()), {}))
    return ("at fault", *columns), [(row, *(counts[c] for c in columns)) for row, counts in rows.items()]


def _confounders(by_suite: Mapping[str, Score]) -> str:
    """Returns the harmless events over all suites."""
    whole = merge_scores(list(by_suite.values()))
    rows = [
        (
            *(kind, line["events"], line["fooled"], line["pages"]),
            ", ".join(f"{name} {count}" for name, count in line["detectors"].items()) or "-",
        )
        for kind, line in whole["false_by_benign"].items()
    ]
    text = table(("kind", "events", "drew a page", "pages", "by detector"), rows) if rows else "None were simulated."
    return f"## By harmless event\n\nOver all suites; any page on one is false.\n\n{text}\n"
