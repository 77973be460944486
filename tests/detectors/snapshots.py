"""Snapshots of a Runner as bytes, as the store keeps them, and as data that a test can read and change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from detectors.base.state import pack_state, unpack_state
from detectors.runner import SHARED, Runner


def joined(pieces: Iterable[tuple[str, Sequence[bytes | memoryview]]]) -> dict[str, bytes]:
    """Returns pieces as bytes by name."""
    return {name: b"".join(buffers) for name, buffers in pieces}


def packed(runner: Runner) -> dict[str, bytes]:
    """Returns the snapshot of a runner as a restart reads it."""
    return joined(runner.snapshot())


def read(pieces: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns a snapshot as data: what detectors share, and under `detectors` the state of each."""
    state = {name: unpack_state(piece) for name, piece in pieces.items()}
    return {**state.pop(SHARED), "detectors": state}


def written(state: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the pieces of a snapshot from the data of `read`."""
    shared = {name: value for name, value in state.items() if name != "detectors"}
    pieces = {SHARED: shared, **state.get("detectors", {})}
    return {name: b"".join(pack_state(piece)) for name, piece in pieces.items()}
