"""Results of canaries -> events and counts. Right rounds are folded: a device tells one in `tell` seconds.

A device that gave a wrong answer tells each round until it was right WATCHED times running, so that a detector sees
a retest. A node of 128 cores sends 512 events a day so, and one of a broken core 48 more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.model.records import SECOND, Event

WATCHED = 12
"""Right rounds running after which a device is trusted again: two more than detectors/sdc.py wants."""
MOST_DEVICES = 2048
"""Devices of one node of which results are kept; chosen: twice the processors of the largest servers."""
MOST_EVENTS = 512
"""Events of one look; chosen: more than a program says between two looks."""
FATAL = ("SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE")
"""Signals by which a wrong core ends a program; others come from outside (memory, an operator)."""
_TEXTS = ("canary", "version", "digest", "expected", "format", "range", "uuid")
_NUMBERS = ("runs", "rounds", "again", "lacking", "took", "began")


@dataclass
class Tally:
    """Counts of one device. watched: right rounds it still has to tell one by one."""

    runs: int = 0
    mismatches: int = 0
    yields: int = 0
    time: float = 0.0
    folded: int = 0
    told: int = -(1 << 62)
    watched: int = 0


@dataclass
class Ledger:
    """All devices of one kind. entity names one by what its program calls it; now is UTC in microseconds."""

    entity: Callable[[str], str]
    tell: float
    now: Callable[[], int]
    tallies: dict[str, Tally] = field(default_factory=dict)
    begun: dict[str, Any] | None = None

    def of(self, device: str) -> Tally:
        return self.tallies.setdefault(device, Tally())

    def watched(self) -> list[str]:
        """Devices that gave a wrong answer of late."""
        return [device for device, tally in self.tallies.items() if tally.watched]

    def take(self, line: Mapping[str, Any]) -> Event | None:
        """One line of a program; the event that it is worth, if any. Lines that make no sense are passed over."""
        device = line.get("device")
        if not isinstance(device, str) or (device not in self.tallies and len(self.tallies) >= MOST_DEVICES):
            return None
        tally = self.of(device)
        if line.get("begin"):
            self.begun = dict(line)
            return None
        self.begun = None
        if line.get("yielded"):
            tally.yields += 1
        data = facts(line)
        if not data.keys() >= {"canary", "version", "digest"}:
            return None
        return self._result(device, tally, data)

    def died(self, signal: str) -> Event | None:
        """The program was ended by a signal: the answer of the device that it was at, if that is a fault's sign."""
        begun, self.begun = self.begun, None
        if begun is None:
            return None
        if signal not in FATAL:
            self.of(begun["device"]).yields += 1
            return None
        data = facts({**begun, "digest": f"died {signal}", "golden": False})
        return self._result(begun["device"], self.of(begun["device"]), data)

    def _result(self, device: str, tally: Tally, data: dict[str, Any]) -> Event | None:
        now = self.now()
        tally.runs += int(data.get("runs", 0))
        tally.time += float(data.get("took", 0.0))
        tally.folded += 1
        wrong = "expected" in data and data["expected"] != data["digest"]
        if wrong:
            tally.mismatches += 1
            tally.watched = WATCHED
        elif tally.watched:
            tally.watched -= 1
        elif now - tally.told < self.tell * SECOND:
            return None
        data["rounds"], tally.folded, tally.told = tally.folded, 0, now
        return Event(now, self.entity(device), "digest", data)


def facts(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a result says, as far as it is of the right kind: a wrong device may write anything."""
    found: dict[str, Any] = {k: v[:100] for k in _TEXTS if isinstance(v := line.get(k), str)}
    found |= {k: v for k in _NUMBERS if _number(v := line.get(k))}
    if isinstance(line.get("golden"), bool):
        found["golden"] = line["golden"]
    if isinstance(names := line.get("wrong"), list):
        found["wrong"] = [str(name)[:100] for name in names[:8]]
    return found


def _number(value: object) -> bool:
    """Whether it is one that a count or time can be; true and NaN are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 62
