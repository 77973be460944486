"""The loop continues through faults of collectors and disk, and logs every change once."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from agents.collector import Collector, Device, NoData, Reading
from agents.collectors.canary.canary import Canary
from agents.collectors.jobs.jobs import Jobs
from agents.collectors.training.training import Training
from agents.gateway import gateway
from agents.node.agent import Agent, ChangeLog, InventoryTracker, run
from pipeline.config.sections import Agent as AgentSection
from pipeline.config.sections import Config
from pipeline.config.sections import Spool as SpoolSection
from pipeline.model.errors import ConfigError, SpoolError
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Batch, Event
from pipeline.transport import Message, wire
from tests.agents.ticks import split_ticks

Drain = Callable[[Path], tuple[list[Message], list[tuple[int, int, str]]]]
ROOT = Path(__file__).parents[2]
START = 1_800_000_000 * SECOND


@dataclass
class SteppedClock:
    """Time that passes only by waiting; `stop` is set after `ticks` waits."""

    ticks: int
    time: int = START - SECOND // 3
    start: int = START

    def now(self) -> int:
        return self.time

    def monotonic(self) -> float:
        return (self.time - self.start) / SECOND

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        self.ticks -= 1
        if self.ticks < 0:
            stop.set()
            return True
        self.time += round(seconds * SECOND)
        return False


@dataclass
class Node(Collector):
    """A collector that counts its reads and can be made to misbehave."""

    name: ClassVar[str] = "node"
    isolated: ClassVar[bool] = False
    signals: ClassVar[tuple[str, ...]] = ("node.load1", "node.cpu_count")
    faults: dict[int, Exception] = field(default_factory=dict)
    looks: int = 0
    opened: int = 0
    closed: int = 0
    count: float = 8

    def open(self, node: str) -> None:
        self.opened += 1

    def read(self) -> tuple[Reading, ...]:
        self.looks += 1
        if fault := self.faults.get(self.looks):
            raise fault
        columns = {"node.load1": np.array([self.looks]), "node.cpu_count": np.array([self.count])}
        return (Reading("node", ("node:n1",), columns),)

    def inventory(self) -> dict[str, Device]:
        return {"node:n1": Device((), {"looks": 0})}

    def close(self) -> None:
        self.closed += 1


@dataclass
class Hanging(Node):
    """Hangs in its first read until it is released."""

    name: ClassVar[str] = "hanging"
    release: threading.Event = field(default_factory=threading.Event)

    def read(self) -> tuple[Reading, ...]:
        self.looks += 1
        if self.looks == 1:
            self.release.wait(30)
        return (Reading("gpu", ("gpu:n1.0",), {"gpu.power": np.array([100.0 + self.looks])}),)

    def inventory(self) -> dict[str, Device]:
        return {"gpu:n1.0": Device(("node:n1",))}


@dataclass
class AbsentAtFirst(Hanging):
    """A device that appears later."""

    def open(self, node: str) -> None:
        self.opened += 1
        if self.opened == 1:
            raise NoData("not yet")


def config_at(folder: Path, interval: float = 1.0, free_bytes: int = 0, linger: float = 5.0) -> Config:
    spool = SpoolSection(folder, 1 << 30, free_bytes=free_bytes)
    return Config(agent=AgentSection("n1", interval, linger=linger), spool=spool)


@dataclass
class Ran:
    """The result of a run of the agent. batches: one per tick; messages: as they were sent."""

    messages: list[Batch]
    batches: list[Batch]
    events: list[Event]
    log: list[str]

    def values(self, signal_name: str) -> list[float]:
        return [float(b.columns[signal_name][0, 0]) for t in self.batches for b in t.blocks if signal_name in b.columns]


@pytest.fixture
def loop(tmp_path: Path, drain: Drain) -> Callable[..., Ran]:
    """Runs an agent for some ticks with the given collectors."""

    def run_it(*collectors: Collector, ticks: int, interval: float = 1.0, collect_share: float = 5.0) -> Ran:
        log = io.StringIO()
        Agent(config_at(tmp_path, interval), collectors, SteppedClock(ticks), log, collect_share).run(threading.Event())
        messages, gaps = drain(tmp_path)
        assert gaps == []
        sent = [wire.decode(m.value) for m in messages if m.partition.topic == TELEMETRY]
        events = [e for m in messages if m.partition.topic == EVENTS for e in wire.decode_events(m.value).events]
        return Ran(sent, split_ticks(sent), events, [line.split(" ", 1)[1] for line in log.getvalue().splitlines()])

    return run_it


def test_every_tick_is_one_batch_at_a_whole_multiple_of_the_interval(loop: Callable[..., Ran]) -> None:
    ran = loop(Node(), ticks=5)
    assert [int(t) for b in ran.batches for t in b.times] == [START + i * SECOND for i in range(5)]
    assert ran.values("node.load1") == [1, 2, 3, 4, 5]
    assert {b.origin.node for b in ran.batches} == {"n1"}
    assert {len(b.origin.boot_id) for b in ran.batches} == {16}


def test_the_ticks_of_a_window_are_one_message(loop: Callable[..., Ran]) -> None:
    ran = loop(Node(), ticks=13)
    assert START % (5 * SECOND) == 0
    assert [len(message.times) for message in ran.messages] == [1, 5, 5, 2]  # the last as the agent ends
    assert [int(message.times[-1]) - START for message in ran.messages[:3]] == [0, 5 * SECOND, 10 * SECOND]


def test_values_are_sent_in_their_catalogue_type_and_invalid_ones_are_missing(loop: Callable[..., Ran]) -> None:
    block = next(b for b in loop(Node(count=-3), ticks=1).batches[0].blocks if b.device_class == "node")
    assert block.columns["node.load1"].dtype == np.dtype("<f4")
    assert block.columns["node.cpu_count"].dtype == np.dtype("<u2")
    assert block.columns["node.cpu_count"][0, 0] == 65535


def test_a_hung_collector_delays_neither_the_tick_nor_others_and_is_logged_once(loop: Callable[..., Ran]) -> None:
    hanging = Hanging(deadline=1)
    try:
        ran = loop(Node(), hanging, ticks=6, collect_share=3)  # for a slow machine; only the first tick takes as long
    finally:
        hanging.release.set()
    assert ran.values("node.load1") == list(range(1, 7))
    assert ran.log.count("collector hanging: hung: no answer within 1 s; abandoned, restart in 5 s") == 1
    found_events = [e.data["state"] for e in ran.events if e.kind == "collector" and e.data["collector"] == "hanging"]
    assert found_events == ["hung"]
    states = [b.columns["collector.state"] for t in ran.batches for b in t.blocks if b.device_class == "collector"]
    assert [int(state[0, 1]) for state in states][:2] == [0, 4]  # starting; hung at the tick that saw it


def test_a_tick_without_readings_still_reports_the_agent(loop: Callable[..., Ran]) -> None:
    hanging = Hanging(deadline=60)
    try:
        ran = loop(hanging, ticks=5, collect_share=0.05)
    finally:
        hanging.release.set()
    assert len(ran.batches) == 5


def test_a_collector_that_hung_continues_without_its_old_reading(tmp_path: Path, drain: Drain) -> None:
    hanging, clock, log = Hanging(deadline=1), SteppedClock(99), io.StringIO()
    agent = Agent(config_at(tmp_path), [hanging], clock, log, collect_share=3)
    try:
        for _ in range(12):
            clock.time += SECOND
            agent.tick(clock.time)
    finally:
        hanging.release.set()
    agent.close()
    messages, _ = drain(tmp_path)
    batches = split_ticks(wire.decode(m.value) for m in messages if m.partition.topic == TELEMETRY)
    powers = [float(b.columns["gpu.power"][0, 0]) for t in batches for b in t.blocks if "gpu.power" in b.columns]
    assert powers
    assert 101.0 not in powers
    assert "collector hanging: ok" in log.getvalue()


def test_a_failing_collector_is_logged_once_reopened_and_then_paused(loop: Callable[..., Ran]) -> None:
    collector = Node(faults={i: RuntimeError("bus error") for i in range(3, 6)})
    ran = loop(collector, ticks=40)
    assert ran.log.count("collector node: fault: RuntimeError: bus error") == 1
    assert ran.log.count("collector node: ok") == 2
    assert collector.opened == 4
    assert collector.looks < 25  # after the second fault in a row it pauses for 10 s
    assert [e.data["state"] for e in ran.events if e.kind == "collector"] == ["ok", "fault", "ok"]


@dataclass
class Broken(Node):
    """Returns a reading that cannot be sent."""

    name: ClassVar[str] = "broken"
    reading: Reading = field(default_factory=lambda: Reading("gpu", ("gpu:n1.0",), {}))

    def read(self) -> tuple[Reading, ...]:
        return (self.reading,)


@pytest.mark.parametrize(
    ("reading", "complaint"),
    [
        (Reading("gpu", ("gpu:n1.0",), {"gpu.power": np.zeros(2)}), "values of shape (2,) for 1 devices"),
        (Reading("gpu", ("gpu:n1.0",), {"gpu.power": np.array(["hot"])}), "expected an array of numbers"),
        (Reading("gpu", ("gpu:a", "gpu:a"), {"gpu.power": np.zeros(2)}), "expected kind:name, each once"),
        (Reading("gpu", ("a",), {"gpu.power": np.zeros(1)}), "expected kind:name, each once"),
        (Reading("gpu", (), {}, (Event(1, "gpu:a", "xid", {"what": object()}),)), "not JSON serializable"),
    ],
)
def test_a_reading_that_cannot_be_sent_is_a_fault_of_its_collector_alone(
    loop: Callable[..., Ran], reading: Reading, complaint: str
) -> None:
    ran = loop(Broken(reading=reading), Node(), ticks=3)
    assert ran.values("node.load1") == [1, 2, 3]
    assert any(line.startswith("collector broken: fault: ") and complaint in line for line in ran.log)


def test_an_absent_source_is_logged_once_and_retried_with_backoff(loop: Callable[..., Ran]) -> None:
    absent = Node(faults={i: NoData("no such device") for i in range(1, 99)})
    ran = loop(absent, Hanging(release=_set()), ticks=200)
    assert ran.log.count("collector node: no data: no such device") == 1
    assert absent.looks == 3  # immediately, after 60 s, and 120 s after that
    assert len(ran.values("gpu.power")) == 200


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_a_collector_keeps_its_own_longer_interval(loop: Callable[..., Ran]) -> None:
    slow = Node(interval=10.0)
    assert len(loop(slow, Hanging(release=_set()), ticks=30).values("gpu.power")) == 30
    assert slow.looks in (3, 4)  # whole multiples of 10 s within 30 ticks, and the first read


@pytest.mark.slow
def test_inventory_is_sent_at_start_hourly_and_on_change(loop: Callable[..., Ran]) -> None:
    ran = loop(Node(), ticks=130 * 15, interval=60.0)  # in a long wait for a tick it checks its collectors every 4 s
    found_events = [e for e in ran.events if e.kind == "inventory"]
    assert [e.time - found_events[0].time for e in found_events] == [0, 3600 * SECOND, 7200 * SECOND]
    assert found_events[0].entity == "node:n1"
    entities = found_events[0].data["entities"]
    assert entities["node:n1"] == {"parents": [], "attributes": {"looks": 0}}
    assert entities["collector:n1.node"]["parents"] == entities["agent:n1"]["parents"] == ["node:n1"]


def test_a_clock_in_the_future_that_is_set_back_delays_no_inventory() -> None:
    inventory, day = InventoryTracker(), 86_400 * SECOND
    found = {"node": {"node:n1": Device(())}}
    assert inventory.request_due(START + day)
    assert inventory.update(START + day, found)
    assert inventory.request_due(START)
    assert inventory.update(START, found)
    assert not inventory.request_due(START + SECOND)
    assert not inventory.update(START + SECOND, found)


def test_a_new_device_is_sent_immediately(loop: Callable[..., Ran]) -> None:
    late = AbsentAtFirst(release=_set(), interval=5.0)
    ran = loop(Node(), late, ticks=100)
    found_events = [set(e.data["entities"]) for e in ran.events if e.kind == "inventory"]
    assert len(found_events) == 2
    assert found_events[1] - found_events[0] == {"gpu:n1.0"}


class FullLog(io.StringIO):
    """A log on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _log_refused() -> None:
    training = Training()
    training._ranks = SimpleNamespace(reason="too long")
    training._log_refused(3)


