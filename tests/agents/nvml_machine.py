"""A machine of stub GPUs for the tests; its NVML collector runs in a separate process, one step at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.agents import nvml_stub

ROOT = Path(__file__).parents[2]
Steps = list[tuple[str, Any]]


@dataclass
class Machine:
    """A machine of stub GPUs and its collector, which runs in a separate process."""

    library: Path
    folder: Path
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> Path:
        return self.folder / "calls"

    def run(self, steps: Steps, *settings: str) -> list[Any]:
        fields = {"pci": str(self.folder / "pci"), "seen": str(self.folder / "seen.json"), **self.fields}
        control = self.folder / "control"
        environ = nvml_stub.environment(self.library, settings, control=control, calls=self.calls)
        done = subprocess.run(
            [sys.executable, "-m", "tests.agents.nvml_drive"],
            input=json.dumps({"fields": fields, "steps": steps}),
            cwd=ROOT,
            env=environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found: list[Any] = json.loads(done.stdout)
        return found

    def read_first(self, *settings: str) -> Any:
        """The result of the first read, in which every interval is due."""
        return self.run([("open", "n1"), ("read", 0)], *settings)[1]

    def call_counts(self, function: str) -> Counter[int]:
        """Number of calls of a function by GPU."""
        return Counter(gpu for name, gpu, _ in nvml_stub.calls_made(self.calls) if name == function)


def plug(folder: Path, buses: list[int], vendor: str = "0x10de", driver: str | None = None) -> None:
    """Devices on the PCI bus, at the addresses that the stub gives its GPUs."""
    for bus in buses:
        device = folder / "pci" / f"0000:{bus:02x}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text("0x030200\n")
        if driver:
            (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(folder / "drivers" / driver)


def events(found: Any, *kinds: str) -> list[list[Any]]:
    """[entity, kind, data] of a read's events of these kinds."""
    return [event for event in found["events"] if event[1] in kinds]
