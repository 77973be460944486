"""Recordings: readings are written exactly, survive a kill, and are played back unchanged."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time as clock_time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fleetpulse
from agents.collector import Collector, Device, NoData, Reading
from agents.collectors.host.host import Host
from agents.node.workers.pool import ReadResult, WorkerPool
from agents.recording import files as writing
from agents.recording.files import NodeRecordingWriter, read_rows
from agents.recording.playback import Tape, entity_renamer, parse_column, playback_collectors
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, TELEMETRY, Event
from pipeline.recording.reader import Recording
from pipeline.recording.text_files import read_events, read_topology
from pipeline.transport import wire
from tests.agents.ticks import split_ticks
from tests.examples import examples

ROOT = Path(__file__).parents[2]
T0 = 1_767_225_600 * SECOND
MISSING = 2**64 - 1


@dataclass
class Card(Collector):
    """A collector of two GPUs that returns its script, read by read."""

    name = "card"
    signals = ("gpu.power", "gpu.energy")
    events = ("xid",)
    isolated = False
    script: Sequence[Reading | Exception] = ()
    _looks: int = field(default=0, init=False, repr=False)

    def read(self) -> tuple[Reading, ...]:
        self._looks += 1
        found = self.script[min(self._looks, len(self.script)) - 1]
        if isinstance(found, Exception):
            raise found
        return (found,)

    def inventory(self) -> Mapping[str, Device]:
        return {f"gpu:n1.{i}": Device(("node:n1",), {"serial": f"S{i}", "links": [1, 2]}) for i in range(2)}


def gpus(power: Sequence[float], energy: Sequence[int], *events: Event) -> Reading:
    names = tuple(f"gpu:n1.{i}" for i in range(len(power)))
    return Reading("gpu", names, {"gpu.power": np.array(power), "gpu.energy": np.array(energy, np.uint64)}, events)


def recorded(directory: Path, script: Sequence[Reading | Exception]) -> Path:
    """Writes one read of a card per second, as `fleetpulse record` does."""
    card = Card(script=script)
    looking, writer = WorkerPool([card], "n1"), NodeRecordingWriter(directory, "n1", 1.0, [card])
    for i in range(len(script)):
        delivered = looking.tick(T0 + i * SECOND, 5.0, with_inventory=i == 0)
        writer.write_tick(T0 + i * SECOND, [(w.collector, d) for w, d in delivered.items()])
    looking.close(1.0)
    writer.close()
    return directory


class ManualClock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def read_at(tape: Tape, hand: ManualClock, times: Sequence[float]) -> list[tuple[Reading, ...]]:
    """Returns the readings of a tape's only collector at these seconds after the first read."""
    (collector,) = playback_collectors(tape)
    collector.open("n2")
    found = []
    for at in times:
        hand.at = 100.0 + at
        found.append(collector.read())
    return found


# --- writing ---------------------------------------------------------------------------------------------------------


def test_values_are_written_so_that_they_read_back_exactly(tmp_path: Path) -> None:
    recorded(tmp_path / "r", [gpus([0.1, np.nan], [2**64 - 2, MISSING]), gpus([1e-7, 700], [0, 2**53 + 1])])
    assert (tmp_path / "r/telemetry-gpu.csv").read_text() == (
        "time,entity,gpu.power,gpu.energy\n"
        "2026-01-01T00:00:00.000000Z,gpu:n1.0,0.1,18446744073709551614\n"
        "2026-01-01T00:00:00.000000Z,gpu:n1.1,,\n"
        "2026-01-01T00:00:01.000000Z,gpu:n1.0,1e-07,0\n"
        "2026-01-01T00:00:01.000000Z,gpu:n1.1,700,9007199254740993\n"
    )


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    with pytest.raises(UsageError, match="not empty; expected a new or empty folder"):
        NodeRecordingWriter(tmp_path, "n1", 1.0, [])
    with pytest.raises(UsageError, match="cannot be written: File exists"):
        NodeRecordingWriter(tmp_path / "old", "n1", 1.0, [])


def test_each_change_of_a_collectors_state_is_one_line_and_one_event(tmp_path: Path) -> None:
    sound = gpus([1, 2], [3, 4])
    recorded(tmp_path, [sound, sound, NoData("no card"), sound])
    rows = [json.loads(line) for line in (tmp_path / "collectors.jsonl").read_text().splitlines()]
    assert [(r["time"][17:19], r["collector"], r["state"], r["reason"]) for r in rows] == [
        ("00", "card", "ok", ""),
        ("02", "card", "no data", "no card"),
    ]
    assert all(0 <= r["latency"] < 5 for r in rows)
    reported = read_events([tmp_path / "events.jsonl"])
    assert [(e.kind, e.entity, e.data["state"]) for e in reported] == [
        ("collector", "node:n1", "ok"),
        ("collector", "node:n1", "no data"),
    ]


