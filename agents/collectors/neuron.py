"""AWS Trainium and Inferentia through `neuron-monitor`, which runs as a child and prints a JSON document per period.

Not yet run on hardware: docs/accelerators.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.sources.accelerators import neuron
from agents.sources.accelerators.child import Child
from agents.sources.accelerators.columns import Columns
from agents.sources.accelerators.places import PCI, prefix
from pipeline.model.records import Event

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
            file.write(neuron.config(max(1, self.period)))
        self._config = file.name
        self._child, self._good = Child((command, "-c", self._config), self.silence), time.monotonic()

    def read(self) -> tuple[Reading, ...]:
        """What the newest document says; nothing between two documents."""
        assert self._child is not None
        line = self._child.newest()
        if line is None:
            return self._nothing(self._child.trouble())
        try:
            report = neuron.parse(line)
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
