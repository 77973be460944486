"""The generic detector: the signals that it judges, its findings, and cases without findings."""

from __future__ import annotations

import numpy as np
import pytest

from detectors import configured
from detectors.anomaly.anomaly import Anomaly
from detectors.anomaly.changes import limit_at
from detectors.runner import Runner
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.signals import CATALOGUE as CATALOGUE_SIGNALS
from pipeline.model.signals import extend_catalogue
from pipeline.model.signals.signal import Signal
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START
from tests.detectors.snapshots import packed

GAUGES = [Signal(f"m{i}", "1", "gauge", "node", "f8", f"metric {i}") for i in range(4)]
ERRORS = Signal("node.oddities", "1", "counter", "node", "f8", "errors", harm="up")
DOOR = Signal("node.door", "1", "state", "node", "f8", "door", states=("shut", "open"), normal=("shut",))
HEAT = Signal("node.heat", "Cel", "gauge", "node", "f8", "heat", harm="up")
DECLARED = [*GAUGES, ERRORS, DOOR, HEAT, Signal("rank.mood", "1", "gauge", "rank", "f8", "mood")]
CATALOGUE = extend_catalogue(DECLARED)
STEP = 10 * SECOND


def runner(*names):
    return Runner([Anomaly()], set(names) or {s.name for s in DECLARED}, CATALOGUE)


def run_detector(judge, ticks, values, kind="node", n=3, events=(), step=STEP, topology=None):
    """Findings over some ticks; values: (tick, rng) -> signal -> column."""
    entities, topology, found = tuple(f"{kind}:e{i}" for i in range(n)), topology or Topology(), []
    for t in ticks:
        columns = values(t, np.random.default_rng([t, 3]))
        mine = tuple(e for e in events if e.time == START + t * step)
        width = max((len(c) for c in columns.values()), default=n)
        found += judge.observe({kind: Frame(START + t * step, kind, entities[:width], columns, topology, mine)})
    assert not judge.errors
    return found


def noisy(rng, n=3):
    return {s.name: 50.0 + rng.standard_normal(n) for s in GAUGES}


def shifted(tick, rng, signals=3, by=40.0, at=100, n=3):
    values = noisy(rng, n)
    for s in GAUGES[:signals]:
        values[s.name][1] += by if tick >= at else 0.0
    return values


def test_a_level_that_shifts_in_several_signals_is_reported_with_the_most_unusual_first():
    found = run_detector(runner("m0", "m1", "m2", "m3"), range(110), shifted)
    assert {f.entity for f in found} == {"node:e1"}
    assert set(found[0].signals[:3]) == {"m0", "m1", "m2"}
    assert found[0].onset == START + 100 * STEP
    assert found[0].time == START + 101 * STEP
    assert found[0].evidence["expected"] == pytest.approx(50, abs=6)
    assert found[0].summary.startswith("Node e1: changed: m")
    assert found[0].evidence["cohort"] == "its own past"


def test_a_lasting_change_of_several_signals_becomes_a_ticket_and_never_a_page():
    found = run_detector(runner("m0", "m1", "m2", "m3"), range(200), shifted)
    assert {f.level for f in found} == {"suspect", "ticket"}


def test_after_thirty_samples_a_new_level_is_the_normal_one():
    found = run_detector(runner("m0", "m1", "m2", "m3"), range(400), shifted)
    assert {f.onset for f in found} == {START + 100 * STEP}
    assert max(f.time for f in found) <= START + 131 * STEP


def test_one_of_many_signals_that_moves_alone_is_not_reported():
    assert run_detector(runner("m0", "m1", "m2", "m3"), range(200), lambda t, r: shifted(t, r, signals=1)) == []


def test_a_move_of_less_than_a_tenth_is_not_reported():
    judge = runner("m0", "m1", "m2", "m3")
    assert (
        run_detector(judge, range(200), lambda t, r: {k: v / 50 + 99 for k, v in shifted(t, r, by=4.0).items()}) == []
    )


def drifting(tick, n=3, seed=5):
    """White, autoregressive, quantised and heavy-tailed noise: four instruments, the same whatever was read before."""
    rng = np.random.default_rng([tick // 40, seed])
    walk = np.cumsum(rng.standard_normal((40, 4, n)), axis=0)[tick % 40] / 10
    white = np.random.default_rng([tick, seed]).standard_t(4, (4, n))
    return dict(zip([s.name for s in GAUGES], np.round(50 + walk + white * [[1], [0.3], [0.5], [1]], 1), strict=True))


@pytest.mark.parametrize("seconds", [1, 10, 60, 300])
def test_a_change_of_three_signals_that_lasts_is_a_ticket_at_every_interval(seconds):
    def values(tick, rng):
        changed = drifting(tick)
        for name in ("m0", "m1", "m2"):
            changed[name][1] += 15 * (tick >= 400)
        return changed

    found = run_detector(runner("m0", "m1", "m2", "m3"), range(430), values, step=seconds * SECOND)
    assert {(f.entity, f.onset) for f in found if f.level == "ticket"} == {("node:e1", START + 400 * seconds * SECOND)}
    assert set(found[0].signals[:3]) == {"m0", "m1", "m2"}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1, 10, 60])
