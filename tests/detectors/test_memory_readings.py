"""Memory health from misread counters: unreadable values give no finding, real errors give one in the same frame."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.memory.memory import Memory
from tests.detectors.test_memory import Site

HARD = ("gpu.sram_uncorrected", "node.memory_uncorrected", "dimm.uncorrected")  # one error pages
GROWING = (*HARD, "gpu.dram_uncorrected", "gpu.dram_corrected", "node.memory_corrected", "dimm.corrected")
LEVELS = ("gpu.sram_corrected", "gpu.rows_corrected", "gpu.rows_uncorrected")
COUNTERS = (*GROWING, *LEVELS)
FLAGS = ("gpu.rows_failed", "gpu.rows_pending", "gpu.sram_threshold", "gpu.banks_none")
UNREADABLE = (2.0**8 - 1, 2.0**16 - 1, 2.0**31 - 1, 2.0**32 - 1, 2.0**63 - 1, 2.0**64 - 1, -1.0)


def set_total(signal, value, site, place=1):
    site.values[signal][place] = value


def read(signal, values, step=10):
    """Findings for a counter with these readings."""
    site, found = Site(step), []
    for value in values:
        set_total(signal, value, site)
        found += site.show()
    return found


def starting_at(signal, value, step=10):
    """A site whose counter had this value before it was first read."""
    site = Site(step)
    set_total(signal, value, site)
    site.detector = Memory()
    assert site.show(ticks=3) == []
    return site


def levels(found):
    return {f.level for f in found}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("signal", [*COUNTERS, *FLAGS])
@pytest.mark.parametrize("value", UNREADABLE)
def test_an_unreadable_value_between_good_ones_gives_no_finding(signal, value):
    assert read(signal, [0, value, *[0] * 20]) == []


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("signal", COUNTERS)
@pytest.mark.parametrize("value", UNREADABLE)
def test_unreadable_values_that_stay_give_no_finding(signal, value):
    assert read(signal, [0, *[value] * 20]) == []


@pytest.mark.parametrize("signal", GROWING)
@pytest.mark.parametrize("low", [[0], [0, 0], [3], [-1], [np.nan, 0, np.nan], [0, 700, 0, 700, 0]])
def test_a_counter_that_dips_and_is_back_has_not_grown(signal, low):
    site = starting_at(signal, 700)
    for value in [*low, *[700] * 20]:
        set_total(signal, value, site)
        assert site.show() == []


def test_a_dip_of_the_row_count_is_not_a_replaced_row():
    site, found = starting_at("gpu.rows_corrected", 400, step=3600), []
    for value in [*[400] * 30, 0, *[400] * 40]:
        set_total("gpu.rows_corrected", value, site)
        found += site.show()
    assert found == []


def test_an_unreadable_row_count_does_not_make_an_uncorrected_error_contained():
    site = Site()
    set_total("gpu.dram_uncorrected", 1, site)
    site.show()
    set_total("gpu.rows_uncorrected", 2.0**32 - 1, site)
    found = site.show(ticks=5)
    set_total("gpu.rows_uncorrected", 0, site)
    assert found == []
    assert levels(site.show(ticks=5)) == {"page"}


@pytest.mark.parametrize("signal", [*GROWING, "gpu.sram_corrected", "gpu.rows_corrected"])
@pytest.mark.parametrize("value", [4e9, 2.0**32 - 2, 1e6, 1e15])
def test_a_jump_that_the_next_reading_does_not_confirm_gives_no_finding(signal, value):
    assert read(signal, [0, value, *[0] * 20]) == []


@pytest.mark.parametrize("signal", HARD)
def test_a_jump_that_the_next_reading_confirms_is_reported_with_it(signal):
    assert read(signal, [0, 4e9]) == []
    assert levels(read(signal, [0, 4e9, 4e9 + 7])) == {"page"}


@pytest.mark.parametrize("signal", HARD)
@pytest.mark.parametrize("before", [0, 1, 254, 65_533, 1e9])
@pytest.mark.parametrize("errors", [1, 2, 5_000])
def test_uncorrected_errors_page_with_their_first_reading(signal, before, errors):
    site = starting_at(signal, before)
    set_total(signal, before + errors, site)
    found = site.show()
    assert levels(found) == {"page"}
    assert f": {errors} uncorrected " in found[0].summary


@pytest.mark.parametrize("signal", HARD)
@pytest.mark.parametrize("before", [1, 700])
def test_after_an_unreported_reset_the_next_error_pages_in_its_frame(signal, before):
    site = starting_at(signal, before)
    set_total(signal, 0, site)
    assert site.show(ticks=3) == []
    set_total(signal, before, site)
    found = site.show()
    assert levels(found) == {"page"}
    assert f": {before} uncorrected " in found[0].summary


@pytest.mark.parametrize("signal", ["gpu.sram_uncorrected", "node.memory_uncorrected"])
def test_after_a_reported_reset_the_next_error_pages_in_its_frame(signal):
    site = starting_at(signal, 1)
    set_total(signal, 0, site)
    set_total(f"{signal.split('.')[0]}.generation", 1.8e9, site)
    assert site.show() == []
    set_total(signal, 1, site)
    assert levels(site.show()) == {"page"}


def test_only_errors_above_the_count_before_a_dip_are_reported():
    site = starting_at("node.memory_uncorrected", 700)
    set_total("node.memory_uncorrected", 0, site)
    site.show()
    set_total("node.memory_uncorrected", 702, site)
    assert ": 2 uncorrected memory errors" in site.show()[0].summary


def test_corrected_cache_errors_end_with_an_unreported_reset():
    site = Site()
    set_total("gpu.sram_corrected", 20_000, site)
    assert levels(site.show(ticks=3)) == {"page"}
    set_total("gpu.sram_corrected", 0, site)
    site.show(ticks=3)
    assert not site.detector.cells["many_at"].any()


@pytest.mark.parametrize("signal", HARD)
def test_an_unreadable_first_value_hides_no_later_error(signal):
    site = Site()
    set_total(signal, 2.0**32 - 1, site)
    site.detector = Memory()
    site.show()
    set_total(signal, 4, site)
    assert site.show(ticks=5) == []
    set_total(signal, 5, site)
    assert levels(site.show()) == {"page"}


def again(detector):
    """A detector restored from its snapshot."""
    new = Memory()
    new.restore(detector.snapshot())
    return new


@pytest.mark.parametrize("signal", HARD)
@pytest.mark.parametrize("values", [[0, 700], [4e9, 700], [np.nan, 700]])
def test_a_doubted_value_stays_doubted_after_a_restart(signal, values):
    site = starting_at(signal, 700)
    for value in values:
        set_total(signal, value, site)
        assert site.show() == []
        site.detector = again(site.detector)
