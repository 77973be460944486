"""Our signals under the names of OpenTelemetry's semantic conventions: the one table, both ways, as of SCHEMA.

A signal's `otel` names its convention. Here stands what each convention wants: unit, instrument, attributes. Where a
signal does not fit, or where there is no convention, it goes under our own prefix and in its own unit; nothing is ever
invented under `hw.`. The conventions are all of status Development: a test holds the table to the published package.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.model.signals import CATALOGUE, Signal

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
PREFIX = "fleetpulse."
Instrument = Literal["gauge", "counter", "updowncounter"]
Attributes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Convention:
    """What a semantic convention wants of a metric; `more` gives a signal's attributes, None where it does not fit."""

    instrument: Instrument
    unit: str
    more: Callable[[Signal], Attributes | None] = lambda _: {}


@dataclass(frozen=True, slots=True)
class Metric:
    """What one signal is as a metric: value * factor + offset, or 1 where the state is one of `among`, else 0."""

    signal: str
    name: str
    unit: str
    instrument: Instrument
    help: str
    attributes: tuple[tuple[str, str], ...] = ()
    factor: float = 1.0
    offset: float = 0.0
    among: tuple[int, ...] | None = None

    @property
    def of_hardware(self) -> bool:
        """Whether it is one of the hardware conventions, whose points bear `hw.id`."""
        return self.name.startswith("hw.")


_TYPES: Attributes = {
    # device class -> hw.type; classes that are no hardware have none
    "gpu": "gpu",
    "nvlink": "network",
    "nic": "network",
    "dimm": "memory",
    "disk": "physical_disk",
    "power": "power_supply",
    "psu": "power_supply",
    "battery": "battery",
    "leak": "enclosure",
    "coolant": "enclosure",
    "sensor": "enclosure",
    "node": "enclosure",
}
_UNITS: Mapping[tuple[str, str], float] = {
    ("mJ", "J"): 1e-3,
    ("uJ", "J"): 1e-6,
    ("mW", "W"): 1e-3,
    ("mV", "V"): 1e-3,
    ("us", "s"): 1e-6,
    ("ms", "s"): 1e-3,
    ("min", "s"): 60.0,
    ("%", "1"): 0.01,
    ("MHz", "Hz"): 1e6,
    ("KiBy", "By"): 1024.0,
    ("MiBy", "By"): 1048576.0,
    ("{word}", "By"): 4.0,  # InfiniBand's port data counters count 32-bit words
    ("Mbit/s", "By/s"): 125_000.0,
    ("{task}", "{process}"): 1.0,
}
_FAILED = frozenset(
    ("failed", "fault", "critical", "dead", "down", "lost", "absent", "hangs", "fails", "deleting", "reset_required")
)
"""States in which a thing does not do its work at all; what is neither normal nor among these is degraded. Chosen."""
_CPU_MODES: Attributes = {
    # signal -> cpu.mode; busy and idle time add others up, so they are no mode of their own
    "node.cpu_user_time": "user",
    "node.cpu_system_time": "system",
    "node.cpu_iowait_time": "iowait",
    "node.cpu_irq_time": "interrupt",
    "node.cpu_steal_time": "steal",
}
_FILESYSTEM_STATES: Attributes = {
    "filesystem.used": "used",
    "filesystem.available": "free",
    "node.disk_used": "used",
}


def _tail(signal: Signal) -> str:
    return signal.name.partition(".")[2]


def _direction(signal: Signal) -> Attributes | None:
    words = _tail(signal).split("_")
    if "rx" in words or "received" in words:
        return {"network.io.direction": "receive"}
    if "tx" in words or "sent" in words:
        return {"network.io.direction": "transmit"}
    return None


def _disk_direction(signal: Signal) -> Attributes | None:
    words = _tail(signal).split("_")
    if {"read", "reads"} & set(words):
        return {"disk.io.direction": "read"}
    return {"disk.io.direction": "write"} if {"write", "writes", "written"} & set(words) else None


def _type(signal: Signal) -> Attributes | None:
    found = _TYPES.get(signal.device_class)
    if signal.device_class == "node" and "memory" in signal.name:
        found = "memory"
    return {"hw.type": found} if found else None


