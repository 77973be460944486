"""Spool transport: cursors, removed folders, bounded open files."""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.node.spool.spool import Spool
from pipeline.transport import Partition, segments, wire
from pipeline.transport import spool as spool_transport
from pipeline.transport.spool import SpoolTransport
from tests.open_files import list_open


def fill_spool(folder: Path, node: str = "n1", count: int = 5, **bounds: int) -> None:
    with Spool(folder, node, "telemetry.v1", free_bytes=0, **bounds) as spool:
        spool.append_many([b"%d" % i for i in range(count)], wire.TELEMETRY_KIND, 0)


def read_cursor(folder: Path) -> int | None:
    found = list(folder.glob("*/*/*/pipeline.cursor"))
    return json.loads(found[0].read_text())["next"] if found else None


def test_a_cursor_is_written_at_most_every_ten_seconds_and_in_full_at_close(tmp_path: Path) -> None:
    fill_spool(tmp_path)
    now = 100.0
    transport = SpoolTransport(tmp_path, monotonic=lambda: now)
    (partition,) = transport.partitions()
    transport.commit_offset(partition, 1)
    assert read_cursor(tmp_path) == 1
    transport.commit_offset(partition, 2)
    assert read_cursor(tmp_path) == 1
    now += 10.0
    transport.commit_offset(partition, 3)
    assert read_cursor(tmp_path) == 3
    transport.commit_offset(partition, 4)
    now += 10.0
    transport.partitions()  # nothing more was stored
    assert read_cursor(tmp_path) == 4
    transport.commit_offset(partition, 5)
    transport.close()
    assert read_cursor(tmp_path) == 5


def test_a_cursor_that_passed_a_segment_is_written_after_a_second(tmp_path: Path) -> None:
    fill_spool(tmp_path, count=500, segment_bytes=1000)
    now = 100.0
    transport = SpoolTransport(tmp_path, monotonic=lambda: now)
    (partition,) = transport.partitions()
    read = 0
    for wanted in (1, 100, 200):
        while read < wanted:
            read += len(transport.read(partition, read, 1, 1 << 20))
        transport.commit_offset(partition, read)
        assert read_cursor(tmp_path) == read
        now += 1.0
    transport.close()


def test_a_damaged_cursor_keeps_segments_instead_of_losing_them(tmp_path: Path) -> None:
    fill_spool(tmp_path, count=500, segment_bytes=1000)
    (folder,) = segments.epoch_folders(tmp_path / "n1" / "telemetry.v1")
    (folder / "pipeline.cursor").write_bytes(b"\0\0\0")
    before = segments.list_segments(folder)
    fill_spool(tmp_path, count=1, segment_bytes=1000)
    assert segments.list_segments(folder)[: len(before)] == before


def test_records_beyond_the_mark_are_not_read(tmp_path: Path) -> None:
    fill_spool(tmp_path, count=5)
    (folder,) = segments.epoch_folders(tmp_path / "n1" / "telemetry.v1")
    (folder / "mark").write_bytes(segments.pack_mark(segments.Mark(3, bytes(16))))
    transport = SpoolTransport(tmp_path)
    (partition,) = transport.partitions()
    assert transport.bounds(partition) == (0, 3)
    assert [m.offset for m in transport.read(partition, 0, 100, 1 << 20)] == [0, 1, 2]
    assert transport.read(partition, 3, 100, 1 << 20) == []
    transport.close()


def test_a_half_written_mark_keeps_the_previous_one(tmp_path: Path) -> None:
    fill_spool(tmp_path, count=5)
    (folder,) = segments.epoch_folders(tmp_path / "n1" / "telemetry.v1")
    transport = SpoolTransport(tmp_path)
    (partition,) = transport.partitions()
    assert transport.bounds(partition) == (0, 5)
    whole = (folder / "mark").read_bytes()
    (folder / "mark").write_bytes(whole[:20] + bytes(12))
    assert transport.bounds(partition) == (0, 5)
    transport.close()


def test_a_missing_folder_is_unreachable_and_has_no_partitions(tmp_path: Path) -> None:
    transport = SpoolTransport(tmp_path / "absent")
    assert transport.partitions() == ()
    assert "no agent has run here" in str(transport.find_problem())