def test_topology_and_attributes_come_from_the_inventory(tmp_path: Path) -> None:
    found = read_topology(recorded(tmp_path, [gpus([1, 2], [3, 4])]) / "topology.toml")
    assert found.parents == {"gpu:n1.0": ("node:n1",), "gpu:n1.1": ("node:n1",)}
    assert found.attributes["gpu:n1.1"] == {"serial": "S1", "links": [1, 2]}


def test_attributes_of_one_device_from_two_collectors_are_merged(tmp_path: Path) -> None:
    one, other = Card(), Host()
    writer = NodeRecordingWriter(tmp_path, "n1", 1.0, [one, other])
    for tick in range(2):
        reported = ({"gpu:n1.0": Device(("node:n1",), {"serial": "S"})}, {"gpu:n1.0": Device((), {"slot": "3"})})
        looks = [(c, ReadResult("ok", inventory=i)) for c, i in zip((one, other), reported, strict=True)]
        writer.write_tick(T0 + tick * SECOND, looks)
    writer.close()
    found = read_topology(tmp_path / "topology.toml")
    assert (found.parents, found.attributes) == ({"gpu:n1.0": ("node:n1",)}, {"gpu:n1.0": {"serial": "S", "slot": "3"}})


def test_two_collectors_of_one_class_share_the_lines_of_their_devices(tmp_path: Path) -> None:
    card = Card()
    writer = NodeRecordingWriter(tmp_path, "n1", 1.0, [card])
    power = Reading("gpu", ("gpu:n1.0",), {"gpu.power": np.array([5.0])})
    energy = Reading("gpu", ("gpu:n1.1", "gpu:n1.0"), {"gpu.energy": np.array([7, 8])})
    writer.write_tick(T0, [(card, ReadResult("ok", readings=(power, energy)))])
    writer.close()
    rows = [(row.entity, row.values) for row in read_rows(tmp_path / "telemetry-gpu.csv")]
    assert rows == [("gpu:n1.0", {"gpu.power": "5", "gpu.energy": "8"}), ("gpu:n1.1", {"gpu.energy": "7"})]


def test_entities_of_a_recording_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_ENTITIES", 50)
    card = Card()
    writer = NodeRecordingWriter(tmp_path, "n1", 1.0, [card])
    for tick in range(10):
        there = {f"gpu:n1.{tick * 10 + i}": Device() for i in range(10)}
        writer.write_tick(T0 + tick * SECOND, [(card, ReadResult("ok", inventory=there))])
    writer.close()
    assert len(json.loads((tmp_path / "recording.json").read_text())["collectors"]["card"]["entities"]) == 50


@pytest.mark.slow
def test_a_full_disk_ends_a_recording_with_a_complete_last_line(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from pathlib import Path; import test_recording as t\n"
        "try: t.recorded(Path(sys.argv[3]), [t.gpus([1, 2], [3, 4])] * 30)\n"
        "except t.UsageError as error: print(error)"
    )
    # -B: under this limit, Python would cut the compiled files of the modules it loads, without an error
    words = [sys.executable, "-B", "-c", program, str(ROOT), str(Path(__file__).parent), str(tmp_path / "r")]
    message = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "telemetry-gpu.csv: cannot be written: File too large; expected a folder with room" in message
    text = (tmp_path / "r/telemetry-gpu.csv").read_text()
    assert 900 < len(text) <= 1000
    assert text.endswith("\n")


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    """A node with short waits, and its spool in the test's folder."""
    path = tmp_path / "fleetpulse.toml"
    path.write_text(f'[agent]\nnode = "n7"\ninterval = 0.1\n[spool]\ndirectory = "{tmp_path}/spool"\n')
    return path


@pytest.mark.slow
def test_replay_reads_recordings(tmp_path: Path, configuration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["record", "--config", str(configuration), "--output", str(tmp_path / "r"), "--seconds", "0.5"]
    assert fleetpulse.main(words) == 0
    assert "ticks in" in capsys.readouterr().err
    files = [str(path) for path in (tmp_path / "r").glob("telemetry-*.csv")]
    more = ["--events", str(tmp_path / "r/events.jsonl"), "--topology", str(tmp_path / "r/topology.toml")]
    assert fleetpulse.main(["replay", "--input", *files, *more, "--output", str(tmp_path / "f.jsonl")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 0), (signal.SIGTERM, 0)]
)
def test_a_recording_ended_in_any_way_can_be_read(
    tmp_path: Path, configuration: Path, number: int, status: int
) -> None:
    words = [sys.executable, str(ROOT / "fleetpulse.py"), "record", "--config", str(configuration), "--output"]
    child = subprocess.Popen([*words, str(tmp_path / "r")], stderr=subprocess.DEVNULL)
    file, until = tmp_path / "r/telemetry-node.csv", clock_time.monotonic() + 30
    while not (file.exists() and file.read_text().count("\n") > 3) and clock_time.monotonic() < until:
        clock_time.sleep(0.01)
    child.send_signal(number)
    assert child.wait(30) == status
    assert len(Recording([file]).load()["node"].time) >= 3
    assert Tape(tmp_path / "r").seconds > 0


