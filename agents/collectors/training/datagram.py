"""The datagrams that a training script sends to the agent: encoder and decoder, with the standard library alone.

    "FPTS" | version | kind | length of the identity | identity | body

Little endian. The identity is the JSON object of a RankSender. Any user of the machine may send, so the decoder trusts
nothing.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from agents.collectors.jobs.process_identity import RANK_LIMIT, clean_name

MAGIC, VERSION = b"FPTS", 1
STEP, DIGESTS, CHECKPOINT = 1, 2, 3
HEADER = struct.Struct("<4sBBH")
STEP_BODY = struct.Struct("<5Q5d")
CHECKPOINT_BODY = struct.Struct("<Qd")
DIGESTS_BODY, DIGEST = struct.Struct("<QHH"), struct.Struct("<QB")
MAX_DATAGRAM = 16384
"""Bytes of one datagram. Chosen: MAX_DIGESTS digests of buckets with long names fit."""
MAX_IDENTITY = 1024
"""Bytes of an identity. Chosen: twice the longest name of a job and of a GPU."""
NODE_PLACEHOLDER = "@here@"
"""Replaces the node in the name of a job on one node alone: only the agent knows the node's name."""
MAX_BUCKET = 64
MAX_DIGESTS = 128
"""Most digests of one step. Chosen: DDP cuts 3 GB of gradients into about as many buckets of 25 MB."""
MAX_GPUS = 4096
"""GPU indices of a node are below it. Chosen: far above any node."""
MAX_SECONDS = 1e6
"""Longest duration, as in the catalogue."""
MAX_FLOAT32 = 3.4028234663852886e38
"""Greatest finite loss or gradient norm: they are stored as float32."""
_MISSING_COUNT = (1 << 64) - 1  # value of a missing counter


class InvalidDatagram(ValueError):  # noqa: N818 - it describes the input, not an error of this program
    """The datagram has another format or an impossible value; the message names it."""


@dataclass(frozen=True, slots=True)
class RankSender:
    """The claimed sender of a datagram. world: 0 if unknown; gpu: its index on the node, or -1.

    group: ranks of one group hold the same parameters, so their digests are compared; "" for all ranks of the stage.
    """

    job: str
    rank: int
    world: int = 0
    stage: str = ""
    gpu: int = -1
    group: str = ""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step. step, tokens, drops, refused, nonfinite: totals of the script; the rest is of this step alone.

    A duration that was not measured is NaN. loss and gradient_norm: NaN if not given, infinite if not finite.
    """

    step: int
    tokens: int
    drops: int
    refused: int
    nonfinite: int
    step_time: float = math.nan
    compute_time: float = math.nan
    communication_time: float = math.nan
    loss: float = math.nan
    gradient_norm: float = math.nan


@dataclass(frozen=True, slots=True)
class DigestsReport:
    """Digests of parameter buckets after a step."""

    step: int
    values: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A checkpoint was written after a step; seconds: its duration, NaN if not given."""

    step: int
    seconds: float


Report = StepReport | DigestsReport | CheckpointReport


# --- encoding --------------------------------------------------------------------------------------------------------


def encode_identity(sender: RankSender) -> bytes:
    """Returns the identity as bytes. Raises InvalidDatagram if a value is not allowed."""
    found = json.dumps({f.name: getattr(sender, f.name) for f in fields(sender)}, ensure_ascii=True).encode()
    decode_sender(found)
    return found


def encode_header(kind: int, identity_bytes: bytes) -> bytes:
    """Returns the bytes before the body, the same for every datagram of one script and kind."""
    return HEADER.pack(MAGIC, VERSION, kind, len(identity_bytes)) + identity_bytes


def encode_digests(step: int, values: list[tuple[bytes, int]]) -> bytes:
    """Returns the body of digests: bucket names and values below 2^64."""
    parts = [DIGEST.pack(value, len(name)) + name for name, value in values]
    return DIGESTS_BODY.pack(step, len(parts), 0) + b"".join(parts)


# --- decoding --------------------------------------------------------------------------------------------------------


def decode_datagram(data: bytes) -> tuple[bytes, Report]:
    """Returns (identity as bytes, report) of one datagram. Raises InvalidDatagram."""
    if len(data) > MAX_DATAGRAM or len(data) < HEADER.size:
        raise InvalidDatagram(f"{len(data)} bytes; expected {HEADER.size} to {MAX_DATAGRAM}")
    magic, version, kind, size = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise InvalidDatagram(f"begins with {data[:5]!r}; expected {MAGIC!r} and version {VERSION}")
    if size > MAX_IDENTITY:
        raise InvalidDatagram(f"an identity of {size} bytes; expected at most {MAX_IDENTITY}")
    identity_bytes, body = data[HEADER.size : HEADER.size + size], data[HEADER.size + size :]
    reader = _DECODERS.get(kind)
    if reader is None:
        raise InvalidDatagram(f"kind {kind}; known: {', '.join(map(str, _DECODERS))}")
    return identity_bytes, reader(body)


