"""Reports sites whose agents are all silent: what the pipeline measured by wall clock, as one page for the site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.base.budget import rule_line
from detectors.base.detector import Detector
from pipeline.model.entity_names import TITLE_LENGTH, entity_name, pager_title
from pipeline.model.records import SECOND, Event, Finding, Frame, from_iso
from pipeline.model.topology import Topology

_MOST = 10**7  # agents; a larger number is not a count
_NAME_LENGTH = 30  # of a site in a title, which needs room for the rest


@dataclass
class TelemetrySite(Detector):
    """A site whose agents are all silent is a page, with the number of agents and what they share.

    The pipeline finds it by wall clock (35 s without a message of any agent) and writes the event `site_silent`, and
    `site_heard` when the first agent is back or the last one is decommissioned; no other detector can, because frames
    advance with telemetry. If the pipeline itself cannot read (brokers down), the title of the page reports that
    instead. A finding depends on its event alone: it is made when the event is written, and a replay makes the same.

    Source: the events of the pipeline.
    """

    name: ClassVar[str] = "telemetry_site"
    family: ClassVar[str] = "telemetry"
    device_class: ClassVar[str] = "site"
    needs: ClassVar[tuple[str, ...]] = ("event:site_silent",)
    wants: ClassVar[tuple[str, ...]] = ("event:site_heard",)
    on_arrival: ClassVar[tuple[str, ...]] = ("site_silent", "site_heard")
    cannot_see: ClassVar[str] = (
        "A part of a site (the detector `telemetry` reports it), agents without a message for 72 hours, and "
        "recordings without these events."
    )

    def budget(self) -> list[str]:
        """See `Detector.budget`."""
        return [rule_line("sites without a message of any agent for 35 s")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """See `Detector.observe`. The Runner drops findings reported on arrival; ends come from there alone."""
        topology = next((frame.topology for frame in frames.values()), Topology())
        found = (
            self.judge_event(event, topology)
            for frame in frames.values()
            for event in frame.events
            if event.kind == "site_silent"
        )
        return [finding for finding in found if finding is not None]

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """See `Detector.judge_event`; None for an event without its data."""
        agents, since = event.data.get("agents"), _since(event)
        if since is None or not isinstance(agents, int) or not 0 < agents < _MOST:
            return None
        silent = event.kind == "site_silent"
        facts: dict[str, Any] = {key: str(event.data.get(key) or "") for key in ("shares", "reading")}
        facts["holds" if silent else "cleared"] = True
        return self.finding(
            *(event.time, event.entity, (since, "page")),
            score=float(agents),
            summary=pager_title(_short(event.entity), _text(event, agents) if silent else _end(event)),
            signals=("node.load1",),
            clears="the next message of one of its agents, or that all are decommissioned",
            agents=agents,
            silent_s=(event.time - since) / SECOND,
            nodes=event.data.get("nodes"),
            **facts,
        )


def _end(event: Event) -> str:
    return "no agent is left in service" if event.data.get("out_of_service") else "agents report again"


def _since(event: Event) -> int | None:
    try:
        return min(event.time, from_iso(str(event.data.get("since"))))
    except ValueError:
        return None


def _short(entity: str) -> str:
    return entity if len(entity) <= _NAME_LENGTH else f"{entity[: _NAME_LENGTH - 1]}…"


def _text(event: Event, agents: int) -> str:
    """Returns the title without the name of the site."""
    count = "the only agent" if agents == 1 else f"all {agents:,} agents"
    if event.data.get("reading"):
        return f"{count} not read, the pipeline reads nothing"
    shares = str(event.data.get("shares") or "")
    text = f"{count} silent"
    more = f", shared: {entity_name(shares)}" if shares and shares != "nothing known" else ""
    fits = len(entity_name(_short(event.entity))) + 2 + len(text + more) <= TITLE_LENGTH
    return text + more if fits else text
