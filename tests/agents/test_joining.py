"""Agents join the ticks of [agent] linger seconds into one message, and lose none of them uncounted."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.collector import wall_clock
from agents.node import joining
from agents.node.agent import Agent
from agents.node.joining import TickJoiner, join_batches
from agents.node.spool.writer import AGENT_KILLED, KILLED_JOINING, TopicWriter
from pipeline.config.sections import Agent as AgentSection
from pipeline.config.sections import Config, Spool
from pipeline.ingest.ingest import Ingest
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Batch, Block, Origin
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import Message, segments, wire
from pipeline.transport.spool import SpoolTransport
from tests.agents.test_agent import START, Node, SteppedClock
from tests.agents.ticks import split_ticks
from tests.examples import examples
from tests.until import until

Drain = Callable[[Path], tuple[list[Message], list[tuple[int, int, str]]]]
ROOT = Path(__file__).parents[2]
ORIGIN = Origin("local", "n1", bytes(16))


def tick(time: int, *signals: str, entities: tuple[str, ...] = ("gpu:n1.0",)) -> Batch:
    """Returns a batch of one tick whose values are its time in seconds."""
    columns = {name: np.full((1, len(entities)), time / SECOND, "f8") for name in signals or ("gpu.memory_used",)}
    return Batch(ORIGIN, np.array([time]), (Block("gpu", entities, columns),))


def seconds(batches: list[Batch]) -> list[list[int]]:
    return [(batch.times // SECOND).tolist() for batch in batches]


def joined(linger: float, interval: float, times: list[int]) -> list[list[int]]:
    joiner = TickJoiner(round(linger * SECOND), round(interval * SECOND))
    done = [batch for time in times for batch in joiner.add_tick(tick(time * SECOND))]
    return seconds([*done, *joiner.flush()])


def test_a_window_ends_with_the_tick_at_a_multiple_of_the_linger() -> None:
    assert joined(5, 1, list(range(1, 13))) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12]]
    assert joined(5, 2, list(range(2, 13, 2))) == [[2, 4], [6, 8, 10], [12]]


@pytest.mark.parametrize("linger", [0, 1, 10])
def test_without_linger_or_at_a_long_interval_each_tick_is_sent_at_once(linger: float) -> None:
    joiner = TickJoiner(round(linger * SECOND), 10 * SECOND)
    assert seconds(joiner.add_tick(tick(10 * SECOND))) == [[10]]
    assert joiner.count == 0


def test_a_missing_tick_delays_the_others_of_its_window_by_one_at_most() -> None:
    assert joined(5, 1, [1, 2, 3, 4, 6, 7]) == [[1, 2, 3, 4], [6, 7]]


def test_a_clock_that_is_set_back_starts_a_new_message() -> None:
    assert joined(5, 1, [11, 12, 13, 1, 2, 3, 3]) == [[11, 12, 13], [1, 2, 3], [3]]


@settings(max_examples=examples(200), deadline=None)
@given(times=st.lists(st.integers(0, 40), max_size=60), linger=st.integers(0, 10), interval=st.integers(1, 4))
def test_any_ticks_are_sent_once_in_order_and_within_one_window(times: list[int], linger: int, interval: int) -> None:
    found = joined(linger, interval, times)
    assert [time for message in found for time in message] == times
    for message in found:
        assert message == sorted(set(message))
        assert max(message) - min(message) < max(linger, 1)


def test_so_many_bytes_are_sent_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MAX_BYTES", 16)
    assert joined(5, 1, [1, 2, 3]) == [[1, 2], [3]]


def test_signals_of_one_interval_form_one_block() -> None:
    fast, slow = ("gpu.power", "gpu.energy"), ("gpu.memory_used", "gpu.memory_total")
    found = join_batches([tick(1, *fast), tick(2, *fast, *slow), tick(3, *fast)])
    assert [(tuple(b.columns), b.ticks) for b in found.blocks] == [(fast, None), (slow, (1,))]


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_a_joined_message_has_the_values_of_its_ticks(data: st.DataObject) -> None:
    names = st.lists(st.sampled_from(["gpu.power", "gpu.energy", "gpu.memory_used"]), unique=True, min_size=1)
    devices = st.sampled_from([("gpu:n1.0",), ("gpu:n1.0", "gpu:n1.1"), ("gpu:n1.1",)])
    parts = [
        tick(second * SECOND, *data.draw(names), entities=data.draw(devices))
        for second in range(data.draw(st.integers(1, 6)))
    ]
    message = wire.seal(wire.encode(join_batches(parts)), wire.TELEMETRY_KIND, bytes(16), 1, 2)
    for found, wanted in zip(split_ticks([wire.decode(message)]), parts, strict=True):
        assert found.times.tolist() == wanted.times.tolist()
        (block,), (whole,) = found.blocks, wanted.blocks
        assert (block.entities, block.columns.keys()) == (whole.entities, whole.columns.keys())
        for name, values in whole.columns.items():
            np.testing.assert_array_equal(block.columns[name], values)


def test_events_do_not_wait_for_the_telemetry_of_their_tick(tmp_path: Path, drain: Drain) -> None:
    config = Config(agent=AgentSection("n1"), spool=Spool(tmp_path, free_bytes=0))
    agent = Agent(config, [Node()], SteppedClock(0), io.StringIO(), 5.0)
    agent.tick(START + SECOND)
    until(lambda: any(m.partition.topic == EVENTS for m in drain(tmp_path)[0]))
    assert not [m for m in drain(tmp_path)[0] if m.partition.topic == TELEMETRY]
    agent.close()
    messages, gaps = drain(tmp_path)
    assert [wire.decode(m.value).times.tolist() for m in messages if m.partition.topic == TELEMETRY] == [
        [START + SECOND]
    ]
    assert gaps == []


PROGRAM = """
import sys
from pathlib import Path
from agents.node.agent import run
from agents.collectors.host.host import Host
from pipeline.config.sections import Agent, Config, Spool
settings = Spool(Path(sys.argv[1]), free_bytes=0)
sys.exit(run(Config(agent=Agent("n1", 0.1, linger=float(sys.argv[2])), spool=settings), collectors=[Host()]))
"""


def start_agent(folder: Path, linger: float) -> subprocess.Popen[str]:
    (folder / "run").mkdir(exist_ok=True)
    environment = {**os.environ, "RUNTIME_DIRECTORY": str(folder / "run")}
    words = [sys.executable, "-c", PROGRAM, str(folder / "spool"), str(linger)]
    return subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, text=True)


def joining_ticks(folder: Path) -> int:
    """Returns how many ticks wait in the agent, as the next one would read it."""
    writer = TopicWriter(TELEMETRY, Spool(folder / "spool"), ORIGIN, folder / "run")
    previous = writer.accepted.read_previous()
    return 0 if previous is None else previous.ticks


def open_and_close(folder: Path) -> list[tuple[int, int, str]]:
    """Opens the spool of telemetry as the next agent does; returns the gaps of all its epochs."""
    writer = TopicWriter(TELEMETRY, Spool(folder / "spool", free_bytes=0), ORIGIN, folder / "run")
    writer.open()
    assert writer.spool is not None
    writer.spool.close()
    writer.accepted.close(keep=False)
    return [gap for epoch in segments.epoch_folders(writer.spool.home) for gap in segments.read_gaps(epoch)]


@pytest.mark.slow
def test_ticks_that_an_agent_was_joining_when_it_was_killed_are_a_counted_gap(tmp_path: Path, drain: Drain) -> None:
    for kills in range(1, 4):
        agent = start_agent(tmp_path, linger=10.0)
        until(lambda: joining_ticks(tmp_path) > 2)
        agent.kill()
        agent.wait()
        assert joining_ticks(tmp_path) > 0
        gaps = open_and_close(tmp_path)
        assert {cause for _, _, cause in gaps} == {KILLED_JOINING}
        assert sum(end - first for first, end, _ in gaps) == kills
    agent = start_agent(tmp_path, linger=10.0)
    until(lambda: joining_ticks(tmp_path) > 2)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(10) == 0
    assert sum(end - first for first, end, _ in open_and_close(tmp_path)) == 3  # a clean stop sends what waits
    sent = [wire.decode(m.value) for m in drain(tmp_path / "spool")[0] if m.partition.topic == TELEMETRY]
    database, transport = Database(tmp_path / "store.duckdb"), SpoolTransport(tmp_path / "spool")
    ingest = Ingest(database, transport, Devices(database.connection), wall_clock)
    while ingest.step() is not None:
        pass
    query = "SELECT cause, sum(next_sequence - first_sequence) FROM gaps GROUP BY cause"
    assert database.connection.execute(query).fetchall() == [(KILLED_JOINING, 3)]
    assert sum(len(batch.times) for batch in sent) > 2
    for device_class in ("node", "agent"):
        stored = database.connection.execute(f"SELECT epoch_us(time) FROM {device_class} ORDER BY time").fetchall()
        ticks = split_ticks(sent)
        assert [time for (time,) in stored] == [
            int(batch.times[0]) for batch in ticks for block in batch.blocks if block.device_class == device_class
        ]
    transport.close()
    database.close()


def test_unwritten_messages_and_joined_ticks_are_gaps_with_their_own_causes(tmp_path: Path, drain: Drain) -> None:
    spool = Spool(tmp_path / "spool", free_bytes=0)
    before = TopicWriter(TELEMETRY, spool, ORIGIN, tmp_path)
    before.open()
    assert before.spool is not None
    before.spool.append_many([b"a", b"b"], 1, 0)
    before.spool.close()
    before.accepted.set_accepted(3)
    before.accepted.set_joining(4)
    after = TopicWriter(TELEMETRY, spool, ORIGIN, tmp_path)
    after.open()
    assert after.spool is not None
    after.spool.close()
    assert drain(tmp_path / "spool")[1] == [(2, 3, AGENT_KILLED), (3, 4, KILLED_JOINING)]
