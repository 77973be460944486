"""Refused calls: those that worked before are retried soon, and the refusal is reported."""

from __future__ import annotations

import math

import pytest

from agents.collectors.gpu.refusals import FIRST_RETRY_US, MAX_RETRY_US, RefusedCalls
from agents.collectors.gpu.slots import GpuSlot
from pipeline.model.records import SECOND
from tests.agents.nvml_machine import Machine, Steps, events

MISSING = str(2**64 - 1)


@pytest.mark.slow
@pytest.mark.parametrize("code", [3, 13, 25, 26])
def test_five_seconds_of_not_supported_cost_some_seconds_and_are_reported_once(machine: Machine, code: int) -> None:
    rules = [f"fail * {code} 4", *(f"field {number} {code} 4" for number in (186, 83))]
    steps: Steps = [("open", "n1"), ("read", 0), ("read", 60), ("control", rules), *[("read", 1)] * 5]
    found = machine.run([*steps, ("control", []), *[("read", 1)] * 30], "gpus 8")
    assert found[8]["columns"]["gpu.power"] == ["512.345"] * 4 + ["nan"] + ["512.345"] * 3
    last: dict[str, list[str]] = {}
    for result in found[-11:]:
        last |= result["columns"]
    for signal, values in last.items():
        if signal.startswith("gpu."):
            assert (values[4] in ("nan", MISSING)) == (values[3] in ("nan", MISSING)), signal
    reported = [event for result in found[4:] if result for event in events(result, "nvml_refused", "gpu_lost")]
    assert [(entity, kind) for entity, kind, _ in reported] == [("gpu:n1.4", "nvml_refused")]
    assert reported[0][2]["gpu"] == "gpu:n1.4"
    assert "nvmlDeviceGetPowerUsage" in reported[0][2]["calls"]
    assert reported[0][2]["count"] >= len(reported[0][2]["calls"])


def test_fields_links_and_monitoring_that_worked_before_are_retried_soon(machine: Machine) -> None:
    links = [f"field {number} 3" for number in (161, 162, 163)]  # so that links are read one by one
    link = ["fail nvmlDeviceGetNvLinkErrorCounter 3 1"]
    broken = [*links, *link, "field 186 3 1", "field 83 3 1", "fail nvmlGpmSampleGet 3 1"]
    steps: Steps = [("open", "n1"), ("read", 0), ("read", 10), ("control", broken), ("read", 10), ("control", links)]
    found = machine.run([*steps, *[("read", 10)] * 4], "gpus 2", "links 2", *links)
    bad, healed = found[4]["columns"], found[-1]["columns"]
    assert (bad["gpu.power_instant"][1], bad["gpu.energy"][1], bad["gpu.tensor_active"][1]) == ("nan", MISSING, "nan")
    assert bad["nvlink.crc_errors"][2:4] == [MISSING] * 2
    assert healed["gpu.power_instant"] == ["512.345", "513.345"]
    assert healed["gpu.energy"] == ["9007199254740993"] * 2
    assert healed["gpu.tensor_active"] == ["0.25", "0.26"]
    assert MISSING not in healed["nvlink.crc_errors"]
    reported = [event[2]["calls"] for result in found[4:] if result for event in events(result, "nvml_refused")]
    assert reported[0][:2] == ["nvmlGpmSampleGet", "nvmlDeviceGetNvLinkErrorCounter"]
    assert {"field 186", "field 83"} <= {name for names in reported for name in names}


def test_the_newer_call_returns_after_its_fallback(machine: Machine) -> None:
    broken = ["fail nvmlDeviceGetMemoryInfo_v2 13"]
    steps: Steps = [("open", "n1"), ("read", 0), ("control", broken), ("read", 10), ("control", []), ("read", 10)]
    found = machine.run(steps, "gpus 1")
    assert [found[i]["columns"]["gpu.memory_reserved"] for i in (1, 3, 5)] == [
        ["536870912.0"],
        ["nan"],
        ["536870912.0"],
    ]
    assert "nan" not in found[3]["columns"]["gpu.memory_used"]


@pytest.mark.slow
def test_repeated_refusals_are_retried_at_growing_intervals_without_events(machine: Machine) -> None:
    steps: Steps = [
        ("open", "n1"),
        ("read", 0),
        ("control", ["fail nvmlDeviceGetPowerUsage 3 0"]),
        *[("read", 10)] * 180,
    ]
    found = machine.run(steps, "gpus 1")
    assert (
        machine.call_counts("nvmlDeviceGetPowerUsage")[0] <= 1 + 9 + 1
    )  # 10 s, 20 s ... 1280 s, and once for the hour
    assert sum(len(events(result, "nvml_refused")) for result in found[3:]) == 1


def test_waits_double_to_an_hour_and_restart_after_a_success() -> None:
    refusals, now, waits = RefusedCalls([GpuSlot(0)]), 0, []
    refusals.record_answer(0, "power")
    for _ in range(12):
        refusals.record_refusal(0, "power", "power")
        asked = now
        while refusals.is_refused(0, "power") and now - asked < 2 * MAX_RETRY_US:
            now += SECOND
            refusals.start_read(now, everything=False)
        waits.append((now - asked) // SECOND)
    assert waits[:3] == [10, 20, 40]
    assert waits[-1] == MAX_RETRY_US // SECOND
    refusals.record_answer(0, "power")
    refusals.record_refusal(0, "power", "power")
    refusals.start_read(now + FIRST_RETRY_US, everything=False)
    assert not refusals.is_refused(0, "power")


def test_calls_that_never_worked_wait_an_hour() -> None:
    refusals = RefusedCalls([GpuSlot(0)])
    refusals.record_refusal(0, "power", "power")
    refusals.start_read(10**6 * SECOND, everything=False)
    assert refusals.is_refused(0, "power")
    assert refusals.take_new_refusals(0) == []
    assert refusals.start_read(0, everything=True)
    assert not refusals.is_refused(0, "power")
    assert math.isinf(refusals._next_retry)
