"""Finds BMCs and exporters that are configured and not read: what they would tell is watched by nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.conditions import Open, close, tell
from detectors.detector import Detector, notes
from detectors.edge_events import values
from pipeline.records import SECOND, Event, Finding, Frame

_SIGNALS = {"bmc": "bmc.reachable", "exporter": "exporter.up"}
_MEANING = {
    "bmc": "leak detectors, coolant and power of this BMC are not watched",
    "exporter": "what this exporter gives is not watched",
}
_FORGET = 86_400 * SECOND  # a BMC of which nothing came for a day was taken out of the configuration; chosen
_UNSAID = "no reason was told"
_SILENT = "its agent tells nothing of it any more"


@dataclass
class TelemetryBlind(Detector):
    """A BMC or an exporter that does not answer for `seconds` is a ticket, with the reason that its agent gave.

    A BMC of which its agent tells nothing at all for so long is one too: agents tell of each every 10 s. Of exporters
    silence says nothing, since they are scraped as seldom as configured. It is over with the first answer.

    Source: a BMC restarts in 1-3 min, an update of its firmware takes longer and is worth a ticket (seconds, chosen).
    """

    name: ClassVar[str] = "telemetry_blind"
    family: ClassVar[str] = "telemetry"
    device_class: ClassVar[str] = "bmc"
    needs: ClassVar[tuple[str, ...]] = ("bmc.reachable",)
    wants: ClassVar[tuple[str, ...]] = ("exporter.up", "event:bmc_lost", "event:exporter")
    blind: ClassVar[str] = (
        "A BMC that answers with old values, one sensor of it that is not read, and what was never configured."
    )

    seconds: float = 300.0

    known: dict[str, dict[str, Any]] = notes()
    conditions: Open = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        for device_class, signal in _SIGNALS.items():
            for entity, value in values(frames.get(device_class), signal).items():
                self._see(entity, value > 0, time)
        for event in sorted((e for f in frames.values() for e in f.events), key=lambda e: (e.time, e.entity, e.kind)):
            self._hear(event)
        self.known = {entity: k for entity, k in self.known.items() if time - k["seen"] <= _FORGET}
        dark = {entity: since for entity in self.known if (since := self._since(entity, time)) is not None}
        close(self.conditions, set(dark))
        found = []
        for entity, since in sorted(dark.items()):
            if due := tell(self.conditions, entity, time, since, "ticket"):
                found.append(self._finding(entity, time, due[0]))
        return found

    def _see(self, entity: str, answers: bool, time: int) -> None:
        known = self.known.setdefault(entity, {"seen": time, "since": None, "reason": ""})
        known["seen"] = time
        if answers:
            known["since"], known["reason"] = None, ""
        elif known["since"] is None:
            known["since"] = time

    def _hear(self, event: Event) -> None:
        """Keeps the newest reason of whom is not answering."""
        known = self.known.get(event.entity)
        if event.kind in ("bmc_lost", "exporter") and known is not None and known["since"] is not None:
            known["reason"] = str(event.data.get("reason") or known["reason"])

    def _since(self, entity: str, time: int) -> int | None:
        """Since when nothing is known of it, if that is for too long."""
        known, longest = self.known[entity], self.seconds * SECOND
        if known["since"] is not None and time - known["since"] > longest:
            return int(known["since"])
        silent = entity.startswith("bmc:") and time - known["seen"] > longest
        return int(known["seen"]) if silent else None

    def _finding(self, entity: str, time: int, onset: int) -> Finding:
        known, kind = self.known[entity], entity.partition(":")[0]
        reason = (known["reason"] or _UNSAID) if known["since"] is not None else _SILENT
        summary = f"{entity} is not read: {_MEANING[kind]}: {reason}"
        evidence = {"seconds": (time - onset) / SECOND, "reason": reason}
        return Finding(time, onset, entity, self.name, "ticket", 1.0, summary, evidence, (_SIGNALS[kind],))
