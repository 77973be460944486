"""The default share of the disk of a spool, and what syncing less often can cost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Semaphore

import pytest

from agents.node.spool import disk
from agents.node.spool.spool import Spool
from agents.node.spool.spools import NodeSpools
from pipeline.config.sections import Spool as Settings
from pipeline.model.records import SECOND, TELEMETRY, Origin
from pipeline.transport import Message, wire

Drain = Callable[[Path], tuple[list[Message], list[tuple[int, int, str]]]]
SIZE = 8 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_by_default_a_spool_uses_a_twentieth_of_its_disk_and_at_most_one_gibibyte(
    small_disk: Path, tmp_path: Path, drain: Drain
) -> None:
    with Spool(small_disk, "n1", TELEMETRY, free_bytes=0) as spool:
        assert spool.max_bytes == SIZE // 20
        for i in range(1000):
            spool.append(b"%04d" % i + bytes(2000), wire.TELEMETRY_KIND, sent=1)
            spool.sync()
            assert spool.size <= SIZE // 20
        dropped = spool.dropped
    found = os.statvfs(tmp_path)
    assert disk.default_max_bytes(tmp_path / "not/there/yet") == min(1 << 30, found.f_blocks * found.f_frsize // 20)
    messages, gaps = drain(small_disk)
    assert (dropped + len(messages), gaps) == (1000, [])
    assert messages[-1].value[wire.ENVELOPE_BYTES :][:4] == b"0999"


def test_on_a_full_disk_collection_continues_and_losses_are_counted_exactly(small_disk: Path, drain: Drain) -> None:
    """8 MiB, no reader, a much higher limit: the oldest is dropped; then others fill the disk, and free it again."""
    hog, lost = small_disk / "hog", 0
    with Spool(small_disk, "n1", TELEMETRY, max_bytes=1 << 30, segment_bytes=1 << 20, free_bytes=0) as spool:
        for i in range(1200):
            if i == 1000:
                _fill(hog)
            if i == 1100:
                hog.unlink()
            spool.append(b"%04d" % i + bytes(12_000), wire.TELEMETRY_KIND, sent=1)
            spool.sync()
        assert (spool.next, spool.problem) == (1200, None)
        assert "no room on its disk" in spool.loss_reason  # recovered, and still known
        lost = spool.dropped
    messages, gaps = drain(small_disk)
    first = messages[0].offset
    within = sum(behind - start for start, behind, _ in gaps)
    assert first + within == lost
    assert len(messages) == 1200 - lost
    assert [int(m.value[wire.ENVELOPE_BYTES :][:4]) for m in messages] == [m.offset for m in messages]
    assert messages[-1].offset == 1199


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:  # full, as intended
            return


class Clock:
    """Time set by the test."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> int:
        return round(self.seconds * SECOND)

    def monotonic(self) -> float:
        return self.seconds


def spools_at(directory: Path, durable: Callable[[], object] = lambda: None, **settings: float) -> NodeSpools:
    origin = Origin("local", "n1", bytes(16), False)
    return NodeSpools(Settings(directory, **settings), origin, lambda *_: None, Clock(), durable)  # type: ignore[arg-type]


def test_each_message_becomes_durable_without_blocking_the_loop(tmp_path: Path, drain: Drain) -> None:
    durable = Semaphore(0)
    spools = spools_at(tmp_path, durable.release)
    for count in range(1, 6):
        spools.put(TELEMETRY, lambda: b"x", wire.TELEMETRY_KIND)
        assert durable.acquire(timeout=30)
        assert len(drain(tmp_path)[0]) == count
    spools.close()


def test_messages_waiting_for_the_next_sync_are_invisible_and_written_at_the_end(tmp_path: Path, drain: Drain) -> None:
    durable = Semaphore(0)
    spools = spools_at(tmp_path, durable.release, sync_seconds=60.0)
    spools.put(TELEMETRY, lambda: b"x", wire.TELEMETRY_KIND)
    assert durable.acquire(timeout=30)
    for _ in range(4):
        spools.put(TELEMETRY, lambda: b"x", wire.TELEMETRY_KIND)
    assert (len(drain(tmp_path)[0]), spools.waiting) == (1, 4)
    spools.close()
    assert len(drain(tmp_path)[0]) == 5


def test_a_message_that_cannot_be_encoded_or_is_too_large_is_counted_and_stops_nothing(
    tmp_path: Path, drain: Drain
) -> None:
    spools = spools_at(tmp_path)
    spools.put(TELEMETRY, lambda: bytes(1 // 0), wire.TELEMETRY_KIND)
    spools.put(TELEMETRY, lambda: bytes(wire.MAX_MESSAGE), wire.TELEMETRY_KIND)
    spools.put(TELEMETRY, lambda: b"small", wire.TELEMETRY_KIND)
    spools.close()
    messages, gaps = drain(tmp_path)
    assert ([m.value[wire.ENVELOPE_BYTES :] for m in messages], gaps, spools.refused) == ([b"small"], [], 2)


def test_a_small_file_that_fails_stops_no_other_and_no_message(
    tmp_path: Path, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    spools, logged, written = spools_at(tmp_path), [], Semaphore(0)
    monkeypatch.setattr(spools, "_log", lambda *line: logged.append(line))
    spools.write_later(tmp_path / "bad", lambda: Path("/dev/full/x").touch())
    spools.write_later(tmp_path / "good", written.release)
    assert written.acquire(timeout=30)
    spools.check_disk()
    spools.put(TELEMETRY, lambda: b"x", wire.TELEMETRY_KIND)
    spools.close()
    assert len(drain(tmp_path)[0]) == 1
    assert logged == [(f"file {tmp_path / 'bad'}", "cannot be written: Not a directory; retried at its next change")]
