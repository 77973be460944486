"""Signals of the class leak: one leak detector. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

_REACTIONS = ("none", "force_off", "graceful_shutdown", "force_restart", "graceful_restart")
SIGNALS: tuple[Signal, ...] = (
    Signal("leak.state", "", "state", "leak", "u1", "What the detector says", "Redfish LeakDetector DetectorState", "hw.status", states=("ok", "warning", "critical", "unavailable", "absent"), normal=("ok", "absent"), harm="up", interval=5),
    Signal("leak.warning_reaction", "", "state", "leak", "u1", "What the BMC itself does at a warning", "Redfish LeakDetector WarningReactionType", states=_REACTIONS, interval=5),
    Signal("leak.critical_reaction", "", "state", "leak", "u1", "What the BMC itself does at a critical leak", "Redfish LeakDetector CriticalReactionType", states=_REACTIONS, interval=5),
    Signal("leak.reaction_delay", "s", "gauge", "leak", "f4", "Time from the detection to the BMC's reaction", "Redfish LeakDetector ReactionDelaySeconds", "", (0, 1e6), interval=5),
)  # fmt: skip
