"""`fleetpulse once`: reads everything that this node can measure once, prints it and exits. Counters are raw."""

from __future__ import annotations

import csv
import io
import json
import sys
import threading
import time as clock_time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agents.collector import Collector, Reading
from agents.collectors.registry import configured
from agents.node.batches import blocks
from agents.node.health import status_file
from agents.node.workers.pool import Delivery, Looking, Worker, both
from pipeline.config.sections import Config
from pipeline.model.records import iso
from pipeline.model.signals import CATALOGUE

_SIGNALS = {"bmc": "bmc.reachable", "exporter": "exporter.up"}
_EVENTS = frozenset({"bmc_lost", "exporter"})
UNHEARD = "no answer yet"


def unreachable(readings: Sequence[Reading]) -> dict[str, str]:
    """Entity -> why it is not read; `UNHEARD` where it was asked and has neither answered nor failed."""
    up: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for reading in readings:
        for event in reading.events:
            if event.kind in _EVENTS:
                reasons[event.entity] = str(event.data.get("reason") or "")
        signal = _SIGNALS.get(reading.device_class)
        column = reading.columns.get(signal) if signal is not None else None
        for i, entity in enumerate(reading.entities if signal is not None else ()):
            value = float(column[i]) if column is not None else float("nan")
            up[entity] = value if value == value else up.get(entity)
    return {
        entity: UNHEARD if value is None else reasons.get(entity) or "no reason was told"
        for entity, value in up.items()
        if not value
    }


Output = Literal["table", "json", "jsonl", "csv"]
Values = dict[str, float | int | None]
STEP_S = 0.25
"""How far beyond its deadline a collector may be given up; chosen, nobody notices it."""
CLOSE_S = 0.5
"""How long ending waits for the collectors to close; chosen, a person waits for the prompt."""
DISK_S = 2.0
"""How long the agent's word on its disk is waited for, which may lie on that disk; chosen: a sound one takes 1 ms."""
DASH = "- : not measured in one look, or not supported; gauges over a span need two looks\n"


@dataclass(frozen=True, slots=True)
class Look:
    """What one collector brought at `time`: readings, or why there are none ("no data: no NVIDIA driver")."""

    collector: str
    time: int
    readings: tuple[Reading, ...] = ()
    trouble: str = ""
    took: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it failed or hung; what is not there to be measured is no failure."""
        return bool(self.trouble) and not self.trouble.startswith("no data: ")


def once(config: Config, collectors: Sequence[Collector] | None = None) -> list[Look]:
    """Asks every collector once, all at the same time; one that outlives its deadline is `hung`."""
    collectors = (
        configured(config.collector, config.source, config.agent.collectors) if collectors is None else collectors
    )
    looking, now = Looking(collectors, config.agent.node), clock_time.time_ns() // 1000
    try:
        delivered = _answers(looking, now)
        _settle(looking, delivered)
        return [_look(worker, delivered.get(worker), now) for worker in looking.workers]
    finally:
        looking.close(CLOSE_S)


def _answers(looking: Looking, now: int) -> dict[Worker, Delivery]:
    """What each brings by its own deadline: nobody waits for the longest deadline of all."""
    delivered, before = looking.tick(now, 0.0, tell=True), clock_time.monotonic()
    while busy := [worker for worker in looking.workers if worker.busy]:
        delivered |= looking.wait(busy, STEP_S)
        time = clock_time.monotonic()
        for worker in busy:
            worker.age(min(time - before, 2 * STEP_S))  # as the agent has it: a pause of the machine blames nobody
        before = time
    return delivered


def _settle(looking: Looking, delivered: dict[Worker, Delivery]) -> None:
    """Looks again at those whose first look is empty by design, until their values had time to come."""
    began = clock_time.monotonic()
    while waiting := [w for w in looking.workers if w.collector.settling > clock_time.monotonic() - began]:
        clock_time.sleep(STEP_S)
        asked = [w for w in waiting if w in delivered and delivered[w].state == "ok" and not w.busy and w.ask(True)]
        if not asked:
            return
        for worker, delivery in looking.wait(asked, max(w.collector.deadline for w in asked)).items():
            delivered[worker] = both(delivered[worker], delivery)


def _look(worker: Worker, delivery: Delivery | None, time: int) -> Look:
    name = worker.collector.name
    if delivery is None:
        return Look(name, time, (), f"fault: {worker.reason or 'it was not asked'}")
    reason = delivery.reason.partition("; given up, started anew")[0]  # here nothing is started anew
    trouble = f"{delivery.state}: {reason}" if delivery.state != "ok" else ""
    return Look(name, time, delivery.readings, trouble, delivery.took)


def render_once(config: Config, output: Output = "table", collectors: Sequence[Collector] | None = None) -> int:
    """Prints one reading to stdout; what could not be read is said on stderr, in JSON also in the document.

    Gives 1 if a collector failed or hung, else 0: hardware that is not there is no failure.
    """
    looks = once(config, collectors)
    for look in looks:
        if look.trouble:
            sys.stderr.write(f"collector {look.collector}: {look.trouble}\n")
        for entity, reason in unreachable(look.readings).items():
            sys.stderr.write(f"collector {look.collector}: {entity}: {reason}\n")
    if trouble := slow_disk(config):
        sys.stderr.write(f"{trouble}\n")
    sys.stdout.write(_RENDERERS[output](config, looks))
    if output == "table" and any(value is None for values in _entities(looks).values() for value in values.values()):
        sys.stdout.flush()
        sys.stderr.write(DASH)
    return int(any(look.failed for look in looks))


def slow_disk(config: Config) -> str:
    """What the agent of this node says of a slow disk, or that the disk does not even give that; else empty."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.extend(one.text for one in status_file.read(config).conditions if one.name == "disk_slow")
        except status_file.NoStatus:
            return  # no agent runs, so none waits for the disk

    thread = threading.Thread(target=ask, name="disk", daemon=True)
    thread.start()
    thread.join(DISK_S)
    if thread.is_alive():
        found.append(f"the disk of {config.spool.directory} has given no answer for {DISK_S:g} s")
    return f"spool: {'; '.join(found)}; fleetpulse doctor measures it" if found else ""


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
