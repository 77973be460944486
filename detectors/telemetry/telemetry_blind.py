"""Finds BMCs and exporters that are configured but not read: what they report is not monitored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, notes
from detectors.base.event_data import values_by_entity
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.telemetry.silence import BMC_RESTARTS, FOLLOWS, LONGEST_GAP, READINGS
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Event, Finding, Frame, Level

_SIGNALS = {"bmc": "bmc.reachable", "exporter": "exporter.up"}
_LOST = {"bmc": "not read, leak detectors unmonitored", "exporter": "not read"}
_REMOVED = {"bmc": 60 * SECOND, "exporter": 7200 * SECOND}
"""us without a state after which it was removed from the configuration, or its agent is silent, which the state of its
node shows; READINGS of its own usual intervals if that is longer. An exporter is scraped at least hourly; chosen."""
_AGAIN = 2  # failures in a row: one failed scrape may be an hour before the next one; chosen
_NO_REASON = "no reason reported"


@dataclass
class TelemetryBlind(Detector):
    """A BMC or an exporter that does not respond twice is a suspect, and after `seconds` a ticket, with the reason that
    its agent reported; the BMC of a node, which works during that time, after `node_seconds`.

    Silence is not a failure: an agent that reports nothing shows in the state of its node. The condition ends with the
    first response.

    Source: a BMC restarts in 1-3 min; an upgrade of its firmware, with its restarts, takes 10 to 20 min.

    seconds:       longer than a restart; a unit whose BMC is not read may lose coolant unseen. Chosen.
    node_seconds:  longer than an upgrade of firmware, as where `telemetry` misses the supplies of a node; chosen.
    """

    name: ClassVar[str] = "telemetry_blind"
    family: ClassVar[str] = "telemetry"
    device_class: ClassVar[str] = "bmc"
    needs: ClassVar[tuple[str, ...]] = ()
    any_of: ClassVar[tuple[str, ...]] = ("bmc.reachable", "exporter.up")
    wants: ClassVar[tuple[str, ...]] = ("event:bmc_lost", "event:exporter")
    cannot_see: ClassVar[str] = (
        "A BMC that answers with old values, a single sensor of it that is not read, and devices that are not "
        "configured."
    )

    seconds: float = 300.0
    node_seconds: float = BMC_RESTARTS

    known: dict[str, dict[str, Any]] = notes()  # entity -> seen, newest state, usual interval, since, times, reason
    conditions: OpenConditions = notes()

    def budget(self) -> list[str]:
        """See `Detector.budget`."""
        return [rule_line(f"BMCs and exporters that do not answer for {self.seconds:g} or {self.node_seconds:g} s")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """See `Detector.observe`."""
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        topology = next(iter(frames.values())).topology
        for device_class, signal in _SIGNALS.items():
            for entity, value in values_by_entity(frames.get(device_class), signal).items():
                self._record_state(entity, value > 0, time)
        for event in sorted((e for f in frames.values() for e in f.events), key=lambda e: (e.time, e.entity, e.kind)):
            self._record_event(event)
        self.known = {e: k for e, k in self.known.items() if time - k["seen"] <= _patience(e, k)}
        dark = {e: k["since"] for e, k in self.known.items() if k["times"] >= _AGAIN}
        close_ended(self.conditions, set(dark))
        found = []
        for entity, since in sorted(dark.items()):
            of_node = any(parent.startswith("node:") for parent in topology.parents.get(entity, ()))
            wait = self.node_seconds if of_node else self.seconds
            level: Level = "ticket" if time - since > wait * SECOND else "suspect"
            if due := due_report(self.conditions, entity, time, since, level):
                found.append(self._finding(entity, time, due))
        return found

    def _record_state(self, entity: str, answers: bool, time: int) -> None:
        known = self._known(entity, time)
        if known["state"]:
            gap = time - known["state"]
            every = known["every"] or gap
            known["every"] = every + FOLLOWS * (min(gap, LONGEST_GAP * every) - every)
        known["state"] = time
        known["times"] = 0 if answers else known["times"] + 1
        if known["times"] == 1:
            known["since"] = time

    def _record_event(self, event: Event) -> None:
        """Keeps the newest reason; it may come a moment before the state that it explains."""
        if event.kind in ("bmc_lost", "bmc_back", "exporter") and event.entity.startswith(("bmc:", "exporter:")):
            well = event.kind == "bmc_back" or event.data.get("state") == "up"
            known = self._known(event.entity, event.time)
            known["reason"] = "" if well else str(event.data.get("reason") or "")
            if event.kind == "bmc_lost":  # its agent waited long enough: the next state need not confirm it
                known["since"] = known["since"] if known["times"] else event.time
                known["times"] = max(known["times"], _AGAIN)
            elif event.kind == "bmc_back":
                known["times"] = 0

    def _known(self, entity: str, time: int) -> dict[str, Any]:
        fresh = {"seen": time, "state": 0, "every": 0.0, "since": 0, "times": 0, "reason": ""}
        known = self.known.setdefault(entity, fresh)
        known["seen"] = max(known["seen"], time)
        return known

    def _finding(self, entity: str, time: int, due: tuple[int, Level]) -> Finding:
        reason, kind = self.known[entity]["reason"] or _NO_REASON, entity.partition(":")[0]
        return self.finding(
            *(time, entity, due),
            score=1.0,
            summary=pager_title(entity, f"{_LOST[kind]}: {reason}"),
            signals=(_SIGNALS[kind],),
            clears="its first response",
            seconds=(time - due[0]) / SECOND,
            reason=reason,
        )


def _patience(entity: str, known: Mapping[str, Any]) -> float:
    return max(_REMOVED[entity.partition(":")[0]], READINGS * float(known["every"]))