def _errors(signal: Signal) -> Attributes | None:
    """error.type is `corrected` or `uncorrected` where that is all there is to say, else what was counted."""
    kind, hardware = _tail(signal), _type(signal)
    for plain in ("corrected", "uncorrected"):
        kind = plain if kind in (f"ecc_{plain}", f"memory_{plain}") else kind
    return None if hardware is None else {**hardware, "error.type": kind, **(_direction(signal) or {})}


def _located(*quantity: str) -> Callable[[Signal], Attributes]:
    """Where on its device a sensor sits: what the signal's name says beside the quantity."""

    def more(signal: Signal) -> Attributes:
        place = "_".join(word for word in _tail(signal).split("_") if word not in quantity)
        return {"hw.sensor_location": place} if place else {}

    return more


def _fan(signal: Signal) -> Attributes | None:
    return None if signal.device_class == "coolant" else _located("fan", "speed")(signal)  # a pump is no fan


def _limit(signal: Signal) -> Attributes | None:
    return None if "margin" in signal.name else {"hw.limit_type": _tail(signal)}  # a distance is no limit


def _task(signal: Signal) -> Attributes:
    task = next((t for t in ("encoder", "decoder") if t in _tail(signal)), "general")
    return {"hw.gpu.task": task}


def _one(key: str, value: Callable[[Signal], str | None]) -> Callable[[Signal], Attributes | None]:
    """One attribute, without which a signal does not fit."""

    def more(signal: Signal) -> Attributes | None:
        found = value(signal)
        return {key: found} if found else None

    return more


CONVENTIONS: Mapping[str, Convention] = {
    "hw.gpu.utilization": Convention("gauge", "1", _task),
    "hw.gpu.memory.utilization": Convention("gauge", "1"),
    "hw.gpu.memory.usage": Convention("updowncounter", "By"),
    "hw.gpu.memory.limit": Convention("updowncounter", "By"),
    "hw.gpu.io": Convention("counter", "By", _direction),
    "hw.errors": Convention("counter", "{error}", _errors),
    "hw.status": Convention("updowncounter", "1", _type),
    "hw.power": Convention("gauge", "W", _type),
    "hw.energy": Convention("counter", "J", _type),
    "hw.host.power": Convention("gauge", "W"),
    "hw.host.energy": Convention("counter", "J"),
    "hw.host.ambient_temperature": Convention("gauge", "Cel"),
    "hw.host.heating_margin": Convention("gauge", "Cel"),
    "hw.temperature": Convention("gauge", "Cel", _located("temperature")),
    "hw.temperature.limit": Convention("gauge", "Cel", _limit),
    "hw.fan.speed": Convention("gauge", "rpm", _fan),
    "hw.fan.speed.limit": Convention("gauge", "rpm", _limit),
    "hw.fan.speed_ratio": Convention("gauge", "1"),
    "hw.battery.charge": Convention("gauge", "1"),
    "hw.voltage": Convention("gauge", "V", _located("voltage")),
    "hw.voltage.limit": Convention("gauge", "V", _limit),
    "hw.voltage.nominal": Convention("gauge", "V"),
    "hw.network.io": Convention("counter", "By", _direction),
    "hw.network.packets": Convention("counter", "{packet}", _direction),
    "hw.network.bandwidth.limit": Convention("updowncounter", "By/s"),
    "hw.network.bandwidth.utilization": Convention("gauge", "1"),
    "hw.network.up": Convention("updowncounter", "1"),
    "hw.power_supply.usage": Convention("updowncounter", "W"),
    "hw.power_supply.limit": Convention("updowncounter", "W", _limit),
    "hw.power_supply.utilization": Convention("gauge", "1"),
    "hw.memory.size": Convention("updowncounter", "By"),
    "hw.physical_disk.size": Convention("updowncounter", "By"),
    "hw.physical_disk.smart": Convention("gauge", "1", _one("hw.physical_disk.smart_attribute", _tail)),
    "hw.physical_disk.endurance_utilization": Convention(
        "gauge", "1", lambda _: {"hw.physical_disk.state": "remaining"}
    ),
    "system.cpu.time": Convention("counter", "s", _one("cpu.mode", lambda s: _CPU_MODES.get(s.name))),
    "system.cpu.logical.count": Convention("updowncounter", "{cpu}"),
    "system.memory.limit": Convention("updowncounter", "By"),
    "system.memory.linux.available": Convention("updowncounter", "By"),
    "system.uptime": Convention("gauge", "s"),
    "system.disk.io": Convention("counter", "By", _disk_direction),
    "system.disk.operations": Convention("counter", "{operation}", _disk_direction),
    "system.disk.operation_time": Convention("counter", "s", _disk_direction),
    "system.disk.io_time": Convention("counter", "s"),
    "system.filesystem.limit": Convention("updowncounter", "By"),
    "system.filesystem.usage": Convention(
        "updowncounter", "By", _one("system.filesystem.state", lambda s: _FILESYSTEM_STATES.get(s.name))
    ),
}
_KINDS: Mapping[Instrument, tuple[str, ...]] = {
    # instrument -> kinds of signal that it can show
    "gauge": ("gauge", "state"),
    "counter": ("counter",),
    "updowncounter": ("gauge", "state"),
}


