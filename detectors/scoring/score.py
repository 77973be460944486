"""Scores findings against recorded ground truth: `fleetpulse score`. docs/scoring.md has the whole protocol.

The unit is the labelled event. An alert answers it if detector, cause and level match the rule for its kind
(ANSWER_RULES), the cause is the faulty entity or above it, and it came between 60 s before the onset and 10 min after
the end. One alert answers one event; an alert without an event is false, except further alerts of one incident on one
event within 6 hours.

Precision at field rates: a suite has far more faults per day than a data hall, so its own precision means little. Of
the pages of a hall, the share that is right is rate x recall / (rate x recall + false pages), all per 1,000
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

from detectors.scoring.alerts import Alert, Alerts, find_alerts
from detectors.scoring.answer_rules import ANSWER_RULES, AnswerRule
from detectors.scoring.figures import compute_figures, rate_per_1000
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
from detectors.scoring.outcome import record_run
from detectors.scoring.placement import Placement
from detectors.scoring.records import Records, join_records
from detectors.scoring.table import COLUMNS, format_score, summary_text, table_rows
from pipeline.model.errors import UsageError
from pipeline.model.records import Finding, Incident
from pipeline.model.topology import Topology
from pipeline.recording.reader import read_events, read_topology

FIELD_RATES = (6.5, 2.34)
"""Failures per 1,000 node-days of Meta's RSC-1 and RSC-2 (Kokolis et al., "Revisiting Reliability", 2024)."""


def precision_at_field_rates(
    page_kinds: Mapping[str, Any], clean: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Returns the precision at each field rate, with the interval of the page rate; None if one of both is unknown.

    page_kinds: figures of the events whose kind must be paged; a ticket is no page.
    clean:      results of runs without faults; their pages and node-days are added up.
    """
    days = [result["node_days"] for result in clean]
    false = sum(result["false"] for result in clean)
    recall = page_kinds["recall"]
    pages = None if None in days else rate_per_1000(false, math.fsum(days))
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
    "ANSWER_RULES",
    "COLUMNS",
    "Alert",
    "Alerts",
    "AnswerRule",
    "Meta",
    "Placement",
    "Truth",
    "add_field_rates",
    "as_alerts",
    "as_truth",
    "compute_figures",
    "format_score",
    "merge_scores",
    "score",
    "score_run",
    "summary_text",
    "table_rows",
]
_PRECISION = "precision_at_field_rates"
_LISTED = 5  # unknown entities named in a warning; chosen: one line


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
    """Returns the figures of one run as plain data; also written to `json_file`. Raises UsageError with file and line.

    clean:  JSON of scores of runs without faults; adds the precision at field rates.
    events: events.jsonl, for the places of ranks that moved.
    Faulty entities that are missing in a given topology are listed on stderr: alerts on their ancestors cannot match.
    """
    world = Placement(read_topology(topology) if topology else Topology(), read_events(events))
    reported = read_findings(findings)
    merged = read_incidents(incidents) if incidents else None
    labels = read_truth(truth)
    if topology:
        _warn_of_unknown(labels, world)
    result = score_run(labels, find_alerts(reported, merged), world, read_meta(meta))
    if clean:
        result = add_field_rates(result, [read_clean(path) for path in clean])
    if json_file:
        _write(Path(json_file), json.dumps(result, indent=1) + "\n")
    return result


def _warn_of_unknown(truth: Sequence[Truth], world: Placement) -> None:
    unknown = sorted({e for line in truth if line.detectability != "benign" for e in line.entities if e not in world})
    if unknown:
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        print(  # noqa: T201 - log
            f"score: the topology has no {', '.join(unknown[:_LISTED])}{more}, which the truth names as faulty; "
            "only alerts on these entities match: is it the topology of this run?",
            file=sys.stderr,
        )


def score_run(truth: Sequence[Truth], alerts: Alerts, world: Placement, meta: Meta) -> dict[str, Any]:
    """Returns the figures of one run from data in memory: see `as_truth` and `as_alerts`."""
    return compute_figures(record_run(truth, alerts, world, meta))


def as_alerts(findings: Iterable[Finding], incidents: Iterable[Incident] | None) -> Alerts:
    """Returns the alerts of detectors and Desk, for `score_run`."""
    reported = [
        {"time": f.time, "onset": f.onset, "entity": f.entity, "detector": f.detector, "level": f.level}
        for f in findings
    ]
    if incidents is None:
        return find_alerts(reported, None)
    return find_alerts(
        reported, [{**i.as_json(), "opened": i.opened, "onset": i.onset, "resolved": i.resolved} for i in incidents]
    )


def merge_scores(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns several results as one: counts are added, delays pooled, intervals and small events computed again."""
    return compute_figures(join_records(Records.from_json(result["records"]) for result in results))


def add_field_rates(result: Mapping[str, Any], clean: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a result with its precision at field rates: recall of the paged kinds, page rate of the clean runs."""
    return {**result, _PRECISION: precision_at_field_rates(result["page_kinds"], clean)}


def read_clean(path: str | Path) -> dict[str, Any]:
    """Reads a result that `--json` wrote about a run without faults."""
    result = read_object(path, "the output of `score --json` of a run without faults")
    if missing := [key for key in ("false", "node_days", "events", "records") if key not in result]:
        raise UsageError(f"{path}: {', '.join(missing)} missing; expected the output of `score --json`")
    if result["events"] or result["small"]["events"]:
        raise UsageError(f"{path}: has {result['events']} faults; expected a run with harmless events only")
    if not result["node_days"]:
        raise UsageError(f"{path}: has no node-days; score the clean run with --meta")
    return result


def _write(path: Path, text: str) -> None:
    """Replaces a file; the old one stays if this fails."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}; expected a path in an existing folder"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
