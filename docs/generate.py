"""Writes docs/signals.md and docs/detectors.md anew from the code: `make docs`. tests/test_docs.py compares them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from detectors import listing
from pipeline.signals import CLASSES, Signal, of_class

INTRODUCTION = """# Signals

What Fleetpulse measures. Written from the catalogue in `pipeline/signals.py` by `make docs`; a new signal is one line there.

A counter is shipped raw, as the device gives it, and turned into a rate where it is judged. A value outside *valid* is a
broken reading and counts as missing. *Column* is the name in the SQL view of the class: `SELECT time, entity, sm_clock FROM gpu`.
`fleetpulse signals --output json` gives the same as data.
"""
HEAD = "| signal | column | unit | kind | type | valid | harm | measured | source | OpenTelemetry |"


def signals() -> str:
    """The whole text of docs/signals.md."""
    parts = [INTRODUCTION]
    for device_class, kind in CLASSES.items():
        lines = [f"## {device_class}\n\nEntities `{kind}:NAME`.\n", HEAD, "|" + "---|" * HEAD.count(" | ") + "---|"]
        parts.append("\n".join([*lines, *(row(signal) for signal in of_class(device_class))]) + "\n")
    return "\n".join(parts)


def row(signal: Signal) -> str:
    """One line of a table."""
    low, high = signal.valid
    valid = "" if low == float("-inf") else f"{low:g} to {high:g}"
    states = f" ({', '.join(f'{i} = {name}' for i, name in enumerate(signal.states))})" if signal.states else ""
    source = signal.source.replace("|", "\\|")
    cells = (
        *(f"`{signal.name}`", f"`{signal.column}`", signal.unit, signal.kind, signal.type, valid, signal.harm),
        *(signal.help + states, source, f"`{signal.otel}`" if signal.otel else ""),
    )
    return f"| {' | '.join(cells)} |"


DETECTORS = """# Detectors

What judges the telemetry. Written from the detectors' own words by `make docs`; `fleetpulse detectors` lists the same.

A detector without the signals that it needs is off and says so. What it only wants makes it surer. Each says what it cannot
see. Settings go into `[detector.NAME]` of the configuration.
"""


def detectors() -> str:
    """The whole text of docs/detectors.md."""
    return "\n".join([DETECTORS, *map(section, listing())])


def section(row: dict[str, object]) -> str:
    """One detector."""
    names = {key: ", ".join(f"`{name}`" for name in row[key]) or "nothing" for key in ("needs", "wants")}
    settings = [f"| `{name}` | `{json.dumps(value)}` |" for name, value in row["settings"].items()]
    lines = [
        f"## {row['name']}",
        textwrap.dedent("    " + str(row["about"])).strip(),
        f"- Finds: {row['family']}, on entities of the class `{row['class']}`",
        f"- Needs {names['needs']}; wants {names['wants']}",
        f"- Cannot see: {row['blind']}",
    ]
    text = "\n\n".join([*lines[:2], "\n".join(lines[2:])])
    return text + "\n\n| setting | default |\n|---|---|\n" + "\n".join(settings) + "\n"


PAGES = {"signals.md": signals, "detectors.md": detectors}

if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(__file__).with_name(name).write_text(page())
