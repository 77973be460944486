"""File systems: the list of mounts, calls that hang, and a real FUSE file system that does not answer."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData, Reading
from agents.collectors.host.storage import MAX_FILE_SYSTEMS, Filesystems, TimedCalls, parse_mounts, select_mounts
from tests.agents.fuse import Fuse

LINES = rb"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
40 27 259:9 / /scratch rw,noatime shared:7 - xfs /dev/md0 ro,noquota
41 27 0:60 / /data rw,relatime shared:8 - nfs4 store:/data rw,vers=4.2,hard
42 27 0:60 /sub /data/again rw,relatime shared:8 - nfs4 store:/data rw,vers=4.2,hard
43 27 0:61 / /my\040models ro,relatime - lustre 10.0.0.1@o2ib:/lus rw,flock
44 27 0:62 / /var/lib/kubelet/pods/x rw - nfs store:/pods rw
45 27 0:63 / /dev/shm rw - tmpfs tmpfs rw
"""


def proc(root: Path, text: bytes = LINES) -> Path:
    (root / "self").mkdir(exist_ok=True)
    (root / "self" / "mountinfo").write_bytes(text)
    return root


def statistics(blocks: int = 1000) -> os.statvfs_result:
    return os.statvfs_result((65536, 4096, blocks, 400, 300, 50, 20, 20, 0, 255))


def opened(root: Path, query: Callable[[bytes], os.statvfs_result], **settings: object) -> Filesystems:
    made = Filesystems(proc=root, **settings)  # type: ignore[arg-type]
    made._statvfs = query
    made.open("n1")
    return made


def column(reading: Reading, name: str) -> dict[str, float]:
    values = reading.columns[f"filesystem.{name}"]
    return {e.partition("n1.")[2]: float(v) for e, v in zip(reading.entities, values, strict=True)}


def test_real_file_systems_are_reported_once_each_and_others_are_not(tmp_path: Path) -> None:
    collector = opened(proc(tmp_path), lambda _: statistics())
    node, below = collector.read()
    assert below.entities == tuple(f"filesystem:n1.{p}" for p in ("/", "/data", "/my models", "/scratch"))
    assert set(column(below, "used").values()) == {600 * 4096}
    assert set(column(below, "available").values()) == {300 * 4096}
    assert set(column(below, "total").values()) == {1000 * 4096}
    assert set(column(below, "files_used").values()) == {30}
    assert set(column(below, "files_total").values()) == {50}
    assert set(column(below, "mounted").values()) == {1}
    assert {n: v.tolist() for n, v in node.columns.items()} == {
        "node.disk_used": [600 * 4096],
        "node.disk_total": [1000 * 4096],
    }
    found = collector.inventory()
    assert found.keys() == {"node:n1", *below.entities}
    assert found["filesystem:n1./data"].attributes == {"type": "nfs4", "source": "store:/data"}


def test_read_only_is_the_file_system_and_not_the_mount_point(tmp_path: Path) -> None:
    """A mount point that is read-only for us, as under a hardened unit, is not a sign of a failed disk."""
    _, below = opened(proc(tmp_path), lambda _: statistics()).read()
    assert column(below, "read_only") == {"/": 0, "/data": 0, "/my models": 0, "/scratch": 1}


def test_a_file_system_without_inode_limit_reports_none(tmp_path: Path) -> None:
    endless = os.statvfs_result((65536, 4096, 1000, 400, 300, 0, 0, 0, 0, 255))
    _, below = opened(proc(tmp_path), lambda _: endless).read()
    assert all(np.isnan(v) for v in column(below, "files_total").values())


def test_a_missing_required_mount_is_reported_and_any_type_is_included(tmp_path: Path) -> None:
    collector = opened(proc(tmp_path), lambda _: statistics(), types=(), required=("/models/", "/dev/shm"))
    _, below = collector.read()
    assert column(below, "mounted") == {"/dev/shm": 1, "/models": 0}
    assert np.isnan(column(below, "responds")["/models"])
    assert column(below, "responds")["/dev/shm"] == 1
    assert collector.inventory()["filesystem:n1./models"].attributes == {}


def test_errors_differ_from_missing_permission(tmp_path: Path) -> None:
    def query(point: bytes) -> os.statvfs_result:
        if point == b"/data":
            raise OSError(errno.ESTALE, "Stale file handle")
        if point == b"/scratch":
            raise PermissionError(errno.EACCES, "Permission denied")
        return statistics()

    _, below = opened(proc(tmp_path), query).read()
    responds = column(below, "responds")
    assert (responds["/"], responds["/data"]) == (1, 2)
    assert np.isnan(responds["/scratch"])
    assert np.isnan(column(below, "used")["/data"])


