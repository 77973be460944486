"""Counters are sent raw; the generation is when they last started from zero."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import Reading
from agents.node.counter_generations import CounterGenerations
from pipeline.model.records import SECOND, Event

START = 1_767_225_600 * SECOND
MISSING = np.iinfo(np.uint64).max
BOOT = bytes(range(16))
PORTS = ("port:n1.a", "port:n1.b")


def nic_reading(*values: int, entities: tuple[str, ...] = PORTS) -> Reading:
    return Reading("nic", entities, {"nic.rx_bytes": np.array(values, np.uint64), "nic.speed": np.ones(len(entities))})


def update_at(generations: CounterGenerations, second: int, *readings: Reading) -> tuple[list[int], list[Event]]:
    found, events = generations.update(START + second * SECOND, readings)
    since = [int(s) - START // SECOND for reading in found for s in reading.columns["nic.generation"]]
    return since, events


def test_a_device_with_counters_gets_the_second_in_which_it_was_first_seen(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    assert update_at(generations, 0, nic_reading(5, 7)) == ([0, 0], [])
    assert update_at(generations, 9, nic_reading(6, 7)) == ([0, 0], [])


def test_a_decreasing_counter_begins_a_generation_of_its_device_alone_with_an_event(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    update_at(generations, 0, nic_reading(5, 7))
    since, events = update_at(generations, 4, nic_reading(6, 2))
    assert since == [0, 4]
    assert events == [Event(START + 4 * SECOND, "port:n1.b", "counter_reset", {"signals": ["nic.rx_bytes"]})]


def test_a_reset_is_found_across_readings_without_the_counter(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    update_at(generations, 0, nic_reading(5, 7))
    assert update_at(generations, 1, nic_reading(MISSING, 8))[0] == [0, 0]
    assert update_at(generations, 2, nic_reading(1, 9))[0] == [2, 0]


def test_a_reset_is_found_although_another_device_disappears_in_the_same_reading(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    update_at(generations, 0, nic_reading(5, 7))
    assert update_at(generations, 3, nic_reading(2, entities=("port:n1.a",)))[0] == [3]


def test_a_reset_while_the_agent_was_down_is_found(tmp_path: Path) -> None:
    first = CounterGenerations(tmp_path / "g.json", BOOT)
    update_at(first, 0, nic_reading(5, 7))
    first.save()
    since, events = update_at(CounterGenerations(tmp_path / "g.json", BOOT), 90, nic_reading(0, 8))
    assert since == [90, 0]
    assert [event.entity for event in events] == ["port:n1.a"]


def test_a_counter_that_restarts_by_design_was_not_reset(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    for second, energy in enumerate((262_143_000_000, 12)):
        reading = Reading("sensor", ("sensor:n1.p",), {"sensor.energy": np.array([energy], np.uint64)})
        assert generations.update(START + second * SECOND, [reading])[1] == []


def test_bytes_over_pcie_wrap_at_32_bits_from_anywhere_and_hide_no_other_counter(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    since = []
    for second, sent in enumerate((2_892_719_224, 1_100_000_000, 4_000_000_000, 5)):  # 0.4 GB/s and more between two
        columns = {"gpu.pcie_rx_bytes": np.array([sent], np.uint64), "gpu.ecc_corrected": np.array([7], np.uint64)}
        (found,), events = generations.update(START + second * SECOND, [Reading("gpu", ("gpu:n1.0",), columns)])
        since.append(int(found.columns["gpu.generation"][0]) - START // SECOND)
        assert events == []
    assert since == [0] * 4


def test_a_decrease_from_more_than_32_bits_is_a_reset(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    update_at(generations, 0, nic_reading((1 << 32) + 10, 7))
    assert update_at(generations, 1, nic_reading(3, 8))[0] == [1, 0]


def test_a_32_bit_wrap_is_not_a_reset(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    update_at(generations, 0, nic_reading((1 << 32) - 10, 7))
    assert update_at(generations, 1, nic_reading(3, 8)) == ([0, 0], [])


def test_generations_survive_a_restart_of_the_agent_but_not_a_boot(tmp_path: Path) -> None:
    update_at(CounterGenerations(tmp_path / "g.json", BOOT), 0, nic_reading(5, 7))
    assert update_at(CounterGenerations(tmp_path / "g.json", BOOT), 60, nic_reading(6, 8))[0] == [0, 0]
    assert update_at(CounterGenerations(tmp_path / "g.json", bytes(16)), 60, nic_reading(6, 8))[0] == [60, 60]


def test_an_invalid_state_file_is_ignored(tmp_path: Path) -> None:
    ours = f'{{"boot": "{BOOT.hex()}", "last": {{}}, "since": {{"port:n1.a": %s}}}}'
    flipped = [ours % number for number in ("9795287768", "-1", "Infinity", "NaN", "[" * 100_000)]
    for text in (*flipped, "", "[]", "{", '{"boot": 1, "since": 2}', '{"boot": "00", "since": {"a": "x"}}', "\x00\xff"):
        (tmp_path / "g.json").write_text(text, "utf-8")
        assert update_at(CounterGenerations(tmp_path / "g.json", BOOT), 3, nic_reading(5, 7))[0] == [3, 3]


def test_a_read_only_folder_costs_only_the_state_over_restarts(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "absent" / "g.json", BOOT)
    assert update_at(generations, 0, nic_reading(5, 7))[0] == [0, 0]
    assert update_at(generations, 1, nic_reading(1, 7))[0] == [1, 0]


def test_collectors_of_one_device_share_its_generation(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    errors = Reading("nic", PORTS, {"nic.crc_errors": np.array([4, 4], np.uint64)})
    update_at(generations, 0, nic_reading(5, 7), errors)
    fewer = Reading("nic", PORTS, {"nic.crc_errors": np.array([0, 4], np.uint64)})
    readings, _ = generations.update(START + SECOND, [nic_reading(6, 8), fewer])
    assert [int(s) - START // SECOND for s in readings[0].columns["nic.generation"]] == [1, 0]
    assert len(readings) == 1


def test_gauges_and_events_have_no_generation(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    readings = [Reading("gpu", ("gpu:n1.0",), {"gpu.power": np.ones(1)}), Reading("node", (), {}, ())]
    assert generations.update(START, readings) == ([], [])


@given(st.lists(st.integers(0, 1 << 31), min_size=2, max_size=30))
def test_a_generation_changes_exactly_when_a_counter_decreases(values: list[int]) -> None:
    generations = CounterGenerations(Path("/proc/none"), BOOT)
    last = update_at(generations, 0, nic_reading(values[0], 0))[0][0]
    for second, (before, now) in enumerate(itertools.pairwise(values), 1):
        since = update_at(generations, second, nic_reading(now, 0))[0][0]
        assert (since != last) == (now < before)
        last = since


def test_after_a_clock_in_the_future_was_set_back_the_newest_counters_are_saved(tmp_path: Path) -> None:
    generations = CounterGenerations(tmp_path / "g.json", BOOT)
    update_at(generations, 86_400, nic_reading(5, 7))
    update_at(generations, 0, nic_reading(9, 9))
    restarted = CounterGenerations(tmp_path / "g.json", BOOT)
    assert [event.entity for event in update_at(restarted, 1, nic_reading(8, 9))[1]] == ["port:n1.a"]
