"""What a certification must show, world by world: a fleet is one world, so the mean of many alone says too little."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.sim.kinds import KINDS
from benchmarks.detection.goals import SHARED, found_of
from benchmarks.detection.results import Result
from benchmarks.detection.scenarios import REPORT, Run
from benchmarks.detection.tables import number, share, table
from detectors.scoring.score import merge_scores

Score = Mapping[str, Any]
Scored = tuple[Run, Result, Score]
SLOW_SHARE = 0.10
"""Least share of a step's time of the slow ranks that must be found without the training hook."""
LEAST_EVENTS = 30
"""Events of a kind below which its recall is a hint: a recall of 0.9 then has an error of more than 0.1. Chosen."""


@dataclass(frozen=True)
class WorldResult:
    """What came of one world. about: its structure, as its result has it.   clean, raised: scores, None without."""

    number: int
    about: Mapping[str, Any]
    clean: Score | None
    raised: Score | None

    @property
    def half(self) -> str:
        """Returns the half of the structures that it belongs to."""
        return str(self.about["half"])


def by_world(scores: Sequence[Scored]) -> list[WorldResult]:
    """Returns the results of each world, in the order of their numbers."""
    found = []
    for world in sorted({run.world for run, _, _ in scores}):
        mine = [entry for entry in scores if entry[0].world == world]
        suites = {suite: [score for run, _, score in mine if run.suite == suite] for suite in ("clean", "raised")}
        merged = {suite: merge_scores(parts) if parts else None for suite, parts in suites.items()}
        found.append(WorldResult(world, mine[0][1]["meta"]["world"], merged["clean"], merged["raised"]))
    return found


def page_rates(worlds: Sequence[WorldResult]) -> list[Mapping[str, float]]:
    """Returns the false pages per 1,000 node-days of each world with clean runs, with bounds."""
    rates = (world.clean["false_pages_per_1000_node_days"] for world in worlds if world.clean is not None)
    return [rate for rate in rates if rate is not None]


def section(scores: Sequence[Scored]) -> str:
    """Returns the section of the page: goals on the reporting half beside the training half, then one line a world."""
    halves = {half: [entry for entry in scores if _half(entry) == half] for half in (REPORT, "train")}
    columns = {half: dict(_figures(mine)) for half, mine in halves.items() if mine}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [
        (name, *GOALS.get(name, ("-", "-")), *(column.get(name, "-") for column in columns.values())) for name in names
    ]
    head = (
        "figure",
        "goal",
        "floor",
        *({REPORT: "unseen structures", "train": "training structures"}[h] for h in columns),
    )
    worlds = by_world(scores)
    return f"""## Certification: worlds that no detector has seen

{table(head, rows)}

By world; the interval is exact (95 %), the worst world is the one with the highest lower bound.

{table(_WORLD, [_world_row(world) for world in worlds])}
"""


GOALS: Mapping[str, tuple[str, str]] = {
    "false pages per 1,000 node-days, mean of the worlds": ("0.3", "1.0"),
    "false pages, worst world (95 % lower bound)": ("1", "3"),
    "false tickets per 1,000 node-days": ("10", "30"),
    "recall of kinds that must page": ("0.95", "0.92"),
    "right party": ("0.97", "0.94"),
    "right root of shared faults": ("0.95", "0.90"),
    "slow ranks of 10 % and more without the hook": ("0.8", "0.6"),
}
"""Figure -> goal and floor."""
_MEAN, _WORST, _TICKETS, _RECALL, _PARTY, _ROOT, _HOOKLESS = GOALS


def _half(entry: Scored) -> str:
    return str(entry[1]["meta"]["world"]["half"])


def _figures(scores: Sequence[Scored]) -> Iterator[tuple[str, str]]:
    """Yields each figure of one half of the structures, in words."""
    worlds, clean, raised = by_world(scores), _merged(scores, "clean"), _merged(scores, "raised")
    if clean is not None:
        rates = page_rates(worlds)
        values = [rate["value"] for rate in rates]
        yield "clean node-days, worlds", f"{number(clean['node_days'])} in {len(rates)}"
        yield _MEAN, f"{statistics.mean(values):.2f} (median {statistics.median(values):.2f})"
        yield _WORST, f"{max(rate['low'] for rate in rates):.2f}"
        yield _TICKETS, f"{clean['tickets']['false_tickets_per_1000_node_days']['value']:.1f}"
    if raised is not None:
        few = sorted(name for name, block in raised["kinds"].items() if block["events"] < LEAST_EVENTS)
        yield "faults", f"{raised['events']:,}" + (f"; fewer than {LEAST_EVENTS} of {', '.join(few)}" if few else "")
        pages = raised["page_kinds"]
        yield _RECALL, f"{share(pages['recall'])} ({pages['found']} of {pages['events']})"
        right = raised["attribution_right"]
        yield _PARTY, f"{share(right['share'])} ({right['right']} of {right['told']})"
        yield _ROOT, _root(raised)
        yield _HOOKLESS, found_of(_hookless(scores))


def _merged(scores: Sequence[Scored], suite: str) -> Score | None:
    mine = [score for run, _, score in scores if run.suite == suite]
    return merge_scores(mine) if mine else None


def _root(raised: Score) -> str:
    """Returns the share of found faults of shared devices whose incident names the device that failed."""
    names = {name for name, kind in KINDS.items() if kind.target in SHARED}
    tops = [
        e["top1"] for e in raised["records"]["events"] if e["kind"] in names and e["delay_s"] is not None and e["large"]
    ]
    return f"{share(sum(tops) / len(tops))} ({sum(tops)} of {len(tops)})" if tops else "-"


def _hookless(scores: Sequence[Scored]) -> Iterator[Mapping[str, Any]]:
    """Yields the records of large slow ranks of jobs without the training hook."""
    for run, result, score in scores:
        if run.suite != "hookless":
            continue
        effects = {str(line["id"]): abs(line["parameters"].get("effect") or 0.0) for line in result["truth"]}
        for record in score["records"]["events"]:
            if record["detectability"] in ("hard", "soft") and effects[record["id"]] >= SLOW_SHARE:
                yield record


_WORLD = (
    *("world", "half", "structure", "clean node-days", "false pages per 1,000", "false tickets per 1,000"),
    *("faults", "recall of kinds that page", "right party"),
)


def _world_row(world: WorldResult) -> tuple[Any, ...]:
    clean, raised = world.clean, world.raised
    rate = clean["false_pages_per_1000_node_days"] if clean else None
    tickets = clean["tickets"]["false_tickets_per_1000_node_days"] if clean else None
    return (
        *(world.number, world.half, world.about["text"], number(clean["node_days"]) if clean else "-"),
        f"{rate['value']:.2f} ({rate['low']:.2f} to {rate['high']:.2f})" if rate else "-",
        f"{tickets['value']:.1f}" if tickets else "-",
        *((raised["events"], share(raised["page_kinds"]["recall"])) if raised else ("-", "-")),
        share(raised["attribution_right"]["share"]) if raised else "-",
    )
