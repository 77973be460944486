"""What only the spool transport does: cursors, vanished folders, bounded open files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from agents.spool import Spool
from pipeline import wire
from pipeline.transport import Partition, segments
from pipeline.transport import spool as spool_transport
from pipeline.transport.spool import SpoolTransport


def filled(folder: Path, node: str = "n1", count: int = 5, **bounds: int) -> None:
    with Spool(folder, node, "telemetry.v1", free_bytes=0, **bounds) as spool:
        spool.append_many([b"%d" % i for i in range(count)], wire.TELEMETRY_KIND, 0)


def cursor(folder: Path) -> int | None:
    found = list(folder.glob("*/*/*/pipeline.cursor"))
    return json.loads(found[0].read_text())["next"] if found else None


def test_a_cursor_is_written_at_most_once_a_second_and_in_full_at_close(tmp_path: Path) -> None:
    filled(tmp_path)
    now = 100.0
    transport = SpoolTransport(tmp_path, monotonic=lambda: now)
    (partition,) = transport.partitions()
    transport.committed(partition, 1)
    assert cursor(tmp_path) == 1
    transport.committed(partition, 2)
    assert cursor(tmp_path) == 1
    now += 1.0
    transport.committed(partition, 3)
    assert cursor(tmp_path) == 3
    transport.committed(partition, 5)
    transport.close()
    assert cursor(tmp_path) == 5


def test_a_damaged_cursor_keeps_segments_instead_of_losing_them(tmp_path: Path) -> None:
    filled(tmp_path, count=500, segment_bytes=1000)
    (folder,) = segments.epoch_folders(tmp_path / "n1" / "telemetry.v1")
    (folder / "pipeline.cursor").write_bytes(b"\0\0\0")
    before = segments.segments(folder)
    filled(tmp_path, count=1, segment_bytes=1000)
    assert segments.segments(folder)[: len(before)] == before


def test_records_beyond_the_mark_are_not_read(tmp_path: Path) -> None:
    filled(tmp_path, count=5)
    (folder,) = segments.epoch_folders(tmp_path / "n1" / "telemetry.v1")
    (folder / "mark").write_bytes(segments.pack_mark(segments.Mark(3, bytes(16))))
    transport = SpoolTransport(tmp_path)
    (partition,) = transport.partitions()
    assert transport.bounds(partition) == (0, 3)
    assert [m.offset for m in transport.read(partition, 0, 100, 1 << 20)] == [0, 1, 2]
    assert transport.read(partition, 3, 100, 1 << 20) == []
    transport.close()


def test_a_mark_caught_in_the_middle_of_a_write_leaves_what_was_known(tmp_path: Path) -> None:
    filled(tmp_path, count=5)
    (folder,) = segments.epoch_folders(tmp_path / "n1" / "telemetry.v1")
    transport = SpoolTransport(tmp_path)
    (partition,) = transport.partitions()
    assert transport.bounds(partition) == (0, 5)
    whole = (folder / "mark").read_bytes()
    (folder / "mark").write_bytes(whole[:20] + bytes(12))
    assert transport.bounds(partition) == (0, 5)
    transport.close()


def test_no_folder_yet_is_unreachable_and_has_no_partitions(tmp_path: Path) -> None:
    transport = SpoolTransport(tmp_path / "absent")
    assert transport.partitions() == ()
    assert "no agent has run here" in str(transport.reachable())


def test_a_folder_that_vanished_reads_as_empty(tmp_path: Path) -> None:
    filled(tmp_path)
    transport = SpoolTransport(tmp_path)
    (partition,) = transport.partitions()
    shutil.rmtree(tmp_path / "n1")
    assert transport.partitions() == ()
    assert transport.bounds(partition) == (0, 0)
    assert transport.read(partition, 0, 1, 1) == []
    transport.committed(partition, 3)
    transport.close()


def test_a_stranger_in_the_folder_is_passed_over(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "n1" / "telemetry.v1" / "backup").mkdir()
    (tmp_path / "lost+found").mkdir()
    (partition,) = SpoolTransport(tmp_path).partitions()
    assert (partition.topic, partition.name) == ("telemetry.v1", "n1")


def test_open_files_stay_bounded_however_many_nodes_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_transport, "OPEN", 4)
    for i in range(12):
        filled(tmp_path, node=f"n{i}", count=3)
    before = len(os.listdir("/proc/self/fd"))
    transport = SpoolTransport(tmp_path)
    for offset in range(3):
        for partition in transport.partitions():
            (message,) = transport.read(partition, offset, 1, 100)
            assert message.value.endswith(b"%d" % offset)
    assert len(os.listdir("/proc/self/fd")) - before <= 4
    transport.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_unknown_partition_has_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    assert SpoolTransport(tmp_path).read(Partition("telemetry.v1", "n9", "0" * 32), 0, 1, 1) == []
