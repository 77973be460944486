"""A disk that is slow or does not respond delays no tick, and every loss is counted.

The disk is really slow: a C library, preloaded into the agent, delays calls that touch the spool's folder.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agents.node.spool.writer import (
    DISK_SLOW,
    WRITE_BYTES,
    AcceptedCount,
    MessageQueue,
    PreviousCount,
    TopicWriter,
    memory_folder,
)
from pipeline.config.sections import Spool as Settings
from pipeline.model.records import EVENTS, TELEMETRY, Event, Origin
from pipeline.transport import Message, wire
from tests.agents import nvml_stub

Drain = Callable[[Path], tuple[list[Message], list[tuple[int, int, str]]]]
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from agents.node.agent import run
from agents.collectors.host.host import Host
from pipeline.config.sections import Agent, Config, Spool
settings = Spool(Path(sys.argv[1]), free_bytes=0, queue_bytes=int(sys.argv[2]))
sys.exit(run(Config(agent=Agent("n1", 0.1, linger=0.0), spool=settings), collectors=[Host()]))
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that slows a disk down."""
    if sys.platform != "linux" or (compiler := nvml_stub.compiler()) is None:
        pytest.skip("no C compiler on Linux: install gcc to make a disk slow")
    made = tmp_path_factory.mktemp("slow") / "slow_disk.so"
    source = Path(__file__).with_name("slow_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", made, source, "-ldl"], check=True)
    return made