def test_quiet_instruments_of_all_kinds_raise_no_ticket(seconds):
    judge = runner("m0", "m1", "m2", "m3")
    found = run_detector(judge, range(3000), lambda t, r: drifting(t), step=seconds * SECOND)
    assert [f for f in found if f.level != "suspect"] == []


@pytest.mark.parametrize("by", [8.0, 40.0, 1e4, -50.0])
def test_a_glitch_of_one_sample_in_all_signals_is_only_a_suspect(by):
    judge = runner("m0", "m1", "m2", "m3")
    found = run_detector(judge, range(250), lambda t, r: shifted(t, r, signals=4, by=by * (t == 200)))
    assert {f.level for f in found} <= {"suspect"}
    assert {f.onset for f in found} <= {START + 200 * STEP}


@pytest.mark.parametrize(("apart", "level"), [(100, "ticket"), (400, "suspect")])
def test_a_second_change_within_an_hour_is_no_glitch(apart, level):
    judge = runner("m0", "m1", "m2", "m3")
    found = run_detector(judge, range(800), lambda t, r: shifted(t, r, by=40.0 * (t in (300, 300 + apart)), at=0))
    assert [f.level for f in found if f.onset == START + 300 * STEP] == ["suspect"]
    assert {f.level for f in found if f.onset == START + (300 + apart) * STEP} == {level}


def test_the_limit_follows_the_interval_down_to_three_sigma_and_not_below_ten_seconds():
    assert limit_at(9.5, 10.0) == limit_at(9.5, 1.0) == 9.5
    assert limit_at(9.5, 300.0) == pytest.approx(9.5 - np.log(30))
    assert limit_at(9.5, 86_400.0) == 4.0


def test_a_fault_that_comes_back_four_times_is_not_learnt_as_quiet():
    def values(tick, rng):
        return shifted(tick, rng, by=40.0 * (tick % 150 >= 130), at=100)

    found = run_detector(runner("m0", "m1", "m2", "m3"), range(1000), values)
    tickets = {f.onset for f in found if f.level == "ticket"}
    assert {START + (150 * i + 130) * STEP for i in range(4)} <= tickets


def test_an_error_counter_that_starts_to_grow_is_sufficient_evidence():
    def values(tick, rng):
        return {**noisy(rng), ERRORS.name: np.array([7.0, 7.0 + (tick >= 150), 7.0])}

    found = run_detector(runner(ERRORS.name, "m0", "m1", "m2"), range(170), values)
    assert {f.entity for f in found} == {"node:e1"}
    assert found[0].signals[0] == ERRORS.name
    assert "node.oddities grew after standing still" in found[0].summary


def test_a_counter_reset_is_not_reported():
    def values(tick, rng):
        return {ERRORS.name: np.array([7.0, 7.0 * (tick < 150), 7.0])}

    assert run_detector(runner(ERRORS.name), range(200), values) == []


def test_a_state_that_is_not_normal_is_reported_and_its_return_is_not():
    judge = runner(DOOR.name)
    opens = run_detector(judge, range(110), lambda t, r: {DOOR.name: np.array([0.0, float(t >= 100), 0.0])})
    assert opens[0].entity == "node:e1"
    assert "node.door is not normal" in opens[0].summary
    later = run_detector(judge, range(110, 400), lambda t, r: {DOOR.name: np.array([0.0, float(t < 200), 0.0])})
    assert {f.onset for f in later} == {opens[0].onset}
    assert later[-1].time < START + 200 * STEP


def test_a_move_away_from_harm_is_not_reported():
    def heat(by):
        return lambda t, r: {HEAT.name: 50 + r.standard_normal(3) + np.array([0, by * (t >= 100), 0])}

    assert run_detector(runner(HEAT.name), range(150), heat(-30)) == []
    assert {f.entity for f in run_detector(runner(HEAT.name), range(150), heat(30))} == {"node:e1"}


def test_a_move_that_all_peers_make_is_not_reported():
    def all_up(tick, rng):
        return {k: v + 40 * (tick >= 100) for k, v in noisy(rng, 12).items()}

    assert run_detector(runner("m0", "m1", "m2", "m3"), range(200), all_up, n=12) == []
    assert run_detector(runner("m0", "m1", "m2", "m3"), range(200), lambda t, r: shifted(t, r, n=12), n=12) != []


def test_ranks_are_never_blamed():
    judge = runner()
    assert "rank.mood" not in judge.signals
    values = lambda t, r: {"rank.mood": np.array([1.0, 1.0 + 9 * (t >= 100), 1.0])}  # noqa: E731
    assert run_detector(judge, range(200), values, kind="rank") == []


