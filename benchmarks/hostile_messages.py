"""Hostile messages against the decoder of the wire format: each is decoded or refused, at bounded cost.

    python -m benchmarks.hostile_messages [--inputs 1000000] [--seed 1]

Changes valid messages of an agent and of the tests' golden bytes, of both versions: bytes set, swapped, cut, repeated
and moved within the decompressed body, under a valid checksum, so that every check behind it is reached. An exception
other than WireError, a body that takes a second, or decoded values of the wrong extent end the run with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import zstandard

from benchmarks.agent_stream import AgentStream
from pipeline.model.errors import WireError
from pipeline.transport import wire
from tests.pipeline import wire_v1

GOLDEN = Path(__file__).parents[1] / "tests/pipeline/golden"
DICTIONARY = zstandard.ZstdCompressionDict(
    Path(wire.__file__).with_name("wire-2.dictionary").read_bytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT
)
MAX_S = 1.0  # of one message; chosen: a thousand times what the largest of them takes


class Sealer:
    """Compresses bodies of one version into messages with a valid checksum."""

    def __init__(self, version: int, kind: int) -> None:
        known = {"dict_data": DICTIONARY} if version > 1 else {}
        self._version, self._kind = version, kind
        self._compressor = zstandard.ZstdCompressor(level=1, **known)
        self._decompressor = zstandard.ZstdDecompressor(**known)

    def open(self, message: bytes) -> bytes:
        """Returns the decompressed body."""
        return self._decompressor.decompress(message[wire.ENVELOPE_BYTES :])

    def seal(self, body: bytes) -> bytes:
        """Returns a message with this body."""
        return wire_v1.seal(self._compressor.compress(body), self._kind, version=self._version)


def valid_messages() -> list[bytes]:
    """Returns the messages that are changed."""
    stream = AgentStream(20)
    joined = [wire_v1.seal(wire.encode(batch), version=2) for batch in stream.joined("n1")]
    old = [wire_v1.seal(wire_v1.encode(batch)) for batch in stream.batches("n1")]
    return [path.read_bytes() for path in sorted(GOLDEN.glob("wire-*.bin"))] * 4 + joined[:2] + old[:2]


def change(body: bytes, rng: np.random.Generator) -> bytes:
    """Returns the body with one to four changes. Most are in its first bytes: counts, layout, masks and modes."""
    found = bytearray(body)
    for _ in range(int(rng.integers(1, 5))):
        if not found:
            break
        near = len(found) if rng.random() < 0.5 else min(len(found), 400)
        a, b = (int(i) for i in rng.integers(0, near, 2))
        size = int(rng.integers(1, 9))
        match int(rng.integers(0, 6)):
            case 0:
                found[a] = int(rng.integers(0, 256))
            case 1:
                found[a] ^= 1 << int(rng.integers(0, 8))
            case 2:
                found[a], found[b] = found[b], found[a]
            case 3:
                found[a : a + size] = found[b : b + size]
            case 4:
                del found[a : a + size]
            case _:
                found[a:a] = found[b : b + size]
    return bytes(found)


def decode(message: bytes) -> str:
    """Decodes a message in all ways; returns what became of it."""
    try:
        if message[4] == wire.EVENTS_KIND:
            wire.decode_events(message)
            return "decoded"
        body = wire.open_telemetry(message)
    except WireError:
        return "refused"
    rows = 0
    for group in wire.decode_together([body]):
        for _, entities, columns in group.blocks:
            extent = group.times.shape[1] * len(entities[0])
            rows += extent
            if any(values.shape != (1, extent) for values in columns.values()):
                raise ValueError(f"values of another extent than {extent}")
    if rows != sum(body.plan.rows.values()):
        raise ValueError(f"{rows} rows, expected {body.plan.rows}")
    body.plan.read_blocks(body)
    return "decoded"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, messages = np.random.default_rng(options.seed), valid_messages()
    sealers = [Sealer(message[3], message[4]) for message in messages]
    bodies = [sealer.open(message) for sealer, message in zip(sealers, messages, strict=True)]
    counts, longest, slowest = Counter[str](), 0.0, 0
    for number in range(options.inputs):
        which = int(rng.integers(len(bodies)))
        message = sealers[which].seal(change(bodies[which], rng))
        start = time.process_time()
        try:
            counts[decode(message)] += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it would have ended the pipeline
            print(f"input {number} of seed {options.seed}: {type(error).__name__}: {error}\n{message.hex()[:2000]}")
            return 1
        if (took := time.process_time() - start) > longest:
            longest, slowest = took, number
    print(f"{options.inputs} hostile messages: {dict(counts)}, longest {1e3 * longest:.1f} ms (input {slowest})")
    return int(longest > MAX_S)


if __name__ == "__main__":
    sys.exit(main())
