"""Cost of many silent nodes, readers that are gone, several gaps in a row, a clock that is set back."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base.topology_index import TopologyIndex
from detectors.telemetry.silence import LastSamples
from detectors.telemetry.silent_jobs import SilentJobs
from detectors.telemetry.telemetry import Telemetry
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

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
    """Counts the calls of `ancestors`."""

    asked = 0

    def ancestors(self, entity):
        self.asked += 1
        return super().ancestors(entity)


class Site:
    """Nodes of four GPUs and four supplies, one job on all; shows instants of 10 s."""

    def __init__(self, rack=8):
        parents = {node: [f"rack:r{i // rack}"] for i, node in enumerate(NODES)}
        parents |= {e: [f"node:{e[4:].split('.')[0]}"] for c in ("gpu", "psu") for e in BELOW[c]}
        parents |= {rank: [gpu, "job:j"] for rank, gpu in zip(BELOW["rank"], BELOW["gpu"], strict=True)}
        self.topology, self.detector, self.found = Counted(parents), Telemetry(), []

    def show(
        self, tick, silent=(), gpus=(), cpu=None, stepping=True, jobs=(), unread=None, of=range(COUNT), frame=True
    ):
        """silent: nodes with their GPUs.  unread: a class without samples of the nodes `of`, or without a frame."""
        out = np.isin(np.arange(COUNT), list(silent))
        values = {c: np.full(len(names), float(tick if c == "rank" else 500)) for c, names in BELOW.items()}
        values["gpu"][np.repeat(out, GPUS) | np.isin(BELOW["gpu"], list(gpus))] = np.nan
        values["rank"][np.repeat(out, GPUS)] = np.nan
        lost = np.isin(np.arange(COUNT), list(of))
        if unread in values:
            values[unread][np.repeat(lost, GPUS)] = np.nan
        if not stepping:
            values["rank"][:] = 1.0
        time = T0 + tick * 10 * SECOND
        frames = {c: Frame(time, c, names, {SIGNAL[c]: values[c]}, self.topology) for c, names in BELOW.items()}
        load = np.where(out | (lost & (unread == "node")), np.nan, 20.0)
        frames["node"] = Frame(time, "node", NODES, {"node.load1": load}, self.topology, tuple(jobs))
        if cpu is not None:
            seconds = np.where(out, np.nan, np.array([cpu(i, tick) for i in range(COUNT)], float))
            frames["agent"] = Frame(time, "agent", NODES, {"agent.cpu_time": seconds}, self.topology)
        if not frame:
            del frames[unread]
        self.topology.asked = 0
        found = self.detector.observe(frames)
        self.found += found
        return found


def test_a_silent_node_requires_no_walk_over_all_supplies_and_ranks():
    """Seven of sixty, which share nothing: some 10 calls each at an instant, not one for each of 480 devices."""
    site, lone = Site(), range(0, COUNT, 9)
    for tick in range(30):
        site.show(tick)
    for tick in range(30, 45):
        site.show(tick, lone)
        if tick > 38:
            assert site.topology.asked < 20 * len(lone)
    assert {f.entity for f in site.found} == {NODES[i] for i in lone}
    assert all(f.evidence["bmc"] == "answers" and "job j still runs" in f.summary for f in site.found[-len(lone) :])


def test_a_changed_topology_is_walked_once():
    site, lone = Site(), range(0, COUNT, 3)
    for tick in range(45):
        site.show(tick, lone if tick >= 30 else ())
    site.topology.merge({"node:new": ["rack:new"]})
    site.show(45, lone)
    assert site.topology.asked < 4 * (COUNT + sum(map(len, BELOW.values())))
    site.show(46, lone)
    assert site.topology.asked < 20 * len(lone)


def test_only_ranks_on_nodes_that_report_show_what_a_job_does():
    jobs, last, site = SilentJobs(), LastSamples({"node": "node.load1"}), Site()
    names, topology = BELOW["rank"], site.topology
    for tick in range(80):
        steps = np.full(len(names), float(min(tick, 10)))
        steps[:GPUS] = min(tick, 40)  # the ranks of node:n0 go on until it falls silent
        load = np.full(COUNT, 20.0)
        load[0] = np.nan if tick > 40 else 20.0
        time = T0 + tick * 10 * SECOND
        frames = {"rank": Frame(time, "rank", names, {"rank.step": steps}, topology)}
        frames["node"] = Frame(time, "node", NODES, {"node.load1": load}, topology)
        last.update(frames, time)
        jobs.update(frames, time, last)
    assert jobs.verdict("node:n0", T0 + 400 * SECOND, time, topology).state == "unknown"
    assert jobs.verdict("node:n0", T0 + 100 * SECOND, time, topology).state == "hangs"
    assert jobs.verdict("node:n1", T0 + 60 * SECOND, time, topology).state == "running"
    assert jobs.verdict("node:nowhere", T0, time, topology).state == "none"


def test_jobs_are_known_by_their_nodes_until_they_end_and_after_a_restart():
    site = Site()
    ranks = {"rank:k.0": {"gpu": "gpu:n5.0"}}
    begun = Event(T0, "job:k", "job_start", {"ranks": ranks})
    for tick in range(30):
        site.show(tick, jobs=(begun,) if tick == 0 else ())
    jobs = SilentJobs()
    jobs.restore(site.detector.jobs.snapshot())
    now = T0 + 290 * SECOND
    for known in (site.detector.jobs, jobs):
        assert known.verdict("node:n5", now, now, site.topology).job == "job:k"
    over = Frame(now, "job", ("job:k",), {}, site.topology, (Event(now, "job:k", "job_end", {}),))
    jobs.update({"job": over}, now)
    assert jobs.verdict("node:n5", now, now, site.topology).state == "ended"
    assert jobs.verdict("node:n6", now, now, site.topology).job == "job:j", "by the ranks of the topology"
    jobs.update({}, now + 7200 * SECOND)
    assert jobs.verdict("node:n5", now, now, site.topology).job != "job:k"


def test_an_agent_that_stalls_minutes_after_a_restart_did_not_restart_again():
    site = Site()
    for tick in range(90):
        gone = (3,) if 40 <= tick < 43 or 76 <= tick < 79 else ()
        site.show(tick, gone, cpu=lambda i, tick: tick - 40 if i == 3 and tick >= 40 else tick)
    levels = [f.level for f in site.found]
    assert levels[0] == "suspect"
    assert levels[-1] == "ticket"
    assert "its agent restarted" in site.found[0].summary
    assert "its agent did not restart" in site.found[-1].summary


@pytest.mark.parametrize("back", [50, 1000])
def test_a_gpu_that_falls_silent_after_the_clock_was_set_back_is_reported_within_minutes(back):
    """Its node had been silent before, so the start of its reports is known: it must not be in the future."""
    site = Site()
    for tick in range(1000, 1060):
        site.show(tick, (3,) if 1030 <= tick < 1045 else ())
    assert {f.entity for f in site.found} == {"node:n3"}
    site.found.clear()
    for tick in range(1060, 1100):
        site.show(tick - back, gpus=("gpu:n3.1",))
    assert {f.entity for f in site.found} == {"gpu:n3.1"}


def test_steps_dated_later_than_the_clock_after_it_was_set_back_are_not_sign_of_life():
    site = Site()
    for tick in range(100, 140):
        site.show(tick)
    for tick in range(140, 180):
        site.show(tick - 100, (3,), stepping=False)
    assert {f.entity for f in site.found} == {"node:n3"}
    assert not any("job j still runs" in f.summary or f.evidence["silent_s"] < 0 for f in site.found)


def shown(site, ticks, of=range(COUNT), **more):
    """Quiet for 30 instants, then `ticks` without a class; returns the calls of the last one."""
    for tick in range(30):
        site.show(tick)
    for tick in range(30, 30 + ticks):
        site.show(tick, of=of, **more)
    return site.topology.asked


@pytest.mark.parametrize(
    ("unread", "what", "frame"),
    [
        ("gpu", "GPUs", True),
        ("gpu", "GPUs", False),
        ("psu", "power supplies", True),
        ("node", "node data", True),
    ],
)
def test_a_class_that_falls_silent_on_all_live_nodes_is_one_ticket_about_its_reader(unread, what, frame):
    site = Site()
    asked = shown(site, 215 if unread == "psu" else 40, unread=unread, frame=frame)  # BMCs may not answer for 30 min
    assert {(f.entity, f.level) for f in site.found} == {("site:all", "ticket")}
    assert len(site.found) <= 7  # one a minute
    first = site.found[0].summary
    assert first.startswith("Whole site: ")
    assert what in first
    assert "60 of 60 nodes" in first
    assert ("reader gone" in first) == (unread != "node")
    assert asked == 0


def test_a_reader_is_blamed_on_the_nearest_entity_above_all_its_devices():
    site = Site(rack=COUNT)
    shown(site, 12, unread="gpu")
    assert {f.entity for f in site.found} == {"rack:r0"}


def test_a_few_nodes_of_many_are_reported_one_by_one():
    site = Site()
    shown(site, 12, of=range(0, COUNT, 8), unread="gpu")
    assert {f.entity for f in site.found} == {NODES[i] for i in range(0, COUNT, 8)}


@pytest.mark.parametrize("unread", ["gpu", "node"])
def test_readers_that_return_one_after_the_other_are_reported_only_for_those_that_do_not_return(unread):
    site = Site()
    shown(site, 12, unread=unread)
    for tick in range(42, 100):
        site.show(tick, unread=unread, of=range(min(tick - 42, COUNT - 2), COUNT))
    blamed = [f.entity for f in site.found]
    assert {"site:all", *NODES[-2:]} <= set(blamed) <= {"site:all", *NODES[-6:]}
    assert blamed.index(NODES[-1]) > max(i for i, e in enumerate(blamed) if e == "site:all")


def test_a_gpu_that_was_silent_before_keeps_its_own_ticket_beside_that_of_the_reader():
    site = Site()
    for tick in range(60):
        site.show(tick, gpus=("gpu:n3.1",) if tick >= 30 else ())
    for tick in range(60, 75):
        site.show(tick, unread="gpu")
    assert {f.entity for f in site.found} == {"gpu:n3.1", "site:all"}


def test_supplies_that_are_read_at_different_instants_are_one_ticket_too():
    site = Site()
    for tick in range(270):
        resting = () if tick >= 70 else [i for i in range(COUNT) if (tick + i) % 3]
        site.show(tick, unread="psu", of=range(COUNT) if tick >= 70 else resting)
    assert {f.entity for f in site.found} == {"site:all"}


def test_announced_work_costs_one_lookup_per_device_and_its_node_is_not_counted():
    site, begun = Site(), Event(T0 + 20 * SECOND, "node:n7", "maintenance_start", {"seconds": 7200.0})
    for tick in range(50):
        site.show(tick, jobs=(begun,) if tick == 20 else (), unread="gpu" if tick >= 30 else None)
    assert site.topology.asked == 0
    assert {f.entity for f in site.found} == {"site:all"}
    assert "59 of 59 nodes" in site.found[0].summary


def test_gpus_that_fall_silent_with_the_jobs_of_most_nodes_are_a_page():
    site = Site()
    places = {rank: {"gpu": gpu} for rank, gpu in zip(BELOW["rank"], BELOW["gpu"], strict=True)}
    for tick in range(30):
        site.show(tick, jobs=(Event(T0, "job:j", "job_start", {"ranks": places}),) if tick == 0 else ())
    over = Event(T0 + 310 * SECOND, "job:j", "job_end", {})
    for tick in range(30, 45):
        site.show(tick, jobs=(over,) if tick == 31 else (), unread="gpu", stepping=False)
    assert {(f.entity, f.level) for f in site.found} == {("site:all", "page")}
    assert "their jobs ended" in site.found[0].summary


def test_a_lost_reader_is_reported_as_before_after_a_restart():
    site = Site()
    shown(site, 12, unread="gpu")
    kept, site.detector = site.detector.snapshot(), Telemetry()
    site.detector.restore(kept)
    for tick in range(42, 60):
        site.show(tick, unread="gpu", of=range(30, COUNT))
    assert {(f.entity, f.onset) for f in site.found} == {("site:all", site.found[0].onset)}


def test_a_topology_index_is_kept_when_jobs_start_and_rebuilt_when_a_device_moves():
    site, index = Site(), TopologyIndex()
    index.update(BELOW["gpu"], site.topology)
    kept, nodes = index.positions_below("rack:r0"), index.node_positions(NODES)
    site.topology.merge({"rank:k.0": ["gpu:n0.0", "job:k"]})
    index.update(BELOW["gpu"], site.topology)
    assert index.positions_below("rack:r0") is kept
    assert index.node_positions(NODES) is nodes
    site.topology.merge({"gpu:n0.0": ["node:n9"]})
    index.update(BELOW["gpu"], site.topology)
    assert len(index.positions_below("rack:r0")) == len(kept) - 1
    assert index.node_positions(NODES)[0] == 9


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("interval", [20, 30, 60])
@pytest.mark.parametrize("jitter", [0.02, 2.0])
def test_a_node_whose_samples_lie_at_the_edge_of_a_frame_has_no_gap(interval, jitter):
    """The time of a frame is that of its newest sample, so its gaps differ by up to a frame."""
    detector, found, random = Telemetry(), [], np.random.default_rng(interval)
    graph = Topology({"gpu:n0.0": ["node:n0"], "gpu:n1.0": ["node:n1"]})
    own = {int(at // 10): at for at in (i + random.uniform(-jitter, jitter) for i in range(interval, 7200, interval))}
    for cell in range(720):
        newest = max(own.get(cell, 0.0), 10 * cell + 8.7)  # the other node is read in each frame
        time, here = T0 + int(newest * SECOND), np.array([0.0 if cell in own else np.nan, 0.0])
        frames = {
            "node": Frame(time, "node", ("node:n0", "node:n1"), {"node.load1": here + 20 + cell % 7}, graph),
            "gpu": Frame(time, "gpu", ("gpu:n0.0", "gpu:n1.0"), {"gpu.power": here + 600 + cell % 5}, graph),
        }
        found += detector.observe(frames)
    assert found == []
