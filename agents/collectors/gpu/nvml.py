"""NVIDIA GPUs and their NVLinks, read with NVML, the driver's library. A value that a GPU does not provide is missing,
not an error.

library: the NVML library and the attributes of GPUs. slots: which GPU is which. sampler: one read of all GPUs, which
uses fields, calls and gpm. refusals: what a GPU does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule, wall_clock
from agents.collectors.gpu.calls import count_links
from agents.collectors.gpu.library import GpuAttributes, NvmlLibrary, NvmlUnavailable, platform_parents
from agents.collectors.gpu.sampler import GPU_SIGNALS, LINK_SIGNALS, PROCESSES_INTERVAL, GpuSampler, SlowCall
from agents.collectors.gpu.slots import (
    GpuSlot,
    GpuSlots,
    default_state_file,
    gpus_on_bus,
    kernel_pci_address,
    load_gpus,
    save_gpus,
)
from pipeline.model.records import SECOND, Event
from pipeline.model.signals import CATALOGUE

INTERVALS = (3600, 300, 60, 30, 10, 5, 1)
SIGNAL_INTERVALS: Mapping[str, float] = {name: CATALOGUE[name].interval or 1 for name in (*GPU_SIGNALS, *LINK_SIGNALS)}
RECOVERY_ACTIONS = CATALOGUE["gpu.recovery_action"].states
RECOUNT_S = 60
"""Seconds between two checks of the number of GPUs. Chosen: a removed GPU stays away for minutes."""
MAX_RECOUNTS_SKIPPED = 10
"""Most checks between two restarts of the library while a GPU is lost. Chosen: a restart affects the healthy GPUs
too."""
SLOW_CALL_COOLDOWN_US = 60 * SECOND
"""Time between two `slow_call` events of a GPU. Chosen, so that a failing GPU does not flood."""
REFUSAL_COOLDOWN_US = 60 * SECOND
"""Time between two `nvml_refused` events of a GPU. Chosen: its calls are made at intervals of up to a minute."""
REFUSAL_CHECK_S = 10
"""Seconds between two checks for new refusals. Chosen, so that one event lists many calls."""
MAX_EVENT_PIDS = 64
"""Most process ids in an event. Chosen: a GPU runs a few processes."""
MAX_EVENT_CALLS = 32
"""Most calls in an event. Chosen: there are about that many, plus fields."""


@dataclass
class Nvml(Collector):
    """gpu.* and nvlink.*: one entity per GPU seen since boot. A lost GPU keeps its slot; all its values are missing."""

    name: ClassVar[str] = "nvml"
    lane: ClassVar[str] = "gpu"
    signals: ClassVar[tuple[str, ...]] = (*GPU_SIGNALS, *LINK_SIGNALS)
    events: ClassVar[tuple[str, ...]] = (
        *("gpu_count", "gpu_lost", "gpu_back"),
        *("recovery_action", "gpu_processes", "slow_call", "nvml_refused"),
    )
    deadline: float = 20.0
    expected: int = 0
    slow_call: float = 1.0
    pci: Path = Path("/sys/bus/pci/devices")
    seen: Path | None = field(default_factory=default_state_file)
    _node: str = field(default="", init=False, repr=False)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _library: NvmlLibrary | None = field(default=None, init=False, repr=False)
    _sampler: GpuSampler | None = field(default=None, init=False, repr=False)
    _slots: GpuSlots = field(default_factory=GpuSlots, init=False, repr=False)
    _bus_addresses: tuple[str, ...] = field(default=(), init=False, repr=False)
    _reported_counts: tuple[int, int] | None = field(default=None, init=False, repr=False)
    _lost: set[int] = field(default_factory=set, init=False, repr=False)
    _recounts_skipped: int = field(default=0, init=False, repr=False)
    _recounts_to_skip: int = field(default=1, init=False, repr=False)

    def open(self, node: str) -> None:
        """Starts NVML and finds the GPUs. Raises NoData without a driver or GPU."""
        self._node = node
        self._schedule = SamplingSchedule(node, self._now)
        self._recounts_skipped, self._recounts_to_skip = (
            0,
            2,
        )  # the first read follows immediately, too soon to count again
        self._start_library(load_gpus(self.seen))
        if not self._slots.slots:
            raise NoData("no NVIDIA GPU: the driver counts none")

    def read(self) -> tuple[Reading, ...]:
        """Returns the signals that are due, and events of GPUs that were lost or returned."""
        due = max([every for every in INTERVALS if self._schedule.due(every)], default=1)
        if due >= RECOUNT_S:
            self._recount()
        if self._sampler is None or any(
            not p.lost and p.handle is not None and p.links is None for p in self._slots.slots
        ):
            self._make_sampler()
        assert self._sampler is not None
        slow = self._sampler.read(due, self.slow_call, self._now())
        if self._sampler.driver_gone and len(self._lost) == len(self._slots.slots):  # their loss was reported before
            raise RuntimeError(self._driver_gone_message())
        events = (
            *self._presence_events(),
            *self._recovery_events(),
            *self._process_events(due),
            *self._slow_call_events(slow),
            *self._refusal_events(due),
        )
        return tuple(self._readings(due, events))

    def inventory(self) -> Mapping[str, Device]:
        """Returns the GPUs with driver and device attributes, below their node, NVLink clique and chassis, and their
        NVLinks."""
        found: dict[str, Device] = {}
        whole = self._attributes.driver_attributes()
        for place in self._slots.slots:
            self._read_attributes(place)
            above = (f"node:{self._node}", *platform_parents(place.attributes))
            found[self._gpu_entity(place)] = Device(above, whole | place.attributes)
            for link in range(place.links or 0):
                found[f"nvlink:{self._node}.{place.index}.{link}"] = Device(
                    (self._gpu_entity(place), f"node:{self._node}")
                )
        return found

    def close(self) -> None:
        """Frees the samples and shuts NVML down."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        if self._library is not None:
            self._library.close()
            self._library = None

    # --- GPUs of the node --------------------------------------------------------------------------------------------

    def _start_library(self, remembered: Mapping[str, Mapping[str, Any]]) -> None:
        """Starts the library, assigns every GPU to its slot and prepares the sampler."""
        try:
            self._library = NvmlLibrary()
            handles = self._library.gpu_handles()
        except NvmlUnavailable as error:
            if expected := self._gpus_without_driver():
                raise RuntimeError(f"{expected}: {error}; {error.fix}") from None
            raise
        self._attributes = GpuAttributes(self._library.nvml)
        counted = [(self._slot_key(index, handle), handle) for index, handle in enumerate(handles)]
        self._bus_addresses = gpus_on_bus(self.pci)
        self._slots.assign(counted, self._bus_addresses, remembered)
        for place in self._slots.slots:
            known = {key: value for key, value in remembered.get(place.key or "", {}).items() if key != "index"}
            place.attributes = known | place.attributes
            self._read_attributes(place)
        save_gpus(self.seen, self._slots.slots)
        self._make_sampler()

    def _gpus_without_driver(self) -> str:
        """Returns how GPUs are known to exist although the driver reports none; empty if there is no sign of a GPU."""
        if self._slots.slots:
            return self._driver_gone_message()
        found = len(gpus_on_bus(self.pci))
        return f"the PCI bus has NVIDIA GPUs ({found}), but the driver does not report them" if found else ""

    def _driver_gone_message(self) -> str:
        """Returns the message for a driver that disappeared."""
        return f"the NVIDIA driver disappeared: it had {len(self._slots.slots)} GPUs"

    def _slot_key(self, index: int, handle: Any) -> str | None:
        """Returns what identifies a GPU: its PCI address, else its index; None if it is lost."""
        if handle is None:
            return None
        return kernel_pci_address(self._attributes.pci_address(handle) or "") or f"index {index}"

    def _make_sampler(self) -> None:
        """Creates the sampler for the GPUs and links that exist now."""
        assert self._library is not None
        if self._sampler is not None:
            self._sampler.close()
        for place in self._slots.slots:
            if place.handle is not None and place.links is None:
                place.links = count_links(self._library, place.handle)
        version = str(self._attributes.driver_attributes().get("driver", ""))
        gpus = [self._gpu_entity(place) for place in self._slots.slots]
        links = [f"nvlink:{self._node}.{p.index}.{link}" for p in self._slots.slots for link in range(p.links or 0)]
        self._entities = tuple(gpus), tuple(links)
        self._sampler = GpuSampler(self._library, version, self._slots.slots, self._entities)

    def _recount(self) -> None:
        """Restarts the library if the PCI bus changed or a GPU is lost. Only a restart makes NVML count again."""
        changed = gpus_on_bus(self.pci) != self._bus_addresses
        self._recounts_skipped += 1
        trouble = any(place.lost or place.handle is None for place in self._slots.slots)
        if not (changed or trouble):
            self._recounts_skipped, self._recounts_to_skip = 0, 1
            return
        if not changed and self._recounts_skipped < self._recounts_to_skip:
            return
        self._recounts_skipped, self._recounts_to_skip = 0, min(self._recounts_to_skip * 2, MAX_RECOUNTS_SKIPPED)
        self.close()
        self._start_library(load_gpus(self.seen))

    def _read_attributes(self, place: GpuSlot) -> None:
        """Reads the attributes of a GPU. A lost GPU keeps its last ones."""
        if place.pci:
            place.attributes["pci"] = place.pci
        if place.handle is not None and not place.lost:
            place.attributes |= self._attributes.gpu_attributes(place.handle)

    def _gpu_entity(self, place: GpuSlot) -> str:
        return f"gpu:{self._node}.{place.index}"

    # --- readings and events -----------------------------------------------------------------------------------------

    def _readings(self, due: int, events: tuple[Event, ...]) -> Iterator[Reading]:
        assert self._sampler is not None
        gpus, links = self._entities
        values = self._sampler.values
        yield Reading("gpu", gpus, values.columns([s for s in GPU_SIGNALS if SIGNAL_INTERVALS[s] <= due]), events)
        chosen = [s for s in LINK_SIGNALS if SIGNAL_INTERVALS[s] <= due]
        if links and chosen:
            yield Reading("nvlink", links, values.columns(chosen))

    def _make_event(self, entity: str, kind: str, **data: Any) -> Event:
        return Event(self._now(), entity, kind, data)

    def _presence_events(self) -> Iterator[Event]:
        """Yields events for GPUs that were lost or came back since the last read, and for a changed number of GPUs; the
        first read yields the number, which ends what an earlier run reported.

        `present` of a lost GPU: how many others respond. None do while the driver is being reloaded.
        """
        answer = sum(not place.lost for place in self._slots.slots)
        for place in self._slots.slots:
            if place.lost != (place.index in self._lost):
                self._lost ^= {place.index}
                kind, more = ("gpu_lost", {"present": answer}) if place.lost else ("gpu_back", {})
                yield self._make_event(self._gpu_entity(place), kind, **self._identity(place), **more)
        missing = [place.pci or self._gpu_entity(place) for place in self._slots.slots if place.lost]
        expected = max(self.expected, len(self._slots.slots))
        present = len(self._slots.slots) - len(missing)
        reported_values, self._reported_counts = self._reported_counts, (expected, present)
        if self._reported_counts != reported_values:
            data = {"expected": expected, "present": present, "missing": missing, "source": "nvml"}
            yield self._make_event(f"node:{self._node}", "gpu_count", **data)

    def _identity(self, place: GpuSlot) -> dict[str, Any]:
        """Returns what a technician needs to find a GPU."""
        known = {key: place.attributes.get(key) for key in ("serial", "uuid")}
        return {"gpu": self._gpu_entity(place), "pci": place.pci, **known}

    def _recovery_events(self) -> Iterator[Event]:
        """Yields an event for each GPU whose recovery action, as required by the driver, changed."""
        assert self._sampler is not None
        values = self._sampler.values
        for place in self._slots.slots:
            value = values.gauges[values.index_of("gpu.recovery_action", place.index)[1]]
            if (
                not 0 <= value < len(RECOVERY_ACTIONS) or value == place.recovery_action
            ):  # not read, or not a number in the table
                continue
            data = {
                "from": place.recovery_action,
                "to": int(value),
                "action": RECOVERY_ACTIONS[int(value)],
                "pci": place.pci,
            }
            place.recovery_action = int(value)
            yield self._make_event(self._gpu_entity(place), "recovery_action", **data)

    def _process_events(self, due: int) -> Iterator[Event]:
        """Yields an event for each GPU whose processes changed."""
        assert self._sampler is not None
        if due < PROCESSES_INTERVAL:
            return
        for place in self._slots.slots:
            pids = self._sampler.pids.get(place.index, place.pids)
            if pids != place.pids:
                place.pids = pids
                yield self._make_event(self._gpu_entity(place), "gpu_processes", pids=list(pids[:MAX_EVENT_PIDS]))

    def _slow_call_events(self, slow: list[SlowCall]) -> Iterator[Event]:
        for call in slow:
            if (
                not 0 <= self._now() - call.slot.slow_call_reported < SLOW_CALL_COOLDOWN_US
            ):  # below 0: the clock was set back
                call.slot.slow_call_reported = self._now()
                data = {"gpu": self._gpu_entity(call.slot), "call": call.function, "seconds": round(call.seconds, 3)}
                yield self._make_event(self._gpu_entity(call.slot), "slow_call", **data)

    def _refusal_events(self, due: int) -> Iterator[Event]:
        """Yields an event for each GPU that refuses calls or fields that it supported before."""
        assert self._sampler is not None
        if due < REFUSAL_CHECK_S:
            return
        for place in self._slots.slots:
            if 0 <= self._now() - place.refusal_reported < REFUSAL_COOLDOWN_US:
                continue
            names = self._sampler.refusals.take_new_refusals(place.index)
            if names:
                place.refusal_reported = self._now()
                calls = list(dict.fromkeys(names))[:MAX_EVENT_CALLS]
                yield self._make_event(
                    self._gpu_entity(place), "nvml_refused", gpu=self._gpu_entity(place), calls=calls, count=len(names)
                )
