"""Secrets of which systemd gives a running unit copies: the drop-ins of our units, and what a missing copy means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.runtime.systemd import CREDENTIALS

DROP_INS = Path("/etc/systemd/system")
"""Folder of the drop-ins and units that `fleetpulse setup`, Ansible and administrators write."""
RUNTIME = Path("/run/systemd/system")
"""Folder of those that last until the next start of the host (`systemctl edit --runtime`)."""
PACKAGED = Path("/usr/lib/systemd/system")
"""Folder of the units of our packages. systemd takes a file of a name from DROP_INS, else RUNTIME, else here."""
_LOADED = re.compile(r"^[ \t]*LoadCredential(Encrypted)?[ \t]*=[ \t]*([^:\s]+):(/\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HandedOut:
    """The file that a unit's copy is made from. encrypted: only systemd can read it."""

    file: Path
    encrypted: bool = False


def list_texts() -> Iterator[tuple[str, str]]:
    """Yields (unit, text) of our units and of their drop-ins in the three folders, as systemd reads them."""
    units: dict[str, Path] = {}
    drop_ins: dict[tuple[str, str], Path] = {}
    for folder in (PACKAGED, RUNTIME, DROP_INS):
        units |= {file.name: file for file in folder.glob("fleetpulse-*.service")}
        found = folder.glob("fleetpulse-*.service.d/*.conf")
        drop_ins |= {(file.name, file.parent.name.removesuffix(".d")): file for file in found}
    named = [*units.items(), *((unit, drop_ins[name, unit]) for name, unit in sorted(drop_ins))]
    for unit, file in named:
        try:
            yield unit, file.read_text()
        except (OSError, UnicodeDecodeError):
            continue  # systemd reports it when the unit starts


def list_handed_out() -> dict[Path, HandedOut]:
    """Returns the file behind each copy that a unit or a drop-in hands out."""
    copies: dict[Path, HandedOut] = {}
    for unit, text in list_texts():
        loaded = _LOADED.findall(text)
        copies |= {CREDENTIALS / unit / name: HandedOut(Path(path), bool(form)) for form, name, path in loaded}
    return copies


def is_copy(path: Path) -> bool:
    """Returns whether a path is a copy of a unit's secret."""
    return path.is_relative_to(CREDENTIALS)


def explain_missing(copy: Path) -> str:
    """Returns why a copy is missing: no drop-in names it, or its unit does not run or was not restarted since."""
    unit = copy.relative_to(CREDENTIALS).parts[0]
    if copy in list_handed_out():
        return f"systemd makes this copy when {unit} starts"
    return f"no drop-in of {unit} has LoadCredential={copy.name}:FILE"
