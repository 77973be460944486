"""Scores findings against recorded ground truth: `fleetpulse score`. docs/scoring.md has the whole protocol.

The unit is the labelled event. An alert answers it if detector, cause and level count for its kind (COUNTS), the cause
is the guilty entity or lies above it, and it came between 60 s before the onset and 10 min after the end. One alert
answers one event; what answers none is false, except further alerts of one incident on one event within 6 hours.

Precision at field rates: a suite has far more faults per day than a data hall, so its own precision says little. Of
what a hall would page, the share that is right is rate x recall / (rate x recall + false pages), all per 1,000
node-days.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detectors.scoring.alerts import Alert, Heard, heard
from detectors.scoring.counts import COUNTS, Counting
from detectors.scoring.figures import figures, rate
from detectors.scoring.inputs import (
    Meta,
    Truth,
    as_truth,
    read_findings,
    read_incidents,
    read_meta,
    read_object,
    read_truth,
)
from detectors.scoring.outcome import recorded
from detectors.scoring.records import Records, together
from detectors.scoring.table import COLUMNS, rows, shown, summary
from detectors.scoring.world import World
from pipeline.model.errors import UsageError
from pipeline.model.records import Finding, Incident
from pipeline.model.topology import Topology
from pipeline.recording.reader import read_events, read_topology

FIELD_RATES = (6.5, 2.34)
"""Failures per 1,000 node-days of Meta's RSC-1 and RSC-2 (Kokolis et al., "Revisiting Reliability", 2024)."""


def at_field_rates(page_kinds: Mapping[str, Any], clean: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Precision at each field rate, with the interval of the page rate; None where one of both is not known.

    page_kinds: figures of the events whose kind must be paged: a ticket is no page, so what it finds does not count.
    clean:      results of runs without faults; their pages and node-days are added up.
    """
    days = [result["node_days"] for result in clean]
    false = sum(result["false"] for result in clean)
    recall = page_kinds["recall"]
    pages = None if None in days else rate(false, math.fsum(days))
    if recall is None or pages is None:
        return None
    return {
        "recall": recall,
        "events": page_kinds["events"],
        "found": page_kinds["found"],
        "false_pages": false,
        "node_days": math.fsum(days),
        "false_pages_per_1000_node_days": pages,
        "precision": [
            {
                "faults_per_1000_node_days": faults,
                "value": _precision(faults * recall, pages["value"]),
                "low": _precision(faults * recall, pages["high"]),
                "high": _precision(faults * recall, pages["low"]),
            }
            for faults in FIELD_RATES
        ],
    }


def _precision(right: float, false: float) -> float | None:
    return right / (right + false) if right + false else None


__all__ = [
    "COLUMNS",
    "COUNTS",
    "Alert",
    "Counting",
    "Heard",
    "Meta",
    "Truth",
    "World",
    "as_heard",
    "as_truth",
    "figures",
    "judge",
    "merge",
    "rows",
    "score",
    "shown",
    "summary",
    "with_field_rates",
]
_PRECISION = "precision_at_field_rates"
_NAMED = 5  # strange entities by name in a warning; chosen: one line


def score(
    findings: str | Path,
    truth: str | Path,
    incidents: str | Path | None = None,
    topology: str | Path | None = None,
    meta: str | Path | None = None,
    json_file: str | Path | None = None,
    clean: Sequence[str | Path] = (),
    events: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """The figures of one run, as plain data; also written to `json_file`. Raises UsageError naming file and line.

    clean:  JSON of scores of runs without faults; adds the precision at field rates.
    events: events.jsonl, for where the ranks were that moved.
    Guilty entities that a given topology does not hold are named on stderr: nobody who blames an ancestor finds them.
    """
    world = World(read_topology(topology) if topology else Topology(), read_events(events))
    told = read_findings(findings)
    cases = read_incidents(incidents) if incidents else None
    labels = read_truth(truth)
    if topology:
        _warn(labels, world)
    result = judge(labels, heard(told, cases), world, read_meta(meta))
    if clean:
        result = with_field_rates(result, [read_clean(path) for path in clean])
    if json_file:
        _write(Path(json_file), json.dumps(result, indent=1) + "\n")
    return result


def _warn(truth: Sequence[Truth], world: World) -> None:
    strange = sorted({e for line in truth if line.detectability != "benign" for e in line.entities if e not in world})
    if strange:
        more = f" and {len(strange) - _NAMED} more" if len(strange) > _NAMED else ""
        print(  # noqa: T201 - talk
            f"score: the topology does not hold {', '.join(strange[:_NAMED])}{more}, which the truth says are guilty; "
            "only alerts on these very names find them: is it the topology of this run?",
            file=sys.stderr,
        )


def judge(truth: Sequence[Truth], said: Heard, world: World, meta: Meta) -> dict[str, Any]:
    """The figures of one run, from what is in memory: see `as_truth` and `as_heard`."""
    return figures(recorded(truth, said, world, meta))


def as_heard(findings: Iterable[Finding], incidents: Iterable[Incident] | None) -> Heard:
    """What detectors and Desk said, as `judge` wants it."""
    told = [
        {"time": f.time, "onset": f.onset, "entity": f.entity, "detector": f.detector, "level": f.level}
        for f in findings
    ]
    if incidents is None:
        return heard(told, None)
    return heard(
        told, [{**i.as_json(), "opened": i.opened, "onset": i.onset, "resolved": i.resolved} for i in incidents]
    )


def merge(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Several results as one: counts are added, delays pooled, intervals and what is small are reckoned anew."""
    return figures(together(Records.from_json(result["records"]) for result in results))


def with_field_rates(result: Mapping[str, Any], clean: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A result with its precision at field rates: recall of the kinds that are paged, page rate of the clean runs."""
    return {**result, _PRECISION: at_field_rates(result["page_kinds"], clean)}


def read_clean(path: str | Path) -> dict[str, Any]:
    """A result that `--json` wrote about a run without faults."""
    result = read_object(path, "what `score --json` wrote about a run without faults")
    if missing := [key for key in ("false", "node_days", "events", "records") if key not in result]:
        raise UsageError(f"{path}: {', '.join(missing)} missing; wanted what `score --json` wrote")
    if result["events"] or result["small"]["events"]:
        raise UsageError(f"{path}: holds {result['events']} faults; wanted a run without, harmless events alone")
    if not result["node_days"]:
        raise UsageError(f"{path}: does not tell its node-days; score the clean run with --meta")
    return result


def _write(path: Path, text: str) -> None:
    """Whole or not at all: what stood there before stays if this fails."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}; wanted a path in a folder that exists"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
