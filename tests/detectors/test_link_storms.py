"""Errors on many ports together, counters that two sources report, and implausible jumps of counters."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.link.link import Link
from detectors.runner import Runner
from pipeline.model.records import SECOND, Finding, Frame
from pipeline.model.topology import Topology
from tests.detectors.snapshots import packed

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND
NODES, RAILS = 10, 4
PORTS = tuple(f"port:n{i // RAILS}.p{i % RAILS}" for i in range(NODES * RAILS))
SITE = Topology({port: (f"node:n{i // RAILS}", f"leaf:l{i % RAILS}") for i, port in enumerate(PORTS)})
LEAF = [i for i in range(len(PORTS)) if i % RAILS == 2]


def frames_at(tick, errors, changes=None):
    size = len(PORTS)
    values = {
        "nic.state": np.ones(size),
        "nic.speed": np.full(size, 400_000.0),
        "nic.symbol_errors": np.asarray(errors, float),
        "nic.carrier_changes": np.zeros(size) if changes is None else changes,
        "nic.rx_bytes": np.full(size, tick * 1e11),
    }
    return {"nic": Frame(START + tick * STEP, "nic", PORTS, values, SITE)}


def run_detector(errors, ticks: int = 120, link=None) -> list[Finding]:
    """Returns findings. errors(tick): errors of each port so far."""
    link, found = link or Link(), []
    for tick in range(ticks):
        found += link.observe(frames_at(tick, errors(tick)))
    return found


def erring(places, since=60, per_tick=5.0, until=10**9):
    def errors(tick):
        count = np.zeros(len(PORTS))
        count[places] = per_tick * max(0, min(tick, until) - since + 1)
        return count

    return errors


def test_errors_that_begin_together_on_one_leaf_blame_the_leaf():
    found = run_detector(erring(LEAF[:5]))
    assert {f.entity for f in found} == {"leaf:l2"}
    assert {f.level for f in found} == {"suspect", "page"}
    assert "errors on 5 of 10 ports within minutes" in found[0].summary
    assert found[0].onset == START + 59 * STEP


def test_errors_that_begin_together_on_all_leaves_blame_the_fabric():
    found = run_detector(erring(range(len(PORTS))))
    assert {f.entity for f in found} == {"fabric:all"}
    assert "errors on 40 of 40 ports within minutes" in found[-1].summary


def test_errors_that_begin_together_on_several_leaves_of_one_rail_blame_the_rail():
    """Of a bad rail with a leaf for each pod, nothing else of the fabric is at fault."""
    ports = tuple(f"port:n{n}.p{rail}" for n in range(2 * NODES) for rail in range(RAILS))
    site = Topology({p: (f"node:n{i // 4}", f"leaf:l{i // 40}.{i % 4}", f"rail:r{i % 4}") for i, p in enumerate(ports)})
    link, found = Link(), list[Finding]()
    for tick in range(120):
        frame = frames_at(tick, np.zeros(len(PORTS)))["nic"]
        values = {name: np.tile(column, 2) for name, column in frame.values.items()}
        values["nic.symbol_errors"][2::RAILS] = 5.0 * max(0, tick - 59)
        found += link.observe({"nic": Frame(frame.time, "nic", ports, values, site)})
    assert {f.entity for f in found} == {"rail:r2"}
    assert "errors on 20 of 20 ports within minutes" in found[-1].summary


def test_up_to_a_third_of_a_leaf_is_not_a_storm():
    assert {f.entity for f in run_detector(erring(LEAF[:3]))} == {PORTS[i] for i in LEAF[:3]}


def test_errors_that_begin_hours_apart_blame_each_port():
    def errors(tick):
        return sum(erring([i], 60 + 60 * k)(tick) for k, i in enumerate(LEAF[:4]))

    assert {f.entity for f in run_detector(errors, 400)} == {PORTS[i] for i in LEAF[:4]}


def test_the_last_ports_of_a_storm_are_blamed_only_if_errors_continue():
    def errors(tick):
        return erring(LEAF[:6], until=80)(tick) + erring(LEAF[:1], 81)(tick)

    found = run_detector(errors, 300)
    alone = [f for f in found if f.entity != "leaf:l2"]
    assert {f.entity for f in alone} == {PORTS[LEAF[0]]}
    assert alone[0].time > max(f.time for f in found if f.entity == "leaf:l2")


def test_ports_outside_the_fabric_are_not_storm():
    """Laptops on a bad power strip do not page."""
    link, found, site = Link(), [], Topology(dict.fromkeys(PORTS, ("node:n1",)))
    for tick in range(120):
        nic = frames_at(tick, erring(range(len(PORTS)))(tick))["nic"]
        found += link.observe({"nic": Frame(nic.time, "nic", PORTS, nic.values, site)})
    assert {f.entity for f in found} == set(PORTS)
    assert {f.level for f in found} == {"suspect", "ticket"}


def test_a_restart_during_a_storm_changes_nothing():
    whole = run_detector(erring(LEAF[:5]), 150)
    runner, again = Runner([Link()]), Runner([Link()])
    found = run_detector(erring(LEAF[:5]), 70, runner)
    again.restore(packed(runner))
    for tick in range(70, 150):
        found += again.observe(frames_at(tick, erring(LEAF[:5])(tick)))
    assert [(f.time, f.entity, f.level) for f in found] == [(f.time, f.entity, f.level) for f in whole]


def test_counters_reported_by_two_sources_in_turn_do_not_grow():
    assert run_detector(lambda tick: np.full(len(PORTS), 1e4 if tick // 3 % 2 else 9e3), 240) == []


def test_a_counter_that_fell_grows_from_its_new_value():
    found = run_detector(lambda tick: 1e4 * (tick < 50) + erring([6])(tick))
    assert {(f.entity, f.level) for f in found} >= {(PORTS[6], "page")}


def test_a_leap_of_the_transition_counter_is_one_flap_or_more():
    link, found = Link(), []
    for tick in range(150):
        changes = np.full(len(PORTS), 2.0)
        changes[6] += 1e12 * (tick >= 60)
        found += link.observe(frames_at(tick, np.zeros(len(PORTS)), changes))
    assert {(f.entity, f.level) for f in found} == {(PORTS[6], "suspect")}
    assert "1 flap or more" in found[0].summary
    assert found[0].evidence["leapt_by"] == 1e12


def test_errors_are_counted_since_the_reading_before():
    first = run_detector(erring([6], per_tick=5.0))[0]
    assert "5 symbol errors in 10 s" in first.summary
    assert first.onset == START + 59 * STEP


@pytest.mark.parametrize("signal", ["nic.symbol_errors", "nic.crc_errors"])
def test_physical_errors_that_follow_the_load_are_not_congestion(signal):
    """A module that gets warm with its load."""
    rng, link, found = np.random.default_rng(1), Link(), []
    errors, carried = np.zeros(len(PORTS)), np.zeros(len(PORTS))
    for tick in range(400):
        load = 0.5 + 0.4 * np.sin(2 * np.pi * tick / 120)
        carried += load * 5e11 * rng.uniform(0.95, 1.05, len(PORTS))
        errors[6] += rng.poisson(4 * load**3) if tick >= 60 else 0
        frames = frames_at(tick, np.zeros(len(PORTS)))
        frames["nic"].values.update({signal: errors.copy(), "nic.rx_bytes": carried.copy()})
        found += link.observe(frames)
    assert any(f.evidence["tied_to_load"] is not None for f in found)
    assert not any("congestion" in f.summary for f in found)
    assert {f.level for f in found} == {"suspect", "page"}
