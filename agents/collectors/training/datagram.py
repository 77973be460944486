"""The datagrams that a training script sends to the agent: written and read here, by the standard library alone.

    "FPTS" | version | kind | bytes of the identity | identity | body

Little endian. The identity is the JSON object that says whose datagram it is. Any user of the machine may send: what is
read here is trusted in nothing.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from agents.collectors.jobs.process_identity import LARGEST, clean

MAGIC, VERSION = b"FPTS", 1
STEP, DIGESTS, CHECKPOINT = 1, 2, 3
HEAD = struct.Struct("<4sBBH")
STEP_BODY = struct.Struct("<5Q5d")
CHECKPOINT_BODY = struct.Struct("<Qd")
DIGESTS_BODY, DIGEST = struct.Struct("<QHH"), struct.Struct("<QB")
MAX_DATAGRAM = 16384
"""Bytes of one datagram; chosen: MAX_DIGESTS digests of buckets with long names fit."""
MAX_IDENTITY = 1024
"""Bytes of an identity; chosen: twice the longest name of a job and of a GPU."""
HERE = "@here@"
"""Stands for the node in the name of a job that is on one node alone: only the agent knows what it is called."""
MAX_BUCKET = 64
MAX_DIGESTS = 128
"""Most digests of one step; chosen: DDP cuts the gradients of 3 GB into about so many buckets of 25 MB."""
MAX_GPUS = 4096
"""GPUs of a node have indices below it; chosen: far above any node."""
MAX_SECONDS = 1e6
"""Longest duration, as in the catalogue."""
GREATEST = 3.4028234663852886e38
"""Greatest finite loss or gradient norm: that of float32, in which they are stored."""
_COUNT = (1 << 64) - 1  # how a counter says "missing"


class Unusable(ValueError):  # noqa: N818 - reads as what it says of the datagram
    """A datagram that is none of ours, or says what cannot be. The message says what, for a person."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Who a datagram says it is from. world: 0 if unknown; gpu: its index on the node, or -1.

    group: which ranks hold the same parameters, so that their digests may be compared; "" for all of the stage.
    """

    job: str
    rank: int
    world: int = 0
    stage: str = ""
    gpu: int = -1
    group: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step. step, tokens, drops, refused, nonfinite: totals of the script; the rest of this step alone.

    A duration that was not measured is NaN. loss and gradient_norm: NaN where not told, infinite where not finite.
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
class Digests:
    """Digests of parameter buckets after a step."""

    step: int
    values: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint was written after a step; seconds: how long that took, NaN where not told."""

    step: int
    seconds: float


Body = Step | Digests | Checkpoint


# --- writing ---------------------------------------------------------------------------------------------------------


def identity(sender: Sender) -> bytes:
    """The identity as it travels. Raises Unusable if it cannot."""
    found = json.dumps({f.name: getattr(sender, f.name) for f in fields(sender)}, ensure_ascii=True).encode()
    _sender(found)
    return found


def head(kind: int, whose: bytes) -> bytes:
    """What stands before the body of every datagram of one script and kind."""
    return HEAD.pack(MAGIC, VERSION, kind, len(whose)) + whose


def digests_body(step: int, values: list[tuple[bytes, int]]) -> bytes:
    """The body of digests: names of buckets and values below 2^64."""
    parts = [DIGEST.pack(value, len(name)) + name for name, value in values]
    return DIGESTS_BODY.pack(step, len(parts), 0) + b"".join(parts)


# --- reading ---------------------------------------------------------------------------------------------------------


def parsed(data: bytes) -> tuple[bytes, Body]:
    """(identity as it travels, body) of one datagram. Raises Unusable."""
    if len(data) > MAX_DATAGRAM or len(data) < HEAD.size:
        raise Unusable(f"{len(data)} bytes; wanted {HEAD.size} to {MAX_DATAGRAM}")
    magic, version, kind, size = HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise Unusable(f"begins with {data[:5]!r}; wanted {MAGIC!r} and version {VERSION}")
    if size > MAX_IDENTITY:
        raise Unusable(f"an identity of {size} bytes; wanted at most {MAX_IDENTITY}")
    whose, body = data[HEAD.size : HEAD.size + size], data[HEAD.size + size :]
    reader = _READERS.get(kind)
    if reader is None:
        raise Unusable(f"kind {kind}; known: {', '.join(map(str, _READERS))}")
    return whose, reader(body)


def sender_of(whose: bytes) -> Sender:
    """Who sent a datagram. Raises Unusable."""
    return _sender(whose)


