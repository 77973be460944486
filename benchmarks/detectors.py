"""The cost of the detectors: the common kernel beside memcpy, a snapshot of all state, a tick of all detectors.

    python -m benchmarks.detectors [--gpus 100000] [--metrics 20] [--cohort 256] [--ticks 15] [--nodes 4096]

CPU time of one process; all figures of one run, so that they compare. Timed once all streams have learnt, as before it
the kernel has less to do. Its bytes are those that it has to read and write once: sample, cohort and state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from agents.sim.scenario import Fleet, Scenario
from agents.sim.world import draw_world
from benchmarks.detection.judge import Trial
from detectors.base import kernel
from detectors.base.streams import LEARN, Channel, Streams
from pipeline.engine.engine import SNAPSHOT_EVERY
from pipeline.model.records import SECOND
from pipeline.store.detector_state import delete_other_states, state_folder, write_state

_STATE_BYTES = 24  # of a stream, read and written
_INPUT_BYTES = 20  # residual, scale, widening, limit and least effect, float32 each, read
_SNAPSHOT_S = 600.0  # simulated s before the snapshot; longer, and it has no other size
_WATCHED_S = 1200.0  # simulated s in which all detectors are timed, after as many in which they learn
_BUSY = 0  # a world (agents/sim/world.py) in which seven jobs in ten have one node: one starts or ends at each tick
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


def snapshot_cost(nodes: int) -> tuple[float, float, int]:
    """Returns CPU and wall seconds of writing the state of all detectors to disk, and its bytes: median of five."""
    trial = Trial(Scenario(_SNAPSHOT_S, 10.0, None, Fleet(nodes, 8)), 1)
    for _ in trial.run():
        pass
    spent = []
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store.duckdb"
        for number in range(5):
            cpu, wall = time.process_time(), time.monotonic()
            name = write_state(store, number, trial.runner.snapshot())
            spent.append((time.process_time() - cpu, time.monotonic() - wall))
            size = (state_folder(store) / name).stat().st_size
            delete_other_states(store, name)
    return *(statistics.median(values) for values in zip(*spent, strict=True)), size


def tick_cost(nodes: int, world: int | None) -> tuple[float, float]:
    """Returns CPU seconds of all detectors per tick of a fleet, and changes of jobs per tick."""
    scenario = Scenario(2 * _WATCHED_S, 10.0, None, Fleet(nodes, 8))
    scenario = scenario if world is None else scenario.in_world(draw_world(world))
    trial = Trial(scenario, 1)
    run = trial.run(scenario.ticks // 2)
    ticks, version = next(run), trial.topology.version
    before = trial.seconds["detectors"]
    ticks = next(run) - ticks
    return (trial.seconds["detectors"] - before) / ticks, (trial.topology.version - version) / ticks


def main() -> None:
    parser = argparse.ArgumentParser(description="what the common kernel of the detectors costs")
    parser.add_argument("--gpus", type=int, default=100_000)
    parser.add_argument("--metrics", type=int, default=20)
    parser.add_argument("--cohort", type=int, default=256, help="members of a cohort")
    parser.add_argument("--ticks", type=int, default=15)
    parser.add_argument("--nodes", type=int, default=4096, help="simulated nodes whose detectors' state is written")
    options = parser.parse_args()
    spent, state, kept = fleet_tick(options.gpus, options.metrics, options.cohort, options.ticks)
    samples = options.gpus * options.metrics
    print(f"{options.gpus:,} GPUs x {options.metrics} metrics, cohorts of {options.cohort}:")
    print(f"  {spent:.3f} s of a core per tick, {samples / spent / 1e6:.0f} M samples/s; expected <= 0.25 s for 2 M")
    per = f"{state / samples:.0f} bytes a stream; {kept / 1e6:.0f} MB with room to work in"
    print(f"  {state / 1e6:.0f} MB of state, {per}; expected <= 250 MB")
    mine, copy = kernel_speed(samples, options.ticks)
    print(f"  kernel {mine / 1e9:.1f} GB/s, memcpy {copy / 1e9:.1f} GB/s: {mine / copy:.2f}; expected >= 0.25")
    cpu, wall, size = snapshot_cost(options.nodes)
    rate = cpu * 60 * SECOND / SNAPSHOT_EVERY
    print(f"state of all detectors, {options.nodes:,} nodes:")
    print(f"  {size / 1e6:.0f} MB written in {cpu:.2f} s of CPU, {wall:.1f} s")
    print(f"  every {SNAPSHOT_EVERY // SECOND} s: {rate:.2f} s of CPU a minute; expected <= 0.4 s")
    for world, name in ((None, "jobs of days"), (_BUSY, "jobs of one node that start and end")):
        cpu_per_tick, changes = tick_cost(options.nodes, world)
        what = f"all detectors, {options.nodes:,} nodes, {name} ({changes:.1f} changes a tick)"
        print(f"{what}: {cpu_per_tick * 1000:.0f} ms a tick")


if __name__ == "__main__":
    main()
