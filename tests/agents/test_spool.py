"""The spool keeps what it acknowledged, in order, or counts what it dropped."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.node.spool.spool import Spool
from pipeline.model.errors import GapError, SpoolError
from pipeline.transport import Message, segments, wire
from pipeline.transport.spool import SpoolTransport
from tests.examples import examples

Drain = Callable[[Path], tuple[list[Message], list[tuple[int, int, str]]]]
ROOT = Path(__file__).parents[2]


def spool_at(directory: Path, **bounds: int) -> Spool:
    return Spool(directory, "n1", "telemetry.v1", **{"free_bytes": 0, **bounds})


def append_bodies(spool: Spool, *bodies: bytes) -> None:
    for body in bodies:
        spool.append(body, wire.TELEMETRY_KIND, sent=1)
    spool.sync()


def body_of(message: Message) -> bytes:
    return message.value[wire.ENVELOPE_BYTES :]


def bodies_of(messages: list[Message]) -> list[bytes]:
    return [body_of(m) for m in messages]


def keys_of(messages: list[Message]) -> list[tuple[bytes, int]]:
    opened = [wire.open_envelope(m.value) for m in messages]
    return [(e.epoch, e.sequence) for e in opened]


def last_segment(directory: Path) -> Path:
    return max(directory.glob("n1/telemetry.v1/*/*.seg"))


def test_synced_messages_are_read_back_in_order_with_their_sequence(tmp_path: Path, drain: Drain) -> None:
    with spool_at(tmp_path) as spool:
        assert spool.append_many([b"a", b"b"], wire.EVENTS_KIND, sent=7, simulated=True) == range(2)
        spool.sync()
        epoch = spool.epoch
    messages, gaps = drain(tmp_path)
    envelope = wire.open_envelope(messages[1].value)
    assert envelope == wire.Envelope(wire.EVENTS_KIND, True, epoch, 1, 7)
    assert bodies_of(messages) == [b"a", b"b"]
    assert gaps == []


def test_unsynced_messages_are_invisible(tmp_path: Path, drain: Drain) -> None:
    with spool_at(tmp_path) as spool:
        append_bodies(spool, b"durable")
        spool.append(b"waiting", wire.TELEMETRY_KIND, sent=1)
        assert bodies_of(drain(tmp_path)[0]) == [b"durable"]
    assert bodies_of(drain(tmp_path)[0]) == [b"durable", b"waiting"]


def test_sequences_and_epoch_survive_a_restart(tmp_path: Path, drain: Drain) -> None:
    epochs = set()
    for i in range(3):
        with spool_at(tmp_path) as spool:
            append_bodies(spool, b"%d" % i)
            epochs.add(spool.epoch)
            assert spool.next == i + 1
    assert len(epochs) == 1
    assert bodies_of(drain(tmp_path)[0]) == [b"0", b"1", b"2"]


def test_a_second_writer_is_refused_with_the_fix(tmp_path: Path) -> None:
    with spool_at(tmp_path), pytest.raises(SpoolError, match=r"another process writes this spool; stop it, or set"):
        spool_at(tmp_path)
    spool_at(tmp_path).close()


@pytest.mark.parametrize("node", ["", ".", "..", "a/b", "../../etc", "a\0b", "x" * 201])
def test_a_node_name_that_would_leave_the_folder_is_refused(tmp_path: Path, node: str) -> None:
    with pytest.raises(SpoolError, match="node or topic"):
        Spool(tmp_path, node, "telemetry.v1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("node", ["n042", "gpu node", "hôte", "a%2Fb", "-", "CON", ".hidden"])
def test_any_other_node_name_is_read_back_as_it_was(tmp_path: Path, drain: Drain, node: str) -> None:
    with Spool(tmp_path, node, "telemetry.v1", free_bytes=0) as spool:
        append_bodies(spool, b"x")
    assert drain(tmp_path)[0][0].partition.name == node


def test_a_tail_torn_at_any_byte_is_cut_and_no_sequence_identifies_two_messages(tmp_path: Path, drain: Drain) -> None:
    whole_folder = tmp_path / "whole"
    with spool_at(whole_folder) as spool:
        append_bodies(spool, b"first", b"second")
        seen = spool.next
        whole = last_segment(whole_folder).read_bytes()
        append_bodies(spool, b"third")
    tail = last_segment(whole_folder).read_bytes()[len(whole) :]
    for cut in range(len(tail)):
        _crashed_after(whole_folder, whole + tail[:cut], seen)
        with spool_at(whole_folder) as spool:
            assert spool.next == seen
            append_bodies(spool, b"after")
        messages, gaps = drain(whole_folder)
        assert bodies_of(messages) == [b"first", b"second", b"after"]
        assert len(set(keys_of(messages))) == 3
        assert gaps == []


def _crashed_after(directory: Path, segment: bytes, seen: int) -> None:
    """Sets the last segment and the mark as a writer killed during a write leaves them."""
    path = last_segment(directory)
    path.write_bytes(segment)
    mark = segments.read_mark(path.parent)
    assert mark is not None
    (path.parent / "mark").write_bytes(segments.pack_mark(segments.Mark(seen, mark.boot_id)))


def test_a_tail_torn_under_another_boot_starts_a_new_epoch(tmp_path: Path, drain: Drain) -> None:
    with spool_at(tmp_path) as spool:
        append_bodies(spool, b"first", b"second")
        epoch = spool.epoch
    path = last_segment(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    (path.parent / "mark").write_bytes(segments.pack_mark(segments.Mark(1, b"another boot id!")))
    with spool_at(tmp_path) as spool:
        assert spool.epoch != epoch
        append_bodies(spool, b"after")
    messages, gaps = drain(tmp_path)
    assert bodies_of(messages) == [b"first", b"after"]
    assert gaps == []


def test_a_lost_mark_starts_a_new_epoch_and_keeps_the_old_records(tmp_path: Path, drain: Drain) -> None:
    with spool_at(tmp_path) as spool:
        append_bodies(spool, b"first", b"second")
    (last_segment(tmp_path).parent / "mark").write_bytes(b"")
    assert drain(tmp_path) == ([], [])
    with spool_at(tmp_path) as spool:
        append_bodies(spool, b"after")
    assert bodies_of(drain(tmp_path)[0]) == [b"first", b"second", b"after"]


@pytest.mark.parametrize("reopened", [False, True])
def test_one_flipped_bit_anywhere_loses_one_record_as_a_counted_gap(
    tmp_path: Path, drain: Drain, reopened: bool
) -> None:
    bodies = [b"body %d" % i for i in range(4)]
    with spool_at(tmp_path) as spool:
        append_bodies(spool, *bodies)
    path = last_segment(tmp_path)
    whole, folders = path.read_bytes(), {path.parent}
    size = len(whole) // 4
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        if reopened and position % 16 == 0:
            spool_at(tmp_path).close()
        hit = position // size
        messages, gaps = drain(tmp_path)
        assert bodies_of(messages) == bodies[:hit] + bodies[hit + 1 :]
        assert gaps == [(hit, hit + 1, "damaged")]
    assert folders <= set(path.parent.parent.iterdir())


def test_damage_in_an_old_segment_does_not_stop_the_reader(tmp_path: Path, drain: Drain) -> None:
    with spool_at(tmp_path, segment_bytes=200) as spool:
        append_bodies(spool, *[b"%050d" % i for i in range(9)])
    first = min(tmp_path.glob("n1/telemetry.v1/*/*.seg"))
    first.write_bytes(b"\0" * first.stat().st_size)
    messages, gaps = drain(tmp_path)
    lost = gaps[0][1]
    assert gaps == [(0, lost, "damaged")]
    assert bodies_of(messages) == [b"%050d" % i for i in range(lost, 9)]


def test_the_size_limit_holds_and_dropped_messages_are_a_counted_gap(tmp_path: Path, drain: Drain) -> None:
    with spool_at(tmp_path, max_bytes=20_000, segment_bytes=4096) as spool:
        for i in range(300):
            append_bodies(spool, b"%0200d" % i)
            on_disk = sum(p.stat().st_size for p in tmp_path.glob("n1/telemetry.v1/*/*.seg"))
            assert on_disk == spool.size <= 20_000
        dropped = spool.dropped
    messages, gaps = drain(tmp_path)
    assert dropped + len(messages) == 300
    assert bodies_of(messages) == [b"%0200d" % i for i in range(dropped, 300)]
    assert gaps == []  # a new reader starts at the first record


def test_a_reader_behind_the_size_limit_gets_the_gap_with_its_cause(tmp_path: Path) -> None:
    with spool_at(tmp_path, max_bytes=8192, segment_bytes=1024) as spool:
        append_bodies(spool, b"first")
        transport = SpoolTransport(tmp_path)
        (partition,) = transport.partitions()
        for _ in range(200):
            append_bodies(spool, bytes(200))
        with pytest.raises(GapError) as caught:
            transport.read(partition, 0, 10, 1 << 20)
        assert (caught.value.first, caught.value.next_offset, caught.value.cause) == (0, spool.dropped, "spool full")
        assert transport.read(partition, spool.dropped, 1, 1 << 20)[0].offset == spool.dropped
        transport.close()


def test_segments_are_removed_only_after_every_reader_stored_them(tmp_path: Path) -> None:
    def first_kept() -> int:
        return min(int(p.stem) for p in tmp_path.glob("n1/telemetry.v1/*/*.seg"))

    with spool_at(tmp_path, segment_bytes=1024) as spool:
        append_bodies(spool, *[bytes(200)] * 50)
        fast, slow = SpoolTransport(tmp_path, "fast"), SpoolTransport(tmp_path, "slow")
        (partition,) = fast.partitions()
        fast.commit_offset(partition, 50)
        slow.commit_offset(partition, 20)
        fast.close()
        slow.close()
        append_bodies(spool, *[bytes(200)] * 10)
        assert 10 < first_kept() <= 20
        assert spool.dropped == 0


def test_an_old_epoch_is_removed_after_it_was_read_to_its_end(tmp_path: Path) -> None:
    with spool_at(tmp_path) as spool:
        append_bodies(spool, b"old")
    (last_segment(tmp_path).parent / "mark").unlink()
    spool_at(tmp_path).close()
    transport = SpoolTransport(tmp_path)
    old, new = transport.partitions()
    assert transport.bounds(old) == (0, 1)
    transport.commit_offset(old, 1)
    transport.close()
    with spool_at(tmp_path) as spool:
        append_bodies(spool, b"new")
        assert transport.partitions() == (new,)
    with spool_at(tmp_path):
        assert SpoolTransport(tmp_path).partitions() == (new,)


def test_free_space_below_the_minimum_leaves_one_segment(tmp_path: Path, drain: Drain) -> None:
    with spool_at(tmp_path, segment_bytes=1024, free_bytes=1 << 60) as spool:
        append_bodies(spool, *[bytes(200)] * 50)
        assert spool.size <= 2048
        assert "free_bytes" in str(spool.problem)
        assert spool.dropped + len(drain(tmp_path)[0]) == 50


def test_a_spool_whose_folder_was_removed_is_recreated_with_a_new_epoch(tmp_path: Path, drain: Drain) -> None:
    with spool_at(tmp_path) as spool:
        append_bodies(spool, b"first")
        epoch = spool.epoch
        shutil.rmtree(tmp_path / "n1")
        append_bodies(spool, b"lost")
        assert spool.dropped == 1
        append_bodies(spool, b"after", b"that")
        assert spool.epoch != epoch
        assert (spool.dropped, spool.next) == (1, 2)
    assert bodies_of(drain(tmp_path)[0]) == [b"after", b"that"]


def test_a_spool_that_cannot_be_recreated_counts_its_losses_and_writes_to_no_other_file(
    tmp_path: Path, drain: Drain
) -> None:
    precious = [tmp_path / f"precious{i}" for i in range(8)]
    with spool_at(tmp_path / "spool") as spool, contextlib.ExitStack() as others:
        append_bodies(spool, b"first")
        shutil.rmtree(tmp_path / "spool")
        (tmp_path / "spool").write_text("a file where the folder was")
        append_bodies(spool, b"lost")
        for path in precious:
            path.write_text("precious" * 10)
            others.enter_context(path.open("r+"))  # gets the descriptors of the files that the spool closed
        for i in range(3):
            append_bodies(spool, b"lost %d" % i, b"lost too")
            assert "cannot be recreated" in str(spool.problem)
            assert spool.dropped == 3 + 2 * i
        (tmp_path / "spool").unlink()
        append_bodies(spool, b"the last that is lost")
        assert spool.dropped == 8
        append_bodies(spool, b"after")
        assert (spool.problem, spool.dropped) == (None, 8)
    assert {path.read_text() for path in precious} == {"precious" * 10}
    assert bodies_of(drain(tmp_path / "spool")[0]) == [b"after"]


def test_a_removed_spool_that_another_writer_holds_counts_its_losses(tmp_path: Path, drain: Drain) -> None:
    with spool_at(tmp_path) as spool:
        append_bodies(spool, b"first")
        shutil.rmtree(tmp_path / "n1")
        with spool_at(tmp_path) as other:
            append_bodies(other, b"theirs")
            append_bodies(spool, b"lost")
            append_bodies(spool, b"lost as well")
            assert "another process writes this spool" in str(spool.problem)
            assert spool.dropped == 2
        append_bodies(spool, b"the last that is lost")
        append_bodies(spool, b"mine")
    assert bodies_of(drain(tmp_path)[0]) == [b"theirs", b"mine"]


def test_a_closed_spool_accepts_no_messages(tmp_path: Path) -> None:
    spool = spool_at(tmp_path)
    spool.close()
    spool.close()
    with pytest.raises(SpoolError, match="after close"):
        spool.append(b"x", wire.TELEMETRY_KIND, sent=1)


def test_a_segment_that_cannot_be_unlinked_on_a_full_disk_never_raises(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    with spool_at(small_disk, segment_bytes=32 << 10) as spool:
        append_bodies(spool, b"before")
        fill(small_disk / "hog")
        monkeypatch.setattr(Path, "unlink", refused)
        for i in range(5):
            append_bodies(spool, b"%04000d" % i)
        monkeypatch.undo()
        assert spool.problem is not None
        assert spool.dropped >= 5 - 4096 // 4000


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Records the system calls that write and sync: (call, suffix or name of the file)."""
    made: list[tuple[str, str]] = []

    def recorded(name: str) -> None:
        real = getattr(os, name)

        def call(handle: int, *rest: object) -> object:
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            made.append((name, path.suffix or ("folder" if path.is_dir() else path.name)))
            return real(handle, *rest)

        monkeypatch.setattr(os, name, call)

    for name in ("pwrite", "fdatasync", "fsync"):
        recorded(name)
    return made