@pytest.mark.slow
def test_the_agent_plays_a_recording_and_ends_with_it(
    tmp_path: Path, configuration: Path, drain: Callable[..., tuple[list, list]], capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "r", [gpus([i, i], [i, i]) for i in range(8)])
    words = ["--config", str(configuration), "--replay-recording", str(tmp_path / "r")]
    began = clock_time.time_ns() // 1000
    assert fleetpulse.main(["agent", *words, "--speed", "10"]) == 0
    assert "has ended" in capsys.readouterr().err
    sent = [wire.decode(m.value) for m in drain(tmp_path / "spool")[0] if m.partition.topic == TELEMETRY]
    batches = split_ticks(sent)
    seen = [b for batch in batches for b in batch.blocks if b.device_class == "gpu"]
    assert all(batch.origin.simulated and batch.origin.node == "n7" for batch in batches)
    assert all(began - SECOND < batch.times[0] < began + 10 * SECOND for batch in batches)
    assert {block.entities for block in seen} == {("gpu:n7.0", "gpu:n7.1")}
    energy = [int(block.columns["gpu.energy"][0, 0]) for block in seen]
    assert energy == sorted(energy)
    assert (energy[0], energy[-1]) == (0, 7)


def test_once_shows_the_first_tick(tmp_path: Path, configuration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "r", [gpus([5, 6], [7, 8]), gpus([9, 9], [9, 9])])
    words = ["once", "--config", str(configuration), "--replay-recording", str(tmp_path / "r"), "--output", "json"]
    assert fleetpulse.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["entities"]["gpu:n7.1"] == {"gpu.power": 6, "gpu.energy": 8}
    assert found["collectors"] == {"card": "ok"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["agent", "--speed", "2"], "add --replay-recording"),
        (["agent", "--replay-recording", "absent"], "expected a folder of 'fleetpulse record'"),
        (["once", "--replay-recording", "absent"], "expected a folder of 'fleetpulse record'"),
        (["record", "--output", "x", "--seconds", "0"], "expected more than 0"),
    ],
)
def test_invalid_arguments_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fleetpulse.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty ticks; the energy counter is the tick number."""
    return recorded(tmp_path_factory.mktemp("twenty"), [gpus([i, i], [i, i]) for i in range(20)])


# --- playing ---------------------------------------------------------------------------------------------------------


@given(jitter=st.lists(st.floats(-0.4, 0.4), min_size=20, max_size=20))
@settings(max_examples=examples(30), deadline=None)
def test_every_tick_comes_once_with_jittering_reads(twenty: Path, jitter: list[float]) -> None:
    hand = ManualClock()
    tape = Tape(twenty, 1.0, hand)
    found = read_at(tape, hand, [0, *(i + jitter[i] for i in range(1, 20)), 20, 21])
    assert [int(r.columns["gpu.energy"][0]) for look in found for r in look] == list(range(20))


def test_skipped_ticks_leave_their_newest_values(tmp_path: Path) -> None:
    first = Reading("gpu", ("gpu:n1.0",), {"gpu.power": np.array([5.0]), "gpu.energy": np.array([1])})
    later = Reading("gpu", ("gpu:n1.0",), {"gpu.energy": np.array([2])})
    hand = ManualClock()
    tape = Tape(recorded(tmp_path, [first, first, later, later]), 1.0, hand)
    _, (late,) = read_at(tape, hand, [0, 3])
    assert {name: values.tolist() for name, values in late.columns.items()} == {"gpu.power": [5.0], "gpu.energy": [2]}


def test_twice_the_speed_plays_in_half_the_time(twenty: Path) -> None:
    hand = ManualClock()
    tape = Tape(twenty, 2.0, hand)
    assert (tape.interval, tape.seconds) == (0.5, 9.5)
    found = read_at(tape, hand, [i / 2 for i in range(20)])
    assert [int(r.columns["gpu.energy"][0]) for look in found for r in look] == list(range(20))


def test_events_come_with_new_times_and_names(tmp_path: Path) -> None:
    xid = Event(
        T0 + 1_500_000, "gpu:n1.0", "xid", {"code": 79, "peers": ["gpu:n1.1", "gpu:n10.1"], "of": {"node:n1": 1}}
    )
    directory, hand = recorded(tmp_path, [gpus([1, 1], [1, 1]), gpus([1, 1], [1, 1], xid)]), ManualClock()
    tape = Tape(directory, 1.0, hand, lambda: 5 * SECOND)
    _, second = read_at(tape, hand, [0, 1])
    (event,) = [event for reading in second for event in reading.events]
    assert (event.time, event.entity, event.kind) == (6_500_000, "gpu:n2.0", "xid")
    assert event.data == {"code": 79, "peers": ["gpu:n2.1", "gpu:n10.1"], "of": {"node:n2": 1}}


def test_integers_are_exact_and_other_text_is_missing() -> None:
    texts = ["18446744073709551614", "0", "5.0", "", "-1", "nan", "inf", "1e30", "99999999999999999999999"]
    assert parse_column("gpu.energy", texts).tolist() == [2**64 - 2, 0, 5, *[MISSING] * 6]
    np.testing.assert_equal(parse_column("gpu.power", ["0.1", "", "-3"]), np.array([0.1, np.nan, -3], np.float32))


def test_only_entities_of_the_recorded_node_are_renamed() -> None:
    rename = entity_renamer("a.b", "c")
    names = ("node:a.b", "gpu:a.b.0", "gpu:a.bc.0", "gpu:axb.0", "rack:a.b", "text a.b", "pdu:p1")
    assert [rename(n) for n in names] == [
        "node:c",
        "gpu:c.0",
        "gpu:a.bc.0",
        "gpu:axb.0",
        "rack:c",
        "text a.b",
        "pdu:p1",
    ]


def test_a_collectors_failures_are_played_as_recorded(tmp_path: Path) -> None:
    sound = gpus([1, 2], [3, 4])
    directory, hand = recorded(tmp_path, [sound, OSError("the bus fell"), sound, NoData("no card")]), ManualClock()
    looking = WorkerPool(playback_collectors(Tape(directory, 1.0, hand)), "n1", 1.0, hand)
    message = []
    for i in range(4):
        hand.at = 100.0 + i
        message += [(d.state, d.reason) for d in looking.tick(T0 + i * SECOND, 5.0).values()]
    looking.close(1.0)
    assert message == [("ok", ""), ("fault", "OSError: the bus fell"), ("ok", ""), ("no data", "no card")]


def test_a_hang_begins_a_deadline_before_its_record_and_ends_as_recorded(tmp_path: Path) -> None:
    card, hand = Card(deadline=2.0), ManualClock()
    writer = NodeRecordingWriter(tmp_path, "n1", 1.0, [card])
    for i, state in enumerate(("ok", "ok", "", "", "hung", "hung", "ok")):
        found = (gpus([i, i], [i, i]),) if state == "ok" else ()
        looks = [(card, ReadResult(state, readings=found, inventory=card.inventory()))] if state else []
        writer.write_tick(T0 + i * SECOND, looks)
    writer.close()
    (played,) = playback_collectors(Tape(tmp_path, 10.0, hand))
    assert played.deadline == pytest.approx(0.2)
    played.open("n1")
    for at in (0.0, 0.1):
        hand.at = 100.0 + at
        assert len(played.read()) == 1
    hand.at = 100.2
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(played.read)
        hand.at = 100.5
        with pytest.raises(TimeoutError):
            call.result(0.6)
        hand.at = 100.6
        assert call.result(30) == ()
    assert [int(r.columns["gpu.energy"][0]) for r in played.read()] == [6]


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_file_truncated_anywhere_still_plays(tmp_path: Path) -> None:
    directory = recorded(tmp_path / "r", [gpus([i, i], [i, i]) for i in range(3)])
    for name in ("telemetry-gpu.csv", "events.jsonl", "collectors.jsonl"):
        whole = (directory / name).read_bytes()
        for length in range(0, len(whole), 3):
            (directory / name).write_bytes(whole[:length])
            hand = ManualClock()
            energy = [
                int(r.columns["gpu.energy"][0])
                for look in read_at(Tape(directory, 1.0, hand), hand, [0, 1, 2])
                for r in look
            ]
            assert energy == list(range(len(energy)))
        (directory / name).write_bytes(whole)


@given(
    st.text(max_size=200), st.sampled_from(["telemetry-gpu.csv", "events.jsonl", "collectors.jsonl", "recording.json"])
)
@settings(max_examples=examples(150), deadline=None)
def test_damage_is_a_usage_error_or_is_played(twenty: Path, text: str, name: str) -> None:
    whole = (twenty / name).read_bytes()
    (twenty / name).write_bytes(whole[: len(whole) // 2] + text.encode("utf-8", "surrogatepass") + b"\n")
    hand = ManualClock()
    try:
        with contextlib.suppress(UsageError):
            read_at(Tape(twenty, 1.0, hand), hand, range(22))
    finally:
        (twenty / name).write_bytes(whole)
