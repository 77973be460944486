"""Writes docs/detection.md from results of the suites: all figures are generated; no dates, no machine names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.detection import goals
from benchmarks.detection.certification import LEAST_EVENTS, section
from benchmarks.detection.results import Result, scored
from benchmarks.detection.scenarios import NAMES, REPORT, SUITES, TRAIN, Run, kinds_of
from benchmarks.detection.tables import bounds, interval, number, share, table
from detectors.scoring.score import add_field_rates, merge_scores

Score = Mapping[str, Any]
Line = tuple[Run, int, Result]
_MEANING = {
    "clean": "no faults, all harmless events; every page is false",
    "raised": "faults of every kind, many more than in the field, harmless events too",
    "hookless": "what makes single ranks slow, where no job has the training hook",
}
_HALVES = {REPORT: "unseen", TRAIN: "training"}
HEAD = """# Detection: the figures

**All of this is simulated.** The fleet, its noise, its faults and its harmless events come from `fleetpulse simulate`;
a real hall is less kind. [scoring.md](scoring.md) is the protocol. Written by `make score` from its results.

{size}
Every run is in a world whose structure was drawn: cooling, fabric, workloads, noise, instruments, habits of operators
([simulator.md](simulator.md)). Detectors were developed on one half of the structures ("training"); the figures are of
worlds of the other half ("unseen"), which no work on detectors had read before. They were read now: the next
certification reports other worlds. What judged has the {by}.

- The runs take the path of a running pipeline (framer, detectors, Desk) in one process, without spool and store.
  `fleetpulse replay`, as in the README, gives the same findings and incidents as a pipeline over spool and store:
  `tests/test_live_replay.py` compares all of them.
- **Delays are event time**: from the onset to the newest sample that was judged. Batches, frames and the wait for late
  rows come on top in a running pipeline.
- The page budget is off: it would hide false pages by lowering the detector that sends them.
- In the raised suite false pages are far more frequent, as are faults: see the table of false pages.
"""
COMMITS: Mapping[str, str] = {"2ffd45e67b1ec26a": "d193223905be5c62bae592e7a2b7960ffaa21d16"}
"""Fingerprint of certified code -> a commit that has it, to run it again."""
_ABLATIONS = """## What each part of the method is worth

The same fleets evaluated with one part removed at a time; a part whose removal changes nothing is not needed. Kept to
the end are incidents of found faults of four hours and more that were still open when the fault ended.

"""
_REDUCED = " This is a reduced version: `make score` runs the whole."
_UNFINISHED = " **Unfinished**: the other runs are in no figure below, and figures of few worlds or faults are a hint."


@dataclass(frozen=True)
class Beside:
    """Content of the page besides the runs.

    trials: what else was measured, by name; ablations: their table, with a line on what it stands on.
    """

    trials: Mapping[str, str] = field(default_factory=dict)
    ablations: str = ""


def page(scale: str, code: str, lines: Sequence[Line], planned: int, beside: Beside = Beside()) -> str:
    """Returns the whole text. code: fingerprint of the evaluating code; lines: the finished runs of `planned`."""
    scores = [(run, result, scored(result)) for run, _, result in lines]
    halves = {half: _by_suite([s for s in scores if half_of(s[1]) == half]) for half in _HALVES}
    shown = halves[REPORT] or halves[TRAIN]
    clean, raised = shown.get("clean"), shown.get("raised")
    if raised is not None and clean is not None:
        shown["raised"] = raised = add_field_rates(raised, [clean])
    half = REPORT if halves[REPORT] else TRAIN
    events = [
        pair for run, r, score in scores if (run.suite, half_of(r)) == ("raised", half) for pair in _pairs(r, score)
    ]
    seen = goals.Seen(clean, raised, events, beside.trials)
    parts = [
        _head(scale, _by(code), lines, planned),
        _stands_on(lines, halves),
        section(scores),
        _goals(seen),
        _pages(halves, raised),
        *(_of_faults(raised) if raised else ()),
        _confounders([shown[suite] for suite in ("clean", "raised") if suite in shown]),
        *((_ABLATIONS + beside.ablations,) if beside.ablations else ()),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def half_of(result: Result) -> str:
    """Returns the half of the structures that the world of a result belongs to."""
    return str(result["meta"]["world"]["half"])


def _by_suite(scores: Sequence[tuple[Run, Result, Score]]) -> dict[str, Score]:
    found = {suite: [score for run, _, score in scores if run.suite == suite] for suite in SUITES}
    return {suite: merge_scores(mine) for suite, mine in found.items() if mine}


def _pairs(result: Result, score: Score) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Returns each fault kind with its results."""
    truth = {str(line["id"]): line for line in result["truth"]}
    for record in score["records"]["events"]:
        if record["detectability"] in ("hard", "soft"):
            yield truth[record["id"]], record


