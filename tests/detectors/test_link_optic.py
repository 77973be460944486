"""Optics: trends and steps, and which ports get a ticket."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.link.link_optic import LinkOptic
from detectors.link.optic_history import find_last_step, fit_trend, row_median
from pipeline.model.records import SECOND, Event, Finding, Frame, from_iso
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START
from tests.examples import examples

HOUR = 3600 * SECOND
BITS = 1e15


def site(ports: int) -> tuple[tuple[str, ...], Topology]:
    names = tuple(f"port:n{i}.p0" for i in range(ports))
    return names, Topology({name: [f"node:n{i}", "leaf:l1"] for i, name in enumerate(names)})


def healthy(ports: int, hours: int, seed: int = 0) -> np.ndarray:
    """Returns (hours, ports) log10 of the raw BER of healthy ports, which vary by a twentieth of a decade."""
    rng = np.random.default_rng(seed)
    return -7.5 + 0.5 * rng.standard_normal(ports) + 0.05 * rng.standard_normal((hours, ports))


def run_detector(
    log_ber: np.ndarray,
    extra: dict[str, np.ndarray] | None = None,
    events: dict[int, Event] | None = None,
    detector: LinkOptic | None = None,
) -> list[Finding]:
    """Returns findings over hours; `extra`: signal -> (hours, ports)."""
    detector = detector or LinkOptic()
    hours, ports = log_ber.shape
    names, topology = site(ports)
    corrected, found = np.cumsum(np.floor(BITS * 10.0**log_ber), axis=0), []
    for hour in range(hours):
        values = {"nic.phy_bits": np.full(ports, 1e16 + BITS * hour), "nic.phy_corrected_bits": corrected[hour]}
        values |= {name: column[hour] for name, column in (extra or {}).items()}
        mine = (events[hour],) if events and hour in events else ()
        found += detector.observe({"nic": Frame(START + hour * HOUR, "nic", names, values, topology, mine)})
    return found


def ticketed(found: list[Finding]) -> set[str]:
    assert {f.level for f in found} <= {"ticket"}
    return {f.entity for f in found}


def test_a_rising_port_is_ticketed_days_ahead_with_a_forecast() -> None:
    log_ber = healthy(16, 120)
    log_ber[40:, 3] = -6.5 + 0.5 * np.arange(80) / 24
    found = run_detector(log_ber)
    assert ticketed(found) == {"port:n3.p0"}
    first = found[0]
    cliff = START + int((40 + 24 * (6.5 - 3.62) / 0.5) * HOUR)
    assert cliff - first.time > 3 * 24 * HOUR
    assert abs(from_iso(first.evidence["forecast"]) - cliff) < 12 * HOUR
    assert first.evidence["decades_per_day"] == pytest.approx(0.5, abs=0.1)
    assert first.evidence["peers"] == 15


def test_a_port_that_jumps_close_to_the_limit_is_ticketed_without_a_trend() -> None:
    log_ber = healthy(16, 60)
    log_ber[40:, 3] = -4.6
    found = run_detector(log_ber)
    assert ticketed(found) == {"port:n3.p0"}
    assert found[0].evidence["reason"] == "high"
    assert found[0].time <= START + 45 * HOUR


def test_a_step_is_not_a_trend() -> None:
    """Healthy ports move by more than a decade in one step, and stay."""
    log_ber = healthy(16, 120)
    log_ber[60:, 3] += 1.5
    assert run_detector(log_ber) == []


def test_a_change_of_all_ports_blames_none() -> None:
    log_ber = healthy(16, 120)
    log_ber[40:] += (0.5 * np.arange(80) / 24)[:, None]
    assert run_detector(log_ber) == []


@pytest.mark.slow
def test_links_that_work_beyond_the_fec_limit_are_not_reported() -> None:
    """Coherent optics always run at 1e-3; some of them move to it from 1e-4."""
    log_ber = healthy(16, 120) + 4.7
    log_ber[:50, 3:6] = -4.4
    assert run_detector(log_ber) == []


def test_without_peers_a_port_is_compared_with_its_past() -> None:
    log_ber = healthy(2, 80)
    log_ber[40:, 1] = -4.7
    found = run_detector(log_ber)
    assert ticketed(found) == {"port:n1.p0"}
    assert found[0].evidence["cohort"] == "own past"


def test_a_ticket_ends_when_the_port_is_cleaned() -> None:
    log_ber = healthy(16, 100)
    log_ber[40:70, 3] = -4.6
    found = run_detector(log_ber)
    assert max(f.time for f in found) < START + 76 * HOUR


def test_a_ticket_stays_open_after_maintenance_without_effect() -> None:
    log_ber = healthy(16, 90)
    log_ber[40:, 3] = -4.6
    node = {50: ("maintenance_start", {"seconds": 7200.0}), 52: ("maintenance_end", {})}
    events = {h: Event(START + h * HOUR, "node:n3", kind, data) for h, (kind, data) in node.items()}
    found = run_detector(log_ber, events=events)
    assert len({f.onset for f in found}) == 1
    assert found[-1].time == START + 89 * HOUR


def test_another_device_at_the_far_end_resets_the_history() -> None:
    log_ber = healthy(16, 50)
    log_ber[40:, 3] = -4.6
    moved = {46: Event(START + 46 * HOUR, "port:n3.p0", "link_peer", {})}
    found = run_detector(log_ber, events=moved)
    assert found
    assert max(f.time for f in found) < START + 46 * HOUR


def test_a_hot_module_is_ticketed_and_a_warm_hall_is_not() -> None:
    rng = np.random.default_rng(1)
    heat = 47 + 3 * rng.standard_normal(16) + 0.3 * rng.standard_normal((60, 16))
    assert run_detector(healthy(16, 60), {"nic.module_temperature": heat + 12.0 * (np.arange(60) >= 40)[:, None]}) == []
    heat[40:, 5] += 14.0
    found = run_detector(healthy(16, 60), {"nic.module_temperature": heat})
    assert ticketed(found) == {"port:n5.p0"}
    assert found[0].evidence["module_warmer_k"] > 10
    assert found[0].signals == ("nic.module_temperature",)


def test_fading_light_is_ticketed_and_a_silent_module_is_not() -> None:
    light = 1.2 + 0.02 * np.random.default_rng(1).standard_normal((60, 16))
    heat = np.full((60, 16), 47.0)
    light[40:, 6], heat[40:, 6] = 6.5535, -1 / 256  # all bits set, as CMIS prints them
    light[40:, 7] = 0.0  # dark: the link is down, which another detector reports
    assert run_detector(healthy(16, 60), {"nic.rx_power_min": light, "nic.module_temperature": heat}) == []
    light[40:, 5] *= 0.4
    found = run_detector(healthy(16, 60), {"nic.rx_power_min": light})
    assert ticketed(found) == {"port:n5.p0"}
    assert found[0].evidence["light_lost_db"] == pytest.approx(4.0, abs=0.2)


def test_restarted_counters_are_not_errors() -> None:
    """A generation that changes, and one that is not reported: the counters fall."""
    detector, (names, topology) = LinkOptic(), site(9)
    for slot in range(6 * 60):
        life = 1.0 + slot // 50
        counted = (slot % 50 + 1) * BITS / 6
        values = {
            "nic.phy_bits": np.full(9, counted),
            "nic.phy_corrected_bits": np.floor(np.full(9, counted) * 3e-8),
            "nic.generation": np.where(np.arange(9) < 4, life, np.nan),
        }
        assert detector.observe({"nic": Frame(START + slot * HOUR // 6, "nic", names, values, topology)}) == []


def test_a_clock_set_back_by_hours_resets_the_history() -> None:
    log_ber = healthy(9, 60)
    detector = LinkOptic()
    run_detector(log_ber, detector=detector)
    assert np.isfinite(detector.history.hourly_medians("ber")).sum() > 9 * 40
    run_detector(log_ber[:5], detector=detector)
    assert np.isfinite(detector.history.hourly_medians("ber")).sum() <= 9 * 4


@pytest.mark.slow
def test_new_and_missing_ports_do_not_affect_others() -> None:
    log_ber = healthy(16, 120)
    log_ber[40:, 3] = -6.0 + 0.5 * np.arange(80) / 24
    log_ber[:50, 15] = np.nan  # there later
    log_ber[70:, 14] = np.nan  # gone
    assert ticketed(run_detector(log_ber)) == {"port:n3.p0"}


def test_a_series_is_cut_at_its_last_step() -> None:
    series = np.concatenate([np.full(20, -8.0), np.full(28, -7.0)]) + 0.01 * np.sin(np.arange(48))
    assert find_last_step(series) == 20
    found = fit_trend(series)
    assert found is not None
    assert found.hours == 28
    assert abs(found.slope) < 0.05
    assert fit_trend(np.full(48, np.nan)) is None


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.floats(-9, 9) | st.just(float("nan")), min_size=5, max_size=5), min_size=1, max_size=6))
def test_row_medians_are_numpys_over_known_values(rows: list[list[float]]) -> None:
    values = np.array(rows)
    for row, median in zip(values, row_median(values), strict=True):
        known = row[np.isfinite(row)]
        assert median == pytest.approx(np.median(known)) if len(known) else np.isnan(median)


@pytest.mark.parametrize("phase", [0, 25, 50])
def test_modules_and_counters_are_seen_at_any_phase_of_their_polls(phase: int) -> None:
    """Frames of 10 s, modules read once a minute: never at the start of ten minutes unless the phase is 0."""
    names, topology = site(10)
    detector, found = LinkOptic(), []
    for second in range(0, 30 * 3600, 10):
        if second % 60 != phase // 10 * 10 and second % 600:
            continue  # nothing happens in these frames
        column = np.full(10, np.nan) if second % 60 != phase // 10 * 10 else np.full(10, 50.0)
        if np.isfinite(column[0]) and second > 20 * 3600:
            column[3] = 65.0
        frame = Frame(START + second * SECOND, "nic", names, {"nic.module_temperature": column}, topology)
        found += detector.observe({"nic": frame})
    assert ticketed(found) == {"port:n3.p0"}


def test_modules_of_a_warm_room_are_not_reported_but_one_that_is_hotter_is() -> None:
    log_ber = healthy(12, 60)
    heat = 72.0 + 0.5 * np.random.default_rng(1).standard_normal((60, 12))
    assert run_detector(log_ber, {"nic.module_temperature": heat}) == []
    heat[:, 5] += 6.0
    assert ticketed(run_detector(log_ber, {"nic.module_temperature": heat})) == {"port:n5.p0"}
