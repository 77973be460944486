"""Errors of links: how many are needed, bunches, congestion, both ends of the cable, maintenance and boots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.detection.link_rates import alarms, delays
from detectors.link.error_counts import ErrorMoments, log_likelihood_ratio
from detectors.link.link import Link
from detectors.link.port_troubles import PacketLosses
from detectors.runner import Runner
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology
from tests.detectors.snapshots import packed
from tests.examples import examples

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND
PORT, FAR = "port:n1.p2", "port:n2.p2"  # indices 6 and 10: FAR plays the other end of the cable
NODE = "node:n1"


def cabled(site):
    """PORT and FAR are the two ends of one cable."""
    site.topology = Topology(site.topology.parents, {PORT: {"peer": FAR}, FAR: {"peer": PORT}})


def erring(*ports, per_tick=2, since=50, until=10**9, signal="nic.symbol_errors"):
    def change(tick, values):
        values["nic"][signal] = np.zeros(16)
        for port in ports:
            values["nic"][signal][port] = per_tick * max(0, min(tick, until) - since + 1)

    return change


def pages(found):
    return [f for f in found if f.level == "page"]


def test_a_bit_error_rate_of_1e_12_pages_within_90_s():
    assert delays(1e-12, 60, 0).recall >= 0.98


@pytest.mark.slow
def test_a_bit_error_rate_of_1e_13_pages_within_5_min():
    assert delays(1e-13, 60, 0).recall >= 0.96


@pytest.mark.parametrize(("learnt", "words"), [(None, "from a cold start"), (1e-15, "after a day at 1e-15")])
def test_a_detector_with_less_history_is_somewhat_later(learnt, words):
    found = delays(1e-13, 60, 0, learnt)
    assert found.recall >= 0.9
    assert words in found.as_text()


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("ber", [1e-16, 1e-15])
def test_healthy_links_do_not_page(ber):
    assert alarms(ber, 0.02, 0).count == 0


def test_only_ports_that_report_a_counter_count_as_readings():
    """A mixed fleet: the others have another counter or are down."""
    link, rng = Link(), np.random.default_rng(3)
    names = tuple(f"port:n{i}.p0" for i in range(1000))
    site = Topology({name: (f"leaf:l{i // 64}",) for i, name in enumerate(names)})
    errors, state = np.full(1000, np.nan), np.ones(1000)
    errors[:100], errors[100:200], state[100:200] = 0.0, 0.0, 0.0
    for tick in range(100):
        errors[:100] += rng.poisson(0.004, 100)
        values = {"nic.state": state, "nic.speed": np.full(1000, 400_000.0), "nic.symbol_errors": errors.copy()}
        link.observe({"nic": Frame(START + tick * STEP, "nic", names, values, site)})
    assert 9_900 < link.errors.counters["nic.symbol_errors"].moments.readings <= 10_000


def test_healthy_links_of_a_mixed_fleet_do_not_page():
    found = alarms(1e-15, 0.01, 0, reporting=0.1)
    assert found.count == 0
    assert found.link_days < 105
    assert "reported by 0.1 of the ports" in found.as_text()


def test_errors_alone_page_once_their_counter_has_been_read_for_ten_minutes(site, watch):
    found = watch(Link(), site, 120, erring(6))
    assert found[0].level == "suspect"
    assert pages(found)[0].time == START + 60 * STEP


def test_a_bunch_of_errors_after_a_cold_start_does_not_page(site, watch):
    def bunches(tick, values):
        values["nic"]["nic.symbol_errors"] = np.zeros(16)
        values["nic"]["nic.symbol_errors"][6] = 3.0 * ((tick >= 30) + (tick >= 34))

    assert {f.level for f in watch(Link(), site, 300, bunches)} == {"suspect"}


@pytest.mark.slow
def test_a_fabric_with_bunched_errors_does_not_page_after_a_cold_start():
    found = alarms(1e-15, 0.012, 11, 1000.0)
    assert found.count == 0


def test_a_restart_is_not_a_cold_start(site, watch):
    runner, again = Runner([Link()]), Runner([Link()])
    watch(runner, site, 61, erring())
    again.restore(packed(runner))
    found = watch(again, site, 20, erring(6, since=62), first=61)
    assert pages(found)[0].time < START + 66 * STEP


def test_errors_at_both_ends_page_within_the_first_ten_minutes(site, watch):
    cabled(site)
    assert pages(watch(Link(), site, 57, erring(6, 10)))


def test_infinite_light_readings_are_ignored(site, watch):
    cabled(site)
    found = watch(Link(), site, 120, combined(erring(6), with_modules(rx_power_min={6: -np.inf})))
    assert "nic.rx_power_min" not in pages(found)[0].evidence


def test_two_errored_windows_page_and_one_does_not(site, watch):
    def bursts(tick, values):
        values["nic"]["nic.symbol_errors"] = np.zeros(16)
        values["nic"]["nic.symbol_errors"][6] = 500.0 * sum(tick >= at for at in starts)

    starts = (70,)
    assert {f.level for f in watch(Link(), site, 200, bursts)} == {"suspect"}
    starts = (70, 74)
    assert pages(watch(Link(), type(site)(), 200, bursts))


@pytest.mark.slow
def test_the_same_errors_count_more_on_a_slow_port(site, watch):
    """An error every two minutes: BER 2e-14 at 400 Gb/s, 8e-14 at 100."""

    def change(speed):
        def shown(tick, values):
            values["nic"]["nic.speed"] = np.full(16, speed)
            values["nic"]["nic.symbol_errors"] = np.zeros(16)
            values["nic"]["nic.symbol_errors"][6] = max(0, (tick - 50) // 12)

        return shown

    assert not pages(watch(Link(), site, 400, change(400_000.0)))
    assert pages(watch(Link(), type(site)(), 400, change(100_000.0)))


def test_more_errors_are_needed_where_the_whole_fabric_has_bunches():
    calm, bunched = ErrorMoments(), ErrorMoments()
    for cohort, second in ((calm, 4000.0), (bunched, 12_000.0)):
        cohort.add_readings(10**7, 0.0)
        cohort.add_errors(4000.0, second)
    assert calm.overdispersion(4e-4) == 0
    assert bunched.overdispersion(4e-4) > 10
    count, healthy, faulty = np.array([6.0]), np.array([4e-4]), np.array([0.4])
    assert log_likelihood_ratio(count, healthy, faulty, bunched.overdispersion(4e-4)) < log_likelihood_ratio(
        count, healthy, faulty, 0.0
    )


@given(st.floats(0, 50), st.floats(1e-6, 1e-2), st.floats(0.02, 50))
def test_the_negative_binomial_becomes_poisson_without_bunches(count, healthy, faulty):
    n, h, f = np.array([count]), np.array([healthy]), np.array([faulty])
    assert log_likelihood_ratio(n, h, f, 1e-5) == pytest.approx(log_likelihood_ratio(n, h, f, 0.0), rel=1e-2, abs=0.05)


def test_errors_of_a_port_that_pages_do_not_count_as_bunches(site, watch):
    link = Link()
    assert pages(watch(link, site, 120, erring(6, per_tick=50)))
    cohort = link.errors.counters["nic.symbol_errors"].moments
    assert (cohort.first, cohort.second) == (0, 0)


@pytest.mark.parametrize("top", [65_535.0, 2.0**32 - 1, 2.0**64])
def test_a_saturated_counter_or_one_with_all_bits_set_is_not_a_burst(site, watch, top):
    def change(tick, values):
        values["nic"]["nic.symbol_errors"] = np.full(16, 7.0)
        values["nic"]["nic.symbol_errors"][6] = top if tick % 20 >= 10 else 7.0

    assert watch(Link(), site, 400, change) == []


def test_a_saturated_counter_of_a_port_in_trouble_is_in_the_evidence(site, watch):
    def change(tick, values):
        values["nic"]["nic.symbol_errors"] = np.zeros(16)
        values["nic"]["nic.symbol_errors"][6] = 65_535.0
        if tick >= 50:
            values["nic"]["nic.state"][6] = 0

    assert watch(Link(), site, 120, change)[-1].evidence["full"] == ["nic.symbol_errors"]


def test_a_counter_that_wraps_at_32_bits_continues(site, watch):
    def change(tick, values):
        values["nic"]["nic.symbol_errors"] = np.zeros(16)
        values["nic"]["nic.symbol_errors"][6] = (2.0**32 - 3 + 2 * max(0, tick - 49)) % 2.0**32

    found = watch(Link(), site, 120, change)
    assert pages(found)
    assert found[0].evidence["nic.symbol_errors"] < 20


def losing(site, tied):
    """Returns packet losses that follow the load (tied), or a fixed share of the packets."""
    load, lost = np.zeros(16), np.zeros(16)
    rng = np.random.default_rng(3)

    def change(tick, values):
        busy = 0.5 + 0.5 * np.sin(tick / 25)
        load[:] += 1e11 * (0.1 + busy)
        if tick >= 50:
            lost[6] += rng.poisson(9 * busy**4 if tied else 4 * (0.1 + busy))
        values["nic"] |= {"nic.rx_bytes": load.copy(), "nic.port_rx_errors": lost.copy()}

    return change


@pytest.mark.slow
def test_losses_that_follow_the_load_are_congestion_and_at_most_a_ticket(site, watch):
    found = watch(Link(), site, 700, losing(site, True))
    assert {f.level for f in found} <= {"suspect", "ticket"}
    assert any("congestion" in f.summary for f in found)


@pytest.mark.slow
def test_losses_of_a_fixed_share_of_the_packets_are_corruption(site, watch):
    found = watch(Link(), site, 700, losing(site, False))
    assert not any("congestion" in f.summary for f in found)
    assert found[0].level == "suspect"
    assert pages(found)


def test_a_steady_load_gives_no_correlation():
    losses = PacketLosses()
    for tick in range(600):
        losses.add_errors(PORT, True, 5 * (tick % 3), tick * STEP)
        losses.close_minutes({PORT: 0}, np.array([1e10 * (tick + 1)]), tick * STEP)
    assert losses.load_correlation(PORT, True) is None


def test_errors_at_both_ends_blame_the_cable_and_page_early(site, watch):
    cabled(site)
    one = watch(Link(), site, 120, erring(6, per_tick=1, until=52))
    assert {f.level for f in one} == {"suspect"}
    assert f"transmitter of {FAR} or the cable" in one[0].evidence["side"]
    other = type(site)()
    cabled(other)
    combined = watch(Link(), other, 120, erring(6, 10, per_tick=1, until=52))
    assert pages(combined)
    assert "the cable: receivers at both ends report errors" in pages(combined)[0].evidence["side"]


def with_modules(**modules):
    """Returns light and heat of all modules. modules: signal without its class -> {index: value} of single ones."""
    usual = {"rx_power_min": 1.0, "tx_power_min": 1.2, "module_temperature": 50.0}

    def change(tick, values):
        for name, value in usual.items():
            values["nic"][f"nic.{name}"] = np.full(16, value)
            for place, other in modules.get(name, {}).items():
                values["nic"][f"nic.{name}"][place] = other

    return change


def combined(*changes):
    def change(tick, values):
        for one in changes:
            one(tick, values)

    return change


@pytest.mark.parametrize(
    ("modules", "statement"),
    [
        ({"rx_power_min": {6: 0.3}}, f"transmitter of {FAR} or the cable"),
        ({"rx_power_min": {6: 0.3}, "tx_power_min": {10: 0.4}}, f"transmitter of {FAR}"),
        ({"module_temperature": {6: 74.0}}, f"receiver of {PORT}, whose module is hot"),
        ({"module_temperature": {10: 63.0}}, f"transmitter of {FAR}"),
        ({}, "light is normal"),
    ],
)
def test_the_modules_show_which_side_is_bad(site, watch, modules, statement):
    cabled(site)
    found = watch(Link(), site, 120, combined(erring(6), with_modules(**modules)))
    assert statement in pages(found)[0].evidence["side"]


def test_without_a_far_end_the_side_is_unknown(site, watch):
    assert "unknown which end" in pages(watch(Link(), site, 120, erring(6)))[0].evidence["side"]


def worked(what, first, seconds, change):
    """Returns a change during announced maintenance of an entity."""

    def shown(tick, values):
        change(tick, values)
        if tick == first:
            return [Event(START + tick * STEP, what, "maintenance_start", {"seconds": seconds})]
        if tick == first + seconds // 10:
            return [Event(START + tick * STEP, what, "maintenance_end", {})]
        return []

    return shown


def down(tick, values):
    if 50 <= tick < 90:
        values["nic"]["nic.state"][6] = 0


@pytest.mark.parametrize("what", [PORT, NODE, "rack:r1", "leaf:l2"])
def test_faults_during_maintenance_are_not_reported(site, watch, what):
    quiet = worked(what, 45, 1000, combined(down, erring(6, per_tick=50, until=100)))
    assert watch(Link(), type(site)(), 400, quiet) == []


def test_a_port_still_down_long_after_maintenance_pages(site, watch):
    def lost(tick, values):
        if tick >= 50:
            values["nic"]["nic.state"][6] = 0

    page = pages(watch(Link(), site, 400, worked(NODE, 45, 600, lost)))[0]
    assert page.time > START + (45 + 60 + 59) * STEP


def test_transitions_during_a_boot_are_not_flaps(site, watch):
    """The node boots three times; its ports come up some seconds after it."""
    boots, born, moved = (100, 300, 500), np.full(16, 1_789_000_000.0), np.full(16, 2.0)

    def change(tick, values):
        for boot in boots:
            if boot - 20 <= tick < boot:
                for column in values["nic"].values():
                    column[4:8] = np.nan
            elif boot <= tick < boot + 4:
                born[4:8] = 1_790_000_000 + boot * 10
                values["nic"]["nic.state"][4:8] = 0
                moved[4:8] = 0
            elif tick == boot + 4:
                moved[4:8] += 1
        values["nic"]["nic.generation"] = born.copy()
        changes = moved.copy()
        changes[np.isnan(values["nic"]["nic.state"])] = np.nan
        values["nic"]["nic.carrier_changes"] = changes

    assert pages(watch(Link(), site, 700, change)) == []


def test_a_switch_port_whose_node_is_silent_does_not_page(site, watch):
    """The node at the far end is off: its port is no longer measured."""
    cabled(site)

    def change(tick, values):
        if tick >= 50:
            values["nic"]["nic.state"][6] = 0
            values["nic"]["nic.state"][10] = np.nan

    found = watch(Link(), site, 200, change)
    assert {f.level for f in found} == {"suspect"}
    assert f"{FAR} is silent" in found[-1].evidence["side"]


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_arbitrary_readings_cause_no_error(seed):
    rng, link = np.random.default_rng(seed), Link()
    site = type("Any", (), {})()
    site.names = tuple(f"port:n{n}.p0" for n in range(6))
    topology = Topology({name: ["leaf:l1"] for name in site.names})
    odd = np.array([np.nan, 0.0, -1.0, 1.0, 2.0**16 - 1, 2.0**32 - 1, 2.0**64, np.inf, -np.inf, 1e300])
    for tick in range(60):
        size = 3 + tick // 20
        signals = [s for s in (*link.needs, *link.wants) if s.startswith("nic.") and rng.random() < 0.9]
        values = {s: rng.choice(odd, size) for s in signals}
        time = START + int(rng.integers(-5, 60)) * STEP
        for f in link.observe({"nic": Frame(time, "nic", site.names[:size], values, topology)}):
            assert f.onset <= f.time
            assert np.isfinite(f.score)