def test_a_removed_folder_reads_as_empty(tmp_path: Path) -> None:
    fill_spool(tmp_path)
    transport = SpoolTransport(tmp_path)
    (partition,) = transport.partitions()
    shutil.rmtree(tmp_path / "n1")
    assert transport.partitions() == ()
    assert transport.bounds(partition) == (0, 0)
    assert transport.read(partition, 0, 1, 1) == []
    transport.commit_offset(partition, 3)
    transport.close()


def test_an_unknown_file_in_the_folder_is_skipped(tmp_path: Path) -> None:
    fill_spool(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "n1" / "telemetry.v1" / "backup").mkdir()
    (tmp_path / "lost+found").mkdir()
    (partition,) = SpoolTransport(tmp_path).partitions()
    assert (partition.topic, partition.name) == ("telemetry.v1", "n1")


def test_open_files_are_bounded_for_any_number_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_transport, "MAX_OPEN", 4)
    for i in range(12):
        fill_spool(tmp_path, node=f"n{i}", count=3)
    transport = SpoolTransport(tmp_path)
    for offset in range(3):
        for partition in transport.partitions():
            (message,) = transport.read(partition, offset, 1, 100)
            assert message.value.endswith(b"%d" % offset)
    assert 0 < len(list_open(tmp_path)) <= 4
    transport.close()
    assert list_open(tmp_path) == []


def test_an_unknown_partition_is_empty(tmp_path: Path) -> None:
    fill_spool(tmp_path)
    assert SpoolTransport(tmp_path).read(Partition("telemetry.v1", "n9", "0" * 32), 0, 1, 1) == []