def test_a_segment_is_durable_before_the_mark_of_readers_moves(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    with spool_at(tmp_path) as spool:
        calls.clear()
        append_bodies(spool, b"into a new segment")
        new = ["pwrite .seg", "fdatasync .seg", "fsync folder", "pwrite mark", "fdatasync mark", "pwrite mark"]
        assert [" ".join(call) for call in calls] == new
        calls.clear()
        append_bodies(spool, b"behind it")
        assert [" ".join(call) for call in calls] == ["pwrite .seg", "fdatasync .seg", "pwrite mark"]


def test_a_message_larger_than_the_wire_allows_is_refused(tmp_path: Path) -> None:
    with spool_at(tmp_path) as spool, pytest.raises(SpoolError, match="expected at most"):
        spool.append(bytes(wire.MAX_MESSAGE), wire.TELEMETRY_KIND, sent=1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_on_a_full_disk_the_oldest_is_dropped_with_a_count_and_the_newest_stays(small_disk: Path, drain: Drain) -> None:
    with spool_at(small_disk, segment_bytes=32 << 10) as spool:
        for i in range(400):
            append_bodies(spool, b"%04000d" % i)
        dropped = spool.dropped
    messages, gaps = drain(small_disk)
    assert dropped > 300
    assert gaps == []
    assert bodies_of(messages) == [b"%04000d" % i for i in range(dropped, 400)]


def fill(hog: Path) -> None:
    """Writes until the disk is full."""
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_disk_filled_by_others_costs_counted_records_but_never_stops_the_agent(
    small_disk: Path, drain: Drain
) -> None:
    with spool_at(small_disk, segment_bytes=32 << 10) as spool:
        append_bodies(spool, b"before")
        hog = small_disk / "hog"
        fill(hog)
        for i in range(20):
            append_bodies(spool, b"%04000d" % i)
        assert "No space" in str(spool.problem)
        hog.unlink()
        append_bodies(spool, b"after")
        assert spool.problem is None
        messages, _ = drain(small_disk)
        assert body_of(messages[-1]) == b"after"
        assert len(messages) + spool.dropped == 22


LIMITED = """
import resource, sys
from pathlib import Path
from agents.node.spool.spool import Spool
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
spool = Spool(Path(sys.argv[1]), "n1", "telemetry.v1", free_bytes=0)
for i in range(100):
    spool.append(b"%0300d" % i, 1, 1)
    spool.sync()
print(spool.dropped)
"""


def test_a_short_write_continues_in_a_new_segment(tmp_path: Path, drain: Drain) -> None:
    # -B: under this limit, Python would cut the compiled files of the modules it loads, without an error
    words = [sys.executable, "-B", "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "0\n", done.stderr
    for path in tmp_path.glob("n1/telemetry.v1/*/*.seg"):
        assert segments.scan_records(path.read_bytes(), int(path.stem))[1] == path.stat().st_size
    messages, gaps = drain(tmp_path)
    assert bodies_of(messages) == [b"%0300d" % i for i in range(100)]
    assert gaps == []


WRITER = """
import sys
from pathlib import Path
from agents.node.spool.spool import Spool
spool = Spool(Path(sys.argv[1]), "n1", "telemetry.v1", segment_bytes=4096, free_bytes=0)
while True:
    for _ in range(3):
        sequence = spool.append(b"x%0100d" % spool.next, 1, 1)
    spool.sync()
    print(sequence, flush=True)
"""


@pytest.mark.slow
def test_everything_acknowledged_before_a_kill_is_read_back_once(tmp_path: Path, drain: Drain) -> None:
    acknowledged = -1
    for round_ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(20 + 7 * round_):
            acknowledged = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read().split("\n")[:-1]  # whole lines only
        acknowledged = int(rest[-1]) if rest else acknowledged
        writer.wait()
        writer.stdout.close()
    spool_at(tmp_path).close()
    messages, gaps = drain(tmp_path)
    assert gaps == []
    assert len(messages) > acknowledged
    assert bodies_of(messages) == [b"x%0100d" % i for i in range(len(messages))]
    assert len(set(keys_of(messages))) == len(messages)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    script=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.lists(st.integers(0, 3000), max_size=5)),
            st.tuples(st.sampled_from(["restart", "damage"]), st.just([])),
        ),
        max_size=25,
    ),
    segment_bytes=st.integers(200, 5000),
    max_bytes=st.integers(2000, 30_000),
)
def test_after_any_operation_each_record_is_read_once_or_is_in_a_gap(
    tmp_path_factory: pytest.TempPathFactory,
    drain: Drain,
    script: list[tuple[str, list[int]]],
    segment_bytes: int,
    max_bytes: int,
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    bounds = {"segment_bytes": segment_bytes, "max_bytes": max_bytes}
    spool, dropped = spool_at(directory, **bounds), 0
    sent: dict[tuple[bytes, int], bytes] = {}
    damaged: set[Path] = set()
    for step, sizes in script:
        if step == "put":
            for size in sizes:
                body = b"%d:" % len(sent) + bytes(size)
                sent[spool.epoch, spool.append(body, wire.TELEMETRY_KIND, sent=1)] = body
            spool.sync()
        elif step == "restart":
            spool.close()
            dropped += spool.dropped
            spool = spool_at(directory, **bounds)
        elif step == "damage" and (files := sorted({*directory.glob("n1/telemetry.v1/*/*.seg")} - damaged)):
            data = bytearray(files[0].read_bytes())
            data[len(data) // 2] ^= 0x10
            files[0].write_bytes(data)
            damaged.add(files[0])  # a second flip of the same bit would repair it
        assert spool.size <= max_bytes
    spool.close()
    dropped += spool.dropped
    messages, gaps = drain(directory)
    found = dict(zip(keys_of(messages), bodies_of(messages), strict=True))
    assert len(found) == len(messages)
    assert all(sent[key] == body for key, body in found.items())
    assert len(found) + dropped + sum(behind - first for first, behind, _ in gaps) >= len(sent)