def decode_sender(identity_bytes: bytes) -> RankSender:
    """Returns the sender in an identity. Raises InvalidDatagram."""
    if len(identity_bytes) > MAX_IDENTITY:
        raise InvalidDatagram(f"an identity of {len(identity_bytes)} bytes; expected at most {MAX_IDENTITY}")
    try:
        identity = json.loads(identity_bytes)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of too many digits
        raise InvalidDatagram(f"the identity is not JSON: {error}") from None
    if not isinstance(identity, dict):
        raise InvalidDatagram("the identity is not a JSON object")
    job, stage, group = identity.get("job"), identity.get("stage", ""), identity.get("group", "")
    if not (
        _is_entity_name(job) and (stage == "" or _is_entity_name(stage)) and (group == "" or _is_entity_name(group))
    ):
        raise InvalidDatagram(
            f"job {job!r}, stage {stage!r}, group {group!r}; expected letters, digits and _+/@- (job: no less)"
        )
    rank, world = _integer_field(identity, "rank", 0, RANK_LIMIT - 1), _integer_field(identity, "world", 0, RANK_LIMIT)
    if rank is None or (world and rank >= world):
        raise InvalidDatagram(
            f"rank {identity.get('rank')!r} of {world}; expected a whole number from 0 and below the world's size"
        )
    gpu = _integer_field(identity, "gpu", -1, MAX_GPUS - 1)
    return RankSender(str(job), rank, world or 0, str(stage), -1 if gpu is None else gpu, str(group))


def _is_entity_name(name: object) -> bool:
    """Whether it is a name as entities have it."""
    return isinstance(name, str) and name != "" and clean_name(name) == name


def is_bucket_name(name: object) -> bool:
    """Whether it can name a bucket of parameters: printable ASCII without spaces, such as `model.layers.0.weight`."""
    return isinstance(name, str) and 0 < len(name) <= MAX_BUCKET and all("!" <= letter <= "~" for letter in name)


def _integer_field(identity: dict[str, Any], key: str, low: int, high: int) -> int | None:
    """Returns an integer of the identity; None if absent. Raises InvalidDatagram for anything else."""
    found = identity.get(key)
    if found is None:
        return None
    if type(found) is not int or not low <= found <= high:
        raise InvalidDatagram(f"{key} {found!r}; expected a whole number from {low} to {high}")
    return found


def _decode_step(body: bytes) -> StepReport:
    if len(body) != STEP_BODY.size:
        raise InvalidDatagram(f"a step of {len(body)} bytes; expected {STEP_BODY.size}")
    found = StepReport(*STEP_BODY.unpack(body))
    if _MISSING_COUNT in (found.step, found.tokens, found.drops, found.refused, found.nonfinite):
        raise InvalidDatagram("a count of 2^64 - 1")
    for seconds in (found.step_time, found.compute_time, found.communication_time):
        if not (seconds != seconds or 0 <= seconds <= MAX_SECONDS):
            raise InvalidDatagram(f"a duration of {seconds!r} s; expected 0 to {MAX_SECONDS:g}")
    return found


def _decode_digests(body: bytes) -> DigestsReport:
    if len(body) < DIGESTS_BODY.size:
        raise InvalidDatagram(f"digests of {len(body)} bytes")
    step, count, _ = DIGESTS_BODY.unpack_from(body)
    if not 0 < count <= MAX_DIGESTS or step == _MISSING_COUNT:
        raise InvalidDatagram(f"{count} digests of step {step}; expected 1 to {MAX_DIGESTS}")
    at, values = DIGESTS_BODY.size, []
    for _ in range(count):
        if at + DIGEST.size > len(body):
            raise InvalidDatagram("digests that are cut off")
        value, size = DIGEST.unpack_from(body, at)
        name = body[at + DIGEST.size : at + DIGEST.size + size].decode("ascii", "replace")
        if len(name) != size or not is_bucket_name(name):
            raise InvalidDatagram(f"a bucket named {name!r}; expected 1 to {MAX_BUCKET} printable ASCII characters")
        values.append((name, value))
        at += DIGEST.size + size
    if at != len(body):
        raise InvalidDatagram(f"{len(body) - at} bytes behind the last digest")
    return DigestsReport(step, tuple(values))


def _decode_checkpoint(body: bytes) -> CheckpointReport:
    if len(body) != CHECKPOINT_BODY.size:
        raise InvalidDatagram(f"a checkpoint of {len(body)} bytes; expected {CHECKPOINT_BODY.size}")
    step, seconds = CHECKPOINT_BODY.unpack(body)
    if step == _MISSING_COUNT or not (seconds != seconds or 0 <= seconds <= MAX_SECONDS):
        raise InvalidDatagram(f"a checkpoint of {seconds!r} s after step {step}")
    return CheckpointReport(step, seconds)


_DECODERS: Mapping[int, Callable[[bytes], Report]] = {
    STEP: _decode_step,
    DIGESTS: _decode_digests,
    CHECKPOINT: _decode_checkpoint,
}
