"""What a document of `neuron-monitor` means: one JSON object per period (AWS Neuron, Neuron Monitor User Guide)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.sources.accelerators.columns import number, text, total, whole

MOST_DEVICES = 64
"""Most devices of a node; an instance has 16 (trn2.48xlarge), twice that in an UltraServer's largest."""
MOST_CORES = 512
"""Most cores of a node; 16 devices of 8 have 128."""
_ECC = {
    "gpu.dram_corrected": "mem_ecc_corrected",
    "gpu.dram_uncorrected": "mem_ecc_uncorrected",
    "gpu.sram_corrected": "sram_ecc_corrected",
    "gpu.sram_uncorrected": "sram_ecc_uncorrected",
}
_OUTCOMES = (
    "completed",
    "completed_with_err",
    "completed_with_num_err",
    "timed_out",
    "incorrect_input",
    "failed_to_queue",
)


@dataclass
class Report:
    """Values by device and by (device, core on it); a device without a value of a signal has not been told of."""

    devices: dict[int, dict[str, Any]] = field(default_factory=dict)
    cores: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)


def config(period: int) -> str:
    """The configuration file that makes neuron-monitor tell what is read here, every `period` seconds."""
    groups = ("neuroncore_counters", "memory_used", "execution_stats")
    runtimes = [{"tag_filter": ".*", "metrics": [{"type": group} for group in groups]}]
    system = [{"type": "neuron_hw_counters"}]
    return json.dumps({"period": f"{period}s", "neuron_runtimes": runtimes, "system_metrics": system})


