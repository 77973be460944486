"""The real nvidia-ml-py over a stub driver library: only values that a GPU does not report are missing."""

from __future__ import annotations

from collections import Counter

import pytest

from agents.collectors.gpu.fields import GPU_FIELDS, LINK_FIELDS
from agents.collectors.gpu.nvml import RECOVERY_ACTIONS, SIGNAL_INTERVALS, Nvml
from agents.collectors.gpu.xid_text import RECOVERY_ACTION_NAMES
from agents.collectors.registry import COLLECTORS
from pipeline.model.signals import CATALOGUE, signals_of_class
from tests.agents import nvml_stub
from tests.agents.nvml_machine import Machine, Steps

MISSING = str(2**64 - 1)


# --- values ----------------------------------------------------------------------------------------------------------

GPU_VALUES = {
    "gpu.present": "1.0",
    "gpu.throttle_reasons": "64",
    "gpu.power": "512.345",
    "gpu.power_average": "501.0",
    "gpu.power_instant": "513.345",
    "gpu.power_memory": "501.0",
    "gpu.power_module": "513.345",
    "gpu.utilization": "0.87",
    "gpu.memory_utilization": "0.41",
    "gpu.sm_clock": "1755.0",
    "gpu.memory_clock": "2619.0",
    "gpu.sm_clock_max": "1980.0",
    "gpu.memory_clock_max": "2620.0",
    "gpu.temperature": "41.0",
    "gpu.memory_temperature": "51.0",
    "gpu.thermal_margin": "45.0",
    "gpu.shutdown_margin": "-8.0",
    "gpu.slowdown_margin": "-2.0",
    "gpu.memory_max_margin": "0.0",
    "gpu.operating_max_margin": "0.0",
    "gpu.energy": "9007199254740993",  # 2**53 + 1: counters keep every digit
    "gpu.power_limit": "690.0",
    "gpu.power_limit_requested": "650.0",
    "gpu.power_limit_default": "700.0",
    "gpu.power_limit_min": "200.0",
    "gpu.power_limit_max": "700.0",
    "gpu.smoothing_life": "99.0",
    "gpu.memory_used": "85362474000.0",
    "gpu.memory_total": "85899345920.0",
    "gpu.memory_reserved": "536870912.0",
    "gpu.dram_corrected": "2001",
    "gpu.dram_uncorrected": "2011",
    "gpu.sram_corrected": "7001",
    "gpu.sram_uncorrected": "7011",
    "gpu.dram_corrected_total": "2101",
    "gpu.dram_uncorrected_total": "2111",
    "gpu.sram_corrected_total": "7101",
    "gpu.sram_uncorrected_total": "7111",
    "gpu.sram_parity_total": "500",
    "gpu.sram_secded_total": "501",
    "gpu.sram_l2_total": "506",
    "gpu.sram_sm_total": "507",
    "gpu.sram_pcie_total": "508",
    "gpu.sram_mcu_total": "509",
    "gpu.sram_other_total": "510",
    "gpu.sram_threshold": "0.0",
    "gpu.rows_corrected": "3",
    "gpu.rows_uncorrected": "4",
    "gpu.rows_pending": "0.0",
    "gpu.rows_failed": "0.0",
    "gpu.banks_max": "2554.0",
    "gpu.banks_high": "3.0",
    "gpu.banks_partial": "2.0",
    "gpu.banks_low": "1.0",
    "gpu.banks_none": "0.0",
    "gpu.pages_pending": "0.0",
    "gpu.memory_unrepairable": "0.0",
    "gpu.channel_repair_pending": "0.0",
    "gpu.tpc_repair_pending": "0.0",
    "gpu.inforom_valid": "1.0",
    "gpu.recovery_action": "0.0",
    "gpu.pcie_generation": "5.0",
    "gpu.pcie_width": "16.0",
    "gpu.pcie_generation_max": "5.0",
    "gpu.pcie_width_max": "16.0",
    "gpu.pcie_replays": "3",
    "gpu.fabric_state": "3.0",
    "gpu.fabric_status": "0.0",
    "gpu.fabric_health": str(float(0x2AA)),
    "gpu.fabric_clique": "32766.0",
    "gpu.fabric_summary": "1.0",
    "gpu.c2c_links": "1.0",
    "gpu.c2c_state": "1.0",
    "gpu.c2c_bandwidth_max": "450000.0",
    "gpu.c2c_power_state": "0.0",
    "gpu.processes": "2.0",
    "gpu.field_latency": "4e-06",
}
"""Of GPU 1 of the stub; other counters are field number * 1,000,000 + GPU * 1,000 + link."""
LINK_VALUES = {
    "nvlink.state": "1.0",
    "nvlink.speed": str(26562 * 8.0),
    "nvlink.effective_ber": "1.5e-254",
    "nvlink.symbol_ber": "3e-12",
    "nvlink.raw_ber": "5e-09",
}
NUMBERS = {f.signal: f.name for f in (*GPU_FIELDS, *LINK_FIELDS)}


