"""Shared by the tests of spool and agent: reading a spool to its end, as the pipeline does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import GapError
from pipeline.transport import Message
from pipeline.transport.spool import SpoolTransport

Drained = tuple[list[Message], list[tuple[int, int, str]]]


@pytest.fixture
def drain() -> Callable[[Path], Drained]:
    """Reads every partition below a folder from its first offset to its end: (messages, gaps)."""

    def run(directory: Path) -> Drained:
        transport, messages, gaps = SpoolTransport(directory), [], []
        for partition in transport.partitions():
            offset, end = transport.bounds(partition)
            while offset < end:
                try:
                    found = transport.read(partition, offset, 100, 1 << 20)
                except GapError as gap:
                    gaps.append((gap.first, gap.next_offset, gap.cause))
                    if not gap.first == offset < gap.next_offset <= end:
                        raise
                    offset = gap.next_offset
                    continue
                assert [m.offset for m in found] == list(range(offset, offset + len(found)))
                messages += found
                offset += len(found)
        transport.close()
        return messages, gaps

    return run
