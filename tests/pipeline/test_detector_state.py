"""The state of the detectors is in a file that the store names: whole or not at all, whatever happens in between."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pipeline.store.detector_state import delete_other_states, read_state, state_folder, write_state

PIECES = [("shared", [b"abc"]), ("thermal", [b"", memoryview(bytes(range(200))), b"x\ny"]), ("empty", [])]
JOINED = {name: b"".join(buffers) for name, buffers in PIECES}


def files(store: Path) -> list[str]:
    return sorted(path.name for path in state_folder(store).iterdir())


def test_pieces_come_back_as_they_were_written(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    name = write_state(store, 17, PIECES)
    assert read_state(store, name) == JOINED
    assert files(store) == [name] == ["17.state"]


def test_only_the_owner_can_read_the_state(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    path = state_folder(store) / write_state(store, 17, PIECES)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)] == [0o600, 0o700]


def test_a_file_cut_at_any_byte_is_refused_or_lacks_its_last_pieces(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    path = state_folder(store) / write_state(store, 17, PIECES)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            found = read_state(store, path.name)
        except ValueError:
            continue
        assert found.items() <= JOINED.items()


@pytest.mark.parametrize("place", [0, 30, -1])
def test_a_changed_byte_is_an_error_that_names_the_file(tmp_path: Path, place: int) -> None:
    store = tmp_path / "store.duckdb"
    path = state_folder(store) / write_state(store, 17, PIECES[:2])
    content = bytearray(path.read_bytes())
    content[place] ^= 0x20
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"17\.state|Expecting|delimiter"):
        read_state(store, path.name)


def test_the_name_of_an_older_version_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="older version"):
        read_state(tmp_path / "store.duckdb", '{"format":3}')


@pytest.mark.parametrize("step", ["piece", "sync", "rename"])
def test_a_disk_that_refuses_leaves_the_file_before_as_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = tmp_path / "store.duckdb"
    kept = write_state(store, 17, PIECES)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def pieces():
        yield PIECES[0]
        if step == "piece":
            refuse()
        yield PIECES[1]

    if step != "piece":
        monkeypatch.setattr(os, {"sync": "fsync", "rename": "replace"}[step], refuse)
    with pytest.raises(OSError, match="No space"):
        write_state(store, 18, pieces())
    monkeypatch.undo()
    assert files(store) == [kept]
    assert read_state(store, kept) == JOINED


def test_what_a_killed_process_left_is_deleted_with_the_next_state(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    write_state(store, 17, PIECES)
    (state_folder(store) / "18.state.partial").write_bytes(b"half")
    name = write_state(store, 19, PIECES)
    delete_other_states(store, name)
    assert files(store) == [name]
