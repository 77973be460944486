"""`fleetpulse setup --units` on a host that is configured: the units of the new version; the configuration stays."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pipeline.commands import units
from pipeline.commands.installed import is_node
from pipeline.commands.setup_answers import Ask, ask_role
from pipeline.config.sections import load_config
from pipeline.model.errors import Refused
from pipeline.runtime import systemd

TOKENS = "tokens"
"""Name of the file of tokens beside the configuration, which the units of a server load."""
_CONFIGURING = ("site", "kafka", "gpus", "webhook", "allow_http", "allow_private")


def renew_units(given: argparse.Namespace, ask: Ask, path: Path, source: Path, program: Path) -> list[str]:
    """Writes the units of a host that is configured, as after an upgrade by pip. Returns the lines to print.

    Raises Refused for a flag that would change the configuration, and for a role that it cannot have; ConfigError if
    the services could not read it.
    """
    flags = [flag.replace("_", "-") for flag in _CONFIGURING if getattr(given, flag) not in (None, False)]
    if flags:
        raise Refused(
            f"{path}: exists; expected no --{flags[0]}, then the units alone are written; change it by hand, or: "
            "fleetpulse setup --units --replace"
        )
    serves, usual = _read_role(path)
    role = ask_role(given, ask, usual)
    _check_role(role, serves, path)
    said = units.install_units(role, source, program)
    names = " ".join(f"fleetpulse-{service}" for service in units.SERVICES[role])
    return [*said, f"configuration: {path} stays", "", "Next:", f"    systemctl try-restart {names}"]


def find_installed_role() -> str | None:
    """Returns the role of the units that are installed, or of a package of nodes; None if nothing says it."""
    agent, pipeline = (_is_installed(service) for service in ("agent", "pipeline"))
    if agent and pipeline:
        return "one-host"
    if agent or pipeline:
        return "node" if agent else "server"
    return "node" if is_node() else None


def _is_installed(service: str) -> bool:
    return os.path.lexists(systemd.HOST_UNITS / f"fleetpulse-{service}.service")


def _read_role(path: Path) -> tuple[bool, str]:
    """Returns whether the host may be a server, and its usual role: that of its units, else of its configuration."""
    config = load_config(path)
    serves = config.api.token_file is not None or (path.parent / TOKENS).exists() or _is_installed("pipeline")
    if not serves:
        return False, "node"
    return True, find_installed_role() or ("server" if config.pipeline.transport == "kafka" else "one-host")


def _check_role(role: str, serves: bool, path: Path) -> None:
    """Raises Refused for the role of a server on a node, and for that of a node on a server without an agent."""
    if role != "node" and not serves:
        raise Refused(
            f"setup --units: {path} is that of a node: [api] token_file is not set, and there is no "
            f"{path.parent / TOKENS}; expected --role node; to make this host a {role}: fleetpulse setup --units "
            f"--replace --role {role}"
        )
    if role == "node" and serves and _is_installed("pipeline") and not _is_installed("agent"):
        raise Refused(
            f"setup --units: {systemd.HOST_UNITS}/fleetpulse-pipeline.service: this host is a server; expected --role "
            "server, or one-host for an agent beside it"
        )
