"""Edge rules report urgent conditions once, and never for a wrong reading or a changed load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.collector import Reading
from agents.node.edge import rules as edges
from agents.node.edge.rules import EdgeRules
from pipeline.config import sections
from pipeline.model.event_kinds import EVENT_KINDS
from pipeline.model.records import SECOND, Event
from pipeline.model.signals import CATALOGUE
from tests.examples import examples

START = 1_790_000_000 * SECOND
NOT_READ = 255
LOOP, ROPE, GPU = "connector:row1.1", "leak_detector:row1.tray", "gpu:n1.0"


class RuleRunner:
    """Passes values to the rules, by default one reading a second."""

    def __init__(self, **how: object) -> None:
        self.edge, self.time = EdgeRules(sections.Edge(**how)), START  # type: ignore[arg-type]

    def show(self, device_class: str, entity: str, step: float = 1.0, **values: float) -> list[Event]:
        self.time += round(step * SECOND)
        columns = {}
        for name, value in values.items():
            signal = CATALOGUE[name.replace("__", ".")]
            columns[signal.name] = np.array([value], np.uint8 if signal.type == "u1" else np.float32)
        return self.edge.evaluate(self.time, [Reading(device_class, (entity,), columns)])

    def flow(self, *values: float) -> list[Event]:
        return [e for value in values for e in self.show("coolant", LOOP, coolant__flow=value)]

    def leak(self, *states: int) -> list[Event]:
        return [e for state in states for e in self.show("leak", ROPE, leak__state=state)]


def states_of(events: list[Event]) -> list[tuple[str, str]]:
    return [(e.kind, e.data["state"]) for e in events]


# --- leaks -----------------------------------------------------------------------------------------------------------


def test_a_leak_is_reported_at_the_first_reading_once_and_again_when_it_worsens() -> None:
    rules = RuleRunner()
    found = rules.leak(0, 0, 1, 1, 1, 2, 2, 2)
    assert [(e.kind, e.entity, e.data["leak"]) for e in found] == [
        ("leak", ROPE, "warning"),
        ("leak", ROPE, "critical"),
    ]
    assert found[0].time == START + 3 * SECOND == found[0].data["since"] == found[1].data["since"]


def test_a_leak_ends_after_two_dry_readings_and_a_wet_one_between_begins_no_new_one() -> None:
    rules = RuleRunner()
    assert states_of(rules.leak(2, 0, 2, 0)) == [("leak", "active")]
    assert states_of(rules.leak(0)) == [("leak", "cleared")]


def test_a_detector_that_cannot_be_read_neither_leaks_nor_ends_a_leak() -> None:
    assert RuleRunner().leak(0, 3, NOT_READ, 4, 3) == []
    rules = RuleRunner()
    assert states_of(rules.leak(2, NOT_READ, 3, 4, NOT_READ, 3)) == [("leak", "active")]
    assert states_of(rules.leak(0, 0)) == [("leak", "cleared")]


def test_a_flapping_detector_is_reported_at_most_once_a_minute() -> None:
    found = RuleRunner().leak(*(state for _ in range(300) for state in (2, 0, 0, 0)))
    begun = [e.time for e in found if e.data["state"] == "active"]
    assert len(begun) == 20
    assert min(np.diff(begun)) >= 60 * SECOND


def test_a_detector_that_alternates_between_warning_and_critical_is_reported_twice() -> None:
    assert [e.data["leak"] for e in RuleRunner().leak(*[1, 2] * 200)] == ["warning", "critical"]


# --- flow and pressure -----------------------------------------------------------------------------------------------


def learned_rules(**how: object) -> RuleRunner:
    rules = RuleRunner(**how)
    assert rules.flow(*np.random.default_rng(1).normal(300, 6, 120)) == []
    return rules


def test_flow_below_seven_tenths_is_reported_at_the_second_reading() -> None:
    rules = learned_rules()
    began = rules.time + SECOND
    (found,) = rules.flow(190, 190, 100, 50)
    assert (found.kind, found.entity, found.time) == ("flow_collapse", LOOP, began + SECOND)
    assert found.data["since"] == began
    assert found.data["usual"] == pytest.approx(300, rel=0.02)
    assert found.data["value"] == 190
    assert found.data["signal"] == "coolant.flow"


def test_one_wrong_reading_is_not_reported() -> None:
    rules = learned_rules()
    for broken in (0.0, float("nan"), 1e9, -1.0, 49_999.0, 0.0):
        assert rules.flow(broken, 300, 301, 299) == []


def test_missing_readings_neither_begin_nor_end_a_collapse() -> None:
    rules = learned_rules()
    nan = float("nan")
    assert rules.flow(nan, nan, nan, nan) == []
    assert states_of(rules.flow(100, nan, nan, 100)) == [("flow_collapse", "active")]
    assert rules.flow(*[nan] * 100) == []
    assert states_of(rules.flow(*[300] * 5)) == [("flow_collapse", "cleared")]


def test_a_recovered_flow_is_reported_after_five_good_readings_and_not_at_the_threshold() -> None:
    rules = learned_rules()
    assert states_of(rules.flow(100, 100)) == [("flow_collapse", "active")]
    assert rules.flow(*[215, 205, 212] * 20) == []
    (over,) = rules.flow(300, 300, 300, 300, 300)
    assert (over.data["state"], over.data["why"]) == ("cleared", "recovered")


def test_a_flow_that_oscillates_around_the_threshold_is_reported_at_most_once_a_minute() -> None:
    found = learned_rules().flow(*([100] * 3 + [300] * 6) * 100)
    begun = [e.time for e in found if e.data["state"] == "active"]
    assert 10 <= len(begun) <= 15
    assert min(np.diff(begun)) >= 60 * SECOND


def test_a_collapse_does_not_become_the_usual_flow_before_four_hours() -> None:
    rules = learned_rules()
    assert states_of(rules.flow(*[100] * 3600 * 3)) == [("flow_collapse", "active")]
    (over,) = rules.flow(*[100] * 3602)
    assert (over.data["state"], over.data["why"]) == ("cleared", "new level")
    assert states_of(rules.flow(40, 40)) == [("flow_collapse", "active")]


def test_a_slow_decline_and_a_starting_pump_are_not_a_collapse() -> None:
    rules = learned_rules()
    assert rules.flow(*np.linspace(300, 120, 7200)) == []
    rules = RuleRunner()
    assert rules.flow(*[0.0] * 600, *np.linspace(0, 300, 60), *[300] * 600) == []
    assert states_of(rules.flow(100, 100)) == [("flow_collapse", "active")]


def renewed_every(seconds: int, count: int = 120) -> list[float]:
    """Values of a controller that measures this rarely: each measurement in many readings."""
    noise = np.random.default_rng(2).normal(300, 6, count // seconds)
    return [float(value) for value in noise for _ in range(seconds)]


@pytest.mark.parametrize("seconds", [5, 7, 10])
def test_one_wrong_zero_of_a_slow_controller_is_one_measurement(seconds: int) -> None:
    rules = RuleRunner()
    assert rules.flow(*renewed_every(seconds), *[0.0] * seconds, *renewed_every(seconds)) == []
    assert states_of(rules.flow(*[0.0] * 20)) == [("flow_collapse", "active")]


def test_two_different_low_measurements_are_reported_immediately_at_any_interval() -> None:
    rules = RuleRunner()
    rules.flow(*renewed_every(5))
    began = rules.time + SECOND
    (found,) = rules.flow(*[100] * 5, *[90] * 5)
    assert found.time == began + 5 * SECOND


def test_flow_and_pressure_that_fall_together_confirm_each_other() -> None:
    rules = RuleRunner()
    for value in renewed_every(10):
        rules.show("coolant", LOOP, coolant__flow=value, coolant__pressure=value / 100)
    fallen = [rules.show("coolant", LOOP, coolant__flow=0.0, coolant__pressure=0.0) for _ in range(2)]
    assert fallen[0] == []
    assert [e.kind for e in fallen[1]] == ["flow_collapse", "pressure_collapse"]


def test_a_constant_sensor_is_reported_at_the_second_low_reading_and_at_the_third_zero() -> None:
    rules = RuleRunner()
    rules.flow(*[300] * 60)
    assert rules.flow(0.0, 0.0, *[300] * 3) == []
    assert states_of(rules.flow(90, 90)) == [("flow_collapse", "active")]
    rules = RuleRunner()
    rules.flow(*[300] * 60)
    assert states_of(rules.flow(0.0, 0.0, 0.0)) == [("flow_collapse", "active")]


def test_an_idle_loop_is_not_evaluated() -> None:
    assert RuleRunner().flow(*[0.4] * 100, 0.0, 0.0, 0.0) == []


def test_a_broken_reading_while_learning_does_no_harm() -> None:
    assert RuleRunner().flow(*[300] * 5, 49_999, 0.0, *[300] * 30, 0.0, *[300] * 30) == []


def test_pressure_below_half_is_reported_for_either_sensor() -> None:
    for signal in ("coolant__pressure", "coolant__supply_pressure"):
        rules = RuleRunner()
        for _ in range(60):
            assert rules.show("coolant", LOOP, **{signal: 2.0}) == []
        found = [e for value in (0.9, 0.9, 0.9) for e in rules.show("coolant", LOOP, **{signal: value})]
        assert states_of(found) == [("pressure_collapse", "active")]
        assert found[0].data["signal"] == signal.replace("__", ".")


# --- configuration, bounds, hostile input ----------------------------------------------------------------------------


def test_rules_can_be_disabled_and_thresholds_changed() -> None:
    assert RuleRunner(enabled=False).leak(2, 2, 2) == []
    assert learned_rules(flow_share=0.3).flow(100, 100, 100) == []


def test_entities_and_events_are_bounded() -> None:
    edge = EdgeRules(sections.Edge())
    names = tuple(f"leak_detector:x.{i}" for i in range(edges.MAX_WATCHED + 500))
    states = np.full(len(names), 2, np.uint8)
    first = edge.evaluate(START, [Reading("leak", names, {"leak.state": states})])
    assert len(first) == edges.MAX_EVENTS
    assert len(edge._watched) == edges.MAX_WATCHED


def test_every_event_has_a_line_in_the_catalogue_with_all_its_data() -> None:
    rules = learned_rules()
    found = [*rules.flow(10, 10, *[300] * 6), *rules.leak(2, 0, 0)]
    assert len(found) == 4
    for event in found:
        assert set(event.data) <= set(EVENT_KINDS[event.kind].data)


numbers = st.floats(width=32) | st.sampled_from([0.0, 70.0, 300.0, float("nan")])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(numbers, numbers, st.integers(0, 255), st.integers(-5, 100)), max_size=80))
def test_no_value_and_no_clock_breaks_a_rule(count: list[tuple[float, float, int, int]]) -> None:
    rules = RuleRunner()
    for flow, warmth, state, step in count:
        rules.show("coolant", LOOP, step, coolant__flow=flow, coolant__supply_temperature=warmth)
        rules.show("gpu", GPU, 0, gpu__temperature=warmth, gpu__power=flow)
        rules.show("leak", ROPE, 0, leak__state=state)


# --- end of a condition, and the usual flow --------------------------------------------------------------------------


def test_a_flow_just_above_its_threshold_has_not_recovered() -> None:
    rules = learned_rules()
    assert states_of(rules.flow(100, 101)) == [("flow_collapse", "active")]
    assert rules.flow(*[225, 226] * 10) == []  # of 210
    assert states_of(rules.flow(300, 301, 300, 301, 300)) == [("flow_collapse", "cleared")]


def test_a_flow_has_recovered_at_the_fifth_good_reading_in_a_row_and_not_before() -> None:
    rules = learned_rules()
    assert states_of(rules.flow(100, 101)) == [("flow_collapse", "active")]
    assert rules.flow(300, 301, 300, 301, 100, 300, 301, 300, 301) == []
    assert states_of(rules.flow(300)) == [("flow_collapse", "cleared")]


def test_a_started_pump_is_monitored_at_its_new_flow_within_two_minutes() -> None:
    rules = RuleRunner()
    assert rules.flow(*[5.0, 5.1] * 30, *[300.0, 301.0] * 60) == []
    assert states_of(rules.flow(150, 151)) == [("flow_collapse", "active")]