def _by(code: str) -> str:
    """Returns the fingerprint of the evaluating code."""
    commit = f"; commit `{COMMITS[code]}` has it" if code in COMMITS else ""
    return f"fingerprint `{code}` (`benchmarks.detection.fingerprint`){commit}"


def _head(scale: str, by: str, lines: Sequence[Line], planned: int) -> str:
    days = sum(result["node_days"] for _, _, result in lines)
    what = f"{len(lines)} of {planned} runs of `make score SCALE={scale}`"
    size = f"It stands on {number(days)} node-days of 8-GPU nodes: {what}."
    size += _UNFINISHED if len(lines) < planned else ""
    return HEAD.format(size=size + ("" if scale == "certified" else _REDUCED), by=by)


def _stands_on(lines: Sequence[Line], halves: Mapping[str, Mapping[str, Score]]) -> str:
    rows = []
    for half, suite, score in _suites(halves):
        mine = [run for run, _, result in lines if (run.suite, half_of(result)) == (suite, half)]
        sizes = dict.fromkeys(f"{run.nodes} x {run.days:g}" for run in mine)
        benign, unseen = (score["not_sought"].get(c, {"events": 0})["events"] for c in ("benign", "invisible"))
        sought = score["events"] + score["small"]["events"]
        worlds = len({run.world for run in mine})
        rows.append(
            (
                *(suite, _HALVES[half], _MEANING[suite], "; ".join(sizes), worlds),
                number(score["node_days"]),
                sought,
                unseen,
                benign,
            )
        )
    head = (
        *("suite", "structures", "what", "runs: nodes x days", "worlds", "node-days", "faults"),
        *("beside them invisible", "harmless events"),
    )
    return f"## What it stands on\n\n{table(head, rows)}\n"


def _suites(halves: Mapping[str, Mapping[str, Score]]) -> Iterator[tuple[str, str, Score]]:
    for half, by_suite in halves.items():
        yield from ((half, suite, score) for suite, score in by_suite.items())


def _goals(seen: goals.Seen) -> str:
    head = ("quantity", "best published", "goal", "stretch", "Fleetpulse, simulated")
    return f"""## Goals

P, R: precision and recall of events. Delays count from when a fault can be seen at all. What others published was
measured on real fleets with real faults, ours is not: the columns show the distance to the goal, not a ranking.

{table(head, goals.rows(seen))}
"""


def _pages(halves: Mapping[str, Mapping[str, Score]], raised: Score | None) -> str:
    rows = [
        (
            *(suite, _HALVES[half], number(score["node_days"]), score["false"]),
            interval(score["false_pages_per_1000_node_days"]),
            *(interval(score["tickets"]["false_tickets_per_1000_node_days"]), share(score["precision"])),
            ", ".join(f"{name} {count}" for name, count in score["false_by_detector"].items()) or "-",
        )
        for half, suite, score in _suites(halves)
    ]
    head = (
        *("suite", "structures", "node-days", "false pages", "per 1,000 node-days", "false tickets per 1,000"),
        *("precision", "by detector"),
    )
    text = f"## False pages\n\nWith the exact Poisson interval (95 %).\n\n{table(head, rows)}\n"
    field = (raised or {}).get("precision_at_field_rates")
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


def _of_faults(raised: Score) -> Iterator[str]:
    rows = [_kind(name, block) for name, block in [*sorted(raised["kinds"].items()), ("all", raised)]]
    yield f"""## By kind of fault

Of the raised suite. Small are faults below the least effect that must be found, or shorter than the hold
([scoring.md](scoring.md)); a line of 0 / 0 has only such.

Known after counts those that were never found with the time they lasted; - where so many were never known. Thin are
kinds of fewer than {LEAST_EVENTS} events: their figures are a hint.
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
    thin = " (thin)" if block["events"] < LEAST_EVENTS else ""
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


def _confounders(scores: Sequence[Score]) -> str:
    """Returns the harmless events over the suites."""
    whole = merge_scores(scores)
    rows = [
        (
            *(kind, line["events"], line["fooled"], line["pages"]),
            ", ".join(f"{name} {count}" for name, count in line["detectors"].items()) or "-",
        )
        for kind, line in whole["false_by_benign"].items()
    ]
    text = table(("kind", "events", "drew a page", "pages", "by detector"), rows) if rows else "None were simulated."
    return f"## By harmless event\n\nOver clean and raised suites; any page on one is false.\n\n{text}\n"
