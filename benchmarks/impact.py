"""Impact of incidents: error of slowdown and lost GPU-hours against a fleet without the fault, and cost per frame.

    python -m benchmarks.impact [--seeds 3] [--nodes 4096] [--incidents 5000]

Truth: the same fleet and seed without the fault. The steps that its jobs make there in the time of the fault are what
the fault cost; the simulator draws the same noise, so nothing else differs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agents.sim.faults.slow import Straggler
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Line, Scenario
from pipeline.config.sections import Impact
from pipeline.incidents.changes import Change
from pipeline.incidents.impact import ImpactBook
from pipeline.incidents.impact_rows import ImpactWriter
from pipeline.incidents.job_loss import HOUR
from pipeline.incidents.job_pace import SLOWER
from pipeline.incidents.jobs import JobBook
from pipeline.model.records import SECOND, Frame, Incident, Instant
from pipeline.model.topology import Topology, kind_of
from pipeline.store.database import Database

ONSET, END, DURATION = 5400.0, 9000.0, 10_200.0  # s: 90 min of past, an hour of fault, 20 min after it; chosen
SLOWDOWNS = (0.1, 0.25, 0.5)
COLUMNS = ("rank.step", "rank.step_time")


@dataclass(frozen=True)
class Run:
    """A simulated fleet. steps: job -> steps that it made in the time of the fault.  book: the impact, as measured."""

    steps: dict[str, float]
    book: ImpactBook


def simulate(seed: int, slowdown: float) -> Run:
    """Runs a fleet with a slow GPU, or none; its incident opens 30 s after the onset, as a detector would."""
    lines = (Line(Straggler(slowdown=slowdown), ONSET, END),) if slowdown else ()
    simulator = FleetSimulator(Scenario(DURATION, 10.0, None, Fleet(16, 8), lines), seed)
    topology, begun, ended = Topology(simulator.parents), dict[str, float](), dict[str, float]()
    book = ImpactBook(JobBook(topology), Impact())
    entity = str(simulator.truth()[0]["entity"]) if slowdown else ""
    for chunk in simulator.chunks():
        ranks = chunk.entities["rank"]
        jobs = {str(topology.ancestor_of_kind(rank, "job")): i for i, rank in reversed(list(enumerate(ranks)))}
        values = {name: chunk.columns["rank"][name].astype(np.float64) for name in COLUMNS}
        for tick, moment in enumerate(chunk.times.tolist()):
            frame = Frame(moment, "rank", ranks, {name: values[name][tick] for name in COLUMNS}, topology)
            book.jobs.observe(Instant(moment, moment, {"rank": frame}))
            if entity and not book.tracked and moment >= simulator.time_at(ONSET + 30):
                book.publish([open_incident("inc", entity, simulator.time_at(ONSET), moment)], [], moment)
            book.advance(moment)
            now = {job: float(values["rank.step"][tick][i]) for job, i in jobs.items()}
            begun = now if moment == simulator.time_at(ONSET) else begun
            ended = now if moment == simulator.time_at(END) else ended
    return Run({job: ended[job] - begun[job] for job in begun}, book)


def open_incident(id_: str, cause: str, onset: int, now: int) -> Change:
    """Returns the change that opens an incident."""
    return Change(
        "opened", Incident(id_, cause, now, onset, "page", "slow", "straggler", cause, (cause,)), now, "bench"
    )


def print_errors(seeds: int) -> None:
    """Prints measured and true slowdown and loss of the job with the slow GPU."""
    print("seed  injected  job  slowdown: true  measured   lost GPU-h: true  measured   error")
    errors = []
    for seed in range(1, seeds + 1):
        plain = simulate(seed, 0.0)
        for injected in SLOWDOWNS:
            run = simulate(seed, injected)
            (loss,) = run.book.tracked["inc"].listed()[:1]
            share = 1 - run.steps[loss.job] / plain.steps[loss.job]
            true, measured = loss.gpus * share * (END - ONSET) / 3600, loss.lost / HOUR
            slow = 1 / (1 - share) - 1
            harmed = share > SLOWER  # a rank of a light stage slows no other: they wait for another stage
            errors += [abs(measured - true) / true] if harmed else []
            print(
                f"{seed:4d}  {injected:8.2f}  {loss.job[4:]:>3}  {slow:14.3f}  {_slowest(run):8.3f}  "
                f"{true:17.2f}  {measured:8.2f}  {f'{100 * (measured / true - 1):+5.1f} %' if harmed else 'not slower'}"
            )
    print(f"median error of the loss {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %")


def _slowest(run: Run) -> float:
    """Returns the slowdown over the minutes of the fault: afterwards the job is as fast as before."""
    loss = run.book.tracked["inc"].listed()[0]
    minutes = [m for m in run.book.jobs.paces.jobs[loss.job].minutes if loss.base and m.step_time > 1.02 * loss.base]
    return statistics.median(m.step_time for m in minutes) / (loss.base or 1.0) - 1 if minutes else 0.0


def print_cost(nodes: int, incidents: int) -> None:
    """Prints CPU milliseconds per frame with many open incidents, and of a write of all of them."""
    topology, ranks = _make_fleet(nodes)
    book, now = ImpactBook(JobBook(topology), Impact()), 1_790_000_040 * SECOND
    spent: dict[str, list[float]] = {"ranks of a frame": [], "impact of a frame": []}
    rng, steps = np.random.default_rng(1), np.arange(len(ranks), dtype=np.float64)
    for tick in range(120):
        now += 10 * SECOND
        steps = steps + 3
        values = {"rank.step": steps, "rank.step_time": rng.normal(3.0, 0.02, len(ranks))}
        instant = Instant(now, now, {"rank": Frame(now, "rank", ranks, values, topology)})
        if tick == 60:
            gpus = [e for e in topology.parents if kind_of(e) == "gpu"][:: max(1, nodes * 8 // incidents)][:incidents]
            begin = time.process_time()
            book.publish([open_incident(f"inc-{i}", gpu, now, now) for i, gpu in enumerate(gpus)], [], now)
            print(f"{len(gpus)} incidents opened together: {1000 * (time.process_time() - begin):.0f} ms")
        for name, work in (("ranks of a frame", book.jobs.observe), ("impact of a frame", book.advance)):
            begin = time.process_time()
            work(instant if name.startswith("ranks") else now)  # type: ignore[arg-type]
            spent[name].append(1000 * (time.process_time() - begin))
    for name, each in spent.items():
        late = sorted(each[61:])
        print(f"{name}: median {statistics.median(late):.1f} ms, largest {late[-1]:.1f} ms ({len(ranks)} ranks)")
    with tempfile.TemporaryDirectory() as folder:
        database, writer = Database(Path(folder) / "store.duckdb"), ImpactWriter(book)
        begin = time.process_time()
        with database.transaction() as connection:
            writer.write(connection, now)
        print(f"one write of at most 500 impacts: {1000 * (time.process_time() - begin):.0f} ms")
        database.close()


def _make_fleet(nodes: int) -> tuple[Topology, tuple[str, ...]]:
    """Returns a fleet of 8 GPUs per node with a job on every 64 nodes, and its ranks."""
    parents: dict[str, tuple[str, ...]] = {f"node:n{n}": (f"rack:r{n // 8}",) for n in range(nodes)}
    parents |= {f"gpu:n{n}.{i}": (f"node:n{n}",) for n in range(nodes) for i in range(8)}
    ranks = {f"rank:{n // 64}.{n * 8 + i}": (f"job:{n // 64}", f"gpu:n{n}.{i}") for n in range(nodes) for i in range(8)}
    return Topology({**parents, **ranks}), tuple(ranks)


def main() -> None:
    """Prints the errors and the cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=4096)
    parser.add_argument("--incidents", type=int, default=5000)
    options = parser.parse_args()
    print_errors(options.seeds)
    print_cost(options.nodes, options.incidents)


if __name__ == "__main__":
    main()