def test_it_judges_signals_that_no_active_detector_uses():
    available = {"coolant.flow", "pump.vibration", "coolant.pressure"}
    vibration = Signal("pump.vibration", "[g]", "gauge", "coolant", "f8", "vibration")
    judge = Runner(configured(), available, extend_catalogue([vibration]))
    mine = next(d for d in judge.detectors if d.name == "anomaly")
    assert mine.input_signals() == ("pump.vibration",)
    assert "pump.vibration" in judge.signals


def test_it_is_off_where_other_detectors_use_all_signals():
    assert "anomaly" in Runner(configured(), {"leak.state"}).off


def test_it_judges_the_same_signals_live_and_in_a_replay_of_a_fleet():
    everything = set(CATALOGUE) - {s.name for s in DECLARED}
    for signals in (None, {"signals": ["node.load1", "gpu.memory_used"]}):
        live, played = (
            Runner(configured({"anomaly": signals or {}})),
            Runner(configured({"anomaly": signals or {}}), everything),
        )
        mine = [next(d for d in r.detectors if d.name == "anomaly").input_signals() for r in (live, played)]
        assert mine[0] == mine[1] != ()
        assert live.signals == played.signals
    mine, all_of = (Runner(configured(), there).signals for there in ({"coolant.flow"}, None))
    unread = next(d for d in configured() if d.name == "anomaly")
    assert Runner([*(d for d in configured() if d.name != "anomaly"), unread]).signals == all_of
    assert mine == all_of - set(unread.input_signals()), "a detector that is off changes no frame of the others"


def test_it_judges_the_series_of_unknown_exporters_and_configured_signals():
    assert Anomaly().input_signals() == ("custom.value",)
    assert set(Anomaly(signals=("node.load1",)).input_signals()) == {"node.load1"}
    wanted = next(d for d in configured({"anomaly": {"signals": ["node.load1"]}}) if d.name == "anomaly")
    assert "node.load1" in Runner([wanted]).signals


UNREAD = {"node.aer_fatal": (7.0, 8.0), "power.redundancy": (0.0, 1.0), "filesystem.responds": (1.0, 0.0)}


@pytest.mark.parametrize("name", UNREAD)
def test_a_live_error_counter_or_state_that_no_detector_reads_is_a_suspect_when_it_leaves_its_rest(name):
    judge, signal, (rest, gone) = Runner(configured()), CATALOGUE_SIGNALS[name], UNREAD[name]
    mine = next(d for d in judge.detectors if d.name == "anomaly")
    assert name in mine.input_signals()
    assert name in judge.signals
    if signal.states:
        rest, gone = (
            float(signal.states.index(s))
            for s in (signal.normal[0], next(s for s in signal.states if s not in signal.normal))
        )
    kind, found = signal.device_class, []
    for t in range(300):
        values = {name: np.array([rest, gone if 150 <= t < 200 or t >= 220 else rest, rest])}
        entities = tuple(f"{kind}:e{i}" for i in range(3))
        found += mine.observe({kind: Frame(START + t * STEP, kind, entities, values, Topology())})
    assert {(f.entity, f.onset, f.level) for f in found} == {(f"{kind}:e1", START + 150 * STEP, "suspect")}
    assert name in found[0].summary


def test_load_on_signals_that_no_detector_reads_is_not_judged_live():
    mine = next(d for d in Runner(configured()).detectors if d.name == "anomaly").input_signals()
    assert not {"node.memory_dirty", "node.swap_used", "gpu.memory_used", "nic.rx_packets"} & set(mine)


def test_announced_work_is_not_reported():
    work = Event(START + 90 * STEP, "node:e1", "maintenance_start", {"seconds": 3600})
    assert run_detector(runner("m0", "m1", "m2", "m3"), range(200), shifted, events=(work,)) == []


def test_missing_and_late_entities_and_many_nan_values_are_not_reported():
    def values(tick, rng):
        found = noisy(rng, 3 if tick >= 60 else 2)
        for column in found.values():
            column[rng.random(len(column)) < 0.3] = np.nan
            column[0] = np.nan if tick > 80 else column[0]
        return found

    assert run_detector(runner("m0", "m1", "m2", "m3"), range(300), values) == []


def test_constant_signals_are_not_reported():
    assert (
        run_detector(runner("m0", "m1", "m2", "m3"), range(200), lambda t, r: {s.name: np.ones(3) for s in GAUGES})
        == []
    )


def test_a_level_that_a_person_accepts_is_normal_from_then_on():
    judge = runner("m0", "m1", "m2", "m3")
    assert run_detector(judge, range(105), shifted) != []
    feedback = Event(START + 105 * STEP, "node:e1", "feedback", {"verdict": "not_a_fault", "detector": "anomaly"})
    assert run_detector(judge, range(105, 200), shifted, events=(feedback,)) == []


def test_a_restart_with_other_signals_begins_again():
    first, second = runner("m0", "m1", "m2"), runner("m0", "m1", "m2", "m3")
    run_detector(first, range(50), lambda t, r: noisy(r))
    second.restore(packed(first))
    assert run_detector(second, range(50, 80), lambda t, r: noisy(r)) == []
