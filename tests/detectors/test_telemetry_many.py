"""Many silent nodes cost no more than they are; readers that are gone; holes in a row, a time that steps back."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base.topology_index import TopologyIndex
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
    """Counts how often it is asked."""

    asked = 0

    def above(self, entity):
        self.asked += 1
        return super().above(entity)


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
        """silent: nodes with their GPUs.  unread: a class of which the nodes `of` tell nothing, or not even a frame."""
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
            told = np.where(out, np.nan, np.array([cpu(i, tick) for i in range(COUNT)], float))
            frames["agent"] = Frame(time, "agent", NODES, {"agent.cpu_time": told}, self.topology)
        if not frame:
            del frames[unread]
        self.topology.asked = 0
        found = self.detector.observe(frames)
        self.found += found
        return found


def test_a_silent_node_costs_a_look_at_itself_and_not_at_all_supplies_and_ranks():
    """Seven of sixty, which share nothing: some 10 questions each at an instant, not one for each of 480 devices."""
    site, lone = Site(), range(0, COUNT, 9)
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
        gone = (3,) if 40 <= tick < 43 or 76 <= tick < 79 else ()
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


def shown(site, ticks, of=range(COUNT), **more):
    """Quiet for 30 instants, then `ticks` without a class; what the last of them cost."""
    for tick in range(30):
        site.show(tick)
    for tick in range(30, 30 + ticks):
        site.show(tick, of=of, **more)
    return site.topology.asked


@pytest.mark.parametrize(
    ("unread", "what", "frame"),
    [
        ("gpu", "GPUs of", True),
        ("gpu", "GPUs of", False),
        ("psu", "Power supplies of", True),
        ("node", "60 of 60", True),
    ],
)
def test_a_class_that_falls_silent_on_all_nodes_that_live_is_one_ticket_about_its_reader(unread, what, frame):
    site = Site()
    asked = shown(site, 40, unread=unread, frame=frame)
    assert {(f.entity, f.level) for f in site.found} == {("site:all", "ticket")}
    assert len(site.found) <= 7  # one a minute
    first = site.found[0].summary
    assert first.startswith(what)
    assert "60 of 60 nodes" in first
    assert "what reads them is gone (exporter, collector)" in first
    assert asked == 0


def test_what_reads_a_class_is_blamed_on_the_place_that_holds_all_of_it():
    site = Site(rack=COUNT)
    shown(site, 12, unread="gpu")
    assert {f.entity for f in site.found} == {"rack:r0"}


def test_a_few_nodes_of_many_are_told_each_for_itself():
    site = Site()
    shown(site, 12, of=range(0, COUNT, 8), unread="gpu")
    assert {f.entity for f in site.found} == {NODES[i] for i in range(0, COUNT, 8)}


@pytest.mark.parametrize("unread", ["gpu", "node"])
def test_readers_that_come_back_one_after_the_other_are_no_news_of_the_rest_but_of_whom_they_leave_out(unread):
    site = Site()
    shown(site, 12, unread=unread)
    for tick in range(42, 100):
        site.show(tick, unread=unread, of=range(min(tick - 42, COUNT - 2), COUNT))
    told = [f.entity for f in site.found]
    assert {"site:all", *NODES[-2:]} <= set(told) <= {"site:all", *NODES[-6:]}
    assert told.index(NODES[-1]) > max(i for i, e in enumerate(told) if e == "site:all")


def test_a_gpu_that_was_silent_before_keeps_its_own_ticket_and_the_flood_is_told_beside_it():
    site = Site()
    for tick in range(60):
        site.show(tick, gpus=("gpu:n3.1",) if tick >= 30 else ())
    for tick in range(60, 75):
        site.show(tick, unread="gpu")
    assert {f.entity for f in site.found} == {"gpu:n3.1", "site:all"}


def test_supplies_of_which_each_is_read_at_another_instant_are_one_ticket_too():
    site = Site()
    for tick in range(100):
        resting = () if tick >= 70 else [i for i in range(COUNT) if (tick + i) % 3]
        site.show(tick, unread="psu", of=range(COUNT) if tick >= 70 else resting)
    assert {f.entity for f in site.found} == {"site:all"}


def test_work_that_is_announced_somewhere_costs_a_look_at_each_device_once_and_its_node_is_not_counted():
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
    assert "jobs ended with it" in site.found[0].summary


def test_a_reader_that_is_gone_is_told_of_as_before_after_a_restart():
    site = Site()
    shown(site, 12, unread="gpu")
    kept, site.detector = site.detector.snapshot(), Telemetry()
    site.detector.restore(kept)
    for tick in range(42, 60):
        site.show(tick, unread="gpu", of=range(30, COUNT))
    assert {(f.entity, f.onset) for f in site.found} == {("site:all", site.found[0].onset)}


def test_jobs_that_come_and_go_leave_what_is_known_of_the_homes_of_devices_and_a_move_renews_it():
    site, homes = Site(), TopologyIndex()
    homes.update(BELOW["gpu"], site.topology)
    kept, nodes = homes.positions_below("rack:r0"), homes.node_positions(NODES)
    site.topology.merge({"rank:k.0": ["gpu:n0.0", "job:k"]})
    homes.update(BELOW["gpu"], site.topology)
    assert homes.positions_below("rack:r0") is kept
    assert homes.node_positions(NODES) is nodes
    site.topology.merge({"gpu:n0.0": ["node:n9"]})
    homes.update(BELOW["gpu"], site.topology)
    assert len(homes.positions_below("rack:r0")) == len(kept) - 1
    assert homes.node_positions(NODES)[0] == 9
