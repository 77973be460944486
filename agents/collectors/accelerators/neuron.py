"""The collector `neuron`: AWS Trainium and Inferentia through `neuron-monitor`, a program that writes JSON documents.

The program runs as a child and writes one document per period (AWS Neuron, Neuron Monitor User Guide). A thread reads
them, and restarts the program if it ends or goes silent. Not yet run on hardware: docs/accelerators.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.collectors.accelerators.answers import SignalColumns, sum_counts, to_count, to_float, to_text
from agents.collectors.accelerators.pci_devices import PCI_DEVICES, entity_prefix
from pipeline.model.records import Event

MAX_LINE_BYTES = 4 * 1024 * 1024
"""Longest accepted line. Chosen: a document of 128 cores and as many programs has some 100 KiB."""
READ_AT_ONCE = 64 * 1024
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Pause before the first restart and the longest one; doubled each time. Chosen: with a broken driver, restarts must
stay rare. A line resets the pause."""
EXIT_WAIT_S = 5.0
"""Longest wait for an ended child or thread; both end immediately after a kill."""


class MonitorProgram:
    """The newest line of a program. Two threads may use it: its own reader, and the caller."""

    def __init__(self, command: Sequence[str], silence: float) -> None:
        """silence: seconds without a line after which the program counts as stuck."""
        self._command, self._silence = tuple(command), silence
        self._lock = threading.Lock()
        self._line: bytes | None = None
        self._problem = ""
        self._stop = threading.Event()
        self._waker, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"lines of {self._command[0]}")
        self._thread.start()

    def pop_line(self) -> bytes | None:
        """Returns the last whole line since the call before; None if there is none. Older lines are dropped."""
        with self._lock:
            found, self._line = self._line, None
            return found

    def problem(self) -> str:
        """Returns why there are no lines; empty while they come."""
        with self._lock:
            return self._problem

    def close(self) -> None:
        """Ends the thread and the program."""
        if self._stop.is_set():
            return
        self._stop.set()
        os.close(self._woken)  # the thread sees the end of this pipe
        self._thread.join(EXIT_WAIT_S)
        os.close(self._waker)

    def _run(self) -> None:
        pause = MIN_PAUSE_S
        while not self._stop.is_set():
            try:
                got = self._run_once()
            except OSError as error:
                got = False
                self._set_problem(f"{self._command[0]} cannot be started: {error.strerror or error}")
            except Exception as fault:  # noqa: BLE001 - without its thread the program would stay silent forever
                got = False
                self._set_problem(f"{self._command[0]}: {type(fault).__name__}: {fault}")
            pause = MIN_PAUSE_S if got else min(pause * 2, MAX_PAUSE_S)
            self._stop.wait(pause)

    def _run_once(self) -> bool:
        """Runs the program once; returns whether it wrote a line."""
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the agent, which ends the child itself
        )
        assert child.stdout is not None
        got, why = False, ""
        try:
            got, why = self._read(child.stdout.fileno())
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                child.kill()
            child.stdout.close()
            code = self._wait_for_exit(child)
        self._set_problem(why or f"{self._command[0]} ended with status {code}")
        return got

    def _wait_for_exit(self, child: subprocess.Popen[bytes]) -> int | None:
        """Returns the exit code. Waits for a child stuck in the kernel, since a second one would hang too."""
        while True:
            try:
                return child.wait(EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                if self._stop.is_set():
                    return None
                self._set_problem(
                    f"{self._command[0]} was killed and does not end: stuck in the kernel (pid {child.pid})"
                )

    def _read(self, pipe: int) -> tuple[bool, str]:
        """Reads until the end; returns (whether there was a line, why the program was stopped)."""
        waiting, got, last = b"", False, time.monotonic()
        while not self._stop.is_set():
            ready = select.select([pipe, self._waker], [], [], max(0.0, last + self._silence - time.monotonic()))[0]
            if not ready or time.monotonic() - last > self._silence:  # empty lines do not count
                return got, f"{self._command[0]} wrote nothing for {self._silence:g} s"
            if self._waker in ready:
                break
            data = os.read(pipe, READ_AT_ONCE)
            if not data:
                return got, ""
            *lines, waiting = (waiting + data).split(b"\n")
            if len(waiting) > MAX_LINE_BYTES:
                return got, f"{self._command[0]} wrote a line of more than {MAX_LINE_BYTES} bytes"
            if whole := [line for line in lines if line.strip()]:
                self._store_line(whole[-1])
                got, last = True, time.monotonic()
        return got, ""

    def _store_line(self, line: bytes) -> None:
        with self._lock:
            self._line, self._problem = line, ""

    def _set_problem(self, trouble: str) -> None:
        with self._lock:
            self._problem = trouble


MAX_DEVICES = 64
"""Most devices of a node. An instance has 16 (trn2.48xlarge), the largest UltraServer twice as many."""
MAX_CORES = 512
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
class MonitorReport:
    """Values by device and by (device, core on it); a missing value was not reported."""

    devices: dict[int, dict[str, Any]] = field(default_factory=dict)
    cores: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)


