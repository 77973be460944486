"""NVIDIA GPUs and their NVLinks through the driver's own library: what a GPU does not tell is missing, not an error.

The files beside this one: nvml_driver (the library), nvml_places (which GPU is which), nvml_facts (what a GPU is),
nvml_look (one look), and what a look consists of: nvml_fields and nvml_reader, nvml_calls, nvml_gpm, nvml_links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, Rhythm, wall_clock
from agents.collectors.gpu.calls import count_links
from agents.collectors.gpu.library import Driver, Facts, NotStarted
from agents.collectors.gpu.sampler import GPU_SIGNALS, LINK_SIGNALS, PROCESSES_EVERY, Look, Slow
from agents.collectors.gpu.slots import Place, Places, address, fitted, keep, memory_of_the_service, recall
from pipeline.model.records import SECOND, Event
from pipeline.model.signals import CATALOGUE

RHYTHMS = (3600, 300, 60, 30, 10, 5, 1)
EVERY: Mapping[str, float] = {name: CATALOGUE[name].interval or 1 for name in (*GPU_SIGNALS, *LINK_SIGNALS)}
ACTIONS = CATALOGUE["gpu.recovery_action"].states
RECOUNT = 60
"""Seconds between two looks at how many GPUs there are; chosen: a GPU that is taken out stays away for minutes."""
LONGEST_WAIT = 10
"""Recounts between two restarts of the library while a GPU is lost; chosen: a restart touches the healthy ones too."""
SLOW_AGAIN = 60 * SECOND
"""A GPU's slow calls are told at most once in this time; chosen, so that a dying GPU does not flood."""
REFUSED_AGAIN = 60 * SECOND
"""What a GPU refuses is told at most once in this time; chosen: its calls are made in rhythms of up to a minute."""
REFUSED_EVERY = 10
"""Seconds between two looks whether there is such news; chosen, so that one event names many calls."""
NAMED_PIDS = 64
"""Most process ids in an event; chosen: a GPU runs a few."""
NAMED_CALLS = 32
"""Most calls in an event; chosen: there are about so many, and fields beside them."""


