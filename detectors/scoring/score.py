"""Scores findings against recorded ground truth: `fleetpulse score`. docs/scoring.md has the whole protocol.

The unit is the labelled event. An alert answers it if detector, cause and level match the rule for its kind
(ANSWER_RULES), the cause is the faulty entity or above it, and it came between 60 s before the onset and 10 min after
the end. One alert answers one event; an alert without an event is false, except further alerts of one incident on one
event within 6 hours.

Precision at field rates: a suite has far more faults per day than a data hall, so its own precision means little. Of
the pages of a hall, the share that is right is rate x recall / (rate x recall + false pages), all per 1,000
node-days.

The table for people has one row per kind, then lines with the other figures, at most 100 columns.
"""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from detectors.scoring.alerts import Alert, Alerts, find_alerts
from detectors.scoring.answer_rules import ANSWER_RULES, CLASSES, NOT_FOUND, AnswerRule
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
from detectors.scoring.placement import Placement
from detectors.scoring.records import Records, join_records, record_run
from pipeline.model.errors import UsageError
from pipeline.model.records import Finding, Incident
from pipeline.model.topology import Topology
from pipeline.recording.reader import read_events, read_topology

COLUMNS = ("kind", "found", "recall", "recall_95", "median_s", "p90_s", "top1", "top3", "small")
FIELDS = (
    *("kind", "level", "events", "found", "recall", "recall_low", "recall_high", "delay_median_s", "delay_p90_s"),
    *("half_known_after_s", "ninety_percent_known_after_s", "top1", "top3", "small", "small_found"),
    *("large", "large_found", "large_recall"),
)
_WIDTH = 100
_SHORT = {NOT_FOUND: "none"}


def format_score(result: Mapping[str, Any], form: str) -> tuple[Iterable[dict[str, Any]], tuple[str, ...], str]:
    """Returns (rows, columns, text after them) for stdout: words for people, numbers only for programs."""
    if form == "table":
        return table_rows(result), COLUMNS, f"\n{summary_text(result)}\n"
    return _number_rows(result), FIELDS, ""


