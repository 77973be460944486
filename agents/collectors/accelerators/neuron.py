"""AWS Trainium and Inferentia through `neuron-monitor`, which runs as a child and prints a JSON document per period.

Not yet run on hardware: docs/accelerators.md.

What a document of `neuron-monitor` means: one JSON object per period (AWS Neuron, Neuron Monitor User Guide).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.collectors.accelerators.answers import Columns, number, text, total, whole
from agents.collectors.accelerators.monitor_program import Child
from agents.collectors.accelerators.pci_devices import PCI, prefix
from pipeline.model.records import Event

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


def monitor_config(period: int) -> str:
    """The configuration file that makes neuron-monitor tell what is read here, every `period` seconds."""
    groups = ("neuroncore_counters", "memory_used", "execution_stats")
    runtimes = [{"tag_filter": ".*", "metrics": [{"type": group} for group in groups]}]
    system = [{"type": "neuron_hw_counters"}]
    return json.dumps({"period": f"{period}s", "neuron_runtimes": runtimes, "system_metrics": system})


def parse_report(line: bytes) -> Report:
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


INSTALLED = "/opt/aws/neuron/bin/neuron-monitor"
"""Where the package aws-neuronx-tools puts it."""
MOST_EVENTS = 8
"""Most events of one document; chosen: a node runs a few programs."""
_GPU = (
    *("gpu.utilization", "gpu.memory_used", "gpu.memory_total", "gpu.ecc_corrected", "gpu.ecc_uncorrected"),
    *("gpu.dram_corrected", "gpu.dram_uncorrected", "gpu.sram_corrected", "gpu.sram_uncorrected"),
    *("gpu.executions", "gpu.execution_errors", "gpu.execution_latency", "gpu.execution_latency_p99"),
)
_CORE = ("neuroncore.utilization", "neuroncore.flops", "neuroncore.memory_used")


@dataclass
class Neuron(Collector):
    """gpu.* of each Neuron device and neuroncore.* of each of its cores."""

    name: ClassVar[str] = "neuron"
    signals: ClassVar[tuple[str, ...]] = (*_GPU, *_CORE)
    events: ClassVar[tuple[str, ...]] = ("execution_errors",)
    command: str = ""
    device: Path = Path("/dev/neuron0")
    period: int = 5
    silence: float = 30.0
    pci: Path = PCI
    _node: str = field(default="", init=False, repr=False)
    _good: float = field(default=0.0, init=False, repr=False)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _child: Child | None = field(default=None, init=False, repr=False)
    _config: str = field(default="", init=False, repr=False)
    _prefix: str = field(default="", init=False, repr=False)
    _facts: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False)
    _devices: tuple[int, ...] = field(default=(), init=False, repr=False)
    _cores: tuple[tuple[int, int], ...] = field(default=(), init=False, repr=False)

    def open(self, node: str) -> None:
        if not self.device.exists():
            raise NoData(f"no Neuron device: {self.device} is not there (the driver aws-neuronx-dkms makes it)")
        import shutil  # here, as tempfile: they load much that other nodes do without
        import tempfile

        command = shutil.which(self.command or "neuron-monitor") or shutil.which(self.command or INSTALLED)
        if command is None:
            missing = self.command or "neuron-monitor"
            raise NoData(f"there is a Neuron device, but {missing} is not there: install aws-neuronx-tools")
        self.close()
        self._node, self._prefix = node, prefix("neuron", self.pci)
        with tempfile.NamedTemporaryFile("w", prefix="fleetpulse-neuron-", suffix=".json", delete=False) as file:
            file.write(monitor_config(max(1, self.period)))
        self._config = file.name
        self._child, self._good = Child((command, "-c", self._config), self.silence), time.monotonic()

    def read(self) -> tuple[Reading, ...]:
        """What the newest document says; nothing between two documents."""
        assert self._child is not None
        line = self._child.newest()
        if line is None:
            return self._nothing(self._child.trouble())
        try:
            report = parse_report(line)
        except ValueError as error:
            return self._nothing(f"neuron-monitor wrote a line that is no document: {error}")
        self._good = time.monotonic()
        self._facts, self._devices, self._cores = report.facts, tuple(sorted(report.devices)), tuple(report.cores)
        devices, cores = Columns(_GPU, len(self._devices)), Columns(_CORE, len(self._cores))
        for row, device in enumerate(self._devices):
            devices.put(row, report.devices[device])
        for row, place in enumerate(self._cores):
            cores.put(row, report.cores[place])
        events = tuple(self._event(failure) for failure in report.failures[:MOST_EVENTS])
        readings = [Reading("gpu", tuple(map(self._gpu, self._devices)), devices.taken(), events)]
        if self._cores:
            readings.append(Reading("neuroncore", tuple(map(self._core, self._cores)), cores.taken()))
        return tuple(readings)

    def inventory(self) -> Mapping[str, Device]:
        node = f"node:{self._node}"
        found = {self._gpu(device): Device((node,), self._facts) for device in self._devices}
        return found | {self._core(place): Device((self._gpu(place[0]), node)) for place in self._cores}

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
        if self._config:
            Path(self._config).unlink(missing_ok=True)
            self._config = ""

    def _nothing(self, why: str) -> tuple[Reading, ...]:
        """No document at this look; a fault once that lasts, whose mend is a new child."""
        if why and time.monotonic() - self._good > self.silence:
            raise RuntimeError(why)
        return ()

    def _gpu(self, device: int) -> str:
        return f"gpu:{self._node}.{self._prefix}{device}"

    def _core(self, place: tuple[int, int]) -> str:
        return f"neuroncore:{self._node}.{self._prefix}{place[0]}.{place[1]}"

    def _event(self, failure: dict[str, Any]) -> Event:
        named = failure | {"devices": [self._gpu(device) for device in failure["devices"]]}
        return Event(self._now(), f"node:{self._node}", "execution_errors", named)