def metrics(signal: Signal) -> tuple[Metric, ...]:
    """What a signal of the catalogue is as metrics: several where each of its states is one. Never none."""
    return _table()[signal.name]


@functools.cache
def _table() -> Mapping[str, tuple[Metric, ...]]:
    """Every signal of the catalogue. Where two of a class would be one metric, the first is: who adds it up must not
    count twice. States are not added up, so there the signals' names tell them apart."""
    found = {signal.name: _metrics(signal) for signal in CATALOGUE.values()}
    places = [(CATALOGUE[name].device_class, m.name, m.attributes) for name, all_ in found.items() for m in all_]
    seen, taken = Counter(places), set[object]()
    for name, all_ in found.items():
        place = (CATALOGUE[name].device_class, all_[0].name, all_[0].attributes)
        if all_[0].name == "hw.status":
            found[name] = tuple(_named(m) if seen[place] > 1 and m.among is not None else m for m in all_)
        elif place in taken:
            found[name] = (_own(CATALOGUE[name]),)
        taken.add(place)
    return found


def _named(metric: Metric) -> Metric:
    return replace(metric, attributes=(*metric.attributes, ("fleetpulse.signal", metric.signal)))


def _metrics(signal: Signal) -> tuple[Metric, ...]:
    convention = CONVENTIONS.get(signal.otel)
    more = convention.more(signal) if convention else None
    if convention is None or more is None:
        return (_own(signal),)
    metric = Metric(signal.name, signal.otel, convention.unit, convention.instrument, signal.help, tuple(more.items()))
    if signal.otel in ("hw.status", "hw.network.up"):
        states = _states(signal, metric)
        return (*states, _own(signal)) if states else (_own(signal),)
    if signal.otel == "hw.physical_disk.smart":  # raw values of any unit
        return (metric,)
    factor = 1.0 if signal.unit == convention.unit else _UNITS.get((signal.unit, convention.unit))
    if factor is None or signal.kind not in _KINDS[convention.instrument]:
        return (_own(signal),)
    if signal.otel == "hw.physical_disk.endurance_utilization":  # ours is what was used
        return (replace(metric, factor=-factor, offset=1.0),)
    return (replace(metric, factor=factor),)


def _states(signal: Signal, metric: Metric) -> tuple[Metric, ...]:
    """One metric per state of the convention that the signal can be in; none if its numbers are no states."""
    if not signal.states or not signal.normal or signal.type[0] != "u":
        return ()
    sets: dict[str, list[int]] = {"ok": [], "degraded": [], "failed": []}
    for number, state in enumerate(signal.states):
        sets["ok" if state in signal.normal else "failed" if state in _FAILED else "degraded"].append(number)
    if metric.name == "hw.network.up":
        return (replace(metric, among=tuple(sets["ok"])),)
    return tuple(
        replace(metric, attributes=(*metric.attributes, ("hw.state", name)), among=tuple(numbers))
        for name, numbers in sets.items()
        if numbers
    )


def _own(signal: Signal) -> Metric:
    """A signal under our own name, in its own unit."""
    instrument: Instrument = "counter" if signal.kind == "counter" else "gauge"
    return Metric(signal.name, PREFIX + signal.name, signal.unit, instrument, signal.help)
