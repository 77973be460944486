"""The format of /dev/kmsg, and a reader that never waits and counts what it missed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.host.kmsg import MAX_PENDING, MAX_TEXT, KmsgReader, KmsgRecord, decode_text, parse_record


def test_a_record_has_number_time_level_facility_and_text() -> None:
    assert parse_record(b"4,901,227996636,-;nvme nvme0: hello") == KmsgRecord(901, 227996636, 4, 0, "nvme nvme0: hello")
    assert parse_record(b"12,1,2,-,caller=T7;said by a process") == KmsgRecord(1, 2, 4, 1, "said by a process")


def test_continuation_lines_belong_to_the_record_and_name_its_device() -> None:
    found = parse_record(b"6,339,5140900,-;NET: protocol", b" SUBSYSTEM=pci\n DEVICE=+pci:0000:00:01.0")
    assert found is not None
    assert (found.text, found.device) == ("NET: protocol", "+pci:0000:00:01.0")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (rb"caf\xc3\xa9 \x5cpath", "café \\path"),
        (rb"broken \xff byte", r"broken \xff byte"),
        (rb"tab\x09end\x0a", "tab end "),
        ("schön".encode(), "schön"),
    ],
)
def test_escapes_are_decoded_if_they_are_text(raw: bytes, text: str) -> None:
    assert decode_text(raw) == text


@pytest.mark.parametrize("line", [b"", b"hello", b"6,1,2;", b"6,x,2,-;a", b" KEY=value", b"6,1", b"\x00" * 50])
def test_other_lines_are_not_records(line: bytes) -> None:
    assert parse_record(line) is None


@given(st.binary(max_size=3000), st.binary(max_size=300))
def test_any_bytes_are_parsed_or_skipped_and_stay_bounded(line: bytes, rest: bytes) -> None:
    for found in (parse_record(line, rest), parse_record(b"6,1,2,-;" + line, rest)):
        if found is not None:
            assert len(found.text) <= MAX_TEXT
            assert found.text.isprintable()
            assert 0 <= found.priority <= 7


@given(st.lists(st.binary(max_size=60).filter(lambda part: b"\n" not in part), max_size=20), st.integers(1, 40))
def test_records_do_not_depend_on_chunk_boundaries(texts: list[bytes], size: int) -> None:
    whole = b"".join(b"6,%d,7,-;%s\n K=v\n" % (number, text) for number, text in enumerate(texts))
    log, found = KmsgReader(Path()), []
    for begin in range(0, len(whole), size):
        for line, rest in log._lines(whole[begin : begin + size]):
            record = parse_record(line, rest)
            found += [record.sequence] if record else []
    assert found == list(range(len(texts)))


@pytest.fixture
def fifo(tmp_path: Path) -> tuple[KmsgReader, int]:
    """A followed FIFO and the end to write into."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    log = KmsgReader(path)
    log.open()
    return log, os.open(path, os.O_WRONLY)


def numbers(log: KmsgReader, most: int = 100) -> list[int]:
    return [record.sequence for record in log.read_records(most)]


def test_a_silent_log_does_not_block(fifo: tuple[KmsgReader, int]) -> None:
    log, writer = fifo
    begun = time.monotonic()
    assert numbers(log) == []
    assert time.monotonic() - begun < 5  # a blocking read would never return
    os.close(writer)
    assert numbers(log) == []
    log.close()
    assert numbers(log) == []


def test_a_line_in_two_parts_is_one_record(fifo: tuple[KmsgReader, int]) -> None:
    log, writer = fifo
    os.write(writer, b"6,1,1,-;one\n6,2,2,-;tw")
    assert numbers(log) == [1]
    os.write(writer, b"o\n")
    assert numbers(log) == [2]
    os.close(writer)
    log.close()


def test_a_gap_in_the_numbers_is_counted_and_a_repeat_is_skipped(fifo: tuple[KmsgReader, int]) -> None:
    log, writer = fifo
    os.write(writer, b"6,10,1,-;a\n6,11,1,-;b\n6,10,1,-;a\n6,20,1,-;c\n")
    assert numbers(log) == [10, 11, 20]
    assert log.missed == 8
    os.close(writer)
    log.close()


def test_reading_continues_after_an_overrun(fifo: tuple[KmsgReader, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does when its ring was overwritten: one EPIPE, then the oldest record that is left."""
    log, writer = fifo
    os.write(writer, b"6,10,1,-;a\n")
    assert numbers(log) == [10]
    really, overruns = os.read, [BrokenPipeError(32, "Broken pipe")] * 2

    def read(handle: int, size: int) -> bytes:
        if overruns:
            raise overruns.pop()
        return really(handle, size)

    monkeypatch.setattr(os, "read", read)
    os.write(writer, b"6,95,1,-;b\n")
    assert numbers(log) == [95]
    assert log.missed == 84
    overruns += [BrokenPipeError(32, "Broken pipe")] * 1000
    assert numbers(log) == []
    monkeypatch.undo()
    os.close(writer)
    log.close()


def test_a_line_without_end_is_dropped_and_counted(fifo: tuple[KmsgReader, int]) -> None:
    log, writer = fifo
    for _ in range(MAX_PENDING // 4096 + 1):
        os.write(writer, b"x" * 4096)
        assert numbers(log) == []
    assert log.dropped > MAX_PENDING
    os.write(writer, b"\n6,1,1,-;after\n")
    assert numbers(log) == [1]
    os.close(writer)
    log.close()


def test_the_log_of_this_kernel_is_read() -> None:
    log = KmsgReader(Path("/dev/kmsg"))
    try:
        log.open()
    except OSError as error:
        pytest.skip(f"/dev/kmsg: {error.strerror}")
    found = list(log.read_records(1000))
    log.close()
    assert found
    assert [record.sequence for record in found] == sorted({record.sequence for record in found})
    assert all(record.text.isprintable() for record in found)
