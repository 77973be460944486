"""Many silent nodes cost no more than they are; holes one after the other, and a time that steps back."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.telemetry.silent_jobs import SilentJobs
from detectors.telemetry.telemetry import Telemetry
from pipeline.records import SECOND, Event, Frame
from pipeline.topology import Topology

T0 = 1_790_000_000 * SECOND
COUNT, GPUS, SUPPLIES = 60, 4, 4
NODES = tuple(f"node:n{i}" for i in range(COUNT))
BELOW = {
    "gpu": tuple(f"gpu:n{i}.{j}" for i in range(COUNT) for j in range(GPUS)),
    "psu": tuple(f"psu:n{i}.{j}" for i in range(COUNT) for j in range(SUPPLIES)),
    "rank": tuple(f"rank:j.{i}" for i in range(COUNT * GPUS)),
}
SIGNAL = {"gpu": "gpu.power", "psu": "psu.output_power", "rank": "rank.step"}


class Counted(Topology):
    """Counts how often it is asked."""

    asked = 0

    def above(self, entity):
        self.asked += 1
        return super().above(entity)


class Site:
    """Nodes of four GPUs and four supplies, one job on all; shows instants of 10 s."""

    def __init__(self):
        parents = {node: [f"rack:r{i // 8}"] for i, node in enumerate(NODES)}
        parents |= {e: [f"node:{e[4:].split('.')[0]}"] for c in ("gpu", "psu") for e in BELOW[c]}
        parents |= {rank: [gpu, "job:j"] for rank, gpu in zip(BELOW["rank"], BELOW["gpu"], strict=True)}
        self.topology, self.detector, self.found = Counted(parents), Telemetry(), []

    def show(self, tick, silent=(), gpus=(), cpu=None, stepping=True, jobs=()):
        out = np.isin(np.arange(COUNT), list(silent))
        values = {c: np.full(len(names), float(tick if c == "rank" else 500)) for c, names in BELOW.items()}
        values["gpu"][np.repeat(out, GPUS) | np.isin(BELOW["gpu"], list(gpus))] = np.nan
        values["rank"][np.repeat(out, GPUS)] = np.nan
        if not stepping:
            values["rank"][:] = 1.0
        time = T0 + tick * 10 * SECOND
        frames = {c: Frame(time, c, names, {SIGNAL[c]: values[c]}, self.topology) for c, names in BELOW.items()}
        load = np.where(out, np.nan, 20.0)
        frames["node"] = Frame(time, "node", NODES, {"node.load1": load}, self.topology, tuple(jobs))
        if cpu is not None:
            told = np.where(out, np.nan, np.array([cpu(i, tick) for i in range(COUNT)], float))
            frames["agent"] = Frame(time, "agent", NODES, {"agent.cpu_time": told}, self.topology)
        self.topology.asked = 0
        found = self.detector.observe(frames)
        self.found += found
        return found


def test_a_silent_node_costs_a_look_at_itself_and_not_at_all_supplies_and_ranks():
    """Twenty of sixty, which share nothing: some 10 questions each at an instant, not one for each of 480 devices."""
    site, lone = Site(), range(0, COUNT, 3)
    for tick in range(30):
        site.show(tick)
    for tick in range(30, 45):
        site.show(tick, lone)
        if tick > 38:
            assert site.topology.asked < 20 * len(lone)
    assert {f.entity for f in site.found} == {NODES[i] for i in lone}
    assert all(f.evidence["bmc"] == "answers" and "stepped on" in f.summary for f in site.found[-len(lone) :])


def test_another_topology_is_walked_once_whoever_is_silent():
    site, lone = Site(), range(0, COUNT, 3)
    for tick in range(45):
        site.show(tick, lone if tick >= 30 else ())
    site.topology.merge({"node:new": ["rack:new"]})
    site.show(45, lone)
    assert site.topology.asked < 4 * (COUNT + sum(map(len, BELOW.values())))
    site.show(46, lone)
    assert site.topology.asked < 20 * len(lone)


def test_the_newest_step_of_the_others_is_right_for_the_node_that_made_the_newest_one_too():
    jobs, site = SilentJobs(), Site()
    names, topology = BELOW["rank"], site.topology
    for tick in range(80):
        steps = np.full(len(names), float(min(tick, 10)))
        steps[:GPUS] = min(tick, 40)  # the ranks of node:n0 go on for longer
        frame = Frame(T0 + tick * 10 * SECOND, "rank", names, {"rank.step": steps}, topology)
        jobs.hear({"rank": frame}, frame.time)
    assert jobs.of("node:n1", T0 + 100 * SECOND, frame.time, topology).state == "goes on"
    assert jobs.of("node:n0", T0 + 400 * SECOND, frame.time, topology).state == "unknown"
    assert jobs.of("node:n0", T0 + 100 * SECOND, frame.time, topology).state == "hangs"
    assert jobs.of("node:nowhere", T0, frame.time, topology).state == "none"


def test_jobs_are_known_by_their_nodes_until_they_are_over_and_after_a_restart():
    site = Site()
    ranks = {"rank:k.0": {"gpu": "gpu:n5.0"}}
    begun = Event(T0, "job:k", "job_start", {"ranks": ranks})
    for tick in range(30):
        site.show(tick, jobs=(begun,) if tick == 0 else ())
    jobs = SilentJobs()
    jobs.restore(site.detector.jobs.snapshot())
    now = T0 + 290 * SECOND
    for known in (site.detector.jobs, jobs):
        assert known.of("node:n5", now, now, site.topology).job == "job:k"
    over = Frame(now, "job", ("job:k",), {}, site.topology, (Event(now, "job:k", "job_end", {}),))
    jobs.hear({"job": over}, now)
    assert jobs.of("node:n5", now, now, site.topology).state == "ended"
    assert jobs.of("node:n6", now, now, site.topology).job == ""
    jobs.hear({}, now + 7200 * SECOND)
    assert jobs.of("node:n5", now, now, site.topology).job != "job:k"


def test_an_agent_that_stalls_minutes_after_it_was_started_anew_ran_on():
    site = Site()
    for tick in range(90):
        gone = (3,) if 40 <= tick < 43 or 76 <= tick < 80 else ()
        site.show(tick, gone, cpu=lambda i, tick: tick - 40 if i == 3 and tick >= 40 else tick)
    levels = [f.level for f in site.found]
    assert levels[0] == "suspect"
    assert levels[-1] == "ticket"
    assert "started anew" in site.found[0].summary
    assert "ran on" in site.found[-1].summary


@pytest.mark.parametrize("back", [50, 1000])
def test_a_gpu_that_falls_silent_after_the_time_stepped_back_is_told_within_minutes(back):
    """Its node had been silent before, so that it is known since when it speaks: that must not lie in the future."""
    site = Site()
    for tick in range(1000, 1060):
        site.show(tick, (3,) if 1030 <= tick < 1045 else ())
    assert {f.entity for f in site.found} == {"node:n3"}
    site.found.clear()
    for tick in range(1060, 1100):
        site.show(tick - back, gpus=("gpu:n3.1",))
    assert {f.entity for f in site.found} == {"gpu:n3.1"}


def test_a_job_that_stepped_in_a_future_that_is_none_any_more_does_not_step_on():
    site = Site()
    for tick in range(100, 140):
        site.show(tick)
    for tick in range(140, 180):
        site.show(tick - 100, (3,), stepping=False)
    assert {f.entity for f in site.found} == {"node:n3"}
    assert not any("stepped on" in f.summary or f.evidence["silent_s"] < 0 for f in site.found)
