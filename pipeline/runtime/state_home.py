"""Where state goes of a user without a home."""

from __future__ import annotations

import os


def set_state_home() -> None:
    """Sets XDG_STATE_HOME for a user without a home, as a dynamic user of systemd on a host without libnss-systemd or a
    number in a container, so that state is in the unit's StateDirectory or a folder `fleetpulse` below it."""
    if os.environ.get("XDG_STATE_HOME") or not os.path.expanduser("~").startswith("~"):
        return
    folder = os.environ.get("STATE_DIRECTORY", "").partition(":")[0] or "/var/lib/fleetpulse"
    parent, _, name = folder.rstrip("/").rpartition("/")
    os.environ["XDG_STATE_HOME"] = (parent or "/") if name == "fleetpulse" else folder
