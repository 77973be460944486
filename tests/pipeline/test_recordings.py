"""Recorded telemetry: written data reads back, streams stay in order, values out of range are missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, Event
from pipeline.model.signals import CATALOGUE
from pipeline.recording.reader import Recording, read_events, read_signals, read_topology
from pipeline.recording.text_files import write_topology
from pipeline.recording.writer import RecordingWriter, TelemetryWriter
from tests.examples import examples

T0 = 1_767_225_600 * SECOND


def write_parquet(path: Path, times: list[int], entities: list[str], **columns: list[float | None]) -> Path:
    table = {"time": pa.array(times, pa.timestamp("us", "UTC")), "entity": entities}
    pq.write_table(pa.table({**table, **{n.replace("__", "."): v for n, v in columns.items()}}), path)
    return path


def test_written_data_reads_back_unchanged(tmp_path: Path) -> None:
    writer = TelemetryWriter(tmp_path, "gpu")
    times, entities = T0 + np.arange(5) * SECOND, ("gpu:b.10", "gpu:b.2", "gpu:a.0")
    power = np.arange(15, dtype=np.float32).reshape(5, 3)
    power[2, 1] = np.nan
    energy = np.arange(15, dtype=np.uint64).reshape(5, 3) + np.uint64(2**40)
    energy[3, 2] = np.iinfo(np.uint64).max
    present = np.ones((5, 3), bool)
    present[4, 0] = False
    writer.append(times[:2], entities, {"gpu.power": power[:2], "gpu.energy": energy[:2]})
    writer.append(times[2:], entities, {"gpu.power": power[2:], "gpu.energy": energy[2:]}, present[2:])
    writer.close()
    writer.close()
    table = pq.read_table(tmp_path / "telemetry-gpu.parquet")
    assert table.schema.field("time").type == pa.timestamp("us", "UTC")
    assert table.schema.field("gpu.energy").type == pa.int64()
    assert table["entity"].to_pylist()[:3] == ["gpu:a.0", "gpu:b.10", "gpu:b.2"]
    recording = Recording([tmp_path / "telemetry-gpu.parquet"])
    rows = recording.load()["gpu"]
    names = recording.names("gpu")
    back = {
        (int(t), names[d]): (p, e) for t, d, p, e in zip(rows.time, rows.device, *rows.columns.values(), strict=True)
    }
    assert len(back) == writer.rows == 14
    for t, d in zip(*np.nonzero(present), strict=True):
        got = back[int(times[t]), entities[d]]
        wanted = (float(power[t, d]), np.nan if (t, d) == (3, 2) else float(energy[t, d]))
        np.testing.assert_equal(got, wanted)


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    writer = TelemetryWriter(tmp_path, "power")
    values = np.ones((1, 200_000), np.float32)
    writer.append(np.array([T0]), [f"pdu:{i}" for i in range(200_000)], {"power.draw": values})
    assert [p.name for p in tmp_path.iterdir()] == ["telemetry-power.parquet.part"]
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["telemetry-power.parquet"]


def test_values_outside_the_valid_range_and_infinite_ones_are_missing(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "t.parquet", [T0] * 4, [f"gpu:{i}" for i in range(4)], gpu__temperature=[50, 4000, None, np.inf]
    )
    values = Recording([path]).load()["gpu"].columns["gpu.temperature"]
    np.testing.assert_equal(values, [50, np.nan, np.nan, np.nan])


def test_several_files_of_several_classes_are_merged_in_order_of_time(tmp_path: Path) -> None:
    one = write_parquet(
        tmp_path / "a.parquet", [T0 + i * SECOND for i in range(50)], ["gpu:a"] * 50, gpu__power=list(range(50))
    )
    two = write_parquet(
        tmp_path / "b.parquet", [T0 + i * SECOND for i in range(25, 75)], ["gpu:b"] * 50, gpu__power=[1.0] * 50
    )
    three = write_parquet(
        tmp_path / "c.parquet", [T0 + i * 5 * SECOND for i in range(20)], ["cdu:c"] * 20, coolant__flow=[9.0] * 20
    )
    recording = Recording([one, two, three])
    seen, mark = [], -1
    for ready, watermark in recording.read(batch_rows=8):
        times = np.concatenate([r.time for r in ready])
        assert times.min() >= mark
        assert times.max() < watermark
        mark = watermark
        seen += [(int(t), r.device_class, int(d)) for r in ready for t, d in zip(r.time, r.device, strict=True)]
    assert len(seen) == len(set(seen)) == 120
    assert recording.signals == {"gpu": ("gpu.power",), "coolant": ("coolant.flow",)}
    assert set(recording.names("gpu")) == {"gpu:a", "gpu:b"}
    assert recording.names("nic") == ()


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), max_size=30), min_size=1, max_size=3), st.integers(1, 9))
def test_files_cut_at_any_place_give_every_row_once_below_its_watermark(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], batch: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    paths = []
    for number, seconds in enumerate(files):
        entities = [f"gpu:{number}.{i}" for i in range(len(seconds))]
        schema = {
            "time": pa.array([T0 + s for s in seconds], pa.timestamp("us", "UTC")),
            "entity": pa.array(entities, "string"),
        }
        paths.append(folder / f"{number}.parquet")
        pq.write_table(pa.table({**schema, "gpu.power": pa.array([1.0] * len(seconds))}), paths[-1], row_group_size=4)
    recording, got, mark = Recording(paths), [], 0
    for ready, watermark in recording.read(batch_rows=batch):
        for rows in ready:
            assert (rows.time >= mark).all()
            assert (rows.time < watermark).all()
            got += [(recording.names("gpu")[d], int(t)) for t, d in zip(rows.time, rows.device, strict=True)]
        mark = watermark
    assert sorted(got) == sorted((f"gpu:{n}.{i}", T0 + s) for n, f in enumerate(files) for i, s in enumerate(f))


def test_a_file_out_of_order_is_sorted_by_time(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "t.parquet", [T0 + 2, T0, T0 + 1], ["gpu:a", "gpu:b", "gpu:c"], gpu__power=[2.0, 0.0, 1.0]
    )
    assert Recording([path]).load()["gpu"].columns["gpu.power"].tolist() == [0.0, 1.0, 2.0]


def test_csv_reads_like_parquet(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "time,entity,nic.state,nic.speed\n2026-01-01T00:00:00Z,port:l7.Hun0/0/0/1,1,400000\n"
        "2026-01-01T00:00:01.5Z,port:l7.Hun0/0/0/1,,\n2026-01-01T01:00:02+01:00,port:x,0,nan\n"
    )
    recording = Recording([path])
    rows = recording.load()["nic"]
    assert rows.time.tolist() == [T0, T0 + 1_500_000, T0 + 2 * SECOND]
    assert recording.names("nic") == ("port:l7.Hun0/0/0/1", "port:x")
    np.testing.assert_equal(rows.columns["nic.state"], [1, np.nan, 0])


def test_declared_signals_may_have_any_class_and_override_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'version = 1\n[signals.m01]\nunit = "1"\nkind = "gauge"\nclass = "machine"\nhelp = "x"\n'
        'valid = [0, 1]\nharm = "up"\n'
        '[signals."gpu.power"]\nunit = "W"\nkind = "gauge"\nclass = "gpu"\nhelp = "x"\ninterval = 2\n'
        '[signals."nic.line"]\nunit = "1"\nkind = "state"\nclass = "nic"\nhelp = "x"\n'
        'states = ["down", "up"]\nnormal = ["up"]\n'
    )
    signals = read_signals(tmp_path / "s.toml")
    assert signals["m01"].valid == (0, 1)
    assert signals["gpu.power"].interval == 2
    assert signals["nic.line"].normal == ("up",)
    assert set(CATALOGUE) < set(signals)
    path = write_parquet(tmp_path / "t.parquet", [T0], ["machine:1-1"], m01=[0.5])
    assert Recording([path], signals).load()["machine"].columns["m01"].tolist() == [0.5]


def test_a_whole_recording_reads_back(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "new" / "folder")
    values = {"power.draw": np.ones((2, 1), np.float32)}
    writer.telemetry("power", np.array([T0, T0 + 1]), ("pdu:p",), values, np.ones((2, 1), bool))
    event = Event(T0, "port:a", "link_state", {"state": "down"})
    writer.events([event])
    parents = {'rack:r"1\\': ("pdu:p", "cdu:ö"), "pdu:p": ()}
    writer.close(parents, {"pdu:p": {"sku": "X", "simulated": True, "feeds": 2}}, [{"id": "f"}], {"name": "n"})
    assert read_events([tmp_path / "new/folder/events.jsonl"]) == [event]
    topology = read_topology(tmp_path / "new/folder/topology.toml")
    assert topology.parents == {'rack:r"1\\': ("pdu:p", "cdu:ö")}
    assert topology.attributes == {"pdu:p": {"sku": "X", "simulated": True, "feeds": 2}}
    assert '"telemetry-power": 2' in (tmp_path / "new/folder/meta.json").read_text()


def test_an_empty_topology_is_a_valid_file(tmp_path: Path) -> None:
    write_topology(tmp_path / "t.toml", {}, {})
    assert read_topology(tmp_path / "t.toml").parents == {}


@pytest.mark.parametrize("cut", [1, 5, 20, 30])
def test_a_truncated_last_line_is_skipped(tmp_path: Path, cut: int) -> None:
    rows = [f"2026-01-01T00:00:0{i}.000000Z,gpu:a,{i},5000" for i in range(3)]
    path = tmp_path / "telemetry-gpu.csv"
    path.write_text("\n".join(["time,entity,gpu.power,gpu.energy", *rows, rows[0][:cut]]))
    assert Recording([path]).load()["gpu"].columns["gpu.power"].tolist() == [0, 1, 2]
    path.write_text("\n".join(["time,entity,gpu.power,gpu.energy", rows[0][:cut], *rows]))
    with pytest.raises(UsageError, match="not a readable CSV"):
        Recording([path])


def test_a_truncated_event_is_skipped_at_the_end_only(tmp_path: Path) -> None:
    path, whole = tmp_path / "events.jsonl", '{"time":"2026-01-01T00:00:00Z","entity":"node:a","kind":"x","data":{}}'
    for torn in (whole[:9], whole[:-1]):
        path.write_text(f"{whole}\n{torn}")
        assert len(read_events([path])) == 1
        path.write_text(f"{torn}\n{whole}")
        with pytest.raises(UsageError, match="line 1"):
            read_events([path])
    path.write_text(f"{whole}\n{whole}")
    assert len(read_events([path])) == 2
