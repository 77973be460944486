"""Thermal resistance in worlds of other physics: liquid and air, inlets measured, stale and missing, many loads."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.corroboration import LATE, Corroboration
from detectors.heat.thermal import Thermal
from pipeline.model.records import SECOND, Finding
from tests.detectors.cases.case import at_known_site
from tests.detectors.cases.thermal import CASE, GUILTY, topology
from tests.detectors.gpu_heat import START, HeatWorld

pytestmark = pytest.mark.sample(every=6)


def run_world(hours, detector=None, **settings):
    """Findings and the detector; all findings but suspects."""
    world, detector = HeatWorld(**settings), detector or Thermal()
    found = [f for frames in world.frames(hours) for f in detector.observe(frames)]
    return [f for f in found if f.level != "suspect"], detector


SLOW = {"interval": 60.0, "lag": 60.0, "step": 0.1}
WORLDS = [
    {"load": "serving"},
    {"load": "mixed", "reference": "none"},
    {"cooling": "air", "swing": 8.0},
    {"cooling": "air", "swing": 8.0, "reference": "stale", "inlet": 28.0},
    {"cooling": "air", "swing": 8.0, "reference": "none", "load": "mixed"},
    {"cooling": "air", "load": "single"},
    {"cooling": "air", "reference": "none", **SLOW},
    {"load": "single", **SLOW},
    {"load": "training", "lag": 5.0, "step": 0.1},
]


@pytest.mark.parametrize("settings", WORLDS, ids=str)
def test_a_healthy_world_gives_no_ticket_and_no_page(settings):
    found, detector = run_world(5.0, **settings)
    assert found == []
    if settings.get("load") != "single" or settings.get("cooling") != "air":
        assert np.count_nonzero(detector.judged_at > 0) > 16


@pytest.mark.slow
def test_a_healthy_world_of_frames_each_second_gives_no_ticket():
    assert run_world(1.0, interval=1.0)[0] == []


FIRST = [
    ({"cooling": "air", "reference": "none", **SLOW}, 1.3),
    ({}, 1.15),
    ({"cooling": "air", "swing": 8.0}, 1.6),
    ({"load": "serving", "reference": "none"}, 1.4),
]


@pytest.mark.parametrize(("settings", "factor"), FIRST, ids=str)
def test_a_worse_cold_plate_is_a_ticket_and_no_page_far_from_its_limit(settings, factor):
    known = at_known_site(Thermal()) if factor == 1.15 else None
    found, _ = run_world(9.0, known, faults=[(11, 7.5, factor)], limit=150.0, **settings)
    assert {(f.entity, f.level) for f in found} == {("gpu:n1.3", "ticket")}
    late = (found[0].time - START) / SECOND - 7.5 * 3600
    assert late <= (600 if factor == 1.15 else 3600)


def test_a_cold_plate_that_brings_its_gpu_to_its_limit_pages():
    found, _ = run_world(3.0, faults=[(11, 2.0, 2.3)], limit=75.0, nodes=2)
    page = next(f for f in found if f.level == "page")
    assert page.entity == "gpu:n1.3"
    assert (page.time - START) / SECOND - 7200 <= 300


@pytest.mark.parametrize("settings", [{"cooling": "air", **SLOW}, {}, {"cooling": "air"}], ids=str)
def test_all_gpus_of_a_node_that_cool_worse_are_one_ticket_on_the_node(settings):
    found, _ = run_world(6.0, node_faults=[(1, 4.0, 1.4)], **settings)
    assert {(f.entity, f.level) for f in found} == {("node:n1", "ticket")}


@pytest.mark.parametrize("settings", [{"interval": 60.0}, {}, {"load": "mixed"}], ids=str)
def test_a_node_whose_coolant_is_lost_over_hours_is_followed_to_its_limit(settings):
    steps = [(1, 2.5 + 0.5 * k, 1.15) for k in range(8)]  # factor 3 in all
    found, _ = run_world(8.0, node_faults=steps, limit=75.0, seed=3, **settings)
    assert {f.entity for f in found} == {"node:n1"}
    page = next(f for f in found if f.level == "page")
    assert "GPUs cool" in page.summary
    assert (page.time - START) / SECOND / 3600 < 7.0


@pytest.mark.parametrize(("kelvin", "levels"), [(8.0, {"suspect"}), (1.0, {"suspect", "ticket"})])
def test_a_gpu_that_throttles_in_warm_coolant_is_the_ticket_of_that_coolant(kelvin, levels):
    world, detector = HeatWorld(nodes=2, faults=[(11, 0.0, 1.5)], load="steady"), Thermal()
    limit, found = None, []
    for frames in world.frames(5.0):
        heat, supply = frames["gpu"].values["gpu.temperature"], frames["coolant"].values["coolant.supply_temperature"]
        if (frames["gpu"].time - START) / SECOND > 3 * 3600:
            limit = limit or heat[11] + kelvin - 1
            heat += kelvin
            supply += kelvin
            frames["gpu"].values["gpu.throttle_reasons"][11] = 64.0 * (heat[11] > limit - 1)
        found += detector.observe(frames)
    assert {f.entity for f in found} == {"gpu:n1.3"}
    assert {f.level for f in found} == levels


@pytest.mark.parametrize("kelvin", [8.0, -10.0])
def test_gpus_are_judged_again_an_hour_after_their_supply_sensor_stepped(kelvin):
    world, detector = HeatWorld(nodes=2, faults=[(11, 4.0, 1.6)], limit=150.0), Thermal()
    found = []
    for frames in world.frames(6.0):
        if (frames["gpu"].time - START) / SECOND > 7200:
            frames["coolant"].values["coolant.supply_temperature"][:] += kelvin
        found += detector.observe(frames)
    assert {f.entity for f in found if f.level == "ticket"} == {"gpu:n1.3"}


def test_a_condition_whose_load_never_returns_is_learnt_anew():
    world, detector = HeatWorld(nodes=2, faults=[(11, 0.7, 1.6)]), Thermal()
    for frames in world.frames(1.0):
        detector.observe(frames)
    assert detector.conditions.keys() == {"gpu:n1.3"}
    frame = frames["gpu"]
    idle = {**frame.values, "gpu.power": np.full(16, 90.0), "gpu.temperature": np.full(16, 36.0)}
    for minute in range(90):
        time = frame.time + minute * 60 * SECOND
        detector.observe({"gpu": type(frame)(time, "gpu", frame.entities, idle, frame.topology)})
    assert not detector.conditions
    assert not detector.cores.cells[2, 11]


@pytest.mark.parametrize(("later", "explains"), [(LATE // SECOND + 10, False), (30, True), (-30, True)])
def test_a_collapse_explains_only_the_heat_that_began_about_when_it_did(later, explains):
    """`later`: s by which the collapse began after the GPU had become warm."""
    time, first = CASE.time(500), CASE.time(300)
    warm = Finding(time, first, GUILTY, "thermal", "suspect", 1.0, "warm", {}, ("gpu.temperature",))
    dry = Finding(time, first + later * SECOND, "cdu:c1", "coolant_edge", "page", 1.0, "dry", {}, ("coolant.flow",))
    found = Corroboration().corroborate([warm, dry], time, topology())
    assert {f.detector: "corroborated_by" in f.evidence for f in found} == {"thermal": explains, "coolant_edge": False}