def parse(line: bytes) -> Report:
    """Raises ValueError for what is no document; what is missing in one is missing in the report."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("brackets within brackets without end") from None
    if not isinstance(found, dict):
        raise ValueError("wanted a JSON object")
    hardware = _part(found, "neuron_hardware_info")
    count = _count(hardware, "neuron_device_count", MOST_DEVICES)
    per_device = _cores_of_a_device(hardware)
    report = Report(facts=_facts(hardware, _part(found, "instance_info")))
    for device in range(count):
        report.devices[device] = {"gpu.memory_total": _above_zero(hardware.get("neuron_device_memory_size"))}
        report.cores |= {(device, core): {} for core in range(min(per_device, MOST_CORES // max(count, 1)))}
    for row in _rows(_part(_part(found, "system_data"), "neuron_hw_counters"), "neuron_devices"):
        _count_errors(report, row)
    if per_device and isinstance(found.get("neuron_runtime_data"), list):
        _runtimes(report, _rows(found, "neuron_runtime_data"), per_device)
    return report


def _count_errors(report: Report, row: Mapping[str, Any]) -> None:
    device = row.get("neuron_device_index")
    if not isinstance(device, int) or isinstance(device, bool) or not 0 <= device < MOST_DEVICES:
        return
    values = report.devices.setdefault(device, {})
    values |= {signal: row.get(name) for signal, name in _ECC.items()}
    for kind in ("corrected", "uncorrected"):
        values[f"gpu.ecc_{kind}"] = total(row.get(f"{place}_ecc_{kind}") for place in ("mem", "sram"))


def _runtimes(report: Report, runtimes: list[Mapping[str, Any]], per_device: int) -> None:
    """Adds up what the programs do with each core; a core that nobody holds does nothing."""
    use = dict.fromkeys(report.cores, 0.0)
    held = dict.fromkeys(report.cores, 0.0)
    flops: dict[tuple[int, int], float] = {}
    for runtime in runtimes:
        told = _part(runtime, "report")
        places = set()
        for place, core in _by_core(_part(_part(told, "neuroncore_counters"), "neuroncores_in_use"), per_device):
            places.add(place)
            use[place] = use.get(place, 0.0) + number(core.get("neuroncore_utilization")) / 100
            flops[place] = flops.get(place, 0.0) + number(core.get("flops"))
        used = _part(_part(_part(told, "memory_used"), "neuron_runtime_used_bytes"), "usage_breakdown")
        for place, parts in _by_core(_part(used, "neuroncore_memory_usage"), per_device):
            held[place] = held.get(place, 0.0) + sum(number(size) for size in parts.values())
        _executions(report, runtime, _part(told, "execution_stats"), sorted({device for device, _ in places}))
    for place in report.cores:
        values = {"utilization": min(use[place], 1.0), "memory_used": held[place], "flops": flops.get(place)}
        report.cores[place] = {f"neuroncore.{name}": value for name, value in values.items()}
    for device, values in report.devices.items():
        mine = [place for place in report.cores if place[0] == device]
        if mine:
            values["gpu.utilization"] = min(sum(use[place] for place in mine) / len(mine), 1.0)
            values["gpu.memory_used"] = sum(held[place] for place in mine)


def _executions(report: Report, runtime: Mapping[str, Any], stats: Mapping[str, Any], devices: list[int]) -> None:
    """Latency and errors of one program, told of every device that it holds cores of."""
    period = number(stats.get("period"))
    if not 0 < period < 1e6:  # the group was not asked for, or has no period to relate counts to
        return
    errors = {key: n for key, count in _part(stats, "error_summary").items() if 0 < (n := whole(count)) < 2**63}
    done = [n for key in _OUTCOMES if (n := whole(_part(stats, "execution_summary").get(key))) < 2**63]
    latency = _part(_part(stats, "latency_stats"), "device_latency")
    for device in devices:
        values = report.devices.get(device, {})
        values["gpu.executions"] = values.get("gpu.executions", 0.0) + sum(done) / period
        values["gpu.execution_errors"] = values.get("gpu.execution_errors", 0.0) + sum(errors.values()) / period
        for signal, name in (("gpu.execution_latency", "p50"), ("gpu.execution_latency_p99", "p99")):
            found = number(latency.get(name))
            if found == found:
                values[signal] = max(found, values.get(signal, 0.0))
    if errors:
        who = {"pid": whole(runtime.get("pid")) % 2**32, "tag": text(runtime.get("neuron_runtime_tag"))}
        counted = {text(key)[:40]: count for key, count in list(errors.items())[:8]}
        report.failures.append({**who, "period": round(period, 3), "devices": devices, "errors": counted})


def _by_core(table: Mapping[str, Any], per_device: int) -> Iterator[tuple[tuple[int, int], Mapping[str, Any]]]:
    """((device, core on it), what is told of it); numbers of cores run through all devices of the node."""
    for index, values in table.items():
        if index.isdecimal() and len(index) < 5 and int(index) < MOST_CORES and isinstance(values, dict):
            yield divmod(int(index), per_device), values


def _cores_of_a_device(hardware: Mapping[str, Any]) -> int:
    """Logical cores: a Trn2 joins some physical ones to one (logical_neuroncore_config)."""
    joined = _count(hardware, "logical_neuroncore_config", MOST_CORES) or 1
    return _count(hardware, "neuroncore_per_device_count", MOST_CORES) // joined


def _facts(hardware: Mapping[str, Any], instance: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "vendor": "AWS",
        "sku": text(hardware.get("neuron_device_type")),
        "device_version": text(hardware.get("neuron_device_version")),
        "core_version": text(hardware.get("neuroncore_version")),
        "instance_type": text(instance.get("instance_type")),
    }
    return {key: value for key, value in found.items() if value}


def _part(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = found.get(name)
    return part if isinstance(part, dict) else {}


def _rows(found: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = found.get(name)
    return [row for row in rows[:1024] if isinstance(row, dict)] if isinstance(rows, list) else []


def _count(found: Mapping[str, Any], name: str, most: int) -> int:
    value = whole(found.get(name))
    return value if value <= most else 0


def _above_zero(value: object) -> float | None:
    found = number(value)
    return found if found > 0 else None