@dataclass
class Nvml(Collector):
    """gpu.* and nvlink.*: one entity per GPU ever seen since the boot. A lost GPU keeps its place, all missing."""

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
    seen: Path | None = field(default_factory=memory_of_the_service)
    _node: str = field(default="", init=False, repr=False)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _driver: Driver | None = field(default=None, init=False, repr=False)
    _look: Look | None = field(default=None, init=False, repr=False)
    _places: Places = field(default_factory=Places, init=False, repr=False)
    _bus: tuple[str, ...] = field(default=(), init=False, repr=False)
    _told: tuple[int, int] | None = field(default=None, init=False, repr=False)
    _lost: set[int] = field(default_factory=set, init=False, repr=False)
    _waiting: int = field(default=0, init=False, repr=False)
    _wait: int = field(default=1, init=False, repr=False)

    def open(self, node: str) -> None:
        self._node = node
        self._rhythm = Rhythm(node, self._now)
        self._waiting, self._wait = 0, 2  # the first look comes at once, too soon to count again
        self._start(recall(self.seen))
        if not self._places.all:
            raise NoData("no NVIDIA GPU: the driver counts none")

    def read(self) -> tuple[Reading, ...]:
        due = max([every for every in RHYTHMS if self._rhythm.due(every)], default=1)
        if due >= RECOUNT:
            self._recount()
        if self._look is None or any(not p.lost and p.handle is not None and p.links is None for p in self._places.all):
            self._prepare()
        assert self._look is not None
        slow = self._look.read(due, self.slow_call, self._now())
        if self._look.driver_gone and len(self._lost) == len(self._places.all):  # that they are lost was told before
            raise RuntimeError(self._gone())
        events = (*self._presence(), *self._actions(), *self._work(due), *self._slow(slow), *self._refused(due))
        return tuple(self._readings(due, events))

    def inventory(self) -> Mapping[str, Device]:
        found: dict[str, Device] = {}
        whole = self._facts.of_driver()
        for place in self._places.all:
            self._describe(place)
            found[self._gpu(place)] = Device((f"node:{self._node}",), whole | place.facts)
            for link in range(place.links or 0):
                found[f"nvlink:{self._node}.{place.index}.{link}"] = Device((self._gpu(place), f"node:{self._node}"))
        return found

    def close(self) -> None:
        if self._look is not None:
            self._look.close()
            self._look = None
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    # --- which GPUs there are ----------------------------------------------------------------------------------------

    def _start(self, remembered: Mapping[str, Mapping[str, Any]]) -> None:
        """Starts the library, gives every GPU its place and makes ready to look at them."""
        try:
            self._driver = Driver()
            handles = self._driver.handles()
        except NotStarted as error:
            if expected := self._there():
                raise RuntimeError(f"{expected}: {error}; {error.mend}") from None
            raise
        self._facts = Facts(self._driver.nvml)
        counted = [(self._key(index, handle), handle) for index, handle in enumerate(handles)]
        self._bus = fitted(self.pci)
        self._places.settle(counted, self._bus, remembered)
        for place in self._places.all:
            known = {key: value for key, value in remembered.get(place.key or "", {}).items() if key != "index"}
            place.facts = known | place.facts
            self._describe(place)
        keep(self.seen, self._places.all)
        self._prepare()

    def _there(self) -> str:
        """How it is known that there are GPUs, whatever the driver says; empty where nothing tells of one."""
        if self._places.all:
            return self._gone()
        found = len(fitted(self.pci))
        return f"the PCI bus has NVIDIA GPUs ({found}), but the driver does not give them" if found else ""

    def _gone(self) -> str:
        return f"the NVIDIA driver went away: it had {len(self._places.all)} GPUs"

    def _key(self, index: int, handle: Any) -> str | None:
        """What a GPU is known by: its PCI address, else its number; nothing if it is lost."""
        if handle is None:
            return None
        return address(self._facts.address(handle) or "") or f"index {index}"

    def _prepare(self) -> None:
        assert self._driver is not None
        if self._look is not None:
            self._look.close()
        for place in self._places.all:
            if place.handle is not None and place.links is None:
                place.links = count_links(self._driver, place.handle)
        version = str(self._facts.of_driver().get("driver", ""))
        gpus = [self._gpu(place) for place in self._places.all]
        links = [f"nvlink:{self._node}.{p.index}.{link}" for p in self._places.all for link in range(p.links or 0)]
        self._entities = tuple(gpus), tuple(links)
        self._look = Look(self._driver, version, self._places.all, self._entities)

    def _recount(self) -> None:
        """Starts the library anew, which alone makes it count again, where the bus changed or a GPU is lost."""
        changed = fitted(self.pci) != self._bus
        self._waiting += 1
        trouble = any(place.lost or place.handle is None for place in self._places.all)
        if not (changed or trouble):
            self._waiting, self._wait = 0, 1
            return
        if not changed and self._waiting < self._wait:
            return
        self._waiting, self._wait = 0, min(self._wait * 2, LONGEST_WAIT)
        self.close()
        self._start(recall(self.seen))

    def _describe(self, place: Place) -> None:
        """Reads a GPU's attributes; those of a lost one stay as they were."""
        if place.pci:
            place.facts["pci"] = place.pci
        if place.handle is not None and not place.lost:
            place.facts |= self._facts.of_gpu(place.handle)

    def _gpu(self, place: Place) -> str:
        return f"gpu:{self._node}.{place.index}"

    # --- what to tell ------------------------------------------------------------------------------------------------

    def _readings(self, due: int, events: tuple[Event, ...]) -> Iterator[Reading]:
        assert self._look is not None
        gpus, links = self._entities
        values = self._look.values
        yield Reading("gpu", gpus, values.columns([s for s in GPU_SIGNALS if EVERY[s] <= due]), events)
        chosen = [s for s in LINK_SIGNALS if EVERY[s] <= due]
        if links and chosen:
            yield Reading("nvlink", links, values.columns(chosen))

    def _event(self, entity: str, kind: str, **data: Any) -> Event:
        return Event(self._now(), entity, kind, data)

    def _presence(self) -> Iterator[Event]:
        """GPUs that were lost or came back since the look before, and how many there are if that changed.

        `present` of a lost one: how many others answer. None do while the driver is loaded anew.
        """
        answer = sum(not place.lost for place in self._places.all)
        for place in self._places.all:
            if place.lost != (place.index in self._lost):
                self._lost ^= {place.index}
                kind, more = ("gpu_lost", {"present": answer}) if place.lost else ("gpu_back", {})
                yield self._event(self._gpu(place), kind, **self._named(place), **more)
        missing = [place.pci or self._gpu(place) for place in self._places.all if place.lost]
        expected = max(self.expected, len(self._places.all))
        present = len(self._places.all) - len(missing)
        told, self._told = self._told, (expected, present)
        if self._told != told and (told is not None or expected != present):
            data = {"expected": expected, "present": present, "missing": missing, "source": "nvml"}
            yield self._event(f"node:{self._node}", "gpu_count", **data)

    def _named(self, place: Place) -> dict[str, Any]:
        """A GPU as a technician looks for it."""
        known = {key: place.facts.get(key) for key in ("serial", "uuid")}
        return {"gpu": self._gpu(place), "pci": place.pci, **known}

    def _actions(self) -> Iterator[Event]:
        """The recovery action that the driver wants, where it is another than before."""
        assert self._look is not None
        values = self._look.values
        for place in self._places.all:
            value = values.gauges[values.place("gpu.recovery_action", place.index)[1]]
            if not 0 <= value < len(ACTIONS) or value == place.action:  # not looked at, or not a number of the table
                continue
            data = {"from": place.action, "to": int(value), "action": ACTIONS[int(value)], "pci": place.pci}
            place.action = int(value)
            yield self._event(self._gpu(place), "recovery_action", **data)

    def _work(self, due: int) -> Iterator[Event]:
        """The processes of a GPU, where they are others than before."""
        assert self._look is not None
        if due < PROCESSES_EVERY:
            return
        for place in self._places.all:
            pids = self._look.pids.get(place.index, place.pids)
            if pids != place.pids:
                place.pids = pids
                yield self._event(self._gpu(place), "gpu_processes", pids=list(pids[:NAMED_PIDS]))

    def _slow(self, slow: list[Slow]) -> Iterator[Event]:
        for call in slow:
            if not 0 <= self._now() - call.place.slow_told < SLOW_AGAIN:  # below 0: the clock was set back
                call.place.slow_told = self._now()
                data = {"gpu": self._gpu(call.place), "call": call.function, "seconds": round(call.seconds, 3)}
                yield self._event(self._gpu(call.place), "slow_call", **data)

    def _refused(self, due: int) -> Iterator[Event]:
        """The calls and fields that GPUs refuse though they had answered them before."""
        assert self._look is not None
        if due < REFUSED_EVERY:
            return
        for place in self._places.all:
            if 0 <= self._now() - place.refusal_told < REFUSED_AGAIN:
                continue
            names = self._look.refusals.news(place.index)
            if names:
                place.refusal_told = self._now()
                calls = list(dict.fromkeys(names))[:NAMED_CALLS]
                yield self._event(self._gpu(place), "nvml_refused", gpu=self._gpu(place), calls=calls, count=len(names))
