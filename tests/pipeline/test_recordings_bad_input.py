"""Bad recordings are refused with the file, the place and the fix, never with a traceback of a library."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.model.errors import UsageError
from pipeline.recording.reader import Recording, read_events, read_signals, read_topology
from pipeline.recording.writer import RecordingWriter

TIME = pa.array([0, 1], pa.timestamp("us", "UTC"))
SIGNAL = '[signals."x.y"]\nunit = "1"\nkind = "gauge"\nclass = "x"\nhelp = "x"\n'


def error_of(tmp_path: Path, name: str, read: object) -> str:
    with pytest.raises(UsageError) as error:
        read()  # type: ignore[operator]
    assert name in str(error.value)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"time": TIME, "gpu.power": [1.0, 2.0]}, "column 'entity' is missing"),
        ({"entity": ["gpu:a", "gpu:b"], "gpu.power": [1.0, 2.0]}, "column 'time' is missing"),
        ({"time": TIME, "entity": ["gpu:a", "gpu:b"]}, "expected at least one signal"),
        ({"time": TIME, "entity": ["gpu:a", "gpu:b"], "gpu.powr": [1.0, 2.0]}, "did you mean 'gpu.power'?"),
        ({"time": TIME, "entity": ["gpu:a", "gpu:b"], "zzz": [1.0, 2.0]}, "declare it in signals.toml"),
        ({"time": TIME, "entity": ["gpu:a", "b"], "gpu.power": [1.0, 2.0]}, "row 2: entity = 'b'; expected kind:name"),
        ({"time": TIME, "entity": ["gpu:a", None], "gpu.power": [1.0, 2.0]}, "row 2: entity is missing"),
        (
            {"time": TIME, "entity": ["gpu:a", "gpu:b"], "gpu.power": ["1", "2"]},
            "'gpu.power' holds string; expected numbers",
        ),
        ({"time": TIME, "entity": [1, 2], "gpu.power": [1.0, 2.0]}, "'entity' holds int64; expected text"),
        ({"time": ["a", "b"], "entity": ["gpu:a", "gpu:b"], "gpu.power": [1.0, 2.0]}, "expected timestamp"),
        (
            {
                "time": pa.array([0, None], pa.timestamp("us", "UTC")),
                "entity": ["gpu:a", "gpu:b"],
                "gpu.power": [1.0, 2.0],
            },
            "row 2: time is missing",
        ),
        (
            {"time": TIME, "entity": ["gpu:a", "gpu:b"], "gpu.power": [1.0, 2.0], "nic.state": [1, 1]},
            "expected one class per file",
        ),
    ],
)
def test_a_bad_parquet_file_is_reported_with_column_and_row(
    tmp_path: Path, columns: dict[str, object], message: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "bad.parquet")
    assert message in error_of(tmp_path, "bad.parquet", lambda: Recording([tmp_path / "bad.parquet"]).load())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 'time' is missing; found none"),
        (
            "time,entity,gpu.power\n2026-01-01T00:00:00Z,gpu:a,1\nyesterday,gpu:a,2\n",
            "line 3: time = 'yesterday'; expected ISO",
        ),
        ("time,entity,gpu.power\n2026-01-01T00:00:00Z,gpu:a,warm\n", "line 2: gpu.power = 'warm'; expected a number"),
        ("time,entity,gpu.power\n2026-01-01T00:00:00Z,gpu:a\n", "is not a readable CSV file"),
        ("time,entity,gpu.power\n,gpu:a,1\n", "row 1: time is missing"),
        ("time,entity,gpu.power\n2026-01-01T00:00:00Z,a,1\n", "row 1: entity = 'a'"),
        ("time,entity,gpu.power,gpu.power\n", "is there twice"),
    ],
)
def test_a_bad_csv_file_is_reported_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "odd.csv").write_text(text)
    assert message in error_of(tmp_path, "odd.csv", lambda: Recording([tmp_path / "odd.csv"]).load())


def test_a_csv_file_without_rows_is_an_empty_recording(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time,entity,gpu.power\n")
    assert Recording([tmp_path / "t.csv"]).load() == {}


def test_a_truncated_parquet_file_is_reported(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"time": TIME, "entity": ["gpu:a", "gpu:b"], "gpu.power": [1.0, 2.0]}), tmp_path / "cut.parquet"
    )
    data = (tmp_path / "cut.parquet").read_bytes()
    for length in (0, 3, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.parquet").write_bytes(data[:length])
        message = error_of(tmp_path, "cut.parquet", lambda: Recording([tmp_path / "cut.parquet"]))
        assert "was it truncated?" in message


def test_a_parquet_file_with_damaged_pages_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "hurt.parquet"
    entities = [f"gpu:{i}" for i in range(2000)]
    times = pa.array(range(2000), pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"time": times, "entity": entities, "gpu.power": [1.0 * i for i in range(2000)]}), path)
    data = bytearray(path.read_bytes())
    place = pq.read_metadata(path).row_group(0).column(2).dictionary_page_offset
    data[place : place + 400] = b"\xff" * 400
    path.write_bytes(data)
    error_of(tmp_path, "hurt.parquet", lambda: Recording([path]).load())


def test_a_missing_file_and_an_empty_list_are_reported(tmp_path: Path) -> None:
    assert "no such file" in error_of(tmp_path, "gone.parquet", lambda: Recording([tmp_path / "gone.parquet"]))
    assert "no such file" in error_of(tmp_path, tmp_path.name, lambda: Recording([tmp_path]))
    with pytest.raises(UsageError, match="at least one"):
        Recording([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 1\n[[[", "is not TOML"),
        (SIGNAL, "version = None; expected version = 1"),
        ("version = 2\n", "version = 2"),
        ("version = 1\n" + SIGNAL.replace('unit = "1"\n', ""), '[signals."x.y"]: unit is missing'),
        ("version = 1\n" + SIGNAL.replace('"gauge"', '"gage"'), "kind = 'gage': did you mean 'gauge'?"),
        ("version = 1\n" + SIGNAL + 'harn = "up"\n', "harn: no such key; did you mean 'harm'?"),
        ("version = 1\n" + SIGNAL + 'harm = "sideways"\n', "harm = 'sideways'"),
        ("version = 1\n" + SIGNAL + "valid = [1, 0]\n", "valid = [1, 0]; expected [lowest, highest]"),
        ("version = 1\n" + SIGNAL + "valid = 3\n", "valid = 3"),
        ("version = 1\n" + SIGNAL + "interval = 0\n", "interval = 0; expected seconds above 0"),
        ("version = 1\n" + SIGNAL + 'states = ["a"]\nnormal = ["b"]\n', "normal = ['b']; expected some of states"),
        ("version = 1\n" + SIGNAL + "states = 3\n", "states = 3; expected a list of texts"),
        ("version = 1\nsignal = 3\n", "did you mean 'signals'?"),
        ("version = 1\nsignals = 3\n", "signals = 3"),
        ('version = 1\n[signals]\n"x.y" = 3\n', "is 3; expected a table"),
    ],
)
def test_a_bad_signals_file_is_reported_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    assert message in error_of(tmp_path, "bad.toml", lambda: read_signals(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[[", "is not TOML"),
        ("[node]\n", "version = None"),
        ("version = '1'\n", "version = '1'"),
        ('version = 1\n[node]\na = ["node:b"]\nb = ["node:a"]\n', "circle"),
        ('version = 1\n[node]\na = "rack:b"\n', '[node] "a" = '),
        ('version = 1\n[node]\na = ["b"]\n', "expected a list of entities"),
        ("version = 1\nnode = 3\n", "node = 3; expected a table"),
        ('version = 1\n[attributes]\n"node:a" = 3\n', "[attributes]"),
    ],
)
def test_a_bad_topology_file_is_reported_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    assert message in error_of(tmp_path, "bad.toml", lambda: read_topology(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('{"entity": "gpu:a", "kind": "xid"}', "line 2: 'time' is missing"),
        ('{"time": "noon", "entity": "gpu:a", "kind": "xid"}', "line 2"),
        ('{"time": "2026-01-01T00:00:00Z", "entity": "a", "kind": "xid"}', "line 2: expected entity (kind:name)"),
        ('{"time": "2026-01-01T00:00:00Z", "entity": "gpu:a", "kind": "xid", "data": [1]}', "data (object)"),
        ("[1]", "line 2"),
    ],
)
def test_a_bad_event_is_reported_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    good = '{"time": "2026-01-01T00:00:00Z", "entity": "gpu:a", "kind": "xid", "data": {"code": 79}}'
    (tmp_path / "bad.jsonl").write_text(f"{good}\n{line}\n")
    assert message in error_of(tmp_path, "bad.jsonl", lambda: read_events([tmp_path / "bad.jsonl"]))


def test_a_missing_file_or_one_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"version = 1 # \xe9\xff")
    assert "UTF-8" in error_of(tmp_path, "latin.toml", lambda: read_signals(tmp_path / "latin.toml"))
    assert "cannot be read" in error_of(tmp_path, "gone.toml", lambda: read_topology(tmp_path / "gone.toml"))


def test_an_output_folder_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    error_of(tmp_path, "taken", lambda: RecordingWriter(tmp_path / "taken"))
