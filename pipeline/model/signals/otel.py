"""Maps our signals to OpenTelemetry's semantic conventions, in both directions, as of SCHEMA.

A signal's `otel` names its convention; CONVENTIONS has unit, instrument and attributes of each. A signal that does not
fit, or that has no convention, is exported under our own prefix in its own unit; no name is invented under `hw.`. All
these conventions have the status Development; a test compares the table with the published package.
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
    """A semantic convention. `attributes_of` returns a signal's attributes, or None if the signal does not fit."""

    instrument: Instrument
    unit: str
    attributes_of: Callable[[Signal], Attributes | None] = lambda _: {}


@dataclass(frozen=True, slots=True)
class Metric:
    """A signal as a metric: value * factor + offset; with `states`: 1 if the state is one of them, else 0."""

    signal: str
    name: str
    unit: str
    instrument: Instrument
    help: str
    attributes: tuple[tuple[str, str], ...] = ()
    factor: float = 1.0
    offset: float = 0.0
    states: tuple[int, ...] | None = None

    @property
    def is_hardware(self) -> bool:
        """Whether it is a hardware convention, whose points have the attribute `hw.id`."""
        return self.name.startswith("hw.")


_TYPES: Attributes = {
    # device class -> hw.type; classes that are not hardware have none
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
"""States of complete failure; a state that is neither normal nor one of these is degraded. Chosen."""
_CPU_MODES: Attributes = {
    # signal -> cpu.mode; busy and idle time are sums of others
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


def _name_in_class(signal: Signal) -> str:
    return signal.name.partition(".")[2]


def _direction(signal: Signal) -> Attributes | None:
    words = _name_in_class(signal).split("_")
    if "rx" in words or "received" in words:
        return {"network.io.direction": "receive"}
    if "tx" in words or "sent" in words:
        return {"network.io.direction": "transmit"}
    return None


def _disk_direction(signal: Signal) -> Attributes | None:
    words = _name_in_class(signal).split("_")
    if {"read", "reads"} & set(words):
        return {"disk.io.direction": "read"}
    return {"disk.io.direction": "write"} if {"write", "writes", "written"} & set(words) else None


def _hardware_type(signal: Signal) -> Attributes | None:
    found = _TYPES.get(signal.device_class)
    if signal.device_class == "node" and "memory" in signal.name:
        found = "memory"
    return {"hw.type": found} if found else None


def _error_attributes(signal: Signal) -> Attributes | None:
    """error.type is `corrected` or `uncorrected` if nothing more is known, else the name of the counted error."""
    kind, hardware = _name_in_class(signal), _hardware_type(signal)
    for plain in ("corrected", "uncorrected"):
        kind = plain if kind in (f"ecc_{plain}", f"memory_{plain}") else kind
    return None if hardware is None else {**hardware, "error.type": kind, **(_direction(signal) or {})}


def _sensor_location(*quantity: str) -> Callable[[Signal], Attributes]:
    """hw.sensor_location: the parts of the signal's name that are not the quantity."""

    def more(signal: Signal) -> Attributes:
        """Returns the location in a signal name, if any."""
        place = "_".join(word for word in _name_in_class(signal).split("_") if word not in quantity)
        return {"hw.sensor_location": place} if place else {}

    return more


def _fan_location(signal: Signal) -> Attributes | None:
    return None if signal.device_class == "coolant" else _sensor_location("fan", "speed")(signal)  # a pump is not a fan


def _limit_type(signal: Signal) -> Attributes | None:
    return None if "margin" in signal.name else {"hw.limit_type": _name_in_class(signal)}  # a margin is not a limit


def _gpu_task(signal: Signal) -> Attributes:
    task = next((t for t in ("encoder", "decoder") if t in _name_in_class(signal)), "general")
    return {"hw.gpu.task": task}


def _attribute(key: str, value: Callable[[Signal], str | None]) -> Callable[[Signal], Attributes | None]:
    """A function that returns one attribute; a signal without it does not fit."""

    def more(signal: Signal) -> Attributes | None:
        """Returns the attribute; None if the signal does not fit."""
        found = value(signal)
        return {key: found} if found else None

    return more


CONVENTIONS: Mapping[str, Convention] = {
    "hw.gpu.utilization": Convention("gauge", "1", _gpu_task),
    "hw.gpu.memory.utilization": Convention("gauge", "1"),
    "hw.gpu.memory.usage": Convention("updowncounter", "By"),
    "hw.gpu.memory.limit": Convention("updowncounter", "By"),
    "hw.gpu.io": Convention("counter", "By", _direction),
    "hw.errors": Convention("counter", "{error}", _error_attributes),
    "hw.status": Convention("updowncounter", "1", _hardware_type),
    "hw.power": Convention("gauge", "W", _hardware_type),
    "hw.energy": Convention("counter", "J", _hardware_type),
    "hw.host.power": Convention("gauge", "W"),
    "hw.host.energy": Convention("counter", "J"),
    "hw.host.ambient_temperature": Convention("gauge", "Cel"),
    "hw.host.heating_margin": Convention("gauge", "Cel"),
    "hw.temperature": Convention("gauge", "Cel", _sensor_location("temperature")),
    "hw.temperature.limit": Convention("gauge", "Cel", _limit_type),
    "hw.fan.speed": Convention("gauge", "rpm", _fan_location),
    "hw.fan.speed.limit": Convention("gauge", "rpm", _limit_type),
    "hw.fan.speed_ratio": Convention("gauge", "1"),
    "hw.battery.charge": Convention("gauge", "1"),
    "hw.voltage": Convention("gauge", "V", _sensor_location("voltage")),
    "hw.voltage.limit": Convention("gauge", "V", _limit_type),
    "hw.voltage.nominal": Convention("gauge", "V"),
    "hw.network.io": Convention("counter", "By", _direction),
    "hw.network.packets": Convention("counter", "{packet}", _direction),
    "hw.network.bandwidth.limit": Convention("updowncounter", "By/s"),
    "hw.network.bandwidth.utilization": Convention("gauge", "1"),
    "hw.network.up": Convention("updowncounter", "1"),
    "hw.power_supply.usage": Convention("updowncounter", "W"),
    "hw.power_supply.limit": Convention("updowncounter", "W", _limit_type),
    "hw.power_supply.utilization": Convention("gauge", "1"),
    "hw.memory.size": Convention("updowncounter", "By"),
    "hw.physical_disk.size": Convention("updowncounter", "By"),
    "hw.physical_disk.smart": Convention("gauge", "1", _attribute("hw.physical_disk.smart_attribute", _name_in_class)),
    "hw.physical_disk.endurance_utilization": Convention(
        "gauge", "1", lambda _: {"hw.physical_disk.state": "remaining"}
    ),
    "system.cpu.time": Convention("counter", "s", _attribute("cpu.mode", lambda s: _CPU_MODES.get(s.name))),
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
        "updowncounter", "By", _attribute("system.filesystem.state", lambda s: _FILESYSTEM_STATES.get(s.name))
    ),
}
_KINDS: Mapping[Instrument, tuple[str, ...]] = {
    # instrument -> kinds of signal that it can represent
    "gauge": ("gauge", "state"),
    "counter": ("counter",),
    "updowncounter": ("gauge", "state"),
}


def metrics_of_signal(signal: Signal) -> tuple[Metric, ...]:
    """The metrics of a signal of the catalogue, at least one; several if each state is a metric."""
    return _all_metrics()[signal.name]


@functools.cache
def _all_metrics() -> Mapping[str, tuple[Metric, ...]]:
    """The metrics of every signal. If two signals of a class map to the same metric, only the first does, so that a sum
    does not count twice. States are not summed; there the attribute fleetpulse.signal distinguishes them."""
    found = {signal.name: _convert_signal(signal) for signal in CATALOGUE.values()}
    places = [(CATALOGUE[name].device_class, m.name, m.attributes) for name, all_ in found.items() for m in all_]
    seen, taken = Counter(places), set[object]()
    for name, all_ in found.items():
        place = (CATALOGUE[name].device_class, all_[0].name, all_[0].attributes)
        if all_[0].name == "hw.status":
            found[name] = tuple(_with_signal_name(m) if seen[place] > 1 and m.states is not None else m for m in all_)
        elif place in taken:
            found[name] = (_custom_metric(CATALOGUE[name]),)
        taken.add(place)
    return found


def _with_signal_name(metric: Metric) -> Metric:
    return replace(metric, attributes=(*metric.attributes, ("fleetpulse.signal", metric.signal)))


def _convert_signal(signal: Signal) -> tuple[Metric, ...]:
    convention = CONVENTIONS.get(signal.otel)
    more = convention.attributes_of(signal) if convention else None
    if convention is None or more is None:
        return (_custom_metric(signal),)
    metric = Metric(signal.name, signal.otel, convention.unit, convention.instrument, signal.help, tuple(more.items()))
    if signal.otel in ("hw.status", "hw.network.up"):
        states = _state_metrics(signal, metric)
        return (*states, _custom_metric(signal)) if states else (_custom_metric(signal),)
    if signal.otel == "hw.physical_disk.smart":  # raw values, without a unit
        return (metric,)
    factor = 1.0 if signal.unit == convention.unit else _UNITS.get((signal.unit, convention.unit))
    if factor is None or signal.kind not in _KINDS[convention.instrument]:
        return (_custom_metric(signal),)
    if signal.otel == "hw.physical_disk.endurance_utilization":  # our signal is the used part
        return (replace(metric, factor=-factor, offset=1.0),)
    return (replace(metric, factor=factor),)


def _state_metrics(signal: Signal, metric: Metric) -> tuple[Metric, ...]:
    """One metric per state of the convention that the signal can have; none if its values are not states."""
    if not signal.states or not signal.normal or signal.type[0] != "u":
        return ()
    sets: dict[str, list[int]] = {"ok": [], "degraded": [], "failed": []}
    for number, state in enumerate(signal.states):
        sets["ok" if state in signal.normal else "failed" if state in _FAILED else "degraded"].append(number)
    if metric.name == "hw.network.up":
        return (replace(metric, states=tuple(sets["ok"])),)
    return tuple(
        replace(metric, attributes=(*metric.attributes, ("hw.state", name)), states=tuple(numbers))
        for name, numbers in sets.items()
        if numbers
    )


def _custom_metric(signal: Signal) -> Metric:
    """The signal as a metric under our own name and unit."""
    instrument: Instrument = "counter" if signal.kind == "counter" else "gauge"
    return Metric(signal.name, PREFIX + signal.name, signal.unit, instrument, signal.help)
