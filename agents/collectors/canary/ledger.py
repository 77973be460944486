"""Turns results of canaries into events and counts. Right rounds are folded: one event per `report_interval` seconds.

A device with a wrong answer reports every round until CLEAN_ROUNDS rounds in a row were right, so that a detector sees
retests. A node of 128 cores sends 512 events a day, and 48 more with a broken core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.model.records import SECOND, Event

CLEAN_ROUNDS = 12
"""Right rounds in a row after which a device is trusted again: two more than the SDC detector requires."""
MAX_DEVICES = 2048
"""Devices of one node whose results are kept. Chosen: twice the processors of the largest servers."""
MAX_EVENTS = 512
"""Events of one read. Chosen: more than a program writes between two reads."""
FATAL_SIGNALS = ("SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE")
"""Signals by which a faulty core ends a program; other signals come from outside (memory, an operator)."""
_TEXTS = ("canary", "version", "digest", "expected", "format", "range", "uuid")
_NUMBERS = ("runs", "rounds", "again", "lacking", "took", "began")


@dataclass
class DeviceTally:
    """Counts of one device. rounds_to_report: right rounds that are still reported one by one."""

    runs: int = 0
    mismatches: int = 0
    yields: int = 0
    time: float = 0.0
    folded: int = 0
    last_reported: int = -(1 << 62)
    rounds_to_report: int = 0


@dataclass
class ResultLedger:
    """Results of all devices of one kind. entity: device -> entity; now: returns UTC microseconds."""

    entity: Callable[[str], str]
    report_interval: float
    now: Callable[[], int]
    tallies: dict[str, DeviceTally] = field(default_factory=dict)
    current_round: dict[str, Any] | None = None

    def get_tally(self, device: str) -> DeviceTally:
        """Returns the device's counts; new ones for a new device."""
        return self.tallies.setdefault(device, DeviceTally())

    def list_watched(self) -> list[str]:
        """Returns the devices with a recent wrong answer."""
        return [device for device, tally in self.tallies.items() if tally.rounds_to_report]

    def record_line(self, line: Mapping[str, Any]) -> Event | None:
        """Takes one line of a program's output and returns its event, if any. Malformed lines are ignored."""
        device = line.get("device")
        if not isinstance(device, str) or (device not in self.tallies and len(self.tallies) >= MAX_DEVICES):
            return None
        tally = self.get_tally(device)
        if line.get("begin"):
            self.current_round = dict(line)
            return None
        self.current_round = None
        if line.get("yielded"):
            tally.yields += 1
        data = clean_result(line)
        if not data.keys() >= {"canary", "version", "digest"}:
            return None
        return self._record_result(device, tally, data)

    def record_death(self, signal: str) -> Event | None:
        """Takes the signal that ended the program; a fatal one counts as the answer of the device under test."""
        begun, self.current_round = self.current_round, None
        if begun is None:
            return None
        if signal not in FATAL_SIGNALS:
            self.get_tally(begun["device"]).yields += 1
            return None
        data = clean_result({**begun, "digest": f"died {signal}", "golden": False})
        return self._record_result(begun["device"], self.get_tally(begun["device"]), data)

    def _record_result(self, device: str, tally: DeviceTally, data: dict[str, Any]) -> Event | None:
        now = self.now()
        tally.runs += int(data.get("runs", 0))
        tally.time += float(data.get("took", 0.0))
        tally.folded += 1
        wrong = "expected" in data and data["expected"] != data["digest"]
        if wrong:
            tally.mismatches += 1
            tally.rounds_to_report = CLEAN_ROUNDS
        elif tally.rounds_to_report:
            tally.rounds_to_report -= 1
        elif now - tally.last_reported < self.report_interval * SECOND:
            return None
        data["rounds"], tally.folded, tally.last_reported = tally.folded, 0, now
        return Event(now, self.entity(device), "digest", data)


def clean_result(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the valid fields of a result: a faulty device may write anything."""
    found: dict[str, Any] = {k: v[:100] for k in _TEXTS if isinstance(v := line.get(k), str)}
    found |= {k: v for k in _NUMBERS if _is_count(v := line.get(k))}
    if isinstance(line.get("golden"), bool):
        found["golden"] = line["golden"]
    if isinstance(names := line.get("wrong"), list):
        found["wrong"] = [str(name)[:100] for name in names[:8]]
    return found


def _is_count(value: object) -> bool:
    """Whether it can be a count or a time; True and NaN cannot."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 62