def same(found: str, wanted: str) -> bool:
    """Equal to the last digit; fractions to the last but one."""
    return found == wanted or ("." in found and float(found) == pytest.approx(float(wanted)))


def number_of_field(signal: str) -> int:
    pynvml = pytest.importorskip("pynvml")
    moved = {"SOFTWARE_THERMAL": 269, "HARDWARE_THERMAL": 270, "POWER_BRAKE": 271}
    name = NUMBERS[signal]
    return moved.get(name) or int(getattr(pynvml, f"NVML_FI_DEV_{name}"))


def test_every_signal_of_every_gpu_and_link_is_read_in_the_units_of_the_catalogue(machine: Machine) -> None:
    found = machine.read_first("arch all", "gpus 3", "links 4")
    assert found["entities"]["gpu"] == ["gpu:n1.0", "gpu:n1.1", "gpu:n1.2"]
    assert found["entities"]["nvlink"] == [f"nvlink:n1.{gpu}.{link}" for gpu in range(3) for link in range(4)]
    columns = found["columns"]
    assert set(columns) == set(Nvml.signals)
    timed = {"gpu.call_latency_max"}
    monitored = {s for s in columns if CATALOGUE[s].source.startswith("GPM")}  # these need two samples
    for signal in set(columns) - timed - monitored:
        if signal.startswith("gpu."):
            wanted = GPU_VALUES.get(signal) or str(number_of_field(signal) * 1_000_000 + 1000)
            assert same(columns[signal][1], wanted), signal
        else:
            wanted = LINK_VALUES.get(signal) or str(number_of_field(signal) * 1_000_000 + 1000 + 2)
            assert same(columns[signal][4 + 2], wanted), signal
    assert all(columns[signal] == ["nan"] * 3 for signal in monitored)
    assert 0 < float(columns["gpu.call_latency_max"][1]) < 5


def test_every_value_is_in_the_range_of_its_signal(machine: Machine) -> None:
    found = machine.run([("open", "n1"), ("read", 0), ("read", 3600)], "arch all", "gpus 1", "links 1")[2]
    wire, lost = found["wire"], set()
    for signal, values in wire.items():
        kind = CATALOGUE[signal].type
        if values[0] in ("nan", str(2 ** (8 * int(kind[1])) - 1)):
            lost.add(signal)
    assert lost == set()
    assert wire["nvlink.effective_ber"] == ["0.0"]


def test_the_collector_covers_both_classes_except_other_collectors_signals() -> None:
    catalogue = {signal.name for device_class in ("gpu", "nvlink") for signal in signals_of_class(device_class)}
    others = {signal for collector in COLLECTORS if collector is not Nvml for signal in collector.signals}
    assert catalogue - set(Nvml.signals) - others == {"gpu.generation", "nvlink.generation"}  # the agent's own
    assert set(Nvml.signals) <= catalogue