def monitor_config(period: int) -> str:
    """Returns the configuration file for neuron-monitor; period: seconds between two documents."""
    groups = ("neuroncore_counters", "memory_used", "execution_stats")
    runtimes = [{"tag_filter": ".*", "metrics": [{"type": group} for group in groups]}]
    system = [{"type": "neuron_hw_counters"}]
    return json.dumps({"period": f"{period}s", "neuron_runtimes": runtimes, "system_metrics": system})


def parse_report(line: bytes) -> MonitorReport:
    """Returns the values of one document. Raises ValueError if it is none; missing values stay missing."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    hardware = _nested_dict(found, "neuron_hardware_info")
    count = _bounded_count(hardware, "neuron_device_count", MAX_DEVICES)
    per_device = _cores_per_device(hardware)
    report = MonitorReport(facts=_describe_hardware(hardware, _nested_dict(found, "instance_info")))
    for device in range(count):
        report.devices[device] = {"gpu.memory_total": _positive_or_none(hardware.get("neuron_device_memory_size"))}
        report.cores |= {(device, core): {} for core in range(min(per_device, MAX_CORES // max(count, 1)))}
    for row in _dict_rows(_nested_dict(_nested_dict(found, "system_data"), "neuron_hw_counters"), "neuron_devices"):
        _add_error_counts(report, row)
    if per_device and isinstance(found.get("neuron_runtime_data"), list):
        _add_runtimes(report, _dict_rows(found, "neuron_runtime_data"), per_device)
    return report


def _add_error_counts(report: MonitorReport, row: Mapping[str, Any]) -> None:
    device = row.get("neuron_device_index")
    if not isinstance(device, int) or isinstance(device, bool) or not 0 <= device < MAX_DEVICES:
        return
    values = report.devices.setdefault(device, {})
    values |= {signal: row.get(name) for signal, name in _ECC.items()}
    for kind in ("corrected", "uncorrected"):
        values[f"gpu.ecc_{kind}"] = sum_counts(row.get(f"{place}_ecc_{kind}") for place in ("mem", "sram"))


def _add_runtimes(report: MonitorReport, runtimes: list[Mapping[str, Any]], per_device: int) -> None:
    """Adds up each core's use by all programs; a core without a program has use 0."""
    use = dict.fromkeys(report.cores, 0.0)
    held = dict.fromkeys(report.cores, 0.0)
    flops: dict[tuple[int, int], float] = {}
    for runtime in runtimes:
        usage = _nested_dict(runtime, "report")
        places = set()
        for place, core in _iterate_cores(
            _nested_dict(_nested_dict(usage, "neuroncore_counters"), "neuroncores_in_use"), per_device
        ):
            places.add(place)
            use[place] = use.get(place, 0.0) + to_float(core.get("neuroncore_utilization")) / 100
            flops[place] = flops.get(place, 0.0) + to_float(core.get("flops"))
        used = _nested_dict(
            _nested_dict(_nested_dict(usage, "memory_used"), "neuron_runtime_used_bytes"), "usage_breakdown"
        )
        for place, parts in _iterate_cores(_nested_dict(used, "neuroncore_memory_usage"), per_device):
            held[place] = held.get(place, 0.0) + sum(to_float(size) for size in parts.values())
        _add_executions(
            report, runtime, _nested_dict(usage, "execution_stats"), sorted({device for device, _ in places})
        )
    for place in report.cores:
        values = {"utilization": min(use[place], 1.0), "memory_used": held[place], "flops": flops.get(place)}
        report.cores[place] = {f"neuroncore.{name}": value for name, value in values.items()}
    for device, values in report.devices.items():
        mine = [place for place in report.cores if place[0] == device]
        if mine:
            values["gpu.utilization"] = min(sum(use[place] for place in mine) / len(mine), 1.0)
            values["gpu.memory_used"] = sum(held[place] for place in mine)


