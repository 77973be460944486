"""Ports of InfiniBand switches, the far end of every link, read with the fabric's management tools.

One agent per fabric runs this collector, on a host that may send management datagrams. It only reads: it never resets a
counter or changes a setting.

A thread runs the tools one at a time and keeps the newest output of each. After a run of t seconds a tool is not run
again for t seconds, so that a large or broken fabric is busy at most half of the time. Counters use the node list
cached by `ibnetdiscover` and need no discovery of their own.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.collectors.command import CommandError, CommandOutput, CommandRunner
from agents.collectors.fabric.tool_output import (
    COUNTERS_BY_TOOL_NAME,
    THRESHOLD_FILE,
    CounterReadings,
    PortKey,
    SwitchInfo,
    SwitchPort,
    parse_counts,
    parse_links,
    parse_switches,
)
from agents.collectors.fabric.topology import MAX_PORTS, FabricTopology
from agents.collectors.nic.rdma_counters import CounterLimitWatch, PortCounter
from pipeline.model.records import Event

LINKS, COUNTERS, TOPOLOGY = "links", "counters", "topology"
TOOLS: Mapping[str, str] = {LINKS: "iblinkinfo", COUNTERS: "ibqueryerrors", TOPOLOGY: "ibnetdiscover"}
MAX_OUTPUT = 256 << 20
"""Most bytes of one output. Chosen: ten times 65,000 ports with their counters."""
_MIN_WAIT_S = 0.05
_PROCESS_ID = re.compile(r"(?<=: )\[\d+\] ")
"""The tool's process id in a line of libibumad and libibmad; removed so that the same reason stays the same text."""
_NOISE_WORDS = ("sim_connect",)
"""Words of meaningless lines on standard error: the simulator's greeting."""


@dataclass(frozen=True, slots=True)
class PollResults:
    """What arrived since the last call; None if nothing did. errors: tool -> why it fails, "" if it works."""

    links: tuple[SwitchPort, ...] | None = None
    counters: CounterReadings | None = None
    switches: Mapping[str, SwitchInfo] | None = None
    errors: Mapping[str, str] = field(default_factory=dict)


