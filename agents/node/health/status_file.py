"""The small file in which the agent reports the health of its node: its paths, and how it is read.

    {"version": 1, "node", "boot", "since_boot", "time", "simulated", "collectors": {NAME: [state, reason]},
     "conditions": [{"name", "entity", "level", "since", "text"}]}

`since_boot` is CLOCK_BOOTTIME in s: the age of the file is right whatever happens to the wall clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.config.sections import Config

VERSION = 1
RUN_FOLDER = Path("/run/fleetpulse/agent")
"""RuntimeDirectory= of deploy/systemd/fleetpulse-agent.service: all users may read it, as monitoring does."""
STALE_S = 30.0
"""A file older than this is not used. The agent writes it every 10 s (agents/node/health/report.py)."""
MAX_BYTES = 1 << 20
"""Largest file that is read; chosen: 256 conditions of 400 characters are a tenth of it."""
LEVELS = ("critical", "warning")


class NoStatus(Exception):  # noqa: N818 - it is a result: the health is unknown
    """There is no recent report of the agent. The message names the file and the fix."""


@dataclass(frozen=True, slots=True)
class HealthCondition:
    """One reason not to give this node a job. since: UTC microseconds."""

    name: str
    entity: str
    level: str
    since: int
    text: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What the agent reported `age` seconds ago. collectors: name -> state and reason."""

    age: float
    collectors: Mapping[str, tuple[str, str]]
    conditions: tuple[HealthCondition, ...]


def status_file_name(node: str) -> str:
    """Name of the status file of `node` in a folder that several agents may share."""
    return f"{quote(node, safe='')}.status.json"


def spool_status_path(directory: Path, node: str) -> Path:
    """Path of the status file beside the spools of `node`, where it outlives the agent."""
    return directory / quote(node, safe="") / "status.json"


def status_paths(config: Config, run: Path = RUN_FOLDER) -> tuple[Path, ...]:
    """Where the agent of this configuration may have written; the first existing file is used."""
    if config.check.status_file is not None:
        return (config.check.status_file,)
    return run / status_file_name(config.agent.node), spool_status_path(config.spool.directory, config.agent.node)


def read_boot_id() -> str:
    """The kernel's boot id; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def seconds_since_boot() -> float:
    """Seconds since the machine started, suspend included; without such a clock, of one that never jumps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read_status(config: Config, run: Path = RUN_FOLDER) -> NodeStatus:
    """The last report of the agent. Raises NoStatus if there is none, or it is stale or unreadable."""
    tried = status_paths(config, run)
    path = next((path for path in tried if os.path.exists(path)), None)
    if path is None:
        raise NoStatus(f"no agent: no file {' or '.join(map(str, tried))}; systemctl status fleetpulse-agent")
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_BYTES))
        return _parse_status(found, path, config.agent.node)
    except OSError as error:
        raise NoStatus(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NoStatus(f"{path}: is not a status of an agent of this version: {type(error).__name__}") from error


def _parse_status(found: Any, path: Path, node: str) -> NodeStatus:
    if found["version"] != VERSION:
        raise NoStatus(f"{path}: has version {found['version']!r}, expected {VERSION}; restart the agent")
    if found["node"] != node:
        raise NoStatus(f"{path}: is of node {found['node']!r}, expected {node!r}; see [agent] node")
    if found["simulated"]:
        raise NoStatus(f"{path}: is of a replayed recording, not of this node")
    age = seconds_since_boot() - float(found["since_boot"])
    if found["boot"] != read_boot_id():
        raise NoStatus(f"{path}: is of another boot; the agent has not started yet")
    if not -1 <= age <= STALE_S:  # a file from the future, as after restoring a machine, is stale too
        raise NoStatus(f"no report of the agent for {age:.0f} s ({path}); systemctl status fleetpulse-agent")
    states = {str(name): (str(state), str(reason)) for name, (state, reason) in found["collectors"].items()}
    return NodeStatus(age, states, tuple(parse_condition(one) for one in found["conditions"]))


def parse_condition(found: Mapping[str, Any]) -> HealthCondition:
    """One condition of the file. Raises KeyError, TypeError or ValueError on anything else."""
    level = str(found["level"])
    if level not in LEVELS:
        raise ValueError(level)
    return HealthCondition(str(found["name"]), str(found["entity"]), level, int(found["since"]), str(found["text"]))
