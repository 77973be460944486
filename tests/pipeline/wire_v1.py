"""The writer of wire version 1, as released agents have it: one tick or more, all blocks with all ticks."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import numpy as np
import zstandard

from pipeline.model.records import Batch
from pipeline.transport import wire


def encode(batch: Batch) -> bytes:
    """Returns the body of a telemetry message, compressed."""
    layout = [
        [
            b.device_class,
            list(b.entities),
            [[n, v.dtype.kind + str(v.dtype.itemsize)] for n, v in b.columns.items()],
        ]
        for b in batch.blocks
    ]
    whole: Any = {"site": batch.origin.site, "node": batch.origin.node, "blocks": layout}
    names = json.dumps(whole, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    head = struct.pack("<16sII", batch.origin.boot_id, len(names), len(batch.times))
    parts = [head, names, batch.times.astype("<i8").tobytes()]
    for block in batch.blocks:
        parts += [np.ascontiguousarray(v, v.dtype.newbyteorder("<")).tobytes() for v in block.columns.values()]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(parts))


def seal(
    body: bytes,
    kind: int = wire.TELEMETRY_KIND,
    epoch: bytes = bytes(16),
    sequence: int = 1,
    sent: int = 2,
    simulated: bool = False,
    version: int = 1,
) -> bytes:
    """Returns the message: envelope with checksum, then the body."""
    head = struct.pack("<3sBBBH16sQqI", b"FPW", version, kind, int(simulated), 0, epoch, sequence, sent, len(body))
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body
