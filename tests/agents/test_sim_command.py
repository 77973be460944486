"""`simulate` end to end: same samples in files and spools, sent in time; invalid options are refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from agents.sim.command import BACKFILLED, SimulateOptions, simulate
from agents.sim.kinds import KINDS, list_kinds
from pipeline.config.sections import Config, Spool
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, from_iso
from pipeline.model.topology import kind_of
from pipeline.recording.reader import Recording, read_events, read_topology
from pipeline.recording.writer import RecordingWriter
from pipeline.transport import wire

NOW = from_iso("2026-06-01T12:00:00Z")
TEXT = """version = 1
duration = 600
interval = 5
[fleet]
nodes = 3
gpus_per_node = 4
[[fault]]
kind = "telemetry_gap"
entity = "node:sim-n002"
onset = 100
end = 200
[[fault]]
kind = "link_degradation"
onset = 50
"""


class Clock:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now, self.waits = NOW, 0.0

    def __call__(self) -> int:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += round(seconds * SECOND)
        self.waits += seconds
        return False


def config(tmp_path: Path) -> Config:
    return Config(spool=Spool(tmp_path / "spool"))


def run(
    order: SimulateOptions, tmp_path: Path, clock: Clock, sink: RecordingWriter | None = None, **more: Any
) -> list[str]:
    text: list[str] = []
    assert simulate(order, config(tmp_path), sink, more.get("wait", clock.wait), clock, text.append) == 0
    return text


@pytest.mark.slow
def test_files_and_spools_contain_the_same_samples(scenario: str, tmp_path: Path, drain: Callable[[Path], Any]) -> None:
    run(SimulateOptions(scenario, 7, "spool", 20.0), tmp_path, Clock(), RecordingWriter(tmp_path / "out"))
    messages, gaps = drain(tmp_path / "spool")
    assert gaps == []
    sent: dict[str, set[tuple[Any, ...]]] = {}
    for message in (m for m in messages if m.partition.topic == "telemetry.v1"):
        batch = wire.decode(message.value)
        assert batch.origin.simulated
        for block in batch.blocks:
            for t, time in enumerate(batch.times):
                for d, entity in enumerate(block.entities):
                    row = (int(time), entity, *(_plain(v[t, d]) for v in block.columns.values()))
                    assert row not in sent.setdefault(block.device_class, set())
                    sent[block.device_class].add(row)
    assert set(sent) == {"gpu", "nvlink", "nic", "node", "sensor", "psu", "rank", "power", "coolant", "leak"}
    for device_class, rows in sent.items():
        table = pq.read_table(tmp_path / "out" / f"telemetry-{device_class}.parquet")
        columns = [table["time"].cast("int64").to_pylist(), *(table[n].to_pylist() for n in table.column_names[1:])]
        assert set(zip(*columns, strict=True)) == rows
    events = [e for m in messages if m.partition.topic == "events.v1" for e in wire.decode_events(m.value).events]
    assert sorted(map(repr, events)) == sorted(map(repr, read_events([tmp_path / "out/events.jsonl"])))


def _plain(value: Any) -> Any:
    if value.dtype.kind == "f":
        return None if np.isnan(value) else float(value)
    return None if value == np.iinfo(value.dtype).max else int(value)


def test_a_silent_node_leaves_no_rows_in_the_files(scenario: str, tmp_path: Path) -> None:
    run(SimulateOptions(scenario, 7), tmp_path, Clock(), RecordingWriter(tmp_path / "out"))
    rows = pq.read_table(tmp_path / "out/telemetry-node.parquet").to_pylist()
    assert len(rows) == 3 * 120 - 20
    assert sum(r["entity"] == "node:sim-n002" for r in rows) == 100


def test_the_metadata_of_a_recording_describe_it(scenario: str, tmp_path: Path) -> None:
    run(SimulateOptions(scenario, 7), tmp_path, Clock(), RecordingWriter(tmp_path / "out"))
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert meta["nodes"] == 3
    assert meta["simulated"] is True
    assert (meta["start"], meta["end"]) == ("2026-01-01T00:00:00.000000Z", "2026-01-01T00:10:00.000000Z")
    truth = [json.loads(line) for line in (tmp_path / "out/truth.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in truth] == ["telemetry_gap", "link_degradation"]
    topology = read_topology(tmp_path / "out/topology.toml")
    assert topology.ancestor_of_kind("gpu:sim-n001.2", "cdu") == "cdu:sim-c1"
    assert topology.attributes["gpu:sim-n001.2"]["simulated"] is True


def test_written_files_are_sorted_and_can_be_read(scenario: str, tmp_path: Path) -> None:
    run(SimulateOptions(scenario, 7), tmp_path, Clock(), RecordingWriter(tmp_path / "out"))
    for path in (tmp_path / "out").glob("telemetry-*.parquet"):
        table = pq.read_table(path)
        keys = list(zip(table["time"].to_pylist(), table["entity"].to_pylist(), strict=True))
        assert keys == sorted(keys)
    loaded = Recording(sorted((tmp_path / "out").glob("telemetry-*.parquet"))).load()
    assert len(loaded["node"].time) == 340


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "first", "waited"), [(1.0, 0.0, 600.0), (20.0, 570.0, 30.0), (0.0, 600.0, 0.0)])
def test_a_stream_ends_at_its_end_time(
    scenario: str, tmp_path: Path, drain: Callable[[Path], Any], speed: float, first: float, waited: float
) -> None:
    clock = Clock()
    run(SimulateOptions(scenario, 7, "spool", speed), tmp_path, clock)
    messages = [m for m in drain(tmp_path / "spool")[0] if m.partition.name == "sim-n001"]
    times = np.concatenate([wire.decode(m.value).times for m in messages if m.partition.topic == "telemetry.v1"])
    assert times[0] == NOW - first * SECOND
    assert clock.waits == pytest.approx(waited, abs=max(5 / speed, 1) if speed else 0)
    assert times[-1] <= clock.now


@pytest.mark.slow
def test_no_sample_is_sent_before_its_time(scenario: str, tmp_path: Path, drain: Callable[[Path], Any]) -> None:
    for speed in (1.0, 3.0, 20.0):
        run(SimulateOptions(scenario, 7, "spool", speed), tmp_path / str(speed), Clock())
        for message in drain(tmp_path / str(speed) / "spool")[0]:
            sent = wire.open_envelope(message.value).sent
            if message.partition.topic == "telemetry.v1":
                assert wire.decode(message.value).times.max() <= sent
            else:
                assert max(e.time for e in wire.decode_events(message.value).events) <= sent


@pytest.mark.parametrize("speed", [1.0, 3.0, 0.0])
def test_at_any_speed_telemetry_is_one_message_per_node_and_window_and_events_do_not_wait(
    scenario: str, tmp_path: Path, drain: Callable[[Path], Any], speed: float
) -> None:
    Path(scenario).write_text("version = 1\nduration = 30\ninterval = 1\n[fleet]\nnodes = 2\ngpus_per_node = 2\n")
    clock = Clock()
    run(SimulateOptions(scenario, 7, "spool", speed), tmp_path, clock)
    windows = []
    for message in drain(tmp_path / "spool")[0]:
        sent = wire.open_envelope(message.value).sent
        if message.partition.topic == "events.v1":
            late = sent - max(event.time for event in wire.decode_events(message.value).events)
            assert speed != 1.0 or late < 2 * SECOND
        elif message.partition.name == "sim-n001":
            windows.append((wire.decode(message.value).times // SECOND).tolist())
    seconds = [second for window in windows for second in window]
    assert seconds == list(range(seconds[0], seconds[0] + 30))
    assert all(window[-1] % 5 == 0 for window in windows[:-1])  # the last ends with the stream
    assert {len(window) for window in windows[1:-1]} == {5}


def test_inventory_is_sent_first_and_names_every_entity(
    scenario: str, tmp_path: Path, drain: Callable[[Path], Any]
) -> None:
    run(SimulateOptions(scenario, 7, "spool", 0.0), tmp_path, Clock())
    known: set[str] = set()
    measured: set[str] = set()
    for message in drain(tmp_path / "spool")[0]:
        if message.partition.topic == "events.v1":
            events = wire.decode_events(message.value).events
            assert message.offset > 0 or events[0].kind == "inventory"
            known |= {entity for e in events if e.kind == "inventory" for entity in e.data["entities"]}
        else:
            measured |= {e for b in wire.decode(message.value).blocks for e in b.entities}
    assert measured <= known
    assert {"rack", "stage", "job"} <= {kind_of(e) for e in known}


@pytest.mark.slow
def test_backfill_is_sent_immediately_and_then_continues_in_real_time_until_stopped(
    tmp_path: Path, drain: Callable[[Path], Any]
) -> None:
    clock = Clock()
    path = tmp_path / "live.toml"
    path.write_text("version = 1\nduration = 1200\ninterval = 10\n[fleet]\nnodes = 2\n[live]\nevery = 60\n")

    def wait(seconds: float) -> bool:
        clock.wait(seconds)
        return clock.now >= NOW + 300 * SECOND

    text = run(SimulateOptions(str(path), 1, "spool", 1.0, 1200.0), tmp_path, clock, wait=wait)
    assert BACKFILLED in text[0]
    messages = [m for m in drain(tmp_path / "spool")[0] if m.partition.name == "sim-n001"]
    batches = [wire.decode(m.value) for m in messages if m.partition.topic == "telemetry.v1"]
    times = np.concatenate([b.times for b in batches])
    assert times[0] == NOW - 1200 * SECOND
    assert set(np.diff(times)) == {10 * SECOND}
    assert NOW + 280 * SECOND <= times[-1] <= NOW + 300 * SECOND
    assert [len(b.times) for b in batches[:2]] == [60, 60]
    assert {len(b.times) for b in batches[3:]} == {1}


def test_a_stopped_simulation_leaves_complete_files(scenario: str, tmp_path: Path) -> None:
    clock = Clock()

    def wait(seconds: float) -> bool:
        clock.wait(seconds)
        return clock.now > NOW + 100 * SECOND

    run(SimulateOptions(scenario, 7, "spool", 1.0), tmp_path, clock, RecordingWriter(tmp_path / "out"), wait=wait)
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert from_iso(meta["end"]) - from_iso(meta["start"]) == 105 * SECOND
    assert pq.read_metadata(tmp_path / "out/telemetry-gpu.parquet").num_rows == 21 * 12 - 4
    assert not list((tmp_path / "out").glob("*.part"))


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (SimulateOptions("demo", 1, "carrier-pigeon"), "no such transport; expected --to spool or --to kafka"),
        (SimulateOptions("demo", 1), "no destination"),
        (SimulateOptions("demo", 1, "spool", -1.0), "--speed"),
        (SimulateOptions("demo", 1, "spool", float("nan")), "--speed"),
        (SimulateOptions("demo", -1, "spool"), "--seed"),
        (SimulateOptions("demo", 1, "spool", 20.0, 600.0), "--backfill"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, order: SimulateOptions, text: str) -> None:
    with pytest.raises(UsageError, match=text) as error:
        simulate(order, config(tmp_path), None, lambda _: False)
    assert error.value.exit_code == 2


def test_the_list_describes_every_kind_with_its_visible_and_invisible_effects() -> None:
    blocks = {block.split(":")[0].strip(): block for block in list_kinds().strip().split("\n\n")}
    assert set(blocks) == set(KINDS)
    assert all(f"  {label}" in block for block in blocks.values() for label in ("happens", "seen", "not seen", "rate"))
    assert max(map(len, list_kinds().splitlines())) <= 100


def test_faults_without_a_free_time_are_logged_and_in_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "full.toml"
    table = "[rates]\nconfounders = 1.0\n[rates.kinds]\nmaintenance = 1e7\n"
    path.write_text("version = 1\nduration = 600\ninterval = 60\n[fleet]\nnodes = 2\n" + table)
    log_lines: list[str] = []
    out = RecordingWriter(tmp_path / "out")
    order = SimulateOptions(str(path), 1)
    assert (
        simulate(
            order,
            config(tmp_path),
            out,
            lambda _: False,
            log=log_lines.append,
            on_planned=lambda: log_lines.append("!"),
        )
        == 0
    )
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["dropped"] > 0
    assert log_lines[:2] == [
        "!",
        f"simulate: {meta['dropped']} of {meta['planned']} events found no free time and were left out",
    ]


@pytest.mark.parametrize("backfill", [float("nan"), float("inf"), 1e18, -1.0])
def test_a_backfill_before_the_first_possible_time_is_refused(tmp_path: Path, backfill: float) -> None:
    with pytest.raises(UsageError, match=r"--backfill .*: expected seconds above 0, at most 10 years"):
        simulate(SimulateOptions("demo", 1, "spool", 1.0, backfill), config(tmp_path), None, lambda _: False)


@pytest.mark.slow
def test_one_signal_ends_a_simulation_that_is_still_planning(tmp_path: Path) -> None:
    path, status = tmp_path / "long.toml", "SigCgt"
    table = "[fleet]\nnodes = 2000\n[jobs]\nmean_hours = 0.5\n[rates]\nfaults = 20.0\nconfounders = 1.0\n"
    path.write_text("version = 1\nduration = 8640000\ninterval = 3600\n" + table)  # minutes of planning
    door = Path(__file__).parents[2] / "fleetpulse.py"
    command = [sys.executable, str(door), "simulate", "--scenario", str(path), "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            while not _catches(process.pid, status):
                assert process.poll() is None
                sleep(0.05)
            sleep(2.0)  # from the door into the plan
            process.send_signal(signal.SIGTERM)
            assert process.wait(10.0) == 0
        finally:
            process.kill()


def _catches(pid: int, line: str) -> bool:
    """Whether a process has a handler for SIGTERM."""
    mask = next(t for t in Path(f"/proc/{pid}/status").read_text().splitlines() if t.startswith(line))
    return bool(int(mask.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_refused_simulation_leaves_an_earlier_recording_as_it_was(scenario: str, tmp_path: Path) -> None:
    run(SimulateOptions(scenario, 7), tmp_path, Clock(), RecordingWriter(tmp_path / "out"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    sink = RecordingWriter(tmp_path / "out")
    with pytest.raises(UsageError):
        simulate(SimulateOptions(str(tmp_path / "none.toml"), 7), config(tmp_path), sink, lambda _: False)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
