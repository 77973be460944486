"""How fast a fleet is simulated: node-days per core-second, in process, without files.

    python -m benchmarks.simulator [--nodes 512] [--hours 2] [--processes 2] [--node-days 0] [--world 5]

Everything is on: jobs that come and go, published fault rates, every benign event, lost values, jitter. With
--node-days N it simulates so many for real, a fleet per process and one seed each, and prints how long it took.
"""

from __future__ import annotations

import argparse
import resource
import time
from concurrent.futures import ProcessPoolExecutor

from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Jobs, Rates, Scenario
from agents.sim.world import draw_world

DAY = 86_400.0


def scenario(nodes: int, seconds: float, world: int | None) -> Scenario:
    """A day in the field, with all harmless events; in a drawn world at its own interval."""
    field = Scenario(seconds, 10.0, None, Fleet(nodes, 8, 0.01, 5.0), jobs=Jobs(12.0), rates=Rates(1.0, 1.0))
    return field if world is None else field.in_world(draw_world(world))


def run(nodes: int, seconds: float, world: int | None, seed: int) -> tuple[float, int, int]:
    """Returns (CPU seconds, samples, peak memory in MiB) of one fleet."""
    begin, samples = time.process_time(), 0
    for chunk in FleetSimulator(scenario(nodes, seconds, world), seed).chunks():
        samples += sum(v.size for block in chunk.columns.values() for v in block.values())
    took = time.process_time() - begin
    return took, samples, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=512, help="of each fleet")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--node-days", type=float, default=0.0, help="instead of --hours: so many in all")
    parser.add_argument("--world", type=int, default=None, help="number of a drawn world (agents/sim/world.py)")
    given = parser.parse_args()
    seconds = given.node_days * DAY / given.nodes / given.processes or given.hours * 3600
    begin = time.monotonic()
    with ProcessPoolExecutor(given.processes) as pool:
        fleets = [pool.submit(run, given.nodes, seconds, given.world, seed) for seed in range(1, given.processes + 1)]
        found = [fleet.result() for fleet in fleets]
    wall, cpu = time.monotonic() - begin, sum(took for took, _, _ in found)
    days = given.processes * given.nodes * seconds / DAY
    print(f"node-days                    {days:10.1f}")
    print(f"wall                         {wall:10.1f} s")
    print(f"node-days per core-second    {days / cpu:10.2f}")
    print(f"samples per core-second      {sum(s for _, s, _ in found) / cpu / 1e6:10.2f} M")
    print(f"10,000 node-days on 2 cores  {10_000 / (days / cpu) / 2 / 60:10.1f} min")
    print(f"peak memory of a fleet       {max(m for _, _, m in found):10d} MiB")


if __name__ == "__main__":
    main()
