"""A program for the tests: runs the steps of its standard input on the NVML collector and prints their results.

Input: {"fields": {...}, "steps": [[verb, argument], ...]}; output: one result per step. The clock moves only by `read`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from agents.collector import NoData
from agents.collectors.gpu.nvml import Nvml
from agents.node.batches import build_blocks, check_reading
from tests.agents import nvml_stub

START = 1_800_000_000_000_000


class CollectorDriver:
    def __init__(self, fields: dict[str, Any]) -> None:
        paths = {key: Path(value) if key in ("pci", "seen") else value for key, value in fields.items()}
        self.collector = Nvml(**paths)
        self.now = START
        self.collector._now = lambda: self.now

    def open(self, node: str) -> None:
        self.collector.open(node)

    def control(self, lines: list[str]) -> None:
        nvml_stub.write_control(Path(os.environ["STUB_CONTROL"]), *lines)

    def read(self, seconds: float) -> dict[str, Any]:
        """Reads once after the given seconds; values as text, so that every digit of a counter is kept."""
        self.now += round(seconds * 1_000_000)
        found: dict[str, Any] = {"columns": {}, "events": [], "entities": {}, "wire": {}}
        readings = self.collector.read()
        inventory = self.collector.inventory() if seconds == 0 else None
        for reading in readings:
            check_reading(reading, inventory)
            found["columns"] |= {name: [str(value) for value in column] for name, column in reading.columns.items()}
            found["entities"][reading.device_class] = reading.entities
            found["events"] += [[event.entity, event.kind, event.data] for event in reading.events]
        for block in build_blocks(readings):
            found["wire"] |= {name: [str(value) for value in column[0]] for name, column in block.columns.items()}
        return found

    def inventory(self, _: Any) -> dict[str, Any]:
        return {entity: [device.parents, device.attributes] for entity, device in self.collector.inventory().items()}

    def samples(self, _: Any) -> int:
        """GPM samples that were allocated and not freed."""
        return int(ctypes.CDLL(nvml_stub.LIBRARY).stub_gpm_samples())

    def close(self, _: Any) -> None:
        self.collector.close()


def main() -> None:
    orders = json.load(sys.stdin)
    drive, results = CollectorDriver(orders["fields"]), []
    for verb, argument in orders["steps"]:
        try:
            results.append(getattr(drive, verb)(argument))
        except NoData as absent:
            results.append({"no data": str(absent)})
        except RuntimeError as fault:
            results.append({"fault": str(fault)})
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
