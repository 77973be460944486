"""A dead node under a job pages within 90 s; a dead agent, a dark network or a checkpoint does not."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.telemetry.telemetry import Telemetry
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

T0, COUNT, DEAD = 1_790_000_000 * SECOND, 6, 2
NODES = tuple(f"node:n{i}" for i in range(COUNT))
OF = {
    "gpu": tuple(f"gpu:n{i}.{j}" for i in range(COUNT) for j in range(4)),
    "nic": (*(f"port:n{i}.p0" for i in range(COUNT)), *(f"port:l1.{i}" for i in range(COUNT))),
    "psu": tuple(f"psu:n{i}.{j}" for i in range(COUNT) for j in range(2)),
    "rank": tuple(f"rank:7.{i}" for i in range(COUNT)),
}


def topology(job):
    parents = {e: [f"node:{e.partition(':')[2].partition('.')[0]}"] for c in ("gpu", "psu") for e in OF[c]}
    parents |= {f"port:n{i}.p0": [f"node:n{i}"] for i in range(COUNT)}
    parents |= {f"rank:7.{i}": ["job:7", f"gpu:n{i}.0"] for i in range(COUNT if job else 0)}
    return Topology(parents, {f"port:n{i}.p0": {"peer": f"port:l1.{i}"} for i in range(COUNT)})


class Fleet:
    """Six nodes of one job. `run` lets node 2 fall silent at 1,800 s; what else stops is a keyword."""

    def __init__(self, interval=10, step_s=10.0, job=True):
        self.interval, self.step_s, self.topology = interval, step_s, topology(job)
        self.detector, self.rng, self.sent, self.step = Telemetry(), np.random.default_rng(3), np.zeros(COUNT), 0.0

    def run(
        self,
        hook=True,
        seconds=400,
        silent=(DEAD,),
        at=1800,
        stops=None,
        links=False,
        supplies=False,
        ports=False,
        back=1e9,
        draws=1.0,
    ):
        """back: s after which the silent nodes report again.   draws: share of the usual power that all draw then.

        stops: s after which the job stops, None never.  links, supplies: whether those of the node fail with it.
        ports: whether switch ports and supplies are read."""
        found, jitter = [], self.rng.standard_normal
        begun = {"ranks": {f"rank:7.{i}": {"gpu": f"gpu:n{i}.0"} for i in range(COUNT)}}
        for second in range(0, at + seconds, self.interval):
            time, working = T0 + second * SECOND, stops is None or second < at + stops
            out = np.isin(np.arange(COUNT), silent) & (at <= second < at + back)
            self.step += self.interval / self.step_s if working and second % 1800 >= 60 else 0.0
            self.sent += self.interval * 1e9 * (working and second % 1800 >= 60)
            power = np.repeat(np.where(out, np.nan, 600.0 if working else 200.0), 4) + 20 * jitter(4 * COUNT)
            values = {
                "node": {"node.load1": np.where(out, np.nan, 20.0)},
                "gpu": {"gpu.power": power},
                "nic": {"nic.state": np.where(out, np.nan, 1.0), "nic.tx_bytes": np.where(out, np.nan, self.sent)},
            }
            if ports:
                far = {"nic.state": np.where(out & links, 0.0, 1.0), "nic.tx_bytes": self.sent.copy()}
                values["nic"] = {k: np.append(v, far[k]) for k, v in values["nic"].items()}
                given = np.where(out & supplies, 300.0, 2500.0 * (draws if second >= at else 1.0))
                if second % 30 == 0:
                    values["psu"] = {"psu.output_power": np.repeat(given, 2) + 20 * jitter(2 * COUNT)}
            if hook:
                values["rank"] = {"rank.step": np.where(out, np.nan, np.floor(self.step))}
            frames = {}
            for name, columns in values.items():
                events = (Event(time, "job:7", "job_start", begun),) if second == 0 and name == "node" else ()
                names = NODES if name == "node" else OF[name][: len(next(iter(columns.values())))]
                frames[name] = Frame(time, name, names, columns, self.topology, events)
            found += self.detector.observe(frames)
        return [(f.entity, f.level, (f.time - T0) // SECOND - at) for f in found]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("interval", "step_s"), [(1, 2.0), (10, 0.5), (10, 10.0), (10, 20.0)])
def test_a_dead_node_whose_job_stops_with_it_pages_within_90_s(interval, step_s):
    found = Fleet(interval, step_s).run(stops=0, at=2400)
    page = next(f for f in found if f[1] == "page")
    assert page[0] == NODES[DEAD]
    assert page[2] <= 90


@pytest.mark.parametrize("interval", [5, 10])
def test_without_the_hook_power_and_traffic_of_the_other_nodes_show_that_the_job_stopped(interval):
    found = Fleet(interval).run(hook=False, stops=0, at=2400)
    page = next(f for f in found if f[1] == "page")
    assert page[0] == NODES[DEAD]
    assert page[2] <= 90


@pytest.mark.parametrize("hook", [True, False])
def test_a_dead_agent_whose_job_goes_on_is_a_ticket(hook):
    found = Fleet().run(hook=hook, at=2400, seconds=1500)
    assert {(e, level) for e, level, _ in found} == {(NODES[DEAD], "suspect"), (NODES[DEAD], "ticket")}
    assert min(after for _, level, after in found if level == "ticket") <= 70


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize("interval", [1, 5, 10, 30])
def test_an_agent_that_is_restarted_within_50_s_is_no_ticket(hook, interval):
    assert {level for _, level, _ in Fleet(interval).run(hook=hook, at=2400, back=50)} <= {"suspect"}


def test_a_job_that_stops_later_for_another_reason_makes_no_page():
    found = Fleet().run(hook=False, at=2400, stops=200, seconds=1000)
    assert {level for _, level, _ in found} == {"suspect", "ticket"}


@pytest.mark.parametrize("hook", [True, False])
def test_a_network_without_the_data_of_all_nodes_of_a_job_is_no_stopped_job(hook):
    found = Fleet().run(hook=hook, at=2400, silent=tuple(range(COUNT)), seconds=250)
    assert {level for _, level, _ in found} <= {"ticket"}


def test_links_that_are_down_at_their_far_ends_page_at_once_under_a_job():
    found = Fleet().run(hook=False, ports=True, links=True, at=2400, seconds=120)
    assert found[0] in {(NODES[DEAD], "page", 30), (NODES[DEAD], "page", 40)}


@pytest.mark.slow
def test_supplies_that_give_little_since_page_and_full_ones_keep_it_a_ticket():
    found = Fleet().run(hook=False, ports=True, supplies=True, at=2400, seconds=200)
    assert next(f[2] for f in found if f[1] == "page") <= 90
    alive = Fleet().run(hook=False, ports=True, at=2400, seconds=2400)
    assert {f[1] for f in alive} == {"suspect", "ticket"}


def test_supplies_that_give_half_in_an_evaluation_of_the_whole_job_show_no_dead_host():
    paused = Fleet().run(hook=False, ports=True, draws=0.5, at=2400, seconds=200)
    assert {f[1] for f in paused} == {"suspect", "ticket"}
    found = Fleet().run(hook=False, ports=True, supplies=True, draws=0.5, at=2400, seconds=200)
    assert next(f[2] for f in found if f[1] == "page") <= 90


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("interval", [1, 5, 10, 30, 60])
def test_a_fleet_that_just_began_is_not_silent_and_a_node_is_lost_after_three_of_its_own_intervals(interval):
    found, detector, topology_, rng = [], Telemetry(), topology(False), np.random.default_rng(2)
    late = rng.uniform(0, min(5, interval / 2), COUNT)
    lost = 1800
    for second in range(0, 2700, 10):  # frames of 10 s; nodes report each `interval` s, a little late
        due = [(s - late[i]) // interval != (s - 10 - late[i]) // interval for i in range(COUNT) for s in (second,)]
        load = np.where(due, 20.0, np.nan)
        if second >= lost:
            load[DEAD] = np.nan
        frame = Frame(T0 + second * SECOND, "node", NODES, {"node.load1": load}, topology_)
        found += [(f.entity, second - lost) for f in detector.observe({"node": frame})]
    assert {e for e, _ in found} == {NODES[DEAD]}
    assert 0 < found[0][1] <= max(50, 3 * interval + 30)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("interval", "lost"), [(1, 0.02), (10, 0.02), (30, 0.05), (60, 0.02)])
def test_a_rack_that_loses_power_is_one_finding_at_any_interval_though_single_readings_are_lost(interval, lost):
    nodes = tuple(f"node:n{i}" for i in range(32))
    parents = {node: [f"rack:r{i // 16}"] for i, node in enumerate(nodes)}
    topology_, rng, detector = Topology(parents), np.random.default_rng(4), Telemetry()
    phase, found, dark = rng.uniform(0, interval, 32), [], 3600
    for second in range(0, 4800, 10):
        due = np.floor((second - phase) / interval) > np.floor((second - 10 - phase) / interval)
        kept = due & (rng.random(32) >= (lost if interval >= 10 else lost**10))
        load = np.where(kept & ~((np.arange(32) < 16) & (second >= dark)), 20.0, np.nan)
        frame = Frame(T0 + second * SECOND, "node", nodes, {"node.load1": load}, topology_)
        found += [(f.entity, f.level, second - dark) for f in detector.observe({"node": frame})]
    assert {f[0] for f in found} == {"rack:r0"}
    assert 0 < found[0][2] <= max(60, 8 * interval)
