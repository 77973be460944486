"""A driver that is absent, does not start or goes away: no data without hardware, a fault where there is some."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents import nvml_stub
from tests.agents.nvml_machine import Machine, Steps, events, plug


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["gpus 0"], "no NVIDIA GPU"),
        (["init 9"], "the kernel module is not loaded"),
        (["init 18"], "the NVIDIA driver does not start"),
        (["init 4"], "read and write access to /dev/nvidiactl"),
        (["set nvmlDeviceGetCount 4000000000"], "reports 4000000000 GPUs; expected at most 64"),
        (["fail nvmlDeviceGetCount 999"], "reports no number of GPUs"),
    ],
)
def test_a_driver_without_gpus_is_no_data_with_the_reason(machine: Machine, settings: list[str], reason: str) -> None:
    assert reason in machine.run([("open", "n1"), ("close", None)], *settings)[0]["no data"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (1, "does not start"),
        (3, "does not start"),
        (4, "read and write access to /dev/nvidiactl"),
        (9, "modprobe nvidia"),
        (12, "install it"),
        (18, "different versions: reboot"),
        (999, "dmesg | grep NVRM"),
    ],
)
def test_a_driver_that_does_not_start_where_the_bus_has_gpus_is_a_fault(
    machine: Machine, code: int, reason: str
) -> None:
    plug(machine.folder, [0x10, 0x18])
    (found,) = machine.run([("open", "n1")], "gpus 2", f"init {code}")
    assert "the PCI bus has NVIDIA GPUs (2)" in found["fault"]
    assert reason in found["fault"]


def test_a_driver_without_gpu_count_where_the_bus_has_gpus_is_a_fault(machine: Machine) -> None:
    plug(machine.folder, [0x10])
    assert "reports no number of GPUs" in machine.run([("open", "n1")], "fail nvmlDeviceGetCount 999")[0]["fault"]


def test_a_driver_that_does_not_start_is_no_data_where_the_bus_has_other_devices(machine: Machine) -> None:
    plug(machine.folder, [0x10], vendor="0x1a03")
    plug(machine.folder, [0x18], driver="vfio-pci")
    assert "the kernel module is not loaded" in machine.run([("open", "n1")], "init 9")[0]["no data"]


@pytest.mark.slow
@pytest.mark.parametrize("code", [1, 9])
def test_a_driver_that_disappears_is_reported_once_and_is_then_a_fault(machine: Machine, code: int) -> None:
    tries: Steps = [("read", 1), ("read", 1), ("close", None), ("open", "n1"), ("close", None), ("open", "n1")]
    back: Steps = [("control", []), ("open", "n1"), ("read", 60)]
    steps: Steps = [("open", "n1"), ("read", 0), ("control", [f"fail * {code}"]), *tries, *back]
    found = machine.run(steps, "gpus 8")
    assert found[3]["columns"]["gpu.present"] == ["0.0"] * 8
    for result in (found[4], found[6], found[8]):
        assert "the NVIDIA driver disappeared: it had 8 GPUs" in result["fault"]
    assert found[-1]["columns"]["gpu.power"] == ["512.345"] * 8
    counted = [
        e[2]["present"] for result in found if result and "events" in result for e in events(result, "gpu_count")
    ]
    assert counted == [8, 0, 8]


def test_a_driver_that_is_gone_for_all_gpus_while_it_can_be_started_is_a_fault_each_time(machine: Machine) -> None:
    gone = [f"fail {name} 1" for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetFieldValues")]
    steps: Steps = [("open", "n1"), ("read", 0), ("control", gone), *[("read", 1)] * 2, ("close", None), ("open", "n1")]
    found = machine.run([*steps, ("read", 1)], "gpus 2")
    assert found[3]["columns"]["gpu.present"] == ["0.0"] * 2
    assert ["disappeared" in found[i]["fault"] for i in (4, 7)] == [True] * 2


def test_lost_gpus_with_a_working_driver_are_not_fault(machine: Machine) -> None:
    broken = ["fail nvmlDeviceGetCurrentClocksEventReasons 1 0", "lost 1"]
    found = machine.run([("open", "n1"), ("read", 0), ("control", broken), *[("read", 1)] * 3], "gpus 2")
    assert [result["columns"]["gpu.present"] for result in found[3:]] == [["0.0"] * 2] * 3


CODES = [*range(1, 32), 999]


@pytest.mark.slow
def test_no_code_of_one_gpu_affects_the_others(machine: Machine) -> None:
    steps: Steps = [("open", "n1"), ("read", 0)]
    for code in CODES:
        steps += [("control", [f"fail * {code} 5"]), ("read", 5), ("control", []), ("read", 10), ("read", 10)]
    found = machine.run(steps, "gpus 8")[2:]
    for i, code in enumerate(CODES):
        broken, healed = found[5 * i + 1], found[5 * i + 4]
        for result in (broken, healed):
            others = [power for gpu, power in enumerate(result["columns"]["gpu.power"]) if gpu != 5]
            assert others == ["512.345"] * 7, code
        refused = code in (3, 13, 25, 26)  # NVML_ERROR_NOT_SUPPORTED and the like: it does answer
        assert broken["columns"]["gpu.present"] == ["1.0"] * 5 + [str(float(refused))] + ["1.0"] * 2, code
        assert len(events(broken, "gpu_lost")) == (not refused), code
        assert healed["columns"]["gpu.present"] == ["1.0"] * 8, code


@pytest.mark.parametrize("code", [1, 6, 9, 15])
def test_a_gpu_with_one_gone_code_is_not_lost_while_others_respond(machine: Machine, code: int) -> None:
    steps: Steps = [("open", "n1"), ("read", 0), ("control", [f"fail nvmlDeviceGetPowerUsage {code} 1"])]
    found = machine.run([*steps, *[("read", 1)] * 3], "gpus 2")
    assert [result["columns"]["gpu.power"] for result in found[3:]] == [["512.345", "nan"]] * 3
    assert [event for result in found[3:] for event in events(result, "gpu_lost", "gpu_back", "gpu_count")] == []


def test_a_node_without_a_driver_reports_it(machine: Machine, tmp_path: Path) -> None:
    machine.library = tmp_path / "absent" / nvml_stub.LIBRARY
    found = machine.run([("open", "n1")])[0]
    if found is None:
        pytest.skip("this machine has an NVIDIA driver")
    assert found == {"no data": "no NVIDIA driver"}
