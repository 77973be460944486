"""`fleetpulse setup --units`: installs the units of systemd for an installation by pip. Starts nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from pipeline.config.files import DROP_INS
from pipeline.model.errors import UsageError
from pipeline.runtime.guides import find_guides
from pipeline.runtime.systemd import HOST_UNITS, UNIT_FOLDER, has_unit

WHEEL_UNITS = Path(__file__).parents[1] / "units"
"""The same files as UNIT_FOLDER has, in an installed wheel."""
PACKAGED = "/opt/fleetpulse/bin/fleetpulse"
"""The program that the units name."""
PACKAGED_GUIDES = "/opt/fleetpulse/share/doc/fleetpulse/docs"
"""The folder of the guides that the units name."""
SERVICES = {"node": ("agent",), "server": ("pipeline", "dashboard", "executor")}
SERVICES["one-host"] = (*SERVICES["node"], *SERVICES["server"])
ONE_HOST = "fleetpulse-agent.service.d/one-host.conf"
"""The drop-in for an agent whose spool a pipeline of the same host reads."""
HIDDEN = ("/home/", "/root/")
"""Folders that ProtectHome= hides from the units."""


def find_units() -> Path:
    """Returns the folder of the units. Raises UsageError if this installation has none."""
    found = next((folder for folder in (UNIT_FOLDER, WHEEL_UNITS) if folder.is_dir()), None)
    if found is None:
        raise UsageError("setup --units: this is a checkout; expected an installed wheel, a bundle or a package")
    return found


def find_program() -> Path:
    """Returns the command that the units run. Raises UsageError if services cannot reach it."""
    home = Path(sys.prefix).parent if UNIT_FOLDER.is_dir() else Path(sys.prefix)
    program = home / "bin" / "fleetpulse"
    if not program.is_file() or str(program).startswith(HIDDEN):
        why = "services cannot run that; expected a folder such as /opt/fleetpulse"
        raise UsageError(f"setup --units: {program}: {why}")
    return program


def find_wheel_program() -> str | None:
    """Returns the program of an installation by pip, which is not on PATH; None for a package and for a checkout."""
    if UNIT_FOLDER.is_dir() or not WHEEL_UNITS.is_dir():
        return None
    return str(Path(sys.prefix) / "bin" / "fleetpulse")


def find_missing(role: str) -> list[str]:
    """Returns the services of a role that have no unit of this installation, and the drop-in of one host."""
    missing = [service for service in SERVICES[role] if not has_unit(service)]
    return missing + [ONE_HOST] * (role == "one-host" and not (HOST_UNITS / ONE_HOST).exists())


def install_units(role: str, source: Path, program: Path, etc: Path = Path("/etc")) -> list[str]:
    """Writes units, users and folders of a role below `etc`, and has systemd read them. Returns the lines to print.

    Raises UsageError with what was written.
    """
    written: list[Path] = []
    try:
        for service in SERVICES[role]:
            text = (source / f"fleetpulse-{service}.service").read_text().replace(PACKAGED, str(program))
            text = text.replace(PACKAGED_GUIDES, _as_address(find_guides()))
            written.append(_write(etc / "systemd/system" / f"fleetpulse-{service}.service", text))
        for kind in ("agent",) * (role != "server") + ("server",) * (role != "node"):
            for form in ("sysusers", "tmpfiles"):
                text = (source / f"fleetpulse-{kind}.{form}.conf").read_text()
                written.append(_write(etc / f"{form}.d" / f"fleetpulse-{kind}.conf", text))
        if role == "one-host":
            drop_in = etc / "systemd/system" / ONE_HOST
            written.append(_write(drop_in, (source / "one-host.conf").read_text()))
        drop_ins = etc / "fleetpulse" / DROP_INS
        if not drop_ins.is_dir():
            drop_ins.mkdir(parents=True)
            drop_ins.chmod(0o755)  # services of other users read it
    except OSError as error:
        state = f"written: {', '.join(map(str, written)) or 'nothing'}; not written: other units, and the configuration"
        what = f"setup --units: {error.filename}: {error.strerror}"
        raise UsageError(f"{what}; expected to run as root; {state}: repeat the same command") from error
    if etc == Path("/etc"):
        _tell_systemd()
    return [f"unit: {path} written" for path in written]


def _as_address(folder: str) -> str:
    """Returns the folder of the guides as a unit names it (a percent sign is %%); of a checkout, that of packages."""
    return quote(folder).replace("%", "%%") if folder.startswith("/") else PACKAGED_GUIDES


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    return path


def _tell_systemd() -> None:
    """Makes users and folders, and has systemd read the units. Raises UsageError with what failed."""
    for words in (("systemd-sysusers",), ("systemd-tmpfiles", "--create"), ("systemctl", "daemon-reload")):
        if shutil.which(words[0]) is None:
            raise UsageError(f"setup --units: no {words[0]} here; expected a host with systemd")
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode and words[0] != "systemd-tmpfiles":  # it also reports what other packages left
            raise UsageError(f"setup --units: {' '.join(words)}: {done.stderr.strip()[-300:]}")
