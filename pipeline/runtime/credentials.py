"""Secrets of which systemd gives a running unit copies: the drop-ins of our units, and what a missing copy means."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.runtime.systemd import CREDENTIALS

DROP_INS = Path("/etc/systemd/system")
"""Folder of the drop-ins and units that `fleetpulse setup`, Ansible and administrators write."""
PACKAGED = Path("/usr/lib/systemd/system")
"""Folder of the units of our packages; a unit of the same name in DROP_INS takes the place of one of these."""
_LOADED = re.compile(r"^[ \t]*LoadCredential[ \t]*=[ \t]*([^:\s]+):(/\S+)\s*$", re.MULTILINE)


def list_handed_out() -> dict[Path, Path]:
    """Returns copy -> file of each secret that a drop-in or a unit hands out, below DROP_INS or of our packages."""
    found: dict[Path, Path] = {}
    units = {file.name: file for folder in (PACKAGED, DROP_INS) for file in folder.glob("fleetpulse-*.service")}
    for file in (*units.values(), *sorted(DROP_INS.glob("fleetpulse-*.service.d/*.conf"))):
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError):
            continue  # systemd reports it when the unit starts
        unit = file.name if file.suffix == ".service" else file.parent.name.removesuffix(".d")
        found |= {CREDENTIALS / unit / name: Path(path) for name, path in _LOADED.findall(text)}
    return found


def is_copy(path: Path) -> bool:
    """Returns whether a path is a copy of a unit's secret."""
    return path.is_relative_to(CREDENTIALS)


def explain_missing(copy: Path) -> str:
    """Returns why a copy is missing: no drop-in names it, or its unit does not run or was not restarted since."""
    unit = copy.relative_to(CREDENTIALS).parts[0]
    if copy in list_handed_out():
        return f"systemd makes this copy when {unit} starts"
    return f"no drop-in of {unit} has LoadCredential={copy.name}:FILE"
