"""`fleetpulse once`: one reading of everything this node can measure, then exit. Counters are raw."""

from __future__ import annotations

import csv
import io
import json
import sys
import time as clock_time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agents.batches import blocks
from agents.collector import Collector, Reading
from agents.collectors import configured
from agents.workers.looking import Delivery, Looking
from pipeline.config import Config
from pipeline.records import iso
from pipeline.signals import CATALOGUE

Output = Literal["table", "json", "jsonl", "csv"]
Values = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Look:
    """What one collector brought at `time`: readings, or why there are none ("no data: no NVIDIA driver")."""

    collector: str
    time: int
    readings: tuple[Reading, ...] = ()
    trouble: str = ""
    took: float = 0.0


def once(config: Config, collectors: Sequence[Collector] | None = None) -> list[Look]:
    """Asks every collector once, all at the same time; one that outlives its deadline is `hung`."""
    collectors = configured(config.collector, config.source) if collectors is None else collectors
    looking, now = Looking(collectors, config.agent.node), clock_time.time_ns() // 1000
    try:
        delivered = looking.tick(now, max(c.deadline for c in collectors), tell=True)
        return [_look(worker.collector, delivered.get(worker), now) for worker in looking.workers]
    finally:
        looking.close(0.5)


def _look(collector: Collector, delivery: Delivery | None, time: int) -> Look:
    if delivery is None:
        return Look(collector.name, time, (), f"hung: no answer within {collector.deadline:g} s", collector.deadline)
    trouble = f"{delivery.state}: {delivery.reason}" if delivery.state != "ok" else ""
    return Look(collector.name, time, delivery.readings, trouble, delivery.took)


def render_once(config: Config, output: Output = "table", collectors: Sequence[Collector] | None = None) -> int:
    """Prints one reading to stdout; what could not be read is said on stderr, in JSON also in the document."""
    looks = once(config, collectors)
    for look in looks:
        if look.trouble:
            sys.stderr.write(f"collector {look.collector}: {look.trouble}\n")
    sys.stdout.write(_RENDERERS[output](config, looks))
    return 0


def _entities(looks: Sequence[Look]) -> dict[str, Values]:
    """Entity -> signal -> value as it would be sent; None where it is missing."""
    found: dict[str, Values] = {}
    for block in blocks(reading for look in looks for reading in look.readings):
        for name, column in block.columns.items():
            for entity, value in zip(block.entities, column[0].tolist(), strict=True):
                found.setdefault(entity, {})[name] = _plain(name, value)
    return found


def _plain(name: str, value: float) -> float | int | None:
    """The number as a person writes it: missing is None, an f4 has no more than the 7 digits that it holds."""
    code = CATALOGUE[name].type
    if code[0] == "u":
        return None if value == np.iinfo(code).max else value
    if np.isnan(value):
        return None
    return float(f"{value:.7g}") if code == "f4" else value


def _json(config: Config, looks: Sequence[Look]) -> str:
    document = {
        "time": iso(looks[0].time),
        "site": config.site.name,
        "node": config.agent.node,
        "entities": _entities(looks),
        "collectors": {look.collector: look.trouble or "ok" for look in looks},
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _jsonl(_: Config, looks: Sequence[Look]) -> str:
    rows = [{"time": iso(looks[0].time), "entity": entity, **values} for entity, values in _entities(looks).items()]
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def _csv(_: Config, looks: Sequence[Look]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("time", "entity", "signal", "value", "unit"))
    for entity, values in _entities(looks).items():
        writer.writerows((iso(looks[0].time), entity, n, v, CATALOGUE[n].unit) for n, v in values.items())
    return text.getvalue()


def _table(_: Config, looks: Sequence[Look]) -> str:
    lines = [iso(looks[0].time)]
    for entity, values in _entities(looks).items():
        lines += ["", entity]
        lines += [f"  {n:<24} {_text(v):>20} {CATALOGUE[n].unit}" for n, v in values.items()]
    return "\n".join(lines) + "\n"


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.6g}"


_RENDERERS: dict[Output, Callable[[Config, Sequence[Look]], str]] = {
    "table": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": _csv,
}