def test_the_last_mount_at_a_point_hides_those_before_it() -> None:
    text = b"1 0 8:1 / /data rw - ext4 /dev/sda1 rw\n2 0 0:9 / /data rw - tmpfs tmpfs rw\n"
    assert select_mounts(parse_mounts(text), ("ext4",), ()) == {}


def test_the_number_of_file_systems_is_bounded_and_required_ones_come_first(tmp_path: Path) -> None:
    many = b"".join(b"%d 1 8:%d / /a%d rw - ext4 /dev/x rw\n" % (i, i, i) for i in range(2 * MAX_FILE_SYSTEMS))
    collector = opened(proc(tmp_path, many), lambda _: statistics(), required=("/z",))
    _, below = collector.read()
    assert len(below.entities) == MAX_FILE_SYSTEMS
    assert column(below, "mounted")["/z"] == 0


def test_without_a_list_of_mounts_there_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="expected the list of mounts"):
        Filesystems(proc=tmp_path).open("n1")


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[Fuse]:
    made = Fuse(tmp_path / "stuck")
    made.point.mkdir()
    made.mount()
    yield made
    made.unmount()


def test_a_hung_file_system_is_reported_while_the_others_continue(fuse: Fuse) -> None:
    collector = Filesystems(types=("fuse.stuck", "ext4", "xfs", "overlay", "btrfs"), patience=2.0)
    collector.open("n1")
    name = str(fuse.point)
    _, below = collector.read()
    assert column(below, "responds")[name] == 1
    assert column(below, "total")[name] == 1000 * 4096
    fuse.hangs = True
    collector.patience = 0.3
    began = time.monotonic()
    node, below = collector.read()
    assert time.monotonic() - began < 5
    assert column(below, "responds")[name] == 0
    assert column(below, "latency")[name] >= 0.3
    assert np.isnan(column(below, "used")[name])
    assert node.columns["node.disk_total"][0] > 0
    threads = threading.active_count()
    _, below = collector.read()
    assert column(below, "latency")[name] >= 0.6  # the same call, still under way
    assert threading.active_count() <= threads


# --- calls -----------------------------------------------------------------------------------------------------------


def test_a_hung_call_is_not_repeated_before_it_returned() -> None:
    gate, made = threading.Event(), []
    calls: TimedCalls[int] = TimedCalls()

    def hang() -> int:
        made.append(1)
        gate.wait()
        return 7

    first = calls.run({"a": hang, "b": lambda: 2}, 0.1)
    assert (first["a"].seconds, first["b"].value) == (None, 2)
    assert calls.run({"a": hang}, 0.0)["a"].seconds is None
    assert len(made) == 1
    gate.set()
    until = time.monotonic() + 10
    while (found := calls.run({"a": hang}, 1.0)["a"]).value != 7:
        assert time.monotonic() < until
    assert found.error is None


def test_an_error_of_a_call_is_its_result() -> None:
    def fail() -> int:
        raise OSError(errno.EIO, "Input/output error")

    found = TimedCalls[int]().run({"a": fail}, 5.0)["a"]
    assert (found.value, found.error is not None and found.error.errno) == (None, errno.EIO)


def test_a_call_without_a_thread_is_made_at_the_next_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls: TimedCalls[int] = TimedCalls()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="thread"):
            calls.run({"a": lambda: 1}, 5.0)
    assert calls.run({"a": lambda: 2}, 5.0)["a"].value == 2


# --- the list of mounts ----------------------------------------------------------------------------------------------

LINE = st.lists(st.sampled_from([b"1", b"8:1", b"/", b"/a\\040b", b"rw", b"-", b"ext4", b"ro,x", b"\\777", b"\xff"]))


@given(st.one_of(st.binary(max_size=200), st.lists(LINE.map(b" ".join)).map(b"\n".join)))
def test_no_bytes_break_the_parser_of_mounts(text: bytes) -> None:
    found = parse_mounts(text)
    assert len(found) <= text.count(b"\n") + 1
    assert len(select_mounts(found, ("*",), ())) <= len(found)


def test_a_line_of_this_kernel_is_parsed() -> None:
    here = parse_mounts(Path("/proc/self/mountinfo").read_bytes())
    assert [m for m in here if m.type == "proc" and m.point == b"/proc"]
