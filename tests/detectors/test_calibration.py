"""Thresholds follow the quiet streams of the site: in any noise, from conservative to sharp, and not from faults."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from detectors.base.calibration import LEAST, SHIPPED, START, QuietTail, record_from_json, tail_factor
from detectors.base.streams import Channel, Streams
from pipeline.model.records import SECOND

CHANNEL = Channel(floor=0.01, delta=0.03)
SIZE = 600


def white(rng, size, sd=0.02):
    while True:
        yield rng.normal(0, sd, size)


def heavy(rng, size, sd=0.02):
    while True:
        yield sd * rng.standard_t(3, size)


def slow(rng, size, sd=0.02, phi=0.9):
    x = rng.normal(0, sd, size)
    while True:
        x = phi * x + np.sqrt(1 - phi * phi) * rng.normal(0, sd, size)
        yield x


def coarse(rng, size):
    for x in slow(rng, size, phi=0.8):
        yield np.round((x + 0.02) / 0.05) * 0.05


class Site:
    """Streams of one metric of `size` devices, fed hour by hour."""

    def __init__(self, noise, seed=1, size=SIZE, step=60, channel=CHANNEL, **settings):
        self.rng = np.random.default_rng(seed)
        self.noise, self.step, self.size = noise(self.rng, size, **settings), step, size
        self.streams, self.groups = Streams(channel), (np.arange(size) // 100).astype(np.int32)
        self.ticks, self.suspects, self.on = 0, 0, np.zeros(size, bool)

    def run(self, hours, change=lambda x, _: x, kinds=None):
        """Feeds hours; returns how many conditions began. change: of the values (N,) at an hour since the start."""
        before = self.suspects
        for _ in range(int(hours * 3600 / self.step)):
            self.ticks += 1
            values = change(next(self.noise), self.ticks * self.step / 3600)
            step = self.streams.step(values, self.groups, self.ticks * self.step * SECOND, kinds=kinds)
            self.suspects += int((step.on & ~self.on & ~step.moved).sum())
            self.on = step.on.copy()
            self.last = step
        return self.suspects - before

    def factor(self, kind=""):
        return self.streams.quiet.records[kind].factor


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("noise", "settings", "step"),
    [
        (white, {}, 1),
        (white, {}, 10),
        (white, {"sd": 0.1}, 60),
        (heavy, {}, 60),
        (slow, {}, 10),
        (slow, {"sd": 0.03}, 60),
        (slow, {"phi": 0.99}, 60),
        (coarse, {}, 60),
    ],
)
def test_in_any_noise_a_calibrated_site_of_75_nodes_has_no_false_suspect_in_12_hours(noise, settings, step):
    site = Site(noise, step=step, size=SIZE if step > 1 else 100, **settings)
    site.run(4 if step > 1 else 1)
    assert site.run(12 if step > 1 else 2) == 0


@pytest.mark.slow
def test_slow_noise_needs_several_times_the_effect_of_white_noise_of_the_same_size():
    sharp, blunt = Site(white), Site(slow, phi=0.99)
    sharp.run(24)
    blunt.run(24)
    assert sharp.factor() < 1.1
    assert 3 < blunt.factor() < 9


@pytest.mark.slow
def test_a_site_begins_conservative_and_becomes_sharper_with_the_hours():
    site, factors = Site(white), []
    site.run(0.1)
    assert site.last.least[0] == pytest.approx(START * CHANNEL.delta)
    for hours in (1, 3, 8, 36):
        site.run(hours)
        factors.append(site.factor())
    assert SHIPPED >= factors[0] > factors[1] > factors[2] >= factors[3]
    assert factors[3] < 0.95


@pytest.mark.slow
def test_the_effect_needed_is_never_less_than_the_physical_one():
    site = Site(white, sd=0.001)
    site.run(72)
    assert site.factor() == pytest.approx(LEAST, abs=0.05)
    assert (site.last.least >= np.float32(CHANNEL.delta)).all()


def test_a_noisy_site_of_8_nodes_stays_quiet_and_finds_a_fault_of_a_fifth_within_hours():
    """Its first hours alone would ask for nine times the least effect, two days show that four are enough."""
    site = Site(slow, seed=2, size=64, phi=0.9)
    site.groups = (np.arange(64) // 8).astype(np.int32)
    assert site.run(2) == 0
    assert site.factor() < 5

    def change(values, _):
        values[7] += 0.2
        return values

    site.run(1, change)
    assert np.flatnonzero(site.on).tolist() == [7]


def test_a_clear_fault_is_found_before_anything_was_calibrated():
    """Four times the least effect, 10 minutes after the start."""
    site = Site(white, step=10)

    def change(values, hour):
        values[7] += 0.12 * (hour > 1 / 6)
        return values

    site.run(0.4, change)
    assert np.flatnonzero(site.on).tolist() == [7]


@pytest.mark.slow
def test_faults_at_several_times_the_usual_rate_change_the_threshold_by_less_than_a_tenth():
    """One device in a hundred is off by 10 to 60 % for hours of a day: 80 faults per 1,000 node-days."""
    clean, faulty = Site(white), Site(white)
    rng = np.random.default_rng(2)
    hit = {int(i): (rng.uniform(1, 20), rng.uniform(0.1, 0.6)) for i in rng.choice(SIZE, 6, replace=False)}

    def change(values, hour):
        for i, (onset, effect) in hit.items():
            values[i] += effect * (onset <= hour < onset + 4)
        return values

    clean.run(24)
    assert faulty.run(24, change) >= 5
    assert faulty.factor() == pytest.approx(clean.factor(), rel=0.1)


@pytest.mark.slow
def test_a_rack_that_fails_at_once_does_not_raise_the_threshold_of_the_others():
    clean, faulty = Site(white), Site(white)

    def change(values, hour):
        values[:24] += 0.3 * (10 <= hour < 14)
        return values

    clean.run(16)
    faulty.run(16, change)
    assert faulty.factor() <= 1.25 * clean.factor()


@pytest.mark.slow
def test_short_transients_of_a_few_devices_do_not_make_a_detector_blind():
    """Two minutes at seven times the least effect, at each device every three months."""
    site, rng = Site(white, step=10), np.random.default_rng(3)
    left = np.zeros(SIZE, int)

    def change(values, _):
        left[:] = np.where(rng.random(SIZE) < 1e-6, 12, np.maximum(left - 1, 0))
        return values + 0.2 * (left > 0)

    site.run(12, change)
    assert site.factor() < SHIPPED


@pytest.mark.slow
def test_the_threshold_follows_a_site_that_becomes_noisier_within_hours_and_back_within_weeks():
    site, levels = Site(slow, step=300), {}

    def change(values, hour):
        return values * (1 if hour < 24 or hour > 48 else 3)

    for day in (1, 2, 40):
        site.run((day - site.ticks * site.step / 86_400) * 24, change)
        levels[day] = site.factor()
    assert levels[2] > 2 * levels[1]
    assert levels[40] < 1.3 * levels[1]


@pytest.mark.slow
def test_a_new_kind_of_device_begins_conservative_beside_a_known_one():
    site = Site(white)
    site.run(24, kinds=(np.zeros(SIZE, np.int32), ["H100"]))
    number = np.r_[np.zeros(SIZE - 50, np.int32), np.ones(50, np.int32)]
    site.run(0.3, kinds=(number, ["H100", "B200"]))
    assert site.last.least[0] < 1.1 * CHANNEL.delta
    assert site.last.least[-1] == pytest.approx(START * CHANNEL.delta)
    site.run(24, kinds=(number, ["H100", "B200"]))
    assert site.last.least[-1] < 1.2 * CHANNEL.delta


def test_the_order_of_kinds_does_not_matter():
    one, other = Site(white), Site(white)
    number = (np.arange(SIZE) % 2).astype(np.int32)
    one.run(6, kinds=(number, ["A", "B"]))
    other.run(6, kinds=(1 - number, ["B", "A"]))
    assert one.factor("A") == other.factor("A")
    assert one.factor("B") == other.factor("B")


def test_streams_without_peers_have_a_tail_of_their_own():
    site = Site(white)
    site.groups[:100] = -1
    site.run(8, lambda values, hour: values + np.where(site.groups < 0, 0.05 * np.sin(4 * hour), 0))
    records = site.streams.quiet.records
    assert records[" (own past)"].factor > 1.3 * records[""].factor


@pytest.mark.parametrize("stop", [0.5, 3.05])
def test_a_restart_continues_the_calibration_bit_by_bit(stop):
    whole, first, second = Site(slow), Site(slow), Site(slow)
    whole.run(6)
    first.run(stop)
    second.run(stop)
    second.streams = Streams(CHANNEL)
    second.streams.restore(copy.deepcopy(first.streams.snapshot()))
    second.run(6 - stop)
    assert second.streams.cells.tobytes() == whole.streams.cells.tobytes()
    assert second.factor() == whole.factor()
    assert second.streams.quiet.records[""].passed.tolist() == whole.streams.quiet.records[""].passed.tolist()


def test_statistics_that_are_no_streams_get_their_factors_from_the_same_tail():
    tail, rng, quiet = QuietTail(), np.random.default_rng(4), np.ones(200, bool)
    for tick in range(6 * 24 * 3):
        factors = tail.add(rng.exponential(0.1, 200), quiet, (1 + tick) * 600 * SECOND, 1e-7)
    assert factors == pytest.approx(np.full(200, 0.1 * np.log(1e7)), rel=0.25)


def test_the_tail_of_exponential_and_of_normal_margins_is_extrapolated_to_its_quantile():
    blocks, edges = 1e6, 0.125 * 2 ** (np.arange(48) / 6)
    assert tail_factor(blocks * np.exp(-edges / 0.1), blocks, 1e-8) == pytest.approx(0.1 * np.log(1e8), rel=0.1)
    normal = tail_factor(blocks * np.exp(-((edges / 0.3) ** 2) / 2), blocks, 1e-8)
    assert normal == pytest.approx(0.3 * np.sqrt(2 * np.log(1e8)), rel=0.15)
    assert tail_factor(np.zeros(48), 100.0, 1e-8) is None


def test_a_level_that_no_stream_stopped_at_leaves_a_tail_readable():
    passed = np.zeros(48)
    passed[:10], passed[20] = 200.0, 12.0  # a fault that raised some streams far in one step, and nothing between
    assert LEAST <= (tail_factor(passed, 1e4, 1e-8) or 0.0) < np.inf


def test_a_record_survives_its_json_and_a_damaged_one_is_refused():
    site = Site(white)
    site.run(3)
    record = site.streams.quiet.records[""]
    again = record_from_json(record.as_json())
    assert (again.factor, again.blocks) == (record.factor, record.blocks)
    with pytest.raises(ValueError, match="passings"):
        record_from_json({**record.as_json(), "passed": [1.0]})
