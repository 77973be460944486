"""The cost of the common kernel: a tick of a whole fleet, its state, and its speed compared with memcpy.

    python -m benchmarks.detectors [--gpus 100000] [--metrics 20] [--cohort 256] [--ticks 15]

CPU time of one process; all figures of one run, so that they compare. Timed once all streams have learnt, as before it
the kernel has less to do. Its bytes are those that it has to read and write once: sample, cohort and state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from detectors.base import kernel
from detectors.base.streams import LEARN, Channel, Streams
from pipeline.model.records import SECOND

_STATE_BYTES = 24  # of a stream, read and written
_INPUT_BYTES = 20  # residual, scale, widening, limit and least effect, float32 each, read
_WARM = 2 * LEARN  # ticks before the measurement, so that all streams have learned


def seconds(work: Callable[[int], object], ticks: int) -> float:
    """Returns the median CPU seconds of a call, after warm-up calls."""
    for tick in range(_WARM):
        work(tick)
    spent = []
    for tick in range(_WARM, _WARM + ticks):
        began = time.process_time()
        work(tick)
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def kept_bytes(every: Sequence[Streams]) -> int:
    """Returns the bytes that streams keep from tick to tick: state, buffers for a tick, order of their cohorts."""
    pieces = [piece for streams in every for piece in (streams, *vars(streams).values())]
    arrays = [a for piece in pieces for a in getattr(piece, "__dict__", {}).values() if isinstance(a, np.ndarray)]
    return sum({id(array): array.nbytes for array in arrays}.values())


def fleet_tick(gpus: int, metrics: int, cohort: int, ticks: int) -> tuple[float, int, int]:
    """CPU seconds of one tick of all metrics; bytes of state, which snapshots keep, and of all that is held."""
    rng, groups = np.random.default_rng(0), (np.arange(gpus) // cohort).astype(np.int32)
    every = [Streams(Channel(0.01, 0.03)) for _ in range(metrics)]
    samples = [rng.normal(0.0, 0.03, gpus) for _ in range(4)]

    def tick(number: int) -> None:
        for place, streams in enumerate(every):
            streams.step(samples[(number + place) % 4], groups, (number + 1) * 10 * SECOND)

    spent = seconds(tick, ticks)
    return spent, sum(streams.cells.nbytes for streams in every), kept_bytes(every)


def kernel_speed(streams: int, ticks: int) -> tuple[float, float]:
    """Bytes read and written per CPU second: of the sequential kernel, and of copying an array of the same state."""
    cells, other = np.zeros((6, streams), np.float32), np.zeros((6, streams), np.float32)
    residual = np.random.default_rng(0).normal(0, 0.03, streams).astype(np.float32)
    scale, wide = np.full(streams, 0.03, np.float32), np.ones(streams, np.float32)
    limit, least = np.full(streams, 18.5, np.float32), np.full(streams, 0.03, np.float32)
    settings = Channel(0.01, 0.03).settings()
    words = cells[5].view(np.uint32)

    def advance(_: int) -> None:
        kernel.advance_streams(cells, words, residual, scale, wide, limit, least, settings, np.uint32(10))

    mine = (2 * _STATE_BYTES + _INPUT_BYTES) * streams / seconds(advance, ticks)
    return mine, 2 * cells.nbytes / seconds(lambda _: np.copyto(other, cells), ticks)


def main() -> None:
    parser = argparse.ArgumentParser(description="what the common kernel of the detectors costs")
    parser.add_argument("--gpus", type=int, default=100_000)
    parser.add_argument("--metrics", type=int, default=20)
    parser.add_argument("--cohort", type=int, default=256, help="members of a cohort")
    parser.add_argument("--ticks", type=int, default=15)
    options = parser.parse_args()
    spent, state, kept = fleet_tick(options.gpus, options.metrics, options.cohort, options.ticks)
    samples = options.gpus * options.metrics
    print(f"{options.gpus:,} GPUs x {options.metrics} metrics, cohorts of {options.cohort}:")
    print(f"  {spent:.3f} s of a core per tick, {samples / spent / 1e6:.0f} M samples/s; expected <= 0.25 s for 2 M")
    per = f"{state / samples:.0f} bytes a stream; {kept / 1e6:.0f} MB with room to work in"
    print(f"  {state / 1e6:.0f} MB of state, {per}; expected <= 250 MB")
    mine, copy = kernel_speed(samples, options.ticks)
    print(f"  kernel {mine / 1e9:.1f} GB/s, memcpy {copy / 1e9:.1f} GB/s: {mine / copy:.2f}; expected >= 0.25")


if __name__ == "__main__":
    main()
