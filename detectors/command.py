"""`fleetpulse detectors`, `calibration` and `budget`: inputs, settings, thresholds and wrong pages of each detector,
and its state in the running pipeline."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from detectors import explain, listing
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import FleetpulseError

COLUMNS = ("name", "family", "class", "needs", "wants", "blind")
STATE_COLUMNS = ("off", "errors")
SHOWN_COLUMNS = (
    *("detector", "statistic", "kind", "devices", "hours", "factor", "threshold", "least_effect", "pinned"),
    *("suspects", "pages"),
)
COMPARED_COLUMNS = ("other_factor", "other_least_effect", "other_suspects", "other_pages")
HISTORY_COLUMNS = ("version", "time", "action", "of", "user", "in_force")
BUDGET_COLUMNS = ("detector", "family", "budget", "allowed", "wrong_pages", "lowered", "exempt")
_PATH, _CALIBRATION, _BUDGET = "/api/v1/detectors", "/api/v1/calibration", "/api/v1/budget"
_TIMEOUT_S = 2.0  # for the pipeline's answer: most users need only the description; chosen


def detector_rows(
    config: Config, names: Sequence[str], warn: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns (rows, columns of the table) of the named detectors, or of all.

    warn: called with the reason if their state in the pipeline is unknown.
    """
    found = listing(config.detector, config.source)
    wanted = [explain(name, found) for name in names if name != "explain"] or found
    running = _running(config, warn)
    if running is None:
        return wanted, list(COLUMNS)
    both = [{**row, **{key: running.get(row["name"], {}).get(key) for key in STATE_COLUMNS}} for row in wanted]
    return both, [*COLUMNS[:3], *STATE_COLUMNS, *COLUMNS[3:]]


def row_text(row: Mapping[str, Any]) -> str:
    """Returns the description, settings and state of a detector as text for people."""
    settings = [f"  {key} = {value!r}" for key, value in row["settings"].items()]
    budget = ["", "False alarm budget:", *(f"  {line}" for line in row["budget"])] if row["budget"] else []
    state = ["", f"Disabled: the input has no {', '.join(row['off'])}"] if row.get("off") else []
    if row.get("errors"):
        state += ["", f"Failed on {row['errors']} frames since the start; the first is in the pipeline's log"]
    head = [row["name"], "", row["about"], "", f"Blind spots: {row['blind']}"]
    return "\n".join([*head, *state, "", *settings, *budget, ""])


def run_calibration(config: Config, given: argparse.Namespace) -> tuple[Any, list[str]]:
    """Returns (rows, columns) of what is shown or was changed; without columns it is a document."""
    verb, path = given.verb or "show", _CALIBRATION
    if verb in ("pin", "unpin", "rollback"):
        found = client.post(config, path, {"action": verb, "version": getattr(given, "of_version", None)})
        return found["versions"], list(HISTORY_COLUMNS)
    version = given.of_version if verb == "export" else given.compare if verb == "show" else None
    path += "/export" * (verb == "export") + (f"?version={version}" if version is not None else "")
    status, answer = client.get(config, path)
    if status != 200:
        raise client.make_error(status, answer, client.base_url(config) + path)
    if verb == "history":
        return answer["versions"], list(HISTORY_COLUMNS)
    if verb == "show":
        return answer["rows"], [*SHOWN_COLUMNS, *(COMPARED_COLUMNS if version is not None else ())]
    return answer, []


def run_budget(config: Config, given: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Returns the page budgets, after a reset if one is asked for."""
    if given.verb == "reset":
        found: list[Mapping[str, Any]] = client.post(config, f"{_BUDGET}/{quote(given.detector, safe='')}/reset", {})[
            "budgets"
        ]
        return found
    status, answer = client.get(config, _BUDGET)
    if status != 200:
        raise client.make_error(status, answer, client.base_url(config) + _BUDGET)
    return list(answer["budgets"])


def document_text(document: Mapping[str, Any]) -> str:
    """Returns a calibration as it is written to a file."""
    return json.dumps(document, indent=1) + "\n"


def _running(config: Config, warn: Callable[[str], None]) -> dict[str, Mapping[str, Any]] | None:
    """Returns the rows of the running pipeline by name; None, with a warning, if it does not answer."""
    try:
        status, answer = client.get(config, _PATH, _TIMEOUT_S)
        if status != 200:
            raise client.make_error(status, answer, client.base_url(config) + _PATH)
        return {row["name"]: row for row in answer["detectors"]}
    except FleetpulseError as error:
        why = str(error)
    except (KeyError, TypeError):
        why = f"{client.base_url(config)}{_PATH} did not answer like a pipeline of this version"
    warn(f"fleetpulse: state in the pipeline unknown: {why}")
    return None