class FabricPoller:
    """tools: folder of the commands. options: given to each command, such as the port to use."""

    def __init__(self, tools: Path, options: tuple[str, ...], limit: float, every: Mapping[str, float]) -> None:
        self._tools, self._options, self._every = tools, options, dict(every)
        self._command = CommandRunner(limit, MAX_OUTPUT)
        self._due_at = dict.fromkeys(self._every, 0.0)
        self._resting_until = dict.fromkeys(self._every, 0.0)
        self._lines: Mapping[str, SwitchPort] = {}
        self._results: dict[str, object] = {}
        self._errors: dict[str, str] = {}
        self._lock, self._stop, self._first_done = threading.Lock(), threading.Event(), threading.Event()
        self._folder: Path | None = None
        self._cache: Path | None = None
        self._thread = threading.Thread(target=self._run, name="fabric poller", daemon=True)

    def start(self, seconds: float) -> str:
        """Starts the thread. Returns why the first poll of the links failed; "" if it worked or takes longer than
        `seconds`.
        """
        self._thread.start()
        self._first_done.wait(seconds)
        with self._lock:
            return self._errors.get(LINKS, "")

    def stop(self) -> None:
        """Kills the running tool and waits for the thread."""
        self._stop.set()
        self._command.stop()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def take_results(self) -> PollResults:
        """Returns the new results. Each result is returned once."""
        with self._lock:
            new, self._results = self._results, {}
            troubles, self._errors = self._errors, {}
        return PollResults(new.get(LINKS), new.get(COUNTERS), new.get(TOPOLOGY), troubles)  # type: ignore[arg-type] # by key

    def _run(self) -> None:
        asks: Mapping[str, Callable[[], object]] = {
            LINKS: self._poll_links,
            TOPOLOGY: self._poll_topology,
            COUNTERS: self._poll_counters,
        }
        try:
            while not self._stop.is_set():
                name = min(
                    self._due_at, key=lambda n: (max(self._due_at[n], self._resting_until[n]), list(asks).index(n))
                )
                wait = max(self._due_at[name], self._resting_until[name]) - time.monotonic()
                if wait > 0:
                    self._stop.wait(max(wait, _MIN_WAIT_S))
                else:
                    self._run_tool(name, asks[name])
        finally:
            if self._folder is not None:
                import shutil  # imported here, like tempfile below: every agent loads this file, but few read a fabric

                shutil.rmtree(self._folder, ignore_errors=True)

    def _run_tool(self, name: str, ask: Callable[[], object]) -> None:
        began, trouble, answer = time.monotonic(), "", None
        try:
            answer = ask()
        except CommandError as error:
            trouble = str(error)
        except Exception as fault:  # noqa: BLE001 - one broken output must not end the thread; it is reported as the tool's
            trouble = f"{TOOLS[name]}: cannot parse its output: {type(fault).__name__}: {fault}"
        ended = time.monotonic()
        self._due_at[name], self._resting_until[name] = began + self._every[name], 2 * ended - began
        with self._lock:
            self._errors[name] = trouble
            if answer is not None:
                self._results[name] = answer
        if name == LINKS:
            self._first_done.set()

    def _poll_links(self) -> tuple[SwitchPort, ...]:
        output = self._run_command(LINKS, "--line", "--switches-only")
        lines = parse_links(output.text, self._lines)
        if not lines:
            raise CommandError("iblinkinfo: listed no switch port; expected at least one: is the local port up?")
        if {(k.key, k.peer) for k in lines.values()} != {(k.key, k.peer) for k in self._lines.values()}:
            self._due_at[TOPOLOGY] = 0.0  # the cached node list is outdated
        self._lines = lines
        return tuple(lines.values())

    def _poll_topology(self) -> Mapping[str, SwitchInfo]:
        """Reads the topology and renews the cached node list.

        If no file can be written, counters are read without it.
        """
        fresh = self._temporary_file(f"cache-{time.monotonic_ns()}")
        output = self._run_command(TOPOLOGY, *(("--cache", str(fresh)) if fresh else ()))
        if self._cache is not None:
            self._cache.unlink(missing_ok=True)
        self._cache = fresh if fresh is not None and fresh.is_file() else None
        return parse_switches(output.text)

    def _poll_counters(self) -> CounterReadings:
        """Reads errors, then traffic: two runs of one tool, each of which may fail for some ports."""
        thresholds = self._temporary_file("thresholds")
        if thresholds is None:
            raise CommandError("ibqueryerrors: cannot create its threshold file; expected a writable folder TMPDIR")
        thresholds.write_text(THRESHOLD_FILE)
        cached = ("--load-cache", str(self._cache)) if self._cache else ()
        traffic = self._run_command(COUNTERS, "--switch", "--counters", *cached, may_fail=True)
        errors = self._run_command(COUNTERS, "--switch", "--threshold-file", str(thresholds), *cached, may_fail=True)
        flows, found = parse_counts(traffic.text), parse_counts(errors.text, errors.errors, errors.errors_cut)
        if not flows.values and not found.complete:
            raise CommandError(f"ibqueryerrors: {_failure_reason(errors)}")
        values = {place: dict(flow) for place, flow in flows.values.items()}
        for place, counted in found.values.items():
            values.setdefault(place, {}).update(counted)
        return CounterReadings(values, found.failed_ports, found.complete)

    def _run_command(self, name: str, *arguments: str, may_fail: bool = False) -> CommandOutput:
        tool = TOOLS[name]
        output = self._command.run((str(self._tools / tool), *self._options, *arguments))
        if output.code and not may_fail:
            raise CommandError(f"{tool}: {_failure_reason(output)}")
        return output

    def _temporary_file(self, name: str) -> Path | None:
        """Returns a path for a temporary file; None if no folder can be created."""
        if self._folder is None:
            import tempfile

            with contextlib.suppress(OSError):  # a read-only file system: reported by the caller that needs the file
                self._folder = Path(tempfile.mkdtemp(prefix="fleetpulse-fabric-"))
        return self._folder / name if self._folder is not None else None


def _failure_reason(output: CommandOutput) -> str:
    """Returns the last line on standard error of a failed command."""
    lines = [line.strip() for line in output.errors.splitlines() if not any(word in line for word in _NOISE_WORDS)]
    last = next((x for x in reversed(lines) if x), "no output")
    return f"exit status {output.code}: {_PROCESS_ID.sub('', last)[:200]}"


PortColumns = tuple[tuple[str, ...], dict[str, NDArray[Any]]]
"""Entities and their columns."""
SLICE_PORTS = 1536
"""Most ports of one slice. Chosen: two slices with the longest names (59 bytes) are 180 KB of the 256 KB that a message
layout may have (wire.py), and the node's own devices need some."""


