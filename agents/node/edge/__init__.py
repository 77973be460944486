"""Rules that cannot wait for the stream: each tick's readings -> events that are spooled ahead of its telemetry."""

from agents.node.edge.rules import Edge

__all__ = ["Edge"]
