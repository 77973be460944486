"""Compiled inverse of packing.py: the columns of many messages in one call, each written once to its final place.

Only the pipeline decodes many messages, so only it imports this module: the agents save the compiler's 60 MiB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.compiling import compiled, inlined
from pipeline.transport.packing import SCALES

Bytes = NDArray[np.uint8]


def unpack_columns(data: Bytes, start: int, code: str, shape: tuple[int, int, int], modes: int) -> NDArray[Any]:
    """(signals, messages, ticks, devices) values of type `code`, a type of wire.py.

    data: (messages, bytes), read-only, so that there is one machine code per type.  start: of the packed columns.
    shape: (signals, ticks, devices).  modes: where those of floats begin, each below the number of SCALES.
    """
    signals, ticks, devices = shape
    row = np.empty(ticks * devices, f"u{np.dtype(code).itemsize}")
    out: NDArray[Any] = np.empty((signals, len(data), len(row)), code)
    if code.startswith("u"):
        _unpack_integers(data, start, ticks, row, out)
    else:
        _unpack_floats(data, start, modes, ticks, row, row.view(f"i{row.itemsize}"), row.view(code), out)
    return out.reshape(signals, len(data), ticks, devices)


@inlined
def _join_planes(packed: Bytes, first: int, step: int, ticks: int, row: NDArray[Any]) -> None:
    """Writes the unsigned numbers of a column to `row`: planes joined, deltas added up.

    first: where its lowest bytes begin.  step: bytes from one plane to the next.
    """
    count, kind = len(row), row.dtype.type
    plane = packed[first : first + count]  # an index from 0 on is not checked for counting from the end
    for i in range(count):
        row[i] = plane[i]
    for k in range(1, row.itemsize):
        shift, plane = kind(8 * k), packed[first + k * step : first + k * step + count]
        for i in range(count):
            row[i] |= kind(plane[i]) << shift
    devices = count // ticks
    before, after = row[: count - devices], row[devices:]
    for i in range(count - devices):
        after[i] = (after[i] >> kind(1)) ^ (kind(0) - (after[i] & kind(1)))
    for i in range(count - devices):
        after[i] += before[i]


@compiled
def _unpack_integers(data: Bytes, start: int, ticks: int, row: NDArray[Any], out: NDArray[Any]) -> None:
    signals, messages, count = out.shape
    for m in range(messages):
        for s in range(signals):
            _join_planes(data[m], start + s * count, signals * count, ticks, row)
            out[s, m] = row


@compiled
def _unpack_floats(
    data: Bytes,
    start: int,
    modes: int,
    ticks: int,
    row: NDArray[Any],
    whole: NDArray[Any],
    bits: NDArray[Any],
    out: NDArray[Any],
) -> None:
    """whole, bits: `row` as signed integers and as floats."""
    none = np.iinfo(whole.dtype).min
    signals, messages, count = out.shape
    for m in range(messages):
        for s in range(signals):
            _join_planes(data[m], start + s * count, signals * count, ticks, row)
            mode = data[m, modes + s]
            if mode == 0:
                out[s, m] = bits
                continue
            scale = SCALES[mode]
            for i in range(count):
                out[s, m, i] = np.nan if whole[i] == none else whole[i] / scale
