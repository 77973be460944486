"""Hostile requests of other senders against everything that reads them: each is stored or refused, at bounded cost.

    python -m benchmarks.hostile_requests otlp|prometheus1|prometheus2 [--inputs 1000000] [--seed 1]

Changes valid requests as benchmarks/hostile_messages.py changes messages: bytes set, swapped, cut, repeated and moved.
Each goes through the gateway's decompression and check, the decoder with its cache of layouts, admission and the
building of rows. One in ten is changed while compressed. An exception that these do not declare, a request that takes a
second, or rows of the wrong extent end the run with exit code 1.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from agents import protobuf
from agents.gateway.http_server import decompress_body, decompress_snappy
from agents.gateway.receiver import OTLP_FORMAT, V1_FORMAT, V2_FORMAT, RequestError, check_otlp, check_remote_write
from benchmarks.hostile_messages import MAX_S, change
from pipeline.ingest.admission import Admission
from pipeline.ingest.foreign import ForeignDecoder, build_foreign_rows
from pipeline.ingest.messages import Arrival, DeadLetter, ForeignBatch
from pipeline.model.errors import Rejected
from pipeline.model.records import OTLP, Origin
from pipeline.transport import Message, Partition, wire
from tests.pipeline.otlp_requests import T0_NS, Request, gpu_request

FIXTURES = Path(__file__).parents[1] / "tests/agents/fixtures"
PARTITION = Partition(OTLP, "0", "id")
SERIES = 8
"""Series of most of the remote write requests. Chosen: every input makes new layouts, at 40 us a series."""
RENEW = 1000
"""Inputs after which admission starts again. Chosen: below its limits on entities."""


def otlp_requests() -> list[bytes]:
    """Requests with every kind of metric, several nodes, and numbers of both forms."""
    request = Request("n1").gauge("m", 1.5).gauge("m", None, slot="1").sum("s", 3, delta=True).sum("t", 4)
    plain = request.scope.metrics.add(name="h").histogram.data_points.add(time_unix_nano=T0_NS, count=4, sum=10.0)
    plain.bucket_counts.extend([1, 3])
    plain.explicit_bounds.append(0.5)
    plain.exemplars.add(as_double=1.0, time_unix_nano=T0_NS)
    fine = request.scope.metrics.add(name="e").exponential_histogram.data_points.add(time_unix_nano=T0_NS, count=2)
    fine.positive.bucket_counts.extend([1, 1])
    summary = request.scope.metrics.add(name="q").summary.data_points.add(time_unix_nano=T0_NS, count=2, sum=3.0)
    summary.quantile_values.add(quantile=0.5, value=1.0)
    request.node("n2", service_name="x").gauge("hw.temperature", 40.0, hw__id="gpu:n2.0", unit="Cel")
    request.gauge("DCGM_FI_DEV_GPU_TEMP", 50.0, gpu="0").gauge("fleetpulse.custom.value", 1.0, hw__id="custom:n2.x")
    return [request.encode(), gpu_request(), Request("").gauge("m", 1.0, instance="n3:9100").encode()]


def write_requests(version: int) -> list[bytes]:
    """A real Collector's request, and parts of it with some of its series, exemplars and native histograms."""
    whole = decompress_snappy((FIXTURES / f"remote_write_v{version}.snappy").read_bytes(), 1 << 20)
    number, samples, exemplars, histograms = (1, 2, 3, 4) if version == 1 else (5, 2, 4, 3)
    fields = list(split_fields(whole))
    series = [body for found, body in fields if found == number]
    rest = b"".join(protobuf.encode_nested(found, body) for found, body in fields if found != number)
    histogram = protobuf.encode_unsigned(1, 7) + protobuf.encode_double(3, 2.5) + protobuf.encode_unsigned(15, 10**12)
    more = protobuf.encode_nested(histograms, histogram) + protobuf.encode_nested(
        exemplars, protobuf.encode_double(2, 1.0)
    )
    late = protobuf.encode_nested(samples, protobuf.encode_double(1, 9.0) + protobuf.encode_unsigned(2, 10**12))
    parts = [series[at : at + SERIES] for at in range(0, len(series), SERIES)]
    made = [[*part[:-1], part[-1] + more + late] for part in parts]
    cut = [rest + b"".join(protobuf.encode_nested(number, one) for one in part) for part in made]
    return cut * 4 + [whole]


def split_fields(message: bytes) -> Any:
    """(number, content) of each field of a message that has only nested ones."""
    at = 0
    while at < len(message):
        tag, at = protobuf.decode_varint(message, at)
        size, at = protobuf.decode_varint(message, at)
        yield tag >> 3, message[at : at + size]
        at += size