def _sender(whose: bytes) -> Sender:
    if len(whose) > MAX_IDENTITY:
        raise Unusable(f"an identity of {len(whose)} bytes; wanted at most {MAX_IDENTITY}")
    try:
        told = json.loads(whose)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of too many digits
        raise Unusable(f"the identity is no JSON: {error}") from None
    if not isinstance(told, dict):
        raise Unusable("the identity is no JSON object")
    job, stage, group = told.get("job"), told.get("stage", ""), told.get("group", "")
    if not (_is_name(job) and (stage == "" or _is_name(stage)) and (group == "" or _is_name(group))):
        raise Unusable(
            f"job {job!r}, stage {stage!r}, group {group!r}; wanted letters, digits and _+/@- (job: no less)"
        )
    rank, world = _whole(told, "rank", 0, LARGEST - 1), _whole(told, "world", 0, LARGEST)
    if rank is None or (world and rank >= world):
        raise Unusable(f"rank {told.get('rank')!r} of {world}; wanted a whole number from 0 and below the world's size")
    gpu = _whole(told, "gpu", -1, MAX_GPUS - 1)
    return Sender(str(job), rank, world or 0, str(stage), -1 if gpu is None else gpu, str(group))


def _is_name(name: object) -> bool:
    """Whether it is a name as entities bear it."""
    return isinstance(name, str) and name != "" and clean(name) == name


def bucket_is_good(name: object) -> bool:
    """Whether it can name a bucket of parameters: printable ASCII without spaces, as `model.layers.0.weight`."""
    return isinstance(name, str) and 0 < len(name) <= MAX_BUCKET and all("!" <= letter <= "~" for letter in name)


def _whole(told: dict[str, Any], key: str, low: int, high: int) -> int | None:
    """A whole number of the identity; None if it is absent. Raises Unusable where it is anything else."""
    found = told.get(key)
    if found is None:
        return None
    if type(found) is not int or not low <= found <= high:
        raise Unusable(f"{key} {found!r}; wanted a whole number from {low} to {high}")
    return found


def _step(body: bytes) -> Step:
    if len(body) != STEP_BODY.size:
        raise Unusable(f"a step of {len(body)} bytes; wanted {STEP_BODY.size}")
    found = Step(*STEP_BODY.unpack(body))
    if _COUNT in (found.step, found.tokens, found.drops, found.refused, found.nonfinite):
        raise Unusable("a count of 2^64 - 1")
    for seconds in (found.step_time, found.compute_time, found.communication_time):
        if not (seconds != seconds or 0 <= seconds <= MAX_SECONDS):
            raise Unusable(f"a duration of {seconds!r} s; wanted 0 to {MAX_SECONDS:g}")
    return found


def _digests(body: bytes) -> Digests:
    if len(body) < DIGESTS_BODY.size:
        raise Unusable(f"digests of {len(body)} bytes")
    step, count, _ = DIGESTS_BODY.unpack_from(body)
    if not 0 < count <= MAX_DIGESTS or step == _COUNT:
        raise Unusable(f"{count} digests of step {step}; wanted 1 to {MAX_DIGESTS}")
    at, values = DIGESTS_BODY.size, []
    for _ in range(count):
        if at + DIGEST.size > len(body):
            raise Unusable("digests that are cut off")
        value, size = DIGEST.unpack_from(body, at)
        name = body[at + DIGEST.size : at + DIGEST.size + size].decode("ascii", "replace")
        if len(name) != size or not bucket_is_good(name):
            raise Unusable(f"a bucket named {name!r}; wanted 1 to {MAX_BUCKET} printable ASCII characters")
        values.append((name, value))
        at += DIGEST.size + size
    if at != len(body):
        raise Unusable(f"{len(body) - at} bytes behind the last digest")
    return Digests(step, tuple(values))


def _checkpoint(body: bytes) -> Checkpoint:
    if len(body) != CHECKPOINT_BODY.size:
        raise Unusable(f"a checkpoint of {len(body)} bytes; wanted {CHECKPOINT_BODY.size}")
    step, seconds = CHECKPOINT_BODY.unpack(body)
    if step == _COUNT or not (seconds != seconds or 0 <= seconds <= MAX_SECONDS):
        raise Unusable(f"a checkpoint of {seconds!r} s after step {step}")
    return Checkpoint(step, seconds)


_READERS: Mapping[int, Callable[[bytes], Body]] = {STEP: _step, DIGESTS: _digests, CHECKPOINT: _checkpoint}
