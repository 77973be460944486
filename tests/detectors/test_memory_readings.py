"""Memory health by counters that are read amiss: senseless readings say nothing, real errors are told at once."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.memory.memory import Memory
from tests.detectors.test_memory import Site

HARD = ("gpu.sram_uncorrected", "node.memory_uncorrected", "dimm.uncorrected")  # one error pages
GROWING = (*HARD, "gpu.dram_uncorrected", "gpu.dram_corrected", "node.memory_corrected", "dimm.corrected")
STANDING = ("gpu.sram_corrected", "gpu.rows_corrected", "gpu.rows_uncorrected")
COUNTERS = (*GROWING, *STANDING)
FLAGS = ("gpu.rows_failed", "gpu.rows_pending", "gpu.sram_threshold", "gpu.banks_none")
SENSELESS = (2.0**8 - 1, 2.0**16 - 1, 2.0**31 - 1, 2.0**32 - 1, 2.0**63 - 1, 2.0**64 - 1, -1.0)


def at(signal, value, site, place=1):
    site.values[signal][place] = value


def read(signal, values, step=10):
    """What the detector says of a counter that is read like that."""
    site, found = Site(step), []
    for value in values:
        at(signal, value, site)
        found += site.show()
    return found


def standing_at(signal, value, step=10):
    """A site whose counter has stood there for as long as anybody knows."""
    site = Site(step)
    at(signal, value, site)
    site.detector = Memory()
    assert site.show(ticks=3) == []
    return site


def levels(found):
    return {f.level for f in found}


@pytest.mark.parametrize("signal", [*COUNTERS, *FLAGS])
@pytest.mark.parametrize("value", SENSELESS)
def test_a_senseless_reading_between_sound_ones_says_nothing(signal, value):
    assert read(signal, [0, value, *[0] * 20]) == []


@pytest.mark.parametrize("signal", COUNTERS)
@pytest.mark.parametrize("value", SENSELESS)
def test_senseless_readings_that_stay_say_nothing(signal, value):
    assert read(signal, [0, *[value] * 20]) == []


@pytest.mark.parametrize("signal", GROWING)
@pytest.mark.parametrize("low", [[0], [0, 0], [3], [-1], [np.nan, 0, np.nan], [0, 700, 0, 700, 0]])
def test_a_counter_that_dips_and_is_back_has_not_grown(signal, low):
    site = standing_at(signal, 700)
    for value in [*low, *[700] * 20]:
        at(signal, value, site)
        assert site.show() == []


def test_rows_that_dip_for_a_reading_have_not_been_replaced_lately():
    site, found = standing_at("gpu.rows_corrected", 400, step=3600), []
    for value in [*[400] * 30, 0, *[400] * 40]:
        at("gpu.rows_corrected", value, site)
        found += site.show()
    assert found == []


def test_a_senseless_count_of_rows_makes_no_uncorrected_error_a_contained_one():
    site = Site()
    at("gpu.dram_uncorrected", 1, site)
    site.show()
    at("gpu.rows_uncorrected", 2.0**32 - 1, site)
    found = site.show(ticks=5)
    at("gpu.rows_uncorrected", 0, site)
    assert found == []
    assert levels(site.show(ticks=5)) == {"page"}


@pytest.mark.parametrize("signal", [*GROWING, "gpu.sram_corrected", "gpu.rows_corrected"])
@pytest.mark.parametrize("value", [4e9, 2.0**32 - 2, 1e6, 1e15])
def test_a_leap_that_the_next_reading_does_not_confirm_says_nothing(signal, value):
    assert read(signal, [0, value, *[0] * 20]) == []


@pytest.mark.parametrize("signal", HARD)
def test_a_leap_that_the_next_reading_confirms_is_told_with_it(signal):
    assert read(signal, [0, 4e9]) == []
    assert levels(read(signal, [0, 4e9, 4e9 + 7])) == {"page"}


@pytest.mark.parametrize("signal", HARD)
@pytest.mark.parametrize("before", [0, 1, 254, 65_533, 1e9])
@pytest.mark.parametrize("errors", [1, 2, 5_000])
def test_uncorrected_errors_page_with_the_first_reading_that_shows_them(signal, before, errors):
    site = standing_at(signal, before)
    at(signal, before + errors, site)
    found = site.show()
    assert levels(found) == {"page"}
    assert f": {errors} uncorrected error" in found[0].summary


@pytest.mark.parametrize("signal", HARD)
@pytest.mark.parametrize("before", [1, 700])
def test_after_a_reset_that_nobody_tells_of_the_next_error_pages_at_once(signal, before):
    site = standing_at(signal, before)
    at(signal, 0, site)
    assert site.show(ticks=3) == []
    at(signal, before, site)
    found = site.show()
    assert levels(found) == {"page"}
    assert f": {before} uncorrected error" in found[0].summary


@pytest.mark.parametrize("signal", ["gpu.sram_uncorrected", "node.memory_uncorrected"])
def test_after_a_reset_that_the_agent_tells_of_the_next_error_pages_at_once(signal):
    site = standing_at(signal, 1)
    at(signal, 0, site)
    at(f"{signal.split('.')[0]}.generation", 1.8e9, site)
    assert site.show() == []
    at(signal, 1, site)
    assert levels(site.show()) == {"page"}


def test_errors_beyond_where_a_counter_fell_from_are_told_alone():
    site = standing_at("node.memory_uncorrected", 700)
    at("node.memory_uncorrected", 0, site)
    site.show()
    at("node.memory_uncorrected", 702, site)
    assert ": 2 uncorrected errors" in site.show()[0].summary


def test_corrected_errors_of_caches_end_with_a_reset_that_nobody_tells_of():
    site = Site()
    at("gpu.sram_corrected", 20_000, site)
    assert levels(site.show(ticks=3)) == {"page"}
    at("gpu.sram_corrected", 0, site)
    site.show(ticks=3)
    assert not site.detector.cells["many_at"].any()


@pytest.mark.parametrize("signal", HARD)
def test_a_senseless_first_reading_hides_no_later_error(signal):
    site = Site()
    at(signal, 2.0**32 - 1, site)
    site.detector = Memory()
    site.show()
    at(signal, 4, site)
    assert site.show(ticks=5) == []
    at(signal, 5, site)
    assert levels(site.show()) == {"page"}


def again(detector):
    """A detector that goes on from its snapshot."""
    new = Memory()
    new.restore(detector.snapshot())
    return new


@pytest.mark.parametrize("signal", HARD)
@pytest.mark.parametrize("values", [[0, 700], [4e9, 700], [np.nan, 700]])
def test_what_is_doubted_stays_so_after_a_restart(signal, values):
    site = standing_at(signal, 700)
    for value in values:
        at(signal, value, site)
        assert site.show() == []
        site.detector = again(site.detector)