def _add_executions(
    report: MonitorReport, runtime: Mapping[str, Any], stats: Mapping[str, Any], devices: list[int]
) -> None:
    """Adds one program's latency and errors to every device on which it holds cores."""
    period = to_float(stats.get("period"))
    if not 0 < period < 1e6:  # the group was not requested, or has no period to divide by
        return
    errors = {
        key: n for key, count in _nested_dict(stats, "error_summary").items() if 0 < (n := to_count(count)) < 2**63
    }
    done = [n for key in _OUTCOMES if (n := to_count(_nested_dict(stats, "execution_summary").get(key))) < 2**63]
    latency = _nested_dict(_nested_dict(stats, "latency_stats"), "device_latency")
    for device in devices:
        values = report.devices.get(device, {})
        values["gpu.executions"] = values.get("gpu.executions", 0.0) + sum(done) / period
        values["gpu.execution_errors"] = values.get("gpu.execution_errors", 0.0) + sum(errors.values()) / period
        for signal, name in (("gpu.execution_latency", "p50"), ("gpu.execution_latency_p99", "p99")):
            found = to_float(latency.get(name))
            if found == found:
                values[signal] = max(found, values.get(signal, 0.0))
    if errors:
        program = {"pid": to_count(runtime.get("pid")) % 2**32, "tag": to_text(runtime.get("neuron_runtime_tag"))}
        counted = {to_text(key)[:40]: count for key, count in list(errors.items())[:8]}
        report.failures.append({**program, "period": round(period, 3), "devices": devices, "errors": counted})


def _iterate_cores(table: Mapping[str, Any], per_device: int) -> Iterator[tuple[tuple[int, int], Mapping[str, Any]]]:
    """Yields ((device, core on it), its values); core numbers run through all devices of the node."""
    for index, values in table.items():
        if index.isdecimal() and len(index) < 5 and int(index) < MAX_CORES and isinstance(values, dict):
            yield divmod(int(index), per_device), values


def _cores_per_device(hardware: Mapping[str, Any]) -> int:
    """Returns the logical cores of a device: a Trn2 joins physical ones (logical_neuroncore_config)."""
    joined = _bounded_count(hardware, "logical_neuroncore_config", MAX_CORES) or 1
    return _bounded_count(hardware, "neuroncore_per_device_count", MAX_CORES) // joined


def _describe_hardware(hardware: Mapping[str, Any], instance: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "vendor": "AWS",
        "sku": to_text(hardware.get("neuron_device_type")),
        "device_version": to_text(hardware.get("neuron_device_version")),
        "core_version": to_text(hardware.get("neuroncore_version")),
        "instance_type": to_text(instance.get("instance_type")),
    }
    return {key: value for key, value in found.items() if value}