class PortSlices:
    """The newest columns of many ports. Each read returns the next slice, in rotation, so that every slice fits one
    message and no port waits forever.
    """

    def __init__(self) -> None:
        self._entities: tuple[str, ...] = ()
        self._columns: dict[str, NDArray[Any]] = {}
        self._next = self._remaining = 0

    def replace(self, entities: tuple[str, ...], columns: dict[str, NDArray[Any]]) -> None:
        """Replaces the columns, including slices that were not returned yet."""
        self._entities, self._columns = entities, columns
        self._remaining = -(-len(entities) // SLICE_PORTS)
        self._next = self._next if self._next * SLICE_PORTS < len(entities) else 0

    def next_slice(self) -> tuple[PortColumns, ...]:
        """Returns the next slice, if one remains."""
        if not self._remaining:
            return ()
        part = slice(self._next * SLICE_PORTS, (self._next + 1) * SLICE_PORTS)
        self._remaining -= 1
        self._next = self._next + 1 if part.stop < len(self._entities) else 0
        return ((self._entities[part], {name: values[part] for name, values in self._columns.items()}),)


_MISSING = np.iinfo(np.uint64).max
_ACTIVE, _LINK_UP = 4, 5  # IBTA specification 14.2.5.6: PortState, PortPhysicalState
MAX_FAILED_POLLS = 3
"""Failed polls of the links after which the fabric counts as not readable. Chosen: one may be a busy switch."""
_MAX_EVENTS = 500
"""Most events about counters of one read. Chosen as for links."""


@dataclass
class Fabric(Collector):
    """nic.*: one entity per switch port that has or had a cable. `include` and `exclude` select switches by name.

    device, port: the local adapter to use; by default the first active one.
    """

    name: ClassVar[str] = "fabric"
    signals: ClassVar[tuple[str, ...]] = (
        *("nic.state", "nic.logical_state", "nic.phys_state", "nic.speed", "nic.width"),
        *(counter.signal for counter in COUNTERS_BY_TOOL_NAME.values()),
    )
    events: ClassVar[tuple[str, ...]] = (
        *("link_state", "link_peer", "switch_state", "fabric_tool"),
        *("counter_saturated",),
    )
    lane: ClassVar[str] = "fabric"
    remote: ClassVar[bool] = True
    partial: ClassVar[bool] = True
    enabled: bool = False
    tools: Path = Path("/usr/sbin")
    device: str = ""
    port: int = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    links_every: float = 10.0
    counters_every: float = 30.0
    topology_every: float = 120.0
    limit: float = 60.0
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _poller: FabricPoller | None = field(default=None, init=False, repr=False)
    _topology: FabricTopology = field(default_factory=FabricTopology, init=False, repr=False)
    _limit_watch: CounterLimitWatch = field(default_factory=CounterLimitWatch, init=False, repr=False)
    _wide_counters: set[tuple[str, str]] = field(default_factory=set, init=False, repr=False)
    _at_limit: set[tuple[PortKey, str]] = field(default_factory=set, init=False, repr=False)
    _state_slices: PortSlices = field(default_factory=PortSlices, init=False, repr=False)
    _counter_slices: PortSlices = field(default_factory=PortSlices, init=False, repr=False)
    _tool_errors: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _last_links: float = field(default=0.0, init=False, repr=False)

    def has_work(self) -> bool:
        """Returns whether the collector is enabled on this node."""
        return self.enabled

    def open(self, node: str) -> None:
        """Checks that the tools are installed and starts them. Raises NoData if they are not, or if it is disabled."""
        self._node = node
        missing = [tool for tool in TOOLS.values() if not (self.tools / tool).is_file()]
        if not self.enabled:
            raise NoData("not enabled; set `enabled = true` on one agent of the fabric")
        if missing:
            raise NoData(f"{self.tools / missing[0]}: not found; install infiniband-diags, or set `tools`")
        if not self._topology.ports:
            self._topology = FabricTopology(self.include, self.exclude)
        options = (*(("-C", self.device) if self.device else ()), *(("-P", str(self.port)) if self.port else ()))
        every = {LINKS: self.links_every, COUNTERS: self.counters_every, TOPOLOGY: self.topology_every}
        self._poller, self._last_links = FabricPoller(self.tools, options, self.limit, every), time.monotonic()
        # a tool that cannot run fails immediately; one that is still running by then is on a large fabric
        if trouble := self._poller.start(self.deadline / 2):
            raise NoData(_unreadable_message(trouble))

    def read(self) -> tuple[Reading, ...]:
        """Returns what arrived since the last read, one slice of ports at a time; does not wait."""
        assert self._poller is not None, "read before open"
        now, found = self._now(), self._poller.take_results()
        events = self._tool_events(now, found.errors)
        if found.switches is not None:
            self._topology.update_switches(found.switches)
        if found.links is not None:
            self._state_slices.replace(*self._link_columns(now, found.links, events))
        if found.counters is not None:
            self._counter_slices.replace(*self._counter_columns(now, found.counters, events))
        readings = [
            Reading("nic", *slice)
            for share in (self._state_slices, self._counter_slices)
            for slice in share.next_slice()
        ]
        if events and not readings:
            readings = [Reading("nic", (), {})]
        if not readings:
            self._check_failing()
        return (*readings[:-1], *(replace(reading, events=tuple(events)) for reading in readings[-1:]))

    def inventory_changed(self) -> bool:
        """Returns whether ports or switches changed since the last call."""
        return self._topology.inventory_changed()

    def inventory(self) -> Mapping[str, Device]:
        """Returns ports below their switches, and switches with their properties."""
        return self._topology.inventory()

    def close(self) -> None:
        """Stops the tools. Known ports are kept: after a tool failed for a while, the ports must not be new ones."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None

    def _check_failing(self) -> None:
        """Raises NoData with the tool's error message if the fabric has not been readable for long."""
        trouble = self._tool_errors.get(LINKS, "")
        if trouble and time.monotonic() - self._last_links > MAX_FAILED_POLLS * self.links_every:
            raise NoData(_unreadable_message(trouble))

    def _tool_events(self, now: int, troubles: Mapping[str, str]) -> list[Event]:
        """Returns an event when a tool starts to fail, and one when it works again."""
        events = []
        for name, trouble in troubles.items():
            if bool(trouble) != bool(self._tool_errors.get(name)):
                data = {"tool": TOOLS[name], "state": "failing" if trouble else "ok", "reason": trouble}
                events.append(Event(now, f"node:{self._node}", "fabric_tool", data))
            self._tool_errors[name] = trouble
        return events

    def _link_columns(self, now: int, links: tuple[SwitchPort, ...], events: list[Event]) -> PortColumns:
        """Returns state and speed of all ports. They are missing for ports of a switch that was not seen."""
        self._last_links, view = time.monotonic(), self._topology
        left_out = view.left_out
        events += view.update_links(now, links)
        if view.left_out and not left_out:
            reason = f"more than {MAX_PORTS} ports with a cable; divide the switches among agents with `include`"
            events.append(
                Event(now, f"node:{self._node}", "fabric_tool", {"tool": "agent", "state": "failing", "reason": reason})
            )
        seen = {link.key for link in links}
        ports = [view.ports[place] if place in seen else None for place in view.entities]
        logical = np.array([p.logical if p else np.nan for p in ports])
        physical = np.array([p.physical if p else np.nan for p in ports])
        trained = physical == _LINK_UP
        columns: dict[str, NDArray[Any]] = {
            "nic.state": np.where(np.isnan(logical), np.nan, logical == _ACTIVE),
            "nic.logical_state": logical,
            "nic.phys_state": physical,
            "nic.speed": np.where(trained, [p.speed if p else np.nan for p in ports], np.nan),
            "nic.width": np.where(trained, [p.width if p else np.nan for p in ports], np.nan),
        }
        return tuple(view.entities.values()), columns

    def _counter_columns(self, now: int, counts: CounterReadings, events: list[Event]) -> PortColumns:
        """Returns all counters of all ports. What a port did not report is missing, never zero."""
        view = self._topology
        columns: dict[str, NDArray[Any]] = {
            c.signal: np.full(len(view.entities), _MISSING, np.uint64) for c in COUNTERS_BY_TOOL_NAME.values()
        }
        for row, place in enumerate(view.entities):
            values = counts.values.get(place, {})
            answered = place in counts.values and counts.answered(view.ports[place].lid, place[1])
            for name, counter in COUNTERS_BY_TOOL_NAME.items():
                value = values.get(name, 0 if answered and counter.saturates else None)
                if value is not None and value * counter.scale < _MISSING:
                    columns[counter.signal][row] = value * counter.scale
                    self._check_limit(now, place, counter, value, events)
        return tuple(view.entities.values()), columns

    def _check_limit(self, now: int, place: PortKey, counter: PortCounter, value: int, events: list[Event]) -> None:
        """Adds an event if a counter is saturated. A switch that once counted past a classic maximum has wide counters,
        which never saturate.
        """
        top, kind, key = (1 << counter.bits) - 1, (place[0], counter.signal), (place, counter.signal)
        if not counter.saturates or kind in self._wide_counters:
            return
        if value > top:
            self._wide_counters.add(kind)
        elif (value == top or key in self._at_limit) and len(events) < _MAX_EVENTS:
            self._at_limit.add(key)
            if event := self._limit_watch.check(now, self._topology.entities[place], counter, value):
                events.append(event)


def _unreadable_message(trouble: str) -> str:
    return f"{trouble}; expected an active InfiniBand port and access to its umad device"
