"""The watch itself."""

from __future__ import annotations

from dataclasses import dataclass

from agents.sim.effects import Effects
from agents.sim.faults.kind import HOUR, Fault, Kind, Rate, Span


@dataclass(frozen=True)
class TelemetryGap(Kind):
    """Agent of a node sends nothing, and what it did not send is lost: no rows, no events; the node itself works on.

    An outage of Kafka leaves no trace in data that are read later: agents keep what they cannot send and send it all.
    """

    name = "telemetry_gap"
    row = 33
    strikes = "node"
    detectability = "hard"
    attribution = "telemetry"
    seen = "that the node is silent while its job steps on"
    unseen = "everything else of the node while it lasts; a Kafka outage: late, but nothing is missing"
    rate = Rate(1.0, "1,000 node-days", "assumed")
    lasts = Span(10.0, 180.0, HOUR)  # mean 3 min; assumed
    signals = ("node.uptime", "gpu.power")  # their rows, as all others of the node, are missing

    def act(self, fault: Fault, effects: Effects) -> None:
        effects.node.silent.add(fault.device, effects.within(fault.onset, fault.end))
