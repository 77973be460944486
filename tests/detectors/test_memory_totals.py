"""Memory health where some GPUs report errors of device memory and others only totals, or change between them."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.memory.memory import Memory
from tests.detectors.test_memory import Site

OWN = ("gpu.dram_corrected", "gpu.dram_uncorrected")
TOTALS = ("gpu.ecc_corrected", "gpu.ecc_uncorrected")
OWN_GPUS, TOTAL_GPUS = slice(0, 8), slice(8, 16)
GPU, ONLY_TOTALS = "gpu:n0.3", "gpu:n1.2"
DAY = 24 * 3600


def site_of(own=1.0, total=3.0, step=10):
    """All GPUs report both; the counts are from before the detector started."""
    site = Site(step)
    site.detector = Memory()
    site.values |= {signal: np.full(16, own) for signal in OWN}
    site.values |= {signal: np.full(16, total) for signal in TOTALS}
    return site


def mixed(step=10):
    """Agents of the first server report both, an exporter of the second only totals."""
    site = site_of(step=step)
    for signal in OWN:
        site.values[signal][TOTAL_GPUS] = np.nan
    assert site.show(ticks=3) == []
    return site


def restarted(site, restart=True):
    """The site with a detector restored from its snapshot."""
    if restart:
        kept, site.detector = site.detector.snapshot(), Memory()
        site.detector.restore(kept)
    return site


def without(site, signals):
    """Removes the columns and returns them."""
    return {signal: site.values.pop(signal) for signal in signals}


def levels(found):
    return {(f.entity, f.level) for f in found}


def test_an_error_of_a_gpu_with_only_totals_pages_beside_gpus_with_both():
    site = mixed()
    site.add("gpu.ecc_uncorrected", place=10)
    assert levels(site.show(ticks=10)) == {(ONLY_TOTALS, "page")}
    site.add("gpu.dram_uncorrected")
    site.add("gpu.ecc_uncorrected")
    found = site.show(ticks=10)
    assert (GPU, "page") in levels(found)
    assert all(": 1 uncorrected memory error" in f.summary for f in found)


@pytest.mark.slow
def test_a_burst_of_a_gpu_with_only_totals_is_a_ticket_beside_gpus_with_both():
    site, found = mixed(step=60), []
    for tick in range(1200):
        if tick > 600 and tick % 20 == 0:  # a steady rate since the first sample would be a suspect
            site.add("gpu.ecc_corrected", place=10)
        found += site.show()
    assert levels(found) == {(ONLY_TOTALS, "ticket")}


@pytest.mark.parametrize("restart", [False, True])
def test_a_tick_without_device_memory_counters_gives_no_finding(restart):
    site = site_of()
    assert site.show(ticks=3) == []
    kept = without(site, OWN)
    found = site.show()
    site.values |= kept
    assert found + restarted(site, restart).show(ticks=20) == []


@pytest.mark.parametrize("restart", [False, True])
def test_an_error_in_a_tick_without_device_memory_counters_pages_after_it(restart):
    site = site_of()
    site.show(ticks=3)
    kept = without(site, OWN)
    assert site.show() == []
    site.values |= kept
    site.add("gpu.dram_uncorrected")
    site.add("gpu.ecc_uncorrected")
    assert levels(restarted(site, restart).show(ticks=10)) == {(GPU, "page")}


def test_device_memory_counters_that_come_and_go_give_no_finding():
    site = site_of()
    for _ in range(10):
        kept = without(site, OWN)
        assert site.show(ticks=4) == []
        site.values |= kept
        assert site.show(ticks=4) == []


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("own", [1.0, 7.0])
def test_a_gpu_that_starts_to_report_device_memory_pages_only_with_its_next_error(own, restart):
    site = site_of()
    without(site, OWN)
    site.show(ticks=3)
    for signal in OWN:
        site.values[signal] = np.where(np.arange(16) == 10, own, np.nan)
    assert site.show(ticks=10) == []
    site.add("gpu.dram_uncorrected", place=10)
    found = restarted(site, restart).show(ticks=10)
    assert levels(found) == {(ONLY_TOTALS, "page")}
    assert ": 1 uncorrected memory error" in found[0].summary


def test_a_fleet_that_starts_to_report_device_memory_gives_no_finding():
    site = site_of(own=7.0)
    kept = without(site, OWN)
    site.show(ticks=3)
    site.values |= kept
    assert restarted(site).show(ticks=20) == []


@pytest.mark.parametrize("own", [1.0, 7.0])
def test_a_gpu_with_only_totals_for_a_day_is_read_from_them_afterwards(own):
    site = site_of(own=own, step=600)
    site.show(ticks=3)
    without(site, OWN)
    assert site.show(ticks=DAY // 600 + 2) == []
    site.add("gpu.ecc_uncorrected")
    assert levels(restarted(site).show(ticks=3)) == {(GPU, "page")}


def test_a_gpu_whose_own_counters_are_unreadable_is_read_from_its_totals():
    site = site_of(own=2.0**64 - 1)
    site.show(ticks=3)
    site.add("gpu.ecc_uncorrected")
    assert levels(site.show(ticks=10)) == {(GPU, "page")}


def test_a_cache_error_is_not_reported_for_device_memory_too_where_a_total_counts_both():
    site = mixed()
    for signal in ("gpu.sram_uncorrected", "gpu.ecc_uncorrected"):
        site.add(signal, place=10)
    found = site.show(ticks=20)
    assert levels(found) == {(ONLY_TOTALS, "page")}
    assert all(len(f.evidence["troubles"]) == 1 and "caches" in f.summary for f in found)
    site.add("gpu.sram_uncorrected", place=10)
    site.add("gpu.ecc_uncorrected", 3, place=10)
    assert "2 uncorrected memory errors" in site.show(ticks=20)[-1].evidence["troubles"][1]