def test_the_names_of_recovery_actions_are_those_of_the_xid_decoder() -> None:
    assert dict(enumerate(RECOVERY_ACTIONS)) == dict(RECOVERY_ACTION_NAMES)


@pytest.mark.slow
def test_monitoring_compares_two_samples_and_frees_them(machine: Machine) -> None:
    steps: Steps = [
        ("open", "n1"),
        ("read", 0),
        ("read", 5),
        ("read", 1),
        ("read", 4),
        ("close", None),
        ("samples", None),
    ]
    found = machine.run(steps, "gpus 2")
    assert found[2]["columns"]["gpu.tensor_active"] == ["0.25", "0.26"]
    assert found[2]["columns"]["gpu.nvlink_tx_rate"] == [str(6100.0 * 2**20), str(6101.0 * 2**20)]
    assert "gpu.tensor_active" not in found[3]["columns"]
    assert found[4]["columns"]["gpu.sm_active"] == ["0.1", "0.11"]
    assert found[-1] == 0


@pytest.mark.slow
def test_signals_have_the_intervals_of_the_catalogue(machine: Machine) -> None:
    found = machine.run([("open", "n1"), *[("read", 1)] * 121], "gpus 1", "links 1")[1:]
    seen = Counter(name for result in found[1:] for name in result["columns"])
    for signal in Nvml.signals:
        every = SIGNAL_INTERVALS[signal]
        assert seen[signal] == (120 / every if every <= 60 else pytest.approx(1, abs=1)), signal


@pytest.mark.slow
def test_one_call_reads_all_fields_of_a_gpu(machine: Machine) -> None:
    found = machine.run([("open", "n1"), *[("read", 1)] * 21], "gpus 3")
    calls = [call for call in nvml_stub.calls_made(machine.calls) if call[0] == "nvmlDeviceGetFieldValues"]
    at_open = 3  # how many NVLinks there are
    assert Counter(gpu for _, gpu, _ in calls) == dict.fromkeys(range(3), 21 + 1)
    first = calls[at_open][2]
    later = {count for _, _, count in calls[at_open + 3 :]}
    assert first == len(GPU_FIELDS) + 18 * len(LINK_FIELDS)
    assert min(later) == 2  # power, each second
    assert max(later) < first  # values that this GPU lacks are not requested again
    lists = sum("gpu.processes" in result["columns"] for result in found[1:])
    assert machine.call_counts("nvmlDeviceGetComputeRunningProcesses_v3") == dict.fromkeys(range(3), lists)


def test_inventory_names_parents_and_attributes(machine: Machine) -> None:
    found = machine.run([("open", "n1"), ("inventory", None)], "gpus 2", "links 2")[1]
    parents, attributes = found["gpu:n1.1"]
    assert parents == ["node:n1", "clique:01020304-0506-0708-090a-0b0c0d0e0f10.32766", "chassis:SN1234567890"]
    assert attributes == {
        "driver": "590.48.01",
        "pci": "0000:18:00.0",
        "sku": "NVIDIA H100 80GB HBM3",
        "serial": "165001",
        "uuid": "GPU-1",
        "part_number": "692-2G520-0200-000",
        "vbios": "96.00.A5.00.01",
        "gsp_firmware": "590.48.01",
        "inforom": "G520.0200.00.05",
        "mig": False,
        "virtualization": "none",
        "clique": 32766,
        "cluster_uuid": "01020304-0506-0708-090a-0b0c0d0e0f10",
        "chassis_serial": "SN1234567890",
        "slot": 5,
        "tray": 3,
        "host_id": 1,
        "peer_type": 1,
        "module_id": 2,
        "ib_guid": "0a1b2c3d4e5f60718293a4b5c6d7e801",
    }
    assert found["nvlink:n1.1.0"][0] == ["gpu:n1.1", "node:n1"]
    assert list(found) == [
        *("gpu:n1.0", "nvlink:n1.0.0", "nvlink:n1.0.1"),
        *("gpu:n1.1", "nvlink:n1.1.0", "nvlink:n1.1.1"),
    ]