class Ids:
    """Devices without a store."""

    def assign_ids(
        self,
        kind: str,
        site: str,
        node: str,
        simulated: bool,
        entities: tuple[str, ...],
        excluded: Collection[str] = (),
    ) -> Any:
        """An id of each entity."""
        return np.arange(len(entities), dtype=np.int32)


def pack_snappy(raw: bytes) -> bytes:
    """A snappy block of literals."""
    out = protobuf.encode_varint(len(raw))
    for at in range(0, len(raw), 60):
        piece = raw[at : at + 60]
        out += bytes([len(piece) - 1 << 2]) + piece
    return out


class Reader:
    """Everything that reads a request, from the gateway to rows."""

    def __init__(self, form: str) -> None:
        self._form, self._decoder, self._count = form, ForeignDecoder(), 0
        self._admission, self._origin = Admission(), Origin("site", "gw", bytes(16))
        self.encoding, self.pack = ("gzip", gzip_quickly) if form == OTLP_FORMAT else ("snappy", pack_snappy)

    def read(self, body: bytes, encoding: str = "") -> str:
        """What became of a request. One that the gateway refuses is read too, as a record of Kafka would be."""
        try:
            plain = decompress_body(body, encoding)
        except RequestError:
            return "not unpacked"
        refused = False
        try:
            if self._form == OTLP_FORMAT:
                check_otlp(plain)
            else:
                check_remote_write(plain, self._form)
        except RequestError:
            refused = True
        sealed = wire.seal(wire.encode_request(plain, self._form, self._origin), wire.REQUEST_KIND, bytes(16), 0, 0)
        arrival = Arrival(T0_NS // 1000, T0_NS // 1000 + 10**6, lambda node, sent: 0)
        item = self._decoder.decode(Message(PARTITION, 0, sealed), arrival, lambda message, node: None)
        if isinstance(item.body, DeadLetter):
            return "refused" if refused else "rejected"
        if not isinstance(item.body, ForeignBatch):
            raise ValueError(f"unexpected {type(item.body).__name__}")
        return f"{self._admit(item.body)}{', refused by the gateway' if refused else ''}"

    def _admit(self, batch: ForeignBatch) -> str:
        self._count += 1
        if self._count % RENEW == 0:
            self._admission = Admission()
        rejected = len(batch.faults)
        for node in batch.nodes:
            node.part.count_values(frozenset())
            try:
                rejected += len(self._admission.admit_layout(node.part.layout, int(node.times[-1]))[1])
            except Rejected:
                rejected += 1
        for rows in build_foreign_rows([batch], Ids()):  # type: ignore[arg-type]
            if any(len(values) != len(rows.time) for values in (rows.device, *rows.columns.values())):
                raise ValueError(f"columns of another length than {len(rows.time)}")
        return "in part" if rejected else "stored"


def gzip_quickly(raw: bytes) -> bytes:
    """The gzip member of some bytes."""
    return gzip.compress(raw, 1)


REQUESTS: dict[str, Callable[[], list[bytes]]] = {
    OTLP_FORMAT: otlp_requests,
    V1_FORMAT: lambda: write_requests(1),
    V2_FORMAT: lambda: write_requests(2),
}


def run(form: str, inputs: int, seed: int) -> int:
    """Reads so many hostile requests of one format; the exit code."""
    rng, requests, reader = np.random.default_rng(seed), REQUESTS[form](), Reader(form)
    packed = [reader.pack(request) for request in requests]
    for request, small in zip(requests, packed, strict=True):
        if reader.read(request) != "stored" or reader.read(small, reader.encoding) != "stored":
            raise ValueError("a valid request is refused")
    counts, longest, slowest = Counter[str](), 0.0, 0
    for number in range(inputs):
        which, compressed = int(rng.integers(len(requests))), rng.random() < 0.1
        body = change((packed if compressed else requests)[which], rng)
        start = time.process_time()
        try:
            counts[reader.read(body, reader.encoding if compressed else "")] += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it would have ended a thread or the pipeline
            print(f"input {number} of seed {seed}: {type(error).__name__}: {error}\n{body.hex()[:4000]}")
            return 1
        if (took := time.process_time() - start) > longest:
            longest, slowest = took, number
    print(f"{inputs} hostile requests, {form}: {dict(counts)}, longest {1e3 * longest:.1f} ms (input {slowest})")
    return int(longest > MAX_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("format", choices=tuple(REQUESTS))
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    return run(options.format, options.inputs, options.seed)


if __name__ == "__main__":
    sys.exit(main())
