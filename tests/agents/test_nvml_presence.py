"""GPUs that are lost, removed, replaced or slow: slots stay, and each change is reported once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.collectors.gpu.nvml import Nvml
from agents.collectors.gpu.slots import GpuSlots, boot_id, gpus_on_bus, kernel_pci_address, load_gpus, save_gpus
from pipeline.model.event_kinds import EVENT_KINDS
from tests.agents.nvml_machine import Machine, Steps, events, plug

BUSES = [0x10, 0x18, 0x20, 0x28]
LOST_1 = {"gpu": "gpu:n1.1", "pci": "0000:18:00.0", "serial": "165001", "uuid": "GPU-1"}


def count(expected: int, present: int, *missing: str) -> list[Any]:
    data = {"expected": expected, "present": present, "missing": list(missing), "source": "nvml"}
    return ["node:n1", "gpu_count", data]


def test_a_lost_gpu_keeps_its_slot_and_is_reported_once(machine: Machine) -> None:
    steps: Steps = [("open", "n1"), ("read", 0), ("control", ["lost 1"]), *[("read", 1)] * 8]
    found = machine.run(steps, "gpus 3", "links 2")
    assert events(found[1], "gpu_lost", "gpu_count") == [count(3, 3)]
    columns = found[3]["columns"]
    assert columns["gpu.present"] == ["1.0", "0.0", "1.0"]
    assert columns["gpu.power"] == ["512.345", "nan", "512.345"]
    reported = [event for result in found[3:] for event in events(result, "gpu_lost", "gpu_back", "gpu_count")]
    assert reported == [["gpu:n1.1", "gpu_lost", {**LOST_1, "present": 2}], count(3, 2, "0000:18:00.0")]
    assert found[3]["entities"]["gpu"] == found[1]["entities"]["gpu"]
    assert machine.call_counts("nvmlDeviceGetPowerUsage")[1] == 1  # only one call for a lost GPU


def test_every_signal_of_a_lost_gpu_but_its_presence_is_missing(machine: Machine) -> None:
    steps: Steps = [("open", "n1"), ("read", 0), ("control", ["lost 1"]), ("read", 60)]
    columns = machine.run(steps, "gpus 2", "links 2")[3]["columns"]
    known = {name for name, values in columns.items() if values[-1] not in ("nan", str(2**64 - 1))}
    assert known == {"gpu.present", "gpu.call_latency_max"}


@pytest.mark.slow
def test_a_gpu_that_responds_again_is_back_in_its_slot(machine: Machine) -> None:
    steps: Steps = [("open", "n1"), ("read", 0), ("control", ["lost 1"]), ("read", 1), ("control", []), ("read", 1)]
    found = machine.run(steps, "gpus 3")
    assert found[5]["columns"]["gpu.present"] == ["1.0"] * 3
    assert found[5]["columns"]["gpu.power"] == ["512.345"] * 3
    assert events(found[5], "gpu_back", "gpu_count") == [["gpu:n1.1", "gpu_back", LOST_1], count(3, 3)]


def test_a_gpu_that_comes_back_gets_refused_calls_again(machine: Machine) -> None:
    refused = ("control", ["fail nvmlDeviceGetPowerUsage 3 1"])
    steps: Steps = [refused, ("read", 0), ("control", ["lost 1"]), ("read", 1), ("control", []), ("read", 1)]
    found = machine.run([("open", "n1"), *steps], "gpus 2")
    assert [found[i]["columns"]["gpu.power"][1] for i in (2, 4, 6)] == ["nan", "nan", "512.345"]


@pytest.mark.slow
def test_a_gpu_lost_before_the_start_has_a_slot_and_links_when_it_appears(machine: Machine) -> None:
    plug(machine.folder, BUSES[:3])
    steps: Steps = [("control", ["lost 1"]), ("open", "n1"), ("read", 0), ("control", []), ("read", 60), ("read", 60)]
    found = machine.run(steps, "gpus 3", "links 2")
    assert found[2]["entities"]["gpu"] == ["gpu:n1.0", "gpu:n1.1", "gpu:n1.2"]
    assert found[2]["columns"]["gpu.temperature"] == ["40.0", "nan", "42.0"]
    unknown = {"gpu": "gpu:n1.1", "pci": "0000:18:00.0", "serial": None, "uuid": None, "present": 2}
    assert events(found[2], "gpu_lost", "gpu_count") == [["gpu:n1.1", "gpu_lost", unknown], count(3, 2, "0000:18:00.0")]
    assert found[5]["columns"]["gpu.temperature"] == ["40.0", "41.0", "42.0"]
    assert found[5]["entities"]["nvlink"] == [f"nvlink:n1.{gpu}.{link}" for gpu in range(3) for link in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("code", [10, 16, 999])
def test_a_gpu_with_only_errors_is_lost_too(machine: Machine, code: int) -> None:
    steps: Steps = [
        ("open", "n1"),
        ("read", 0),
        ("control", [f"fail * {code} 1"]),
        ("read", 5),
        ("control", []),
        ("read", 1),
    ]
    found = machine.run(steps, "gpus 2")
    assert [found[i]["columns"]["gpu.present"] for i in (1, 3, 5)] == [["1.0", "1.0"], ["1.0", "0.0"], ["1.0", "1.0"]]
    assert len(events(found[3], "gpu_lost")) == len(events(found[5], "gpu_back")) == 1


def test_all_gpus_lost_is_a_reading_and_not_the_end(machine: Machine) -> None:
    found = machine.run([("open", "n1"), ("control", ["lost *"]), ("read", 0), ("control", []), ("read", 1)], "gpus 2")
    assert found[2]["columns"]["gpu.present"] == ["0.0", "0.0"]
    assert found[4]["columns"]["gpu.present"] == ["1.0", "1.0"]


@pytest.mark.slow
def test_indexes_do_not_shift_when_a_gpu_is_removed_and_replaced(machine: Machine) -> None:
    plug(machine.folder, BUSES)
    steps: Steps = [("open", "n1"), ("read", 0), ("control", ["removed 1", "lost 1"]), ("read", 60), ("read", 60)]
    found = machine.run([*steps, ("control", []), *[("read", 60)] * 3, ("inventory", None)], "gpus 4")
    assert found[3]["columns"]["gpu.present"] == ["1.0", "0.0", "1.0", "1.0"]
    assert found[4]["columns"]["gpu.temperature"] == ["40.0", "nan", "42.0", "43.0"]
    reported = [event for result in found[3:5] for event in events(result, "gpu_lost", "gpu_count")]
    assert reported == [["gpu:n1.1", "gpu_lost", {**LOST_1, "present": 3}], count(4, 3, "0000:18:00.0")]
    assert found[8]["columns"]["gpu.temperature"] == ["40.0", "41.0", "42.0", "43.0"]
    assert [found[9][f"gpu:n1.{gpu}"][1]["serial"] for gpu in range(4)] == ["165000", "165001", "165002", "165003"]


@pytest.mark.slow
def test_the_library_is_restarted_at_growing_intervals_while_a_gpu_is_lost(machine: Machine) -> None:
    steps: Steps = [("open", "n1"), ("read", 0), ("control", ["lost 1"]), *[("read", 60)] * 40, ("samples", None)]
    found = machine.run(steps, "gpus 2")
    assert 4 <= machine.call_counts("nvmlInitWithFlags")[-1] <= 9
    assert found[-1] <= 4  # samples of two GPUs: those of the earlier starts were given back


@pytest.mark.slow
def test_a_healthy_library_is_never_restarted(machine: Machine) -> None:
    machine.run([("open", "n1"), *[("read", 60)] * 10], "gpus 2")
    assert machine.call_counts("nvmlInitWithFlags")[-1] == 1


def test_a_gpu_on_the_bus_that_the_driver_does_not_count_is_missing(machine: Machine) -> None:
    plug(machine.folder, BUSES, driver="nvidia")
    found = machine.read_first("gpus 4", "removed 2")
    assert found["columns"]["gpu.temperature"] == ["40.0", "41.0", "nan", "43.0"]
    assert count(4, 3, "0000:20:00.0") in found["events"]


@pytest.mark.slow
def test_gpus_passed_to_guests_are_not_missing(machine: Machine) -> None:
    plug(machine.folder, [*BUSES, 0x90], driver="vfio-pci")
    plug(machine.folder, [0x98], vendor="0x1a03")
    found = machine.read_first("gpus 4")
    assert found["columns"]["gpu.present"] == ["1.0"] * 4
    assert events(found, "gpu_count", "gpu_lost") == [count(4, 4)]


@pytest.mark.slow
def test_expected_gpus_that_never_existed_are_reported(machine: Machine) -> None:
    machine.fields["expected"] = 8
    found = machine.run([("open", "n1"), *[("read", 1)] * 3], "gpus 7")[1:]
    assert [event for result in found for event in events(result, "gpu_count")] == [count(8, 7)]


@pytest.mark.slow
def test_a_restarted_collector_remembers_the_gpus_of_this_boot(machine: Machine) -> None:
    machine.read_first("gpus 4")
    found = machine.read_first("gpus 4", "removed 0")
    assert found["columns"]["gpu.temperature"] == ["nan", "41.0", "42.0", "43.0"]
    lost = {"gpu": "gpu:n1.0", "pci": "0000:10:00.0", "serial": "165000", "uuid": "GPU-0", "present": 3}
    assert events(found, "gpu_lost", "gpu_count") == [["gpu:n1.0", "gpu_lost", lost], count(4, 3, "0000:10:00.0")]


@pytest.mark.parametrize(
    "kept", [b"", b"{", b"[]", b'{"boot": "other", "gpus": {"0000:01:00.0": {}}}', b"\xff\x00", b"0", b'{"gpus": 1}']
)
def test_a_state_file_of_another_boot_or_with_garbage_is_ignored(tmp_path: Path, kept: bytes) -> None:
    path = tmp_path / "seen.json"
    indexes = [{"0000:01:00.0": {"index": 10**9}}, {"0000:01:00.0": {}}, {"0000:01:00.0": {"index": "a"}}]
    for gpus in indexes:
        path.write_text(json.dumps({"boot": boot_id(), "gpus": gpus}))
        assert load_gpus(path) == {}
    path.write_bytes(kept)
    assert load_gpus(path) == {}
    assert load_gpus(tmp_path / "absent") == {}


def test_the_state_file_is_in_the_state_directory_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/fleetpulse:/var/lib/other")
    assert Nvml().seen == Path("/var/lib/fleetpulse/gpus.json")
    monkeypatch.delenv("STATE_DIRECTORY")
    assert Nvml().seen is None


def test_a_state_file_that_cannot_be_written_affects_nothing(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    machine.fields["seen"] = str(tmp_path / "file" / "seen.json")
    assert machine.read_first("gpus 1")["columns"]["gpu.present"] == ["1.0"]
    assert not save_gpus(tmp_path / "file" / "seen.json", [])


def test_addresses_are_the_kernels_in_any_spelling() -> None:
    assert kernel_pci_address("00000000:1B:00.0") == kernel_pci_address("0000:1b:00.0") == "0000:1b:00.0"
    assert kernel_pci_address("00010000:1B:00.0") == "10000:1b:00.0"
    assert [kernel_pci_address(text) for text in ("", "what", "0000:1b:00.9", "0000:1b:00.0/../x")] == [None] * 4


def test_slots_are_added_and_never_move(tmp_path: Path) -> None:
    places = GpuSlots()
    places.assign([("0000:01:00.0", "a"), ("0000:02:00.0", "b")], ())
    places.assign([("0000:02:00.0", "c"), ("0000:00:00.0", "d")], ("0000:03:00.0",))
    assert [(p.pci, p.handle) for p in places.slots] == [
        ("0000:01:00.0", None),
        ("0000:02:00.0", "c"),
        ("0000:00:00.0", "d"),
        ("0000:03:00.0", None),
    ]
    assert gpus_on_bus(tmp_path / "absent") == ()
    save_gpus(tmp_path / "seen.json", places.slots)
    again = GpuSlots()
    again.assign([("0000:00:00.0", "e"), ("0000:04:00.0", "f")], (), load_gpus(tmp_path / "seen.json"))
    assert [p.pci for p in again.slots] == [*(p.pci for p in places.slots), "0000:04:00.0"]


def test_a_slot_without_known_address_stays_free(tmp_path: Path) -> None:
    places = GpuSlots()
    places.assign([("0000:01:00.0", "a"), (None, None), ("0000:03:00.0", "c")], ())
    save_gpus(tmp_path / "seen.json", places.slots)
    again = GpuSlots()
    again.assign([("0000:03:00.0", "c"), ("0000:02:00.0", "b")], (), load_gpus(tmp_path / "seen.json"))
    assert [(p.pci, p.handle) for p in again.slots] == [
        ("0000:01:00.0", None),
        ("0000:02:00.0", "b"),
        ("0000:03:00.0", "c"),
    ]


def test_a_changed_recovery_action_is_reported(machine: Machine) -> None:
    steps: Steps = [
        ("open", "n1"),
        ("read", 0),
        ("control", ["set 230 4 1"]),
        ("read", 5),
        ("read", 5),
        ("control", []),
        ("read", 5),
    ]
    found = machine.run(steps, "gpus 2")
    assert found[3]["columns"]["gpu.recovery_action"] == ["0.0", "4.0"]
    reported = [event[2] for result in found if isinstance(result, dict) for event in events(result, "recovery_action")]
    assert reported == [
        {"from": 0, "to": 4, "action": "drain and reset GPU", "pci": "0000:18:00.0"},
        {"from": 4, "to": 0, "action": "none", "pci": "0000:18:00.0"},
    ]


@pytest.mark.slow
def test_a_slow_call_is_measured_and_reported_once_a_minute(machine: Machine) -> None:
    machine.fields["slow_call"] = 0.05
    hang = ["hang nvmlDeviceGetUtilizationRates 80 1"]
    steps: Steps = [("open", "n1"), ("read", 0), ("control", hang), ("read", 5), ("read", 5), ("read", 60)]
    found = machine.run(steps, "gpus 2")
    slowest = [float(value) for value in found[3]["columns"]["gpu.call_latency_max"]]
    assert slowest[1] >= 0.08 > slowest[0]
    reported = [event for result in found[3:] for event in events(result, "slow_call")]
    assert [event[0] for event in reported] == ["gpu:n1.1"] * 2
    assert reported[0][2]["call"] == "nvmlDeviceGetUtilizationRates"
    assert reported[0][2]["seconds"] >= 0.08


def test_a_slow_call_is_reported_although_the_clock_was_set_back(machine: Machine) -> None:
    machine.fields["slow_call"] = 0.02
    hang = ["hang nvmlDeviceGetUtilizationRates 30 0"]
    found = machine.run([("open", "n1"), ("control", hang), ("read", 5), ("read", -3600)], "gpus 1")
    assert [len(events(result, "slow_call")) for result in found[2:]] == [1, 1]


def test_processes_are_reported_when_they_change(machine: Machine) -> None:
    busy = ["set nvmlDeviceGetComputeRunningProcesses 1"]
    steps: Steps = [("open", "n1"), ("read", 0), ("read", 30), ("control", busy), ("read", 30)]
    found = machine.run(steps, "gpus 1")
    reported = [[event[2]["pids"] for event in events(found[i], "gpu_processes")] for i in (1, 2, 4)]
    assert reported == [[[1000, 1001]], [], [[1000]]]


def test_more_processes_than_are_listed_are_still_counted(machine: Machine) -> None:
    columns = machine.read_first("gpus 1", "set nvmlDeviceGetComputeRunningProcesses 5000")["columns"]
    assert columns["gpu.processes"] == ["5000.0"]


@pytest.mark.slow
def test_every_event_has_the_keys_of_its_kind(machine: Machine) -> None:
    machine.fields["slow_call"] = 0.01
    broken = ["lost 1", "set 230 1 0", "hang nvmlDeviceGetPowerUsage 20 0"]
    steps: Steps = [("open", "n1"), ("read", 0), ("control", broken), ("read", 30), ("control", []), ("read", 30)]
    found = [event for result in machine.run(steps, "gpus 2") if result for event in result["events"]]
    kinds = {kind for _, kind, _ in found}
    assert kinds == {"gpu_count", "gpu_lost", "gpu_back", "recovery_action", "gpu_processes", "slow_call"}
    for entity, kind, data in found:
        assert set(data) <= set(EVENT_KINDS[kind].data), kind
        assert entity.partition(":")[0] == EVENT_KINDS[kind].entity
        json.dumps(data, allow_nan=False)