def test_a_gpu_in_no_known_chassis_has_a_module_and_no_slot(machine: Machine) -> None:
    parents, attributes = machine.run([("open", "n1"), ("inventory", None)], "gpus 1", "chassis 0")[1]["gpu:n1.0"]
    assert [e for e in parents if e.startswith("chassis:")] == []
    assert attributes["module_id"] == 1
    assert attributes.keys().isdisjoint({"slot", "tray", "host_id", "peer_type", "chassis_serial", "ib_guid"})


# --- values that a GPU lacks -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("code", [2, 3, 13, 25, 26])
def test_refused_calls_are_missing_and_not_repeated_for_an_hour(machine: Machine, code: int) -> None:
    rules = (f"fail nvmlDeviceGetPowerUsage {code} 0", f"field 186 {code} 1")
    found = machine.run([("open", "n1"), *[("read", 1)] * 5], "gpus 2", *rules)
    columns = found[5]["columns"]
    assert columns["gpu.power"] == ["nan", "512.345"]
    assert columns["gpu.power_instant"] == ["512.345", "nan"]
    assert machine.call_counts("nvmlDeviceGetPowerUsage") == {0: 1, 1: 5}
    again = machine.run([("open", "n1"), ("read", 0), ("control", []), ("read", 60), ("read", 3600)], "gpus 2", *rules)
    assert again[3]["columns"]["gpu.power"] == ["nan", "512.345"]
    assert machine.call_counts("nvmlDeviceGetPowerUsage")[0] == 1 + 2


@pytest.mark.slow
@pytest.mark.parametrize("code", [4, 10, 16, 17, 19, 20, 21, 27, 999])
def test_a_passing_error_costs_one_value_of_one_gpu(machine: Machine, code: int) -> None:
    rules = (f"fail nvmlDeviceGetPowerUsage {code} 0", f"field 186 {code} 1", f"fail nvmlGpmSampleGet {code} 1")
    found = machine.run(
        [("open", "n1"), ("control", rules), ("read", 0), ("control", []), ("read", 5), ("read", 5)], "gpus 2"
    )
    first, last = found[2]["columns"], found[5]["columns"]
    assert first["gpu.power"] == ["nan", "512.345"]
    assert first["gpu.power_instant"] == ["512.345", "nan"]
    assert first["gpu.temperature"] == ["40.0", "41.0"]
    assert last["gpu.power"] == ["512.345", "512.345"]
    assert last["gpu.power_instant"] == ["512.345", "513.345"]
    assert last["gpu.tensor_active"] == ["0.25", "0.26"]


@pytest.mark.slow
def test_fields_that_fail_beside_refused_ones_are_asked_for_again_at_once(machine: Machine) -> None:
    found = machine.run([("open", "n1"), ("read", 0), ("read", 10), ("read", 3600)], "gpus 2", "spoils 1")
    whole = machine.read_first("gpus 2")["columns"]
    for signal in ("gpu.power_limit_max", "gpu.slowdown_margin", "gpu.hardware_thermal_time"):
        assert found[1]["columns"][signal] == found[3]["columns"][signal] == whole[signal] != [MISSING] * 2
    assert found[2]["columns"]["gpu.power_brake_time"] == whole["gpu.power_brake_time"]
    assert found[3]["columns"]["gpu.smoothing_life"] == ["nan"] * 2


@pytest.mark.slow
def test_no_earlier_value_remains_when_the_field_call_fails(machine: Machine) -> None:
    steps: Steps = [("open", "n1"), ("read", 0), ("control", ["fail nvmlDeviceGetFieldValues 999 1"]), ("read", 10)]
    columns = machine.run(steps, "gpus 2")[3]["columns"]
    assert columns["gpu.power_instant"] == ["512.345", "nan"]
    assert columns["gpu.energy"] == ["9007199254740993", MISSING]
    assert columns["gpu.power"] == ["512.345", "512.345"]