@dataclass
class Node:
    """An agent in its own process with a disk controlled by `disk`: "sync 3", "all ever", "sync 0"."""

    folder: Path
    library: Path
    queue_bytes: int = 16 << 20
    agent: subprocess.Popen[str] | None = None

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def disk(self, how: str) -> None:
        new = self.folder / "control.new"
        new.write_text(how)
        new.replace(self.folder / "control")

    def start(self) -> None:
        environment = {
            **os.environ,
            "LD_PRELOAD": str(self.library),
            "SLOW_DISK_FOLDER": str(self.spool),
            "SLOW_DISK_CONTROL": str(self.folder / "control"),
            "RUNTIME_DIRECTORY": str(self.folder / "run"),
        }
        words = [sys.executable, "-c", PROGRAM, str(self.spool), str(self.queue_bytes)]
        with (self.folder / "log").open("a") as log:
            self.agent = subprocess.Popen(words, cwd=ROOT, env=environment, stderr=log, text=True)

    def end(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        assert self.agent is not None
        self.agent.send_signal(number)
        return self.agent.wait(seconds)


@pytest.fixture
def node(tmp_path: Path, library: Path) -> Iterator[Node]:
    made = Node(tmp_path, library)
    (tmp_path / "run").mkdir()
    made.disk("sync 0")
    yield made
    made.disk("sync 0")
    if made.agent is not None and made.agent.poll() is None:
        made.agent.kill()
        made.agent.wait()


def wait_for(found: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Waits for a condition in another process."""
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def times(messages: list[Message]) -> list[int]:
    """Times of the ticks, in us."""
    bodies = [wire.decode(m.value) for m in messages if m.partition.topic == TELEMETRY]
    return [int(body.times[0]) for body in bodies]


def events(messages: list[Message], kind: str) -> list[Event]:
    batches = [wire.decode_events(m.value) for m in messages if m.partition.topic == EVENTS]
    return [event for batch in batches for event in batch.events if event.kind == kind]


def missed(ticks: list[int]) -> int:
    """Missing ticks of 0.1 s between the first and the last."""
    return (ticks[-1] - ticks[0]) // 100_000 + 1 - len(ticks)


@pytest.mark.slow
def test_a_disk_that_takes_seconds_delays_no_tick_and_is_reported(node: Node, drain: Drain) -> None:
    """Regression: each tick waited for the disk, so that 4 of 80 ticks were made."""
    node.start()
    wait_for(lambda: len(times(drain(node.spool)[0])) > 5, "the first ticks")
    node.disk("sync 4")
    wait_for(lambda: "slow: a message has waited" in node.log, "the slow disk is reported")
    node.disk("sync 0")
    wait_for(lambda: events(drain(node.spool)[0], "disk_slow"), "the event")
    assert node.end() == 0
    messages, gaps = drain(node.spool)
    (sent,) = events(messages, "disk_slow")
    assert (sent.data["state"], sent.data["lost"], gaps) == ("active", 0, [])
    assert sent.data["seconds"] >= 5
    assert missed(times(messages)) <= 8, "a busy machine may miss a tick, a disk of 4 s must not"


@pytest.mark.slow
def test_a_disk_that_never_responds_causes_a_counted_gap_of_messages_beyond_the_memory_limit(
    node: Node, drain: Drain
) -> None:
    node.queue_bytes = 1 << 16
    node.start()
    wait_for(lambda: len(times(drain(node.spool)[0])) > 5, "the first ticks")
    before = len(times(drain(node.spool)[0]))
    node.disk("all ever")
    wait_for(lambda: "losing data: the disk was too slow" in node.log, "the loss is reported", 300)
    node.disk("sync 0")
    wait_for(lambda: len(times(drain(node.spool)[0])) > before + 20, "it continues without help")
    assert node.end() == 0
    messages, gaps = drain(node.spool)
    ((first, behind, cause),) = gaps
    ticks = times(messages)
    assert cause == "the disk was too slow"
    assert len([m for m in messages if m.partition.topic == TELEMETRY]) + behind - first == max(
        m.offset + 1 for m in messages if m.partition.topic == TELEMETRY
    )
    assert missed(ticks) - (behind - first) <= 8, "every tick is stored or counted"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_messages_waiting_for_a_slow_disk_at_the_end_of_the_agent_are_a_counted_gap(
    node: Node, drain: Drain, number: int
) -> None:
    node.start()
    wait_for(lambda: len(times(drain(node.spool)[0])) > 5, "the first ticks")
    node.disk("all ever")
    durable = len(times(drain(node.spool)[0]))
    time.sleep(2)  # the samples of these two seconds are under test
    node.end(number, 10)
    assert len(times(drain(node.spool)[0])) <= durable + 1
    node.disk("sync 0")
    node.start()
    wait_for(lambda: len(times(drain(node.spool)[0])) > durable + 5, "it continues without help")
    assert node.end() == 0
    _, gaps = drain(node.spool)
    (gap,) = [gap for gap in gaps if gap[2] == "the agent ended while its disk was slow" and gap[1] - gap[0] > 3]
    assert 15 <= gap[1] - gap[0] <= 30, "20 ticks of 0.1 s waited"


@pytest.mark.slow
def test_an_agent_starts_although_its_disk_does_not_respond(node: Node, drain: Drain) -> None:
    node.spool.mkdir()
    node.disk("all ever")
    node.start()
    wait_for(lambda: "has not responded for 10 s; starting without it" in node.log, "the start")
    wait_for(lambda: "slow: a message has waited" in node.log, "ticks are made")
    node.disk("sync 0")
    wait_for(lambda: len(times(drain(node.spool)[0])) > 60, "the ticks during the pause")
    assert node.end() == 0


# --- the queue alone --------------------------------------------------------------------------------------------------


def test_the_queue_drops_the_oldest_beyond_its_bytes_and_counts_them_before_the_rest() -> None:
    queue = MessageQueue(10, 600, lambda: 0.0)
    for i in range(6):
        queue.add(b"%03d" % i, 1, i)
    assert (queue.dropped, queue.count) == (3, 3)
    dropped, taken = queue.take_oldest()
    assert (dropped, [m.made for m in taken]) == (3, [3, 4, 5])
    queue.mark_handled()
    assert (queue.handled, queue.accepted, queue.empty) == (6, 6, True)


def test_the_queue_drops_old_messages_but_never_the_newest() -> None:
    now = [0.0]
    queue = MessageQueue(1 << 20, 5, lambda: now[0])
    for second in (0, 1, 20):
        now[0] = second
        queue.add(b"x", 1, second)
    assert [m.made for m in queue.take_oldest()[1]] == [20]
    assert queue.dropped == 2


def test_one_write_is_bounded_and_a_larger_message_is_written_alone() -> None:
    queue = MessageQueue(8 << 20, 600, lambda: 0.0)
    for size in (WRITE_BYTES + 1, WRITE_BYTES - 1, 1, 1):
        queue.add(bytes(size), 1, size)
    assert [[m.made for m in queue.take_oldest()[1]] for _ in range(3)] == [
        [WRITE_BYTES + 1],
        [WRITE_BYTES - 1, 1],
        [1],
    ]


def test_the_age_is_that_of_the_oldest_message_also_while_it_is_being_written() -> None:
    now = [0.0]
    queue = MessageQueue(1 << 20, 600, lambda: now[0])
    assert queue.oldest_age() == 0
    queue.add(b"x", 1, 0)
    queue.take_oldest()
    now[0] = 7.0
    queue.add(b"y", 1, 0)
    assert queue.oldest_age() == 7
    queue.mark_handled()
    assert queue.oldest_age() == 0


def test_the_accepted_count_outlives_the_process_and_belongs_to_one_epoch(tmp_path: Path) -> None:
    first, epoch = AcceptedCount(tmp_path / "spool", tmp_path), bytes(range(16))
    first.start_count(epoch, 100, 0)
    first.set_accepted(7)
    assert AcceptedCount(tmp_path / "spool", tmp_path).read_previous() == PreviousCount(epoch, 107, 0)
    first.set_joining(3)
    assert AcceptedCount(tmp_path / "spool", tmp_path).read_previous() == PreviousCount(epoch, 107, 3)
    first.start_count(epoch, 99, 6)  # the writing thread read the number before the loop added one
    assert AcceptedCount(tmp_path / "spool", tmp_path).read_previous() == PreviousCount(epoch, 106, 3)
    first.set_accepted(8)
    assert AcceptedCount(tmp_path / "spool", tmp_path).read_previous() == PreviousCount(epoch, 107, 0)
    assert AcceptedCount(tmp_path / "other", tmp_path).read_previous() is None
    first.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_messages_waiting_for_an_epoch_that_cannot_continue_are_a_gap_of_the_next_one(tmp_path: Path) -> None:
    """A gap at the end of an epoch, as after a kill before the next record, ends the epoch."""
    settings = Settings(tmp_path / "spool", free_bytes=0)
    before = TopicWriter(TELEMETRY, settings, Origin("s", "n1", bytes(16), False), tmp_path)
    before.open()
    assert before.spool is not None
    before.spool.append_many([b"a", b"b"], 1, 0)
    before.spool.skip_sequences(3, DISK_SLOW)
    before.accepted.set_accepted(9)
    before.spool.close()
    after = TopicWriter(TELEMETRY, settings, Origin("s", "n1", bytes(16), False), tmp_path)
    after.open()
    assert after.spool is not None
    assert after.spool.epoch != before.spool.epoch
    assert (after.spool.next, after.lost) == (4, 4)
    after.accepted.close(keep=True)
    after.spool.close()
    again = TopicWriter(TELEMETRY, settings, Origin("s", "n1", bytes(16), False), tmp_path)
    again.open()
    assert again.lost == 0


def test_the_count_of_an_agent_that_did_not_join_ticks_is_read(tmp_path: Path) -> None:
    count = AcceptedCount(tmp_path / "spool", tmp_path)
    count.start_count(bytes(16), 0, 0)
    count.close(keep=True)
    (path,) = tmp_path.iterdir()
    path.write_bytes(struct.pack("<4s16sqQ", b"FPA1", bytes(range(16)), 100, 7))
    assert AcceptedCount(tmp_path / "spool", tmp_path).read_previous() == PreviousCount(bytes(range(16)), 107, 0)


@pytest.mark.parametrize("content", [b"", b"FPA1", b"FPA2", bytes(64), bytes(range(200, 236))])
def test_a_damaged_count_is_ignored(tmp_path: Path, content: bytes) -> None:
    count = AcceptedCount(tmp_path / "spool", tmp_path)
    count.start_count(bytes(16), 1 << 40, 0)
    count.close(keep=True)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert AcceptedCount(tmp_path / "spool", tmp_path).read_previous() is None


def test_a_symlink_of_another_user_is_not_followed(tmp_path: Path) -> None:
    memory, target = tmp_path / "memory", tmp_path / "target"
    memory.mkdir()
    target.write_bytes(b"precious")
    count = AcceptedCount(tmp_path / "spool", memory)
    count.start_count(bytes(16), 0, 0)
    count.close(keep=True)
    (path,) = memory.iterdir()
    path.unlink()
    path.symlink_to(target)
    again = AcceptedCount(tmp_path / "spool", memory)
    again.start_count(bytes(16), 0, 0)
    again.set_accepted(5)
    again.close(keep=False)
    assert target.read_bytes() == b"precious"


def test_without_shared_memory_nothing_is_counted_and_nothing_fails(tmp_path: Path) -> None:
    assert memory_folder({"RUNTIME_DIRECTORY": str(tmp_path / "none")}) is None
    count = AcceptedCount(tmp_path, None)
    count.start_count(bytes(16), 0, 0)
    count.set_accepted(1)
    assert count.read_previous() is None
    count.close(keep=True)