def _nested_dict(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = found.get(name)
    return part if isinstance(part, dict) else {}


def _dict_rows(found: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = found.get(name)
    return [row for row in rows[:1024] if isinstance(row, dict)] if isinstance(rows, list) else []


def _bounded_count(found: Mapping[str, Any], name: str, most: int) -> int:
    value = to_count(found.get(name))
    return value if value <= most else 0


def _positive_or_none(value: object) -> float | None:
    found = to_float(value)
    return found if found > 0 else None


INSTALLED_PATH = "/opt/aws/neuron/bin/neuron-monitor"
"""Path in the package aws-neuronx-tools."""
MAX_EVENTS = 8
"""Most events of one document. Chosen: a node runs a few programs."""
_GPU = (
    *("gpu.utilization", "gpu.memory_used", "gpu.memory_total", "gpu.ecc_corrected", "gpu.ecc_uncorrected"),
    *("gpu.dram_corrected", "gpu.dram_uncorrected", "gpu.sram_corrected", "gpu.sram_uncorrected"),
    *("gpu.executions", "gpu.execution_errors", "gpu.execution_latency", "gpu.execution_latency_p99"),
)
_CORE = ("neuroncore.utilization", "neuroncore.flops", "neuroncore.memory_used")


@dataclass
class Neuron(Collector):
    """Reports gpu.* of each Neuron device and neuroncore.* of each of its cores."""

    name: ClassVar[str] = "neuron"
    signals: ClassVar[tuple[str, ...]] = (*_GPU, *_CORE)
    events: ClassVar[tuple[str, ...]] = ("execution_errors",)
    command: str = ""
    device: Path = Path("/dev/neuron0")
    period: int = 5
    silence: float = 30.0
    pci: Path = PCI_DEVICES
    _node: str = field(default="", init=False, repr=False)
    _last_report: float = field(default=0.0, init=False, repr=False)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _child: MonitorProgram | None = field(default=None, init=False, repr=False)
    _config: str = field(default="", init=False, repr=False)
    _prefix: str = field(default="", init=False, repr=False)
    _facts: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False)
    _devices: tuple[int, ...] = field(default=(), init=False, repr=False)
    _cores: tuple[tuple[int, int], ...] = field(default=(), init=False, repr=False)

    def open(self, node: str) -> None:
        """See `Collector.open`."""
        if not self.device.exists():
            raise NoData(f"no Neuron device: {self.device} is missing (the driver aws-neuronx-dkms creates it)")
        import shutil  # imported here, like tempfile: other nodes do not need them
        import tempfile

        command = shutil.which(self.command or "neuron-monitor") or shutil.which(self.command or INSTALLED_PATH)
        if command is None:
            missing = self.command or "neuron-monitor"
            raise NoData(f"found a Neuron device, but no {missing}: install aws-neuronx-tools")
        self.close()
        self._node, self._prefix = node, entity_prefix("neuron", self.pci)
        with tempfile.NamedTemporaryFile("w", prefix="fleetpulse-neuron-", suffix=".json", delete=False) as file:
            file.write(monitor_config(max(1, self.period)))
        self._config = file.name
        self._child, self._last_report = MonitorProgram((command, "-c", self._config), self.silence), time.monotonic()

    def read(self) -> tuple[Reading, ...]:
        """Returns the values of the newest document; nothing between two documents."""
        assert self._child is not None
        line = self._child.pop_line()
        if line is None:
            return self._no_report(self._child.problem())
        try:
            report = parse_report(line)
        except ValueError as error:
            return self._no_report(f"neuron-monitor wrote an invalid document: {error}")
        self._last_report = time.monotonic()
        self._facts, self._devices, self._cores = report.facts, tuple(sorted(report.devices)), tuple(report.cores)
        devices, cores = SignalColumns(_GPU, len(self._devices)), SignalColumns(_CORE, len(self._cores))
        for row, device in enumerate(self._devices):
            devices.set_row(row, report.devices[device])
        for row, place in enumerate(self._cores):
            cores.set_row(row, report.cores[place])
        events = tuple(self._failure_event(failure) for failure in report.failures[:MAX_EVENTS])
        readings = [Reading("gpu", tuple(map(self._device_entity, self._devices)), devices.arrays(), events)]
        if self._cores:
            readings.append(Reading("neuroncore", tuple(map(self._core_entity, self._cores)), cores.arrays()))
        return tuple(readings)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the devices and their cores."""
        node = f"node:{self._node}"
        found = {self._device_entity(device): Device((node,), self._facts) for device in self._devices}
        return found | {
            self._core_entity(place): Device((self._device_entity(place[0]), node)) for place in self._cores
        }

    def close(self) -> None:
        """See `Collector.close`."""
        if self._child is not None:
            self._child.close()
            self._child = None
        if self._config:
            Path(self._config).unlink(missing_ok=True)
            self._config = ""

    def _no_report(self, why: str) -> tuple[Reading, ...]:
        """Returns no readings. Raises RuntimeError if documents are missing for too long, which starts a new child."""
        if why and time.monotonic() - self._last_report > self.silence:
            raise RuntimeError(why)
        return ()

    def _device_entity(self, device: int) -> str:
        return f"gpu:{self._node}.{self._prefix}{device}"

    def _core_entity(self, place: tuple[int, int]) -> str:
        return f"neuroncore:{self._node}.{self._prefix}{place[0]}.{place[1]}"

    def _failure_event(self, failure: dict[str, Any]) -> Event:
        named = failure | {"devices": [self._device_entity(device) for device in failure["devices"]]}
        return Event(self._now(), f"node:{self._node}", "execution_errors", named)