@pytest.fixture
def user_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder used without root rights, so that file modes apply."""
    with tempfile.TemporaryDirectory() as name:
        root = os.geteuid() == 0
        if root:
            os.chmod(name, 0o777)
            os.seteuid(65534)  # the user id of `nobody`
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)
            for folder, _, _ in os.walk(name):
                os.chmod(folder, 0o700)


def read_by_node(transport: SpoolTransport) -> dict[str, int]:
    return {p.name: len(transport.read(p, 0, 100, 1 << 20)) for p in transport.partitions()}


def test_an_unwritable_cursor_is_reported_and_tried_again(user_folder: Path) -> None:
    fill_spool(user_folder)
    now = 100.0
    transport = SpoolTransport(user_folder, monotonic=lambda: now)
    (partition,) = transport.partitions()
    (folder,) = segments.epoch_folders(user_folder / "n1" / "telemetry.v1")
    folder.chmod(0o500)
    transport.commit_offset(partition, 1)
    problem = str(transport.find_problem())
    assert "pipeline.cursor: cannot be written: Permission denied" in problem
    assert "free disk space, or make the folder writable for the pipeline's user" in problem
    folder.chmod(0o700)
    assert transport.partitions() == (partition,)
    assert read_cursor(user_folder) is None
    now += 1.0
    assert transport.partitions() == (partition,)
    assert read_cursor(user_folder) == 1
    assert transport.find_problem() is None
    folder.chmod(0o500)
    transport.commit_offset(partition, 2)
    transport.close()
    assert read_cursor(user_folder) == 1


def test_a_cursor_whose_temporary_name_is_taken_never_raises(tmp_path: Path) -> None:
    fill_spool(tmp_path)
    transport = SpoolTransport(tmp_path)
    (partition,) = transport.partitions()
    (folder,) = segments.epoch_folders(tmp_path / "n1" / "telemetry.v1")
    (folder / "pipeline.cursor.tmp").mkdir()
    transport.commit_offset(partition, 1)
    assert "Is a directory" in str(transport.find_problem())
    transport.close()


def test_a_spool_removed_between_reading_and_storing_is_not_an_error(tmp_path: Path) -> None:
    fill_spool(tmp_path)
    fill_spool(tmp_path, node="n2")
    transport = SpoolTransport(tmp_path)
    first, second = transport.partitions()
    assert len(transport.read(first, 0, 100, 1 << 20)) == 5
    shutil.rmtree(tmp_path / "n1")
    transport.commit_offset(first, 5)
    assert "n1" in str(transport.find_problem())
    assert transport.partitions() == (second,)
    assert transport.find_problem() is None
    transport.commit_offset(first, 5)
    transport.close()


@pytest.mark.parametrize("depth", ["n1", "n1/telemetry.v1", "n1/telemetry.v1/0*", "n1/telemetry.v1/*/mark"])
@pytest.mark.parametrize("seen", [False, True])
def test_an_unreadable_node_is_skipped_reported_and_read_again_later(user_folder: Path, depth: str, seen: bool) -> None:
    fill_spool(user_folder)
    fill_spool(user_folder, node="n2")
    transport = SpoolTransport(user_folder)
    if seen:
        assert len(transport.partitions()) == 2
    (barred,) = user_folder.glob(depth)
    barred.chmod(0)
    assert read_by_node(transport).get("n1", 0) == 0
    assert read_by_node(transport)["n2"] == 5
    problem = str(transport.find_problem())
    assert str(user_folder / "n1") in problem
    assert "Permission denied" in problem
    assert "is skipped" in problem or "are skipped" in problem
    for partition in transport.partitions():
        transport.bounds(partition)
    barred.chmod(0o700)
    assert read_by_node(transport) == {"n1": 5, "n2": 5}
    assert transport.find_problem() is None
    transport.close()


def test_an_unreadable_spool_directory_is_reported(user_folder: Path) -> None:
    inner = user_folder / "inner"
    fill_spool(inner / "spool")
    inner.chmod(0)
    transport = SpoolTransport(inner / "spool")
    assert transport.partitions() == ()
    assert "cannot be listed: Permission denied" in str(transport.find_problem())


def test_a_link_to_itself_is_skipped(tmp_path: Path) -> None:
    fill_spool(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    transport = SpoolTransport(tmp_path)
    assert [p.name for p in transport.partitions()] == ["n1"]
    assert transport.find_problem() is None


def open_segments(folder: Path) -> list[str]:
    return [name for name in list_open(folder) if ".seg" in name]


def test_a_segment_that_was_read_is_closed_so_that_unlinking_it_frees_its_space(tmp_path: Path) -> None:
    now = 100.0
    with Spool(tmp_path, "n1", "telemetry.v1", free_bytes=0, segment_bytes=1000) as spool:
        transport = SpoolTransport(tmp_path, monotonic=lambda: now)
        offset = 0
        for _ in range(20):
            spool.append_many([bytes(100)] * 7, wire.TELEMETRY_KIND, 0)
            spool.sync()
            (partition,) = transport.partitions()
            while messages := transport.read(partition, offset, 4, 1 << 20):
                offset += len(messages)
            assert len(open_segments(tmp_path)) == 1
            assert not open_segments(tmp_path)[0].endswith("(deleted)")
            transport.commit_offset(partition, offset)
            now += 1.0
    assert len(list(tmp_path.glob("*/*/*/*.seg"))) <= 2  # the writer unlinked the segments that were read
    transport.close()
    assert open_segments(tmp_path) == []


def test_running_out_of_file_descriptors_is_not_attributed_to_a_node_and_close_never_raises(tmp_path: Path) -> None:
    fill_spool(tmp_path)
    transport = SpoolTransport(tmp_path)
    (partition,) = transport.partitions()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            transport.read(partition, 0, 100, 1 << 20)
        transport.commit_offset(partition, 1)
        transport.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "cannot be written: Too many open files" in str(transport.find_problem())


def test_open_files_of_a_removed_partition_are_closed(tmp_path: Path) -> None:
    fill_spool(tmp_path)
    fill_spool(tmp_path, node="n2")
    transport = SpoolTransport(tmp_path)
    assert read_by_node(transport) == {"n1": 5, "n2": 5}
    shutil.rmtree(tmp_path / "n1")
    transport.partitions()
    assert len(open_segments(tmp_path)) == 1
    assert "(deleted)" not in open_segments(tmp_path)[0]
    transport.close()
