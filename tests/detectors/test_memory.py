"""Memory health: uncorrected errors, rates of corrected ones, pending and failed row remaps, and servers' memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.memory.memory import Memory, describe_spare_rows
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.signals import class_of_entity
from pipeline.model.topology import Topology
from tests.examples import examples

T0 = 1_790_000_000 * SECOND
COUNTS = ("dram_corrected", "dram_uncorrected", "sram_corrected", "sram_uncorrected", "rows_corrected")
FLAGS = ("rows_uncorrected", "rows_pending", "rows_failed", "banks_none", "sram_threshold")
GPU = "gpu:n0.3"


class Site:
    """Two servers of eight GPUs and their modules, seen every `step` s."""

    def __init__(self, step=10, gpus=16):
        self.detector, self.tick, self.step = Memory(), 0, step
        names = [f"gpu:n{k // 8}.{k % 8}" for k in range(gpus)]
        self.names = {"gpu": names, "node": ["node:n0", "node:n1"], "dimm": ["dimm:n0.a", "dimm:n0.b"]}
        parents = {g: [f"node:{g[4:6]}"] for g in names} | {d: ["node:n0"] for d in self.names["dimm"]}
        self.topology = Topology(parents, {g: {"sku": "H100"} for g in names})
        self.values = {f"gpu.{name}": np.zeros(gpus) for name in (*COUNTS, *FLAGS)}
        self.values |= {"node.memory_corrected": np.zeros(2), "node.memory_uncorrected": np.zeros(2)}
        self.values |= {"dimm.corrected": np.zeros(2), "dimm.uncorrected": np.zeros(2)}
        self.values |= {"gpu.generation": np.full(gpus, 1.7e9), "node.generation": np.full(2, 1.7e9)}
        self.show(ticks=3)

    def show(self, *events, ticks=1):
        found = []
        for k in range(ticks):
            time = T0 + self.tick * self.step * SECOND
            frames = {}
            for c, names in self.names.items():
                values = {s: v.copy() for s, v in self.values.items() if s.split(".")[0] == c}
                mine = tuple(e for e in events if class_of_entity(e.entity) == c) if k == 0 else ()
                frames[c] = Frame(time, c, names, values, self.topology, mine)
            found += self.detector.observe(frames)
            self.tick += 1
        return found

    def add(self, signal, count=1.0, place=3):
        self.values[signal][place] += count

    def event(self, kind, entity=GPU, **data):
        return Event(T0 + self.tick * self.step * SECOND, entity, kind, data)


@pytest.fixture
def site():
    return Site()


def levels(found):
    return {f.entity: f.level for f in found}


def test_healthy_memory_gives_no_finding(site):
    assert site.show(ticks=200) == []


@pytest.mark.parametrize("signal", ["gpu.sram_uncorrected", "gpu.rows_failed"])
def test_a_cache_error_and_a_failed_row_remap_page_in_the_same_frame(site, signal):
    site.add(signal)
    assert levels(site.show()) == {GPU: "page"}


def test_an_uncorrected_error_whose_row_is_replaced_is_a_ticket(site):
    for signal in ("gpu.dram_uncorrected", "gpu.rows_uncorrected", "gpu.rows_pending"):
        site.add(signal)
    found = site.show(ticks=60)
    assert levels(found) == {GPU: "ticket"}
    assert "contained" in found[0].summary


def test_an_uncorrected_error_without_a_row_pages_after_a_minute(site):
    site.add("gpu.dram_uncorrected")
    assert site.show(ticks=6) == []
    assert levels(site.show(ticks=2)) == {GPU: "page"}


def test_an_xid_decides_whether_an_error_was_contained(site):
    site.add("gpu.dram_uncorrected")
    assert levels(site.show(site.event("xid", xid=94), ticks=20)) == {GPU: "ticket"}
    site.add("gpu.dram_uncorrected", place=5)
    found = site.show(site.event("xid", "gpu:n0.5", xid=95))
    assert levels(found)["gpu:n0.5"] == "page"
    assert "not contained" in found[-1].summary


def test_a_pending_row_remap_is_a_ticket_until_the_reset(site):
    site.add("gpu.rows_pending")
    found = site.show(ticks=30)
    assert levels(found) == {GPU: "ticket"}
    assert found[0].summary == "GPU 3 of n0: memory row remap pending"
    assert "drain when its job ends" in found[0].evidence["troubles"][0]
    site.add("gpu.rows_pending", -1)
    assert site.show(ticks=30) == []


def test_a_reset_ends_uncorrected_errors_and_counters_start_again(site):
    site.add("gpu.sram_uncorrected", 5)
    site.show(ticks=5)
    site.values["gpu.sram_uncorrected"][3] = 0
    site.values["gpu.generation"][3] += 1000
    assert site.show(ticks=30) == []


def test_ten_thousand_corrected_errors_of_caches_page(site):
    site.add("gpu.sram_corrected", 10_000)
    assert site.show(ticks=3) == []
    site.add("gpu.sram_corrected", 1)
    assert levels(site.show()) == {GPU: "page"}


@pytest.mark.slow
def test_a_burst_of_corrected_errors_is_a_ticket_with_the_usual_rate():
    site = Site(step=60)
    found = []
    for tick in range(24 * 60):
        if tick > 600 and tick % 20 == 0:
            site.add("gpu.dram_corrected")
        found += site.show()
    assert levels(found) == {GPU: "ticket"}
    shown = found[0].evidence
    assert shown["value"] > 10 * shown["expected"] > 0
    assert shown["peers"] == 15
    assert shown["cohort"] == "H100"


@pytest.mark.slow
def test_one_clump_and_single_errors_are_not_burst():
    site = Site(step=600)
    site.add("gpu.dram_corrected", 500)
    found = site.show(ticks=6 * 24)
    for _ in range(10):
        site.add("gpu.dram_corrected", 1, 7)
        found += site.show(ticks=6 * 24)
    assert found == []


@pytest.mark.slow
def test_a_gpu_with_a_high_usual_rate_gives_no_finding():
    site, rng = Site(step=3600), np.random.default_rng(3)
    found = []
    for _ in range(24 * 60):
        site.values["gpu.dram_corrected"][3] += rng.random() < 0.02
        found += site.show()
    assert found == []


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("per_hour", "step"), [(0.5, 60), (2.0, 30), (3.5, 60)])
def test_steady_errors_since_the_first_sample_are_a_suspect_at_most_and_become_usual(per_hour, step):
    site, rng = Site(step=step), np.random.default_rng(5)
    found = []
    for _ in range(4 * 24 * 3600 // step):
        site.values["gpu.dram_corrected"][3] += rng.poisson(per_hour * step / 3600)
        found += site.show()
    assert {finding.level for finding in found} <= {"suspect"}
    assert not site.detector.rates.cells["on"][3]
    assert site.detector.rates.usual[3] == pytest.approx(per_hour, rel=0.5)


@pytest.mark.slow
def test_a_weak_gpu_whose_rate_rises_is_a_ticket():
    site, rng = Site(step=60), np.random.default_rng(6)
    quiet, found = [], []
    for tick in range(5 * 24 * 60):
        rate = 0.5 if tick < 4 * 24 * 60 else 20.0
        site.values["gpu.dram_corrected"][3] += rng.poisson(rate / 60)
        (quiet if tick < 4 * 24 * 60 else found).extend(site.show())
    assert "ticket" not in {finding.level for finding in quiet}
    assert levels(found) == {GPU: "ticket"}


def test_errors_during_announced_work_give_no_finding(site):
    site.show(site.event("maintenance_start", "node:n0", seconds=3600.0))
    site.add("gpu.sram_uncorrected")
    site.add("node.memory_uncorrected", 1, 0)
    assert site.show(ticks=20) == []


def test_an_uncorrected_error_of_a_server_pages_its_node(site):
    site.add("node.memory_uncorrected", 1, 1)
    found = site.show()
    assert levels(found) == {"node:n1": "page"}
    assert "1 uncorrected memory error" in found[0].summary


def test_more_than_a_hundred_corrected_errors_a_day_are_a_ticket_and_ten_of_a_module(site):
    site.add("node.memory_corrected", 99, 1)
    site.add("dimm.corrected", 9, 1)
    assert site.show(ticks=5) == []
    site.add("node.memory_corrected", 5, 1)
    site.add("dimm.corrected", 5, 1)
    assert levels(site.show()) == {"node:n1": "ticket", "dimm:n0.b": "ticket"}


def test_a_hundred_corrected_errors_over_two_days_give_no_finding():
    site = Site(step=600)
    found = []
    for _ in range(100):
        site.add("node.memory_corrected", 1, 1)
        found += site.show(ticks=3)
    assert found == []


def test_spare_rows_are_described_with_the_time_left_if_it_is_known():
    assert "unknown" in describe_spare_rows(float("nan"), 0.0, 3.0, 512.0)
    assert "time left unknown" in describe_spare_rows(1.0, 0.0, 3.0, 512.0)
    assert "time left unknown" in describe_spare_rows(8.0, 0.0, 0.1, 512.0)
    assert "they last 504 days" in describe_spare_rows(8.0, 4.0, 4.0, 512.0)


def test_a_bank_without_spare_rows_is_a_ticket(site):
    site.add("gpu.banks_none", 2)
    assert levels(site.show()) == {GPU: "ticket"}


def test_gpus_without_separate_counters_are_judged_by_totals(site):
    for what in ("corrected", "uncorrected"):
        site.values[f"gpu.ecc_{what}"] = site.values.pop(f"gpu.dram_{what}")
    site.detector = Memory()
    site.show(ticks=3)
    site.add("gpu.ecc_uncorrected")
    assert levels(site.show(ticks=10)) == {GPU: "page"}


def test_missing_readings_are_bridged(site):
    kept = site.values["gpu.sram_uncorrected"].copy()
    site.values["gpu.sram_uncorrected"][:] = np.nan
    site.show(ticks=5)
    site.values["gpu.sram_uncorrected"] = kept
    site.add("gpu.sram_uncorrected")
    assert levels(site.show()) == {GPU: "page"}


def test_new_gpus_and_a_clock_that_goes_back_give_no_finding(site):
    site.tick -= 2
    site.show(ticks=2)
    more = Site(gpus=12)
    more.names["gpu"] += ["gpu:n1.4", "gpu:n1.5"]
    for signal in [s for s in more.values if s.startswith("gpu.")]:
        more.values[signal] = np.append(more.values[signal], [3.0, 3.0] if "corrected" in signal else [0.0, 0.0])
    assert more.show(ticks=30) == []


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([f"gpu.{n}" for n in COUNTS] + ["node.memory_corrected", "gpu.generation"]),
            st.integers(0, 1),
            st.one_of(st.just(float("nan")), st.floats(0, 1e18), st.integers(0, 5).map(float)),
        ),
        max_size=20,
    )
)
def test_any_readings_are_accepted(readings):
    site = Site()
    for signal, place, value in readings:
        site.values[signal][place] = value
        site.show(ticks=2)
    again = Memory()
    again.restore(site.detector.snapshot())
    site.show(ticks=2)


def test_a_failed_row_of_a_gpu_that_is_gone_ends_after_a_day():
    site = Site(step=600)
    site.add("gpu.rows_failed")
    assert levels(site.show(ticks=3)) == {GPU: "page"}
    for values in site.values.values():
        values[:8] = np.nan
    assert levels(site.show(ticks=140)) == {GPU: "page"}
    site.show(ticks=6)
    assert site.show(ticks=20) == []


def test_growth_in_a_frame_that_steps_back_in_time_counts_no_negative_seconds(site):
    site.tick = 2_000
    site.show(ticks=3)
    site.tick = 0
    site.add("gpu.dram_corrected")
    site.add("node.memory_corrected", 5, 0)
    site.show(ticks=1)
    assert (site.detector.rates.cells["seconds"] >= 0).all()
    assert site.detector.servers.cells["bucket"][0] <= 5


@pytest.mark.slow
def test_replaced_rows_at_the_limit_or_soon_at_it_are_a_ticket():
    site = Site(step=3600)
    site.add("gpu.rows_corrected", 512)
    found = site.show(ticks=2)
    assert levels(found) == {GPU: "ticket"}
    assert found[0].summary == "GPU 3 of n0: spare memory rows run out, 512 of 512 used"
    assert "512 rows replaced" in found[0].evidence["spare_rows"]
    site = Site(step=3600)
    found = []
    for _ in range(20 * 24):
        site.add("gpu.rows_corrected", 1)
        found += site.show()
    assert levels(found) == {GPU: "ticket"}
    assert min(f.time for f in found) < T0 + 3 * 24 * 3600 * SECOND


@pytest.mark.slow
def test_a_good_year_does_not_hide_a_bad_fortnight():
    site = Site(step=6 * 3600)
    site.show(ticks=4 * 300)
    found = []
    for _ in range(4 * 14):
        site.add("gpu.rows_corrected", 5)
        found += site.show()
    assert levels(found) == {GPU: "ticket"}
    site = Site(step=6 * 3600)
    for _ in range(4 * 200):
        site.add("gpu.rows_corrected", 0.25)
        assert site.show() == []


def test_the_title_of_a_short_burst_is_in_minutes(site):
    found = []
    for _ in range(30):
        site.add("gpu.dram_corrected", 2.0)
        found += site.show()
    assert "corrected memory errors in " in found[0].summary
    assert " min, usual " in found[0].summary
    assert "0.0 h" not in found[0].summary


def test_counters_at_infinity_count_as_not_read(site):
    for signal in site.values:
        if "generation" not in signal:
            site.add(signal, np.inf, 1)
    assert site.show(ticks=30) == []
    for signal in site.values:
        if "generation" not in signal:
            site.values[signal][1] = 0.0
    assert site.show(ticks=30) == []
