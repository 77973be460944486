"""Reports sites of which no agent is heard: what the pipeline saw by wall clock, as one page for the whole site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from detectors.base.budget import rule_line
from detectors.base.detector import Detector
from detectors.base.findings import make_evidence
from pipeline.model.records import SECOND, Event, Finding, Frame, from_iso
from pipeline.model.topology import Topology

_MOST = 10**7  # agents that are believed; a larger number is no count


@dataclass
class TelemetrySite(Detector):
    """A site of which no agent is heard is a page, with the number of agents and what they share.

    The pipeline finds it by wall clock (35 s without a message of any agent) and writes the event `site_silent`, and
    `site_heard` when the first agent is back; no other detector sees it, because frames advance with telemetry. Where
    the pipeline itself cannot read (brokers away), the page says that instead. A finding depends on its event alone: it
    is made when the event is written, and a replay of the events makes the same.

    Source: the events of the pipeline.
    """

    name: ClassVar[str] = "telemetry_site"
    family: ClassVar[str] = "telemetry"
    device_class: ClassVar[str] = "site"
    needs: ClassVar[tuple[str, ...]] = ("event:site_silent",)
    wants: ClassVar[tuple[str, ...]] = ("event:site_heard",)
    on_arrival: ClassVar[tuple[str, ...]] = ("site_silent", "site_heard")
    cannot_see: ClassVar[str] = (
        "A part of a site (the detector `telemetry` reports it), agents that were not heard for 72 hours, and "
        "recordings without these events."
    )

    def budget(self) -> list[str]:
        return [rule_line("sites of which no agent is heard for 35 s")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Pages of these frames; Runner drops what it made on arrival, and their ends come from there alone."""
        topology = next((frame.topology for frame in frames.values()), Topology())
        found = (
            self.judge_event(event, topology)
            for frame in frames.values()
            for event in frame.events
            if event.kind == "site_silent"
        )
        return [finding for finding in found if finding is not None]

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """What one event says; None of one without its data."""
        agents, since = event.data.get("agents"), _since(event)
        if since is None or not isinstance(agents, int) or not 0 < agents < _MOST:
            return None
        silent = event.kind == "site_silent"
        summary = _summary(event, agents) if silent else f"Site {_name(event)}: agents report again"
        told = make_evidence(
            "the next message of one of its agents",
            None,
            agents=agents,
            silent_s=(event.time - since) / SECOND,
            nodes=event.data.get("nodes"),
            **{key: str(event.data.get(key) or "") for key in ("shares", "reading")},
            **{"holds" if silent else "cleared": True},
        )
        return Finding(
            event.time, since, event.entity, self.name, "page", float(agents), summary, told, ("node.load1",)
        )


def _since(event: Event) -> int | None:
    try:
        return min(event.time, from_iso(str(event.data.get("since"))))
    except ValueError:
        return None


def _name(event: Event) -> str:
    name = event.entity.partition(":")[2]
    return name if len(name) <= 24 else f"{name[:23]}…"


def _summary(event: Event, agents: int) -> str:
    """A title of at most 80 characters."""
    count = "the only agent" if agents == 1 else f"all {agents:,} agents"
    if event.data.get("reading"):
        return f"Site {_name(event)}: {count} not read, the pipeline reads nothing"
    shares = str(event.data.get("shares") or "")
    text = f"Site {_name(event)}: {count} silent"
    more = f", shared: {shares}" if shares and shares != "nothing known" else ""
    return text + more if len(text + more) <= 80 else text
