"""Where the socket of training steps is: one rule for the agent and for training scripts."""

from __future__ import annotations

from collections.abc import Mapping

SYSTEM = "/run/fleetpulse/agent/training.sock"
"""Of an agent that runs as a service: systemd makes the folder (RuntimeDirectory=fleetpulse/agent)."""
VARIABLE = "FLEETPULSE_TRAINING_SOCKET"


def places(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Paths to try in this order: what FLEETPULSE_TRAINING_SOCKET names alone, else the service's, then the user's."""
    if chosen := environment.get(VARIABLE):
        return (chosen,)
    own = environment.get("XDG_RUNTIME_DIR")
    return (SYSTEM, f"{own}/fleetpulse/training.sock") if own else (SYSTEM,)
