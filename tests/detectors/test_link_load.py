"""Links that go down with and without traffic, on several fabrics: a link that a job waits for pages immediately."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.link.link import Link
from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology
from tests.detectors.fabrics import START, STEP, Change, Fabric, Values

AT, PORT = 60, "port:n3.p1"
JOB = (tuple(range(8)),)  # of 16 nodes
LATE = 400  # ticks


def down(port: str = PORT, rests: int = 0, until: int = 10**9) -> Change:
    """A port goes down at AT and moves nothing; before that it has had no traffic for `rests` ticks."""

    def change(fabric: Fabric, tick: int, growth: Values) -> None:
        i = fabric.port(port)
        if tick >= AT - rests:
            growth["nic.tx_bytes"][i] = growth["nic.rx_bytes"][i] = 1e3
        if AT <= tick < until:
            growth["nic.state"][i] = 0
            growth["nic.tx_bytes"][i] = growth["nic.rx_bytes"][i] = 0

    return change


def run(fabric: Fabric, change: Change | None = None, ticks: int = 120) -> list[Finding]:
    detector = Link()
    return [f for frames in fabric.frames(ticks, change) for f in detector.observe(frames)]


def delay(found: list[Finding], level: str) -> float:
    """Returns the seconds from AT to the first finding of a level."""
    return (next(f.time for f in found if f.level == level) - START) / SECOND - AT * STEP


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("roce", [False, True])
@pytest.mark.parametrize("rails", [False, True])
@pytest.mark.parametrize("jobs", [(), JOB])
def test_a_port_that_goes_down_under_load_pages_within_half_a_minute(roce: bool, rails: bool, jobs: tuple) -> None:
    found = run(Fabric(roce=roce, rails=rails, jobs=jobs), down())
    assert {f.entity for f in found} == {PORT}
    assert delay(found, "page") <= 30
    assert "under load" in found[-1].summary


def test_with_polls_of_a_minute_it_pages_at_the_second_that_finds_it_down() -> None:
    found = run(Fabric(poll=60, jobs=JOB), later(down(), 120), ticks=LATE)
    assert delay(found, "page") - 120 * STEP <= 120


def test_a_short_flap_under_load_stays_a_suspect() -> None:
    assert {f.level for f in run(Fabric(jobs=JOB), down(until=AT + 2))} == {"suspect"}


def test_an_idle_port_is_a_ticket_after_four_minutes() -> None:
    found = run(Fabric(jobs=JOB), down("port:n12.p1", rests=AT))
    assert {f.level for f in found} == {"suspect", "ticket"}
    assert 240 <= delay(found, "ticket") <= 250


@pytest.mark.parametrize(("again", "level"), [(False, "ticket"), (True, "page")])
def test_a_job_that_begins_on_a_port_that_flapped_before_pages_once_it_flaps_again(again: bool, level: str) -> None:
    flaps = [LATE, LATE + 6, LATE + 12, *([LATE + 60] if again else [])]

    def change(fabric: Fabric, tick: int, growth: Values) -> None:
        i = fabric.port(PORT)
        if tick < LATE + 30:
            growth["nic.tx_bytes"][i] = growth["nic.rx_bytes"][i] = 1e3
        growth["nic.state"][i] = not any(at <= tick < at + 2 for at in flaps)

    assert run(Fabric(), change, ticks=LATE + 90)[-1].level == level


def test_a_port_of_a_job_that_pauses_pages_after_four_minutes() -> None:
    found = run(Fabric(jobs=JOB), down(rests=10))
    assert 240 <= delay(found, "page") <= 250


def test_a_port_that_is_disabled_on_purpose_is_not_reported() -> None:
    def change(fabric: Fabric, tick: int, growth: Values) -> None:
        down()(fabric, tick, growth)
        growth["nic.phys_state"] = np.where(growth["nic.state"] == 1, 5.0, 3.0)

    assert run(Fabric(jobs=JOB), change) == []


def test_a_node_that_reboots_under_load_does_not_page() -> None:
    """Its agent is silent for three minutes; then its ports need half a minute to come up."""

    def change(fabric: Fabric, tick: int, growth: Values) -> None:
        mine = fabric.node == 3
        if AT <= tick < AT + 18:
            for column in growth.values():
                column[mine] = np.nan
        elif tick >= AT + 18:
            for name in ("nic.tx_bytes", "nic.rx_bytes"):
                fabric.totals[name][mine] = np.nan_to_num(fabric.totals[name][mine])
                growth[name][mine] = 0
            growth["nic.state"][mine] = float(tick >= AT + 22)

    assert [f.level for f in run(Fabric(), change, ticks=200) if f.level != "suspect"] == []


def test_a_site_without_leaves_pages_for_the_fast_ports_of_its_gpu_nodes() -> None:
    fabric = Fabric(jobs=JOB)
    fabric.topology = Topology(
        {e: [p for p in above if "leaf" not in p] for e, above in fabric.topology.parents.items()}
    )
    assert delay(run(fabric, down()), "page") <= 30


def test_a_port_without_byte_counters_pages_after_four_minutes() -> None:
    def change(fabric: Fabric, tick: int, growth: Values) -> None:
        down()(fabric, tick, growth)
        del growth["nic.tx_bytes"], growth["nic.rx_bytes"]

    assert 240 <= delay(run(Fabric(jobs=JOB), change), "page") <= 250


def test_a_leaf_that_is_polled_at_different_times_is_one_page_for_the_leaf() -> None:
    def change(fabric: Fabric, tick: int, growth: Values) -> None:
        if tick >= 200:
            mine = fabric.leaf == 2
            growth["nic.state"][mine] = 0
            growth["nic.tx_bytes"][mine] = growth["nic.rx_bytes"][mine] = 0

    found = run(Fabric(poll=60, jobs=JOB), change, ticks=230)
    assert {f.entity for f in found if f.level == "page"} == {"leaf:l2"}


def test_a_clock_that_is_ahead_mutes_no_port() -> None:
    def change(fabric: Fabric, tick: int, growth: Values) -> None:
        growth["nic.generation"] = np.full(64, START / SECOND + 1e6)
        growth["nic.symbol_errors"][fabric.port(PORT)] = 5.0 * (tick >= AT)

    assert "page" in {f.level for f in run(Fabric(), change, ticks=130)}


def erring(ber: float, port: str = PORT, others: float = 0.0) -> Change:
    """A port with a bit error rate from AT on; all others have another one from the beginning."""

    def change(fabric: Fabric, tick: int, growth: Values) -> None:
        mean = np.full(len(fabric.names), others)
        mean[fabric.port(port)] = ber if tick >= AT else others
        growth["nic.symbol_errors"] = fabric.rng.poisson(mean * fabric.speed * 1e6 * STEP).astype(float)

    return change


def later(change: Change, ticks: int) -> Change:
    """The same change, some ticks later."""
    return lambda fabric, tick, growth: change(fabric, tick - ticks, growth)


@pytest.mark.slow
def test_a_link_that_decays_slowly_is_a_ticket_within_tens_of_minutes() -> None:
    def rising(fabric: Fabric, tick: int, growth: Values) -> None:
        erring(10 ** (-14.5 + min(max(tick - AT, 0) / 720, 1.0)))(fabric, tick, growth)  # to 3e-14 in two hours

    warm = 720  # ticks
    for change, reaches, within in ((rising, 3600, 2400), (erring(3e-14), 0, 1500)):
        found = [run(Fabric(4, 4, seed=seed), later(change, warm), ticks=warm + AT + 720) for seed in range(3)]
        first = [next(f for f in one if f.level != "suspect") for one in found]
        after = [(f.time - START) / SECOND - (warm + AT) * STEP - reaches for f in first]
        assert np.median(after) <= within
        assert "ticket" in {f.level for f in first}


@pytest.mark.slow
def test_healthy_links_that_differ_by_a_decade_are_not_reported() -> None:
    """Lognormal rates with a spread of 1, at 3e-15 and 3e-14."""
    for ber in (3e-15, 3e-14):
        rates = ber * np.exp(np.random.default_rng(3).standard_normal(256))

        def change(fabric: Fabric, tick: int, growth: Values, rates: np.ndarray = rates) -> None:
            growth["nic.symbol_errors"] = fabric.rng.poisson(rates * 4e11 * STEP).astype(float)

        assert [f for f in run(Fabric(64, 4), change, ticks=1000) if f.level != "suspect"] == []


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("poll", [30, 60])
def test_usual_errors_are_learnt_with_slow_polls(poll: int) -> None:
    """Twenty readings are twenty minutes, in which errors do not count; then they are no event."""
    assert [f for f in run(Fabric(poll=poll), erring(1e-14, others=1e-14), ticks=900) if f.level != "suspect"] == []


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("usual", [1e-14, 1e-13])
def test_errors_that_most_links_of_a_site_have_are_normal_and_a_hundred_times_as_many_page(usual: float) -> None:
    assert [f for f in run(Fabric(), erring(usual, others=usual), ticks=720) if f.level != "suspect"] == []

    found = run(Fabric(), later(erring(100 * usual, others=usual), 360), ticks=AT + 420)
    assert {f.entity for f in found if f.level == "page"} == {PORT}
    assert delay(found, "page") - 360 * STEP <= 120


def test_errors_are_found_with_polls_of_a_minute() -> None:
    assert delay(run(Fabric(poll=60), later(erring(1e-12), 120), ticks=LATE), "page") - 120 * STEP <= 300


def test_a_port_that_is_not_read_keeps_its_errors_for_ten_minutes() -> None:
    def change(fabric: Fabric, tick: int, growth: Values) -> None:
        i = fabric.port(PORT)
        growth["nic.symbol_errors"][i] = 2.0 * (80 <= tick < 83)
        if 83 <= tick < 100:
            for name in growth:
                growth[name] = growth[name].copy()
                growth[name][i] = np.nan

    detector, fabric = Link(), Fabric()
    for frames in fabric.frames(99, change):
        detector.observe(frames)
    held = detector.errors.counters["nic.symbol_errors"].sum[fabric.port(PORT)]
    assert held > 12
