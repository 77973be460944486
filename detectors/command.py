"""`fleetpulse detectors`: what each needs, how it is set up here, and how it fares in the running pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from detectors import explain, listing
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import FleetpulseError

COLUMNS = ("name", "family", "class", "needs", "wants", "blind")
FARES = ("off", "errors")
_PATH = "/api/v1/detectors"
_PATIENCE = 2.0  # s for the pipeline's answer: most ask what a detector is, and need none; chosen


def rows(config: Config, names: Sequence[str], say: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows, columns of the table) of the detectors named, or all; `say` hears why it is not known how they fare."""
    found = listing(config.detector, config.source)
    wanted = [explain(name, found) for name in names if name != "explain"] or found
    running = _running(config, say)
    if running is None:
        return wanted, list(COLUMNS)
    told = [{**row, **{key: running.get(row["name"], {}).get(key) for key in FARES}} for row in wanted]
    return told, [*COLUMNS[:3], *FARES, *COLUMNS[3:]]


def as_text(row: Mapping[str, Any]) -> str:
    """How a detector judges, what it cannot see, its settings and how it fares, for people."""
    settings = [f"  {key} = {value!r}" for key, value in row["settings"].items()]
    budget = ["", "False alarms, by arithmetic:", *(f"  {line}" for line in row["budget"])] if row["budget"] else []
    fares = ["", f"Off: the input has no {', '.join(row['off'])}"] if row.get("off") else []
    if row.get("errors"):
        fares += ["", f"Failed on {row['errors']} frames since the start; the first is in the pipeline's log"]
    head = [row["name"], "", row["about"], "", f"Cannot see: {row['blind']}"]
    return "\n".join([*head, *fares, "", *settings, *budget, ""])


def _running(config: Config, say: Callable[[str], None]) -> dict[str, Mapping[str, Any]] | None:
    """Rows of the running pipeline by name; None, told why, if it does not tell."""
    try:
        status, answer = client.get(config, _PATH, _PATIENCE)
        if status != 200:
            raise client.error_of(status, answer, client.base_url(config) + _PATH)
        return {row["name"]: row for row in answer["detectors"]}
    except FleetpulseError as error:
        why = str(error)
    except (KeyError, TypeError):
        why = f"{client.base_url(config)}{_PATH} is no answer of a pipeline of this version"
    say(f"fleetpulse: which are off or fail is not known: {why}")
    return None