def _number_rows(result: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yields one row of numbers per kind, then all, for programs."""
    for kind, block in _blocks(result):
        low, high = block["recall_95"] or (None, None)
        yield {name: block.get(name) for name in FIELDS} | {"kind": kind, "recall_low": low, "recall_high": high}


def _blocks(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    small = {"small": result["small"]["events"], "small_found": result["small"]["found"]}
    large = {f"large{end}": result["large"][key] for end, key in (("", "events"), ("_found", "found"))}
    whole = {**result, **small, **large, "large_recall": result["large"]["recall"]}
    return [*sorted(result["kinds"].items()), ("all", whole)]


def table_rows(result: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yields the table that `fleetpulse score` prints: one row per kind, then all."""
    for kind, block in _blocks(result):
        yield {
            "kind": kind,
            "found": f"{block['found']} of {block['events']}",
            "recall": _text(block["recall"], 3),
            "recall_95": _interval(block["recall_95"]),
            "median_s": _short(block["delay_median_s"], 0),
            "p90_s": _short(block["delay_p90_s"], 0),
            "top1": _text(block["top1"], 2),
            "top3": _text(block["top3"], 2),
            "small": f"{block['small_found']} of {block['small']}" if block["small"] else None,
        }


def summary_text(result: Mapping[str, Any]) -> str:
    """Returns the figures that are not in the table, as lines."""
    wrapped = (
        textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in _lines(result) if line
    )
    return "\n".join([*wrapped, *_confusion(result)])


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield from _waiting_line(result)
    yield from _however_short(result)
    yield _pages("page", result)
    if result["tickets"]["tickets"]:
        yield _pages("ticket", result["tickets"])
    yield _counts_line("false pages by detector", result["false_by_detector"])
    yield _counts_line("false pages by reason", result["false_by_reason"])
    yield from _benign_lines(result["false_by_benign"])
    yield _counts_line("false pages beside faults", result["false_beside_faults"])
    yield _compression(result)
    yield from _field(result.get("precision_at_field_rates"))
    yield from _sizes(result["scales"])


def _pages(level: str, figures: Mapping[str, Any]) -> str:
    precision = _text(figures["precision"], 3)
    if figures["precision_95"] is not None:
        precision += f" ({_interval(figures['precision_95'])})"
    rate = figures[f"false_{level}s_per_1000_node_days"]
    often = "no meta.json, so no rate" if rate is None else f"{_rate(rate)} per 1,000 node-days"
    copies = f", {figures['duplicates']} of them duplicates" if figures["duplicates"] else ""
    little = f"; {figures['right_small']} right, about small events only" if figures["right_small"] else ""
    excused = f"; {figures['excused']} excused, about invisible events only" if figures["excused"] else ""
    false = f"{figures['false']} false of {figures[f'{level}s']}{copies}"
    return f"{level} precision {precision}: {false}; {often}{little}{excused}"


def _whole_first(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    *kinds, whole = _blocks(result)
    return [whole, *kinds]


def _waiting_line(result: Mapping[str, Any]) -> Iterator[str]:
    """Times until half and 90 % of the events are found; delays of found events alone leave out the missed ones."""
    times = [
        f"{kind} {_wait_text(block['half_known_after_s'])} and {_wait_text(block['ninety_percent_known_after_s'])}"
        for kind, block in _whole_first(result)
        if block["found"] < block["events"] and block["found"]
    ]
    if times:
        yield f"half and 90 % found after, missed events still waiting: {'; '.join(times)}"


def _wait_text(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.0f} s"


def _however_short(result: Mapping[str, Any]) -> Iterator[str]:
    """Recall without the rule of length, where that removes events."""
    shares = [
        f"{kind} {block['large_found']} of {block['large']} ({block['large_recall']:.3f})"
        for kind, block in _whole_first(result)
        if block["large"] > block["events"]
    ]
    if shares:
        yield f"found of all large events, however short: {'; '.join(shares)}"


def _benign_lines(benign: Mapping[str, Any]) -> Iterator[str]:
    for kind, figures in benign.items():
        if figures["pages"]:
            by, events = ", ".join(figures["detectors"]), f"{figures['fooled']} of {figures['events']} events"
            yield f"false pages on harmless {kind}: {figures['pages']} on {events}, by {by}"


def _compression(result: Mapping[str, Any]) -> str:
    parts = []
    if result["compression"] is not None:
        parts.append(
            f"{result['compression']:.1f} conditions ({result['compression_of_pages']:.1f} pages) per incident"
        )
    if result["cpu_s_per_million_samples"] is not None:
        parts.append(f"{result['cpu_s_per_million_samples']:.3g} CPU s per 1M samples")
    if result["pages_in_no_incident"]:
        parts.append(f"{result['pages_in_no_incident']} pages in no incident")
    return "; ".join(parts)


def _field(field: Mapping[str, Any] | None) -> Iterator[str]:
    for line in field["precision"] if field else ():
        value, low, high = (_text(line[key], 3) for key in ("value", "low", "high"))
        yield f"precision at {line['faults_per_1000_node_days']} faults per 1,000 node-days: {value} ({low} to {high})"


def _sizes(scales: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields one line per size of fleet, if it is known."""
    for line in scales:
        if line["gpus"] is None:
            continue
        often = line["false_pages_per_1000_node_days"]
        yield (
            f"{line['gpus']:,.0f} GPUs: {line['found']} of {line['events']} found, median "
            f"{_text(line['delay_median_s'], 0)} s, {line['false']} false pages"
            + (f", {often['value']:.2f} per 1,000 node-days" if often else "")
        )


def _confusion(result: Mapping[str, Any]) -> Iterator[str]:
    """Yields the rows and columns that are not empty, as a table of fixed width."""
    rows = result["attribution"]
    columns = [c for c in (*CLASSES, NOT_FOUND) if any(row[c] for row in rows.values())]
    if not any(c != NOT_FOUND for c in columns):
        return
    right = result["attribution_right"]
    yield f"class of the fault (down) and of the alert (across): {right['right']} of {right['told']} right"
    yield "".join([" " * 10, *(f"{_SHORT.get(c, c):>10}" for c in columns)])
    for name, row in rows.items():
        yield "".join([f"{name:<10}", *(f"{row[c]:>10}" for c in columns)])


def _counts_line(what: str, counts: Mapping[str, int]) -> str:
    most = sorted(counts, key=lambda name: (-counts[name], name))
    return f"{what}: " + ", ".join(f"{name} {counts[name]}" for name in most) if counts else ""


def _rate(rate: Mapping[str, float]) -> str:
    return f"{rate['value']:.2f} ({rate['low']:.2f} to {rate['high']:.2f})"


def _interval(pair: Any) -> str | None:
    return None if pair is None else f"{pair[0]:.2f} to {pair[1]:.2f}"


def _short(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


FIELD_RATES = (6.5, 2.34)
"""Failures per 1,000 node-days of Meta's RSC-1 and RSC-2 (Kokolis et al., "Revisiting Reliability", 2024)."""


def precision_at_field_rates(
    page_kinds: Mapping[str, Any], clean: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Returns the precision at each field rate, with the interval of the page rate; None if one of both is unknown.

    page_kinds: figures of the events whose kind must be paged; a ticket is not a page.
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