@pytest.mark.parametrize(
    "log_line",
    [
        lambda: ChangeLog(sys.stderr, SteppedClock(1)).write("disk", "slow"),
        lambda: Jobs()._log_change("pods", "refused"),
        lambda: Canary()._log_once("no core"),
        _log_refused,
        lambda: gateway._log("listening"),
    ],
    ids=["agent", "jobs", "canary", "training", "gateway"],
)
@pytest.mark.parametrize("closed", [False, True])
def test_a_log_that_is_full_or_closed_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, log_line: Callable[[], None], closed: bool
) -> None:
    stream = io.StringIO() if closed else FullLog()
    if closed:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    log_line()


def test_a_clock_set_back_makes_no_second_batch_of_the_same_time(tmp_path: Path, drain: Drain) -> None:
    clock = SteppedClock(9)
    agent = Agent(config_at(tmp_path), [Node(interval=0.0)], clock, io.StringIO(), 5.0)
    agent.tick(START)
    agent.tick(START)
    agent.close()
    assert len([m for m in drain(tmp_path)[0] if m.partition.topic == TELEMETRY]) == 1


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 128 KiB."""
    place = tmp_path / "full"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_does_not_stop_the_agent_and_is_logged_once(full_disk: Path, drain: Drain) -> None:
    (full_disk / "hog").write_bytes(bytes(60 << 10))
    log, clock = io.StringIO(), SteppedClock(400)
    agent = Agent(config_at(full_disk, linger=0.0), [Node()], clock, log, 5.0)
    agent.run(threading.Event())
    assert log.getvalue().count("losing data") == 1
    assert "No space left" in log.getvalue()
    messages, _ = drain(full_disk)
    newest = [wire.decode(m.value) for m in messages if m.partition.topic == TELEMETRY][-1]
    assert int(newest.times[0]) == START + 399 * SECOND


def test_a_spool_of_another_process_or_without_permission_is_refused(tmp_path: Path) -> None:
    first = Agent(config_at(tmp_path), [], SteppedClock(0), io.StringIO())
    with pytest.raises(SpoolError, match="another process writes this spool"):
        Agent(config_at(tmp_path), [], SteppedClock(0), io.StringIO())
    first.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match=r"expected a folder that the agent may write: set \[spool\] directory"):
        Agent(config_at(tmp_path / "file"), [], SteppedClock(0), io.StringIO())


def test_an_invalid_interval_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[agent\] interval = 0: expected more than 0 s"):
        run(config_at(tmp_path, interval=0))


PROGRAM = """
import sys
from pathlib import Path
from agents.node.agent import run
from pipeline.config.sections import Agent, Config, Spool
sys.exit(run(Config(agent=Agent("n1", 0.05), spool=Spool(Path(sys.argv[1])))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_agent_cleanly_within_two_seconds(tmp_path: Path, drain: Drain, number: int) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert agent.stderr is not None
    assert "started" in agent.stderr.readline()
    assert "collector" in agent.stderr.readline()
    os.kill(agent.pid, number)
    assert agent.wait(timeout=2) == 0
    assert "stopped" in agent.stderr.read()
    agent.stderr.close()
    assert drain(tmp_path)[0]


LOADED = """
import sys
import agents.node.agent
import agents.collectors.registry
heavy = {"duckdb", "pyarrow", "pandas", "streamlit", "fastapi", "numba", "torch", "pynvml"} & set(sys.modules)
print(sorted(heavy))
"""


@pytest.mark.slow
def test_the_agent_stays_light(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
