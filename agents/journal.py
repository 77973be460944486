"""Which events are also a line of the agent's log, so that `journalctl` tells on the node itself what happened."""

from __future__ import annotations

from pipeline.records import Event

LOUD = frozenset(
    (
        *("gpu_lost", "gpu_back", "gpu_count", "recovery_action", "xid", "sxid", "nvml_refused", "slow_call"),
        *("link_state", "leak", "flow_collapse", "pressure_collapse", "temperature_rise"),
        *("bmc_lost", "bmc_back", "disk_slow", "exporter", "job_start", "job_end"),
    )
)
_MOST = 240
"""Characters of one line; chosen, two lines of a terminal: the whole event is in the store."""


def line(event: Event) -> tuple[str, str] | None:
    """Subject and text of the line that an event deserves, if it does."""
    if event.kind not in LOUD:
        return None
    facts = (
        f"{key} {value}" for key, value in event.data.items() if isinstance(value, (str, int, float)) and value != ""
    )
    return f"{event.kind} {event.entity}", ", ".join(facts)[:_MOST]
