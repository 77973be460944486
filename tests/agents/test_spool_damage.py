"""A spool with damaged files opens, continues, and returns no byte that was not written."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.node.spool import disk
from agents.node.spool.spool import Spool
from pipeline.transport import Message, segments, wire
from pipeline.transport.spool import SpoolTransport

Drain = Callable[[Path], tuple[list[Message], list[tuple[int, int, str]]]]
Key = tuple[bytes, int]
PAGE = 4096


class Written:
    """A spool in a folder, and everything written to it, by sequence."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: dict[Key, set[bytes]] = {}

    def write(self, count: int, size: int = 40) -> None:
        with Spool(self.folder, "n1", "telemetry.v1", segment_bytes=2000, max_bytes=1 << 20, free_bytes=0) as spool:
            for _ in range(count):
                body = b"%d " % len(self.sent) + bytes(size)
                sequence = spool.append(body, wire.TELEMETRY_KIND, sent=1)
                self.sent.setdefault((spool.epoch, sequence), set()).add(body)
                spool.sync()

    def holds(self, drain: Drain) -> int:
        """The number of messages read; each was written like this, with its own sequence."""
        messages, _ = drain(self.folder)
        found = {(e.epoch, e.sequence): m for m in messages if (e := wire.open_envelope(m.value))}
        assert len(found) == len(messages)
        assert all(m.value[wire.ENVELOPE_BYTES :] in self.sent[key] for key, m in found.items())
        return len(found)

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.folder.glob(f"n1/telemetry.v1/*/{pattern}"))


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_spool_truncated_at_any_byte_continues_and_loses_only_the_cut_part(
    written: Written, drain: Drain, step: int
) -> None:
    """Every fourth byte is in each field of a header and of a record."""
    written.write(12)
    whole = written.files("*.seg")[-1].read_bytes()
    before = written.holds(drain) - 12
    for cut in (*range(0, len(whole), step), len(whole) - 1):
        written.files("*.seg")[-1].write_bytes(whole[:cut])
        kept = written.holds(drain)
        written.write(1)
        assert written.holds(drain) == kept + 1 > before
        _restore(written, whole)


def _restore(written: Written, whole: bytes) -> None:
    """Restores the spool from before the damage: one epoch, complete segments."""
    first, *newer = sorted({path.parent for path in written.files("mark")})
    for folder in newer:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    for extra in sorted(first.glob("*.seg"))[1:]:
        extra.unlink()
    min(first.glob("*.seg")).write_bytes(whole)
    disk.write_mark(first / "mark", segments.Mark(12, disk.read_boot_id()))


@pytest.mark.slow
def test_three_thousand_flipped_bits_give_no_wrong_byte(written: Written, drain: Drain) -> None:
    written.write(40)
    files = [*written.files("*.seg"), *written.files("mark")]
    whole = {path: path.read_bytes() for path in files}
    draw = random.Random(1)
    for round_ in range(3000):
        path = draw.choice(files)
        data = bytearray(whole[path])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        if round_ % 10 == 0:
            assert written.holds(drain) >= 0
        path.write_bytes(whole[path])
    assert written.holds(drain) == 40


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("seed", range(12))
def test_opened_with_flipped_bits_in_every_file_it_continues(written: Written, drain: Drain, seed: int) -> None:
    written.write(40)
    draw = random.Random(seed)
    for path in [*written.files("*.seg"), *written.files("mark"), *written.files("gaps*")]:
        data = bytearray(path.read_bytes())
        for _ in range(3):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    written.write(5)
    assert written.holds(drain) >= 5


def test_a_last_page_of_zeros_after_a_power_cut_costs_only_that_page(written: Written, drain: Drain) -> None:
    written.write(3, size=1500)
    path = written.files("*.seg")[-1]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(PAGE))
    written.write(2)
    assert written.holds(drain) >= 3


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, b"not a cursor\n", bytes(40)])
def test_a_damaged_or_missing_cursor_costs_no_message(written: Written, drain: Drain, damage: bytes) -> None:
    written.write(20)
    transport = SpoolTransport(written.folder, "pipeline")
    (partition,) = transport.partitions()
    transport.commit_offset(partition, 7)
    transport.close()
    (cursor,) = written.files("*.cursor")
    cursor.write_bytes(damage)
    written.write(5)
    assert written.holds(drain) == 25
    cursor.unlink()
    written.write(5)
    assert written.holds(drain) == 30


def test_foreign_files_in_its_folder_do_not_stop_it(written: Written, drain: Drain) -> None:
    written.write(5)
    home = written.files("mark")[0].parent
    for name in ("lost+found", "notes.txt", "99999999999999999999999.seg", "abc.seg", "mark.tmp"):
        (home / name).write_bytes(b"not ours")
    (home.parent / "notes").mkdir()
    written.write(5)
    assert written.holds(drain) == 10