@pytest.mark.parametrize(
    ("newer", "signal", "wanted"),
    [
        ("nvmlDeviceGetTemperatureV", "gpu.temperature", "40.0"),
        ("nvmlDeviceGetMemoryInfo_v2", "gpu.memory_used", "85899344896.0"),
    ],
)
def test_an_older_driver_gets_the_older_calls(machine: Machine, newer: str, signal: str, wanted: str) -> None:
    found = machine.run([("open", "n1"), ("read", 0), ("read", 10)], "gpus 1", f"fail {newer} 13")
    assert [result["columns"][signal] for result in found[1:]] == [[wanted], [wanted]]
    assert machine.call_counts(newer) == {0: 1}


def test_links_are_read_one_by_one_without_fields(machine: Machine) -> None:
    rules = [f"field {number} 3" for number in (91, 161, 162, 163, 165)]
    found = machine.run([("open", "n1"), ("read", 0), ("read", 10)], "gpus 1", "links 3", *rules)
    columns = found[2]["columns"]
    assert columns["nvlink.state"][:3] == ["1.0"] * 3
    assert columns["nvlink.crc_errors"][:3] == ["200", "201", "202"]


@pytest.mark.slow
def test_the_fields_that_nvidia_renumbered_are_read_by_the_drivers_version(machine: Machine) -> None:
    for driver, thermal, life in [
        ("570.86.15", MISSING, "99.0"),
        ("575.51.03", "251000000", "26.0"),
        ("580.65.06", "251000000", "26.0"),
        ("580.95.05", MISSING, "nan"),
        ("580.126.09", "269000000", "99.0"),
        ("610.43.02", "269000000", "99.0"),
        ("what", MISSING, "nan"),
    ]:
        settings = ("gpus 1", "links 0", "arch all", f"driver {driver}", "set 263 26")
        columns = machine.read_first(*settings)["columns"]
        assert columns["gpu.software_thermal_time"] == [thermal], driver
        later = [MISSING if thermal == MISSING else str(int(thermal) + step * 1_000_000) for step in (1, 2)]
        found = [columns[f"gpu.{name}_time"][0] for name in ("hardware_thermal", "power_brake")]
        assert found == later, driver
        assert columns["gpu.smoothing_life"] == [life], driver


@pytest.mark.slow
def test_a_gpu_in_mig_mode_reports_its_available_values(machine: Machine) -> None:
    steps: Steps = [("open", "n1"), ("read", 0), ("read", 5), ("read", 5), ("inventory", None)]
    found = machine.run(steps, "gpus 2", "mig 1")
    columns = found[3]["columns"]
    assert columns["gpu.utilization"] == ["0.87", "nan"]
    assert columns["gpu.tensor_active"] == ["0.25", "nan"]
    assert columns["gpu.temperature"] == ["40.0", "41.0"]
    assert machine.call_counts("nvmlGpmSampleGet") == {0: 3, 1: 1}
    assert [found[4][f"gpu:n1.{gpu}"][1]["mig"] for gpu in range(2)] == [False, True]
    assert found[4]["gpu:n1.1"][1]["virtualization"] == "none"


@pytest.mark.parametrize(("mode", "name"), [(1, "passthrough"), (2, "vgpu"), (3, "host vgpu"), (99, None)])
def test_virtualization_differs_from_mig(machine: Machine, mode: int, name: str | None) -> None:
    settings = ("gpus 1", f"set nvmlDeviceGetVirtualizationMode {mode}", "set nvmlDeviceGetHostVgpuMode 1")
    attributes = machine.run([("open", "n1"), ("inventory", None)], *settings)[1]["gpu:n1.0"][1]
    assert (attributes.get("virtualization"), attributes["mig"]) == (name, False)
    assert attributes["host_vgpu"] == "sriov"


def test_a_corrupt_inforom_is_a_value_and_not_missing(machine: Machine) -> None:
    columns = machine.read_first("gpus 2", "fail nvmlDeviceValidateInforom 14 1")["columns"]
    assert columns["gpu.inforom_valid"] == ["1.0", "0.0"]
