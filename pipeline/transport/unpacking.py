"""Compiled inverse of packing.py: the columns of many messages in one call, each written once to its final place.

Only the pipeline decodes many messages, so only it imports this module: the agents save the compiler's 60 MiB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.compiling import compiled, inlined
from pipeline.model.signals import TYPES
from pipeline.transport.packing import SCALES

Bytes = NDArray[np.uint8]


def unpack_columns(data: Bytes, start: int, code: str, shape: tuple[int, int, int], modes: int) -> NDArray[Any]:
    """(signals, messages, ticks, devices) values of type `code`, a type of wire.py.

    data: (messages, bytes), read-only, so that there is one machine code per type.  start: of the packed columns.
    shape: (signals, ticks, devices).  modes: where those of floats begin, each below the number of SCALES.
    """
    signals, ticks, devices = shape
    flat = np.empty(signals * ticks * devices, f"u{np.dtype(code).itemsize}")
    out: NDArray[Any] = np.empty((signals, len(data), ticks * devices), code)
    if code.startswith("u"):
        _unpack_integers(data, start, ticks, flat, out)
    else:
        _unpack_floats(data, start, modes, ticks, flat, flat.view(f"i{flat.itemsize}"), flat.view(code), out)
    return out.reshape(signals, len(data), ticks, devices)


def compile_loops() -> None:
    """Compiles the loops for each type, or reads what an earlier start compiled: else the first messages wait."""
    data = np.frombuffer(bytes(64), np.uint8).reshape(1, -1)  # read-only, as messages are
    for code in TYPES:
        unpack_columns(data, 0, code, (1, 2, 1), 0)


@inlined
def _join_planes(packed: Bytes, flat: NDArray[Any]) -> None:
    """Writes the unsigned numbers of all columns of a message to `flat`. packed: from their lowest bytes on."""
    count, kind = len(flat), flat.dtype.type
    plane = packed[:count]  # an index from 0 on is not checked for counting from the end
    for i in range(count):
        flat[i] = plane[i]
    for k in range(1, flat.itemsize):
        shift, plane = kind(8 * k), packed[k * count : (k + 1) * count]
        for i in range(count):
            flat[i] |= kind(plane[i]) << shift


@inlined
def _add_deltas(row: NDArray[Any], ticks: int) -> None:
    """Replaces the deltas of a column by its values."""
    devices, kind = len(row) // ticks, row.dtype.type
    before, after = row[: len(row) - devices], row[devices:]
    for i in range(len(before)):
        after[i] = (after[i] >> kind(1)) ^ (kind(0) - (after[i] & kind(1)))
    for i in range(len(before)):
        after[i] += before[i]


@compiled
def _unpack_integers(data: Bytes, start: int, ticks: int, flat: NDArray[Any], out: NDArray[Any]) -> None:
    signals, messages, count = out.shape
    for m in range(messages):
        _join_planes(data[m, start:], flat)
        for s in range(signals):
            row = flat[s * count : (s + 1) * count]
            if ticks > 1:
                _add_deltas(row, ticks)
            for i in range(count):
                out[s, m, i] = row[i]


@compiled
def _unpack_floats(
    data: Bytes,
    start: int,
    modes: int,
    ticks: int,
    flat: NDArray[Any],
    whole: NDArray[Any],
    bits: NDArray[Any],
    out: NDArray[Any],
) -> None:
    """whole, bits: `flat` as signed integers and as floats."""
    none = np.iinfo(whole.dtype).min
    signals, messages, count = out.shape
    for m in range(messages):
        _join_planes(data[m, start:], flat)
        for s in range(signals):
            first = s * count
            if ticks > 1:
                _add_deltas(flat[first : first + count], ticks)
            mode = data[m, modes + s]
            if mode == 0:
                for i in range(count):
                    out[s, m, i] = bits[first + i]
                continue
            scale = SCALES[mode]
            for i in range(count):
                value = whole[first + i]
                out[s, m, i] = np.nan if value == none else value / scale
