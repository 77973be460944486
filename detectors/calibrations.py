"""The calibration of all detectors as one document: exported with a version, shown, loaded and pinned.

A document is `{"format": 1, "detectors": {detector: {statistic: {kind of device: QuietRecord.as_json()}}}}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detectors.base.calibration import BLOCK_S, QuietRecord, record_from_json
from detectors.base.detector import Detector
from detectors.base.streams import Streams
from pipeline.model.errors import UsageError
from pipeline.model.records import Event

FORMAT = 1
_Records = dict[str, dict[str, QuietRecord]]  # statistic -> kind -> record


def export_calibration(detectors: Iterable[Detector]) -> dict[str, Any]:
    """Returns the document of what is in force now, with the evidence for it."""
    found: dict[str, Any] = {}
    for detector in detectors:
        for statistic, tail in detector.tails().items():
            kinds = {k: {**r.as_json(), "factor": tail.factor(k)} for k, r in sorted(tail.records.items())}
            if kinds:
                found.setdefault(detector.name, {})[statistic] = kinds
    return {"format": FORMAT, "detectors": found}


def list_calibration(detectors: Iterable[Detector], other: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Returns a row of each statistic and kind of device; see models.CalibrationRow. other: document to compare."""
    rows = []
    for detector in detectors:
        streams = {path: piece for path, piece in detector.pieces() if isinstance(piece, Streams)}
        known = _read_records(other, detector.name) if other is not None else {}
        for statistic, tail in detector.tails().items():
            for kind in sorted({*tail.records, *known.get(statistic, {})}):
                record, factor = tail.records.get(kind, QuietRecord()), tail.factor(kind)
                threshold, least = streams[statistic].needed(factor) if statistic in streams else (None, None)
                row = {"detector": detector.name, "statistic": statistic, "kind": kind, "factor": round(factor, 3)}
                row |= {"threshold": threshold, "least_effect": least, "pinned": bool(tail.pinned)}
                row |= {"hours": round(record.seconds / 3600, 1), "devices": _devices(record)}
                row |= {"suspects": record.count_passed(factor), "other_factor": None, "other_suspects": None}
                if other is not None:
                    factor = known[statistic][kind].factor if kind in known.get(statistic, {}) else QuietRecord().factor
                    row |= {"other_factor": round(factor, 3), "other_suspects": record.count_passed(factor)}
                    row["other_least_effect"] = streams[statistic].needed(factor)[1] if statistic in streams else None
                rows.append(row)
    return rows


def _devices(record: QuietRecord) -> int:
    return round(record.blocks * BLOCK_S / record.seconds) if record.seconds else 0


def load_calibration(detectors: Iterable[Detector], document: Mapping[str, Any]) -> None:
    """Replaces what the detectors have learnt by a document; they learn on from it. Raises UsageError if it is none."""
    for detector, records in _read_all(detectors, document):
        for statistic, tail in detector.tails().items():
            tail.load(records.get(statistic, {}))


def pin_calibration(detectors: Iterable[Detector], document: Mapping[str, Any] | None) -> None:
    """Sets the factors of a document in force until they are released (None); what is measured is still counted.

    A kind of device that the document lacks uses what is measured.
    """
    for detector, records in _read_all(detectors, document or {"format": FORMAT, "detectors": {}}):
        for statistic, tail in detector.tails().items():
            tail.pin({kind: record.factor for kind, record in records.get(statistic, {}).items()})


def apply_calibration_events(detectors: Sequence[Detector], events: Iterable[Event]) -> None:
    """Applies what people decided: events `calibration` with an action and, to pin and roll back, a document."""
    for event in sorted((e for e in events if e.kind == "calibration"), key=lambda e: e.time):
        document = event.data.get("calibration")
        if event.data.get("action") == "rollback":
            load_calibration(detectors, document or {})
        else:
            pin_calibration(detectors, document if event.data.get("action") == "pin" else None)


def read_calibration(path: str | Path) -> dict[str, Any]:
    """Reads an exported document. Raises UsageError."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}; expected a file of `fleetpulse calibration export`"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path}: no JSON: {error}; expected a file of `fleetpulse calibration export`") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected an object as from `fleetpulse calibration export`")
    return found


def _read_all(detectors: Iterable[Detector], document: Mapping[str, Any]) -> list[tuple[Detector, _Records]]:
    """Returns all records, so that nothing is changed if one is bad."""
    if document.get("format") != FORMAT:
        raise UsageError(f"calibration: format {document.get('format')!r}; expected {FORMAT}")
    return [(detector, _read_records(document, detector.name)) for detector in detectors]


def _read_records(document: Mapping[str, Any], detector: str) -> _Records:
    try:
        statistics = document["detectors"].get(detector, {})
        return {s: {k: record_from_json(r) for k, r in kinds.items()} for s, kinds in statistics.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        expected = "expected a file of `fleetpulse calibration export`"
        raise UsageError(f"calibration: {detector}: {type(error).__name__}: {error}; {expected}") from error
