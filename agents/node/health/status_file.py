"""The small file in which the agent says how fit its node is: where it lies, and how it is read.

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
RUN = Path("/run/fleetpulse/agent")
"""RuntimeDirectory= of deploy/fleetpulse-agent.service: all users may read there, as monitoring does."""
STALE_S = 30.0
"""A status file older than this is ignored. The agent writes it every 10 s (agents/node/health/report.py)."""
MOST_BYTES = 1 << 20
"""Largest file that is read; chosen: 256 conditions of 400 characters are a tenth of it."""
LEVELS = ("critical", "warning")


class NoStatus(Exception):  # noqa: N818 - it is an answer: nobody knows
    """The agent did not say lately how fit the node is. The message says what was found, and the mend."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that speaks against giving this node a job. since: UTC microseconds."""

    name: str
    entity: str
    level: str
    since: int
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """What the agent said `age` seconds ago. collectors: name -> state and reason."""

    age: float
    collectors: Mapping[str, tuple[str, str]]
    conditions: tuple[Condition, ...]


def file_name(node: str) -> str:
    """Of the status of `node` in a folder that several agents may share."""
    return f"{quote(node, safe='')}.status.json"


def in_spool(directory: Path, node: str) -> Path:
    """Beside the spools of `node`, where it outlives the agent."""
    return directory / quote(node, safe="") / "status.json"


def places(config: Config, run: Path = RUN) -> tuple[Path, ...]:
    """Where the agent of this configuration may have written, the first that is there holds."""
    if config.check.status_file is not None:
        return (config.check.status_file,)
    return run / file_name(config.agent.node), in_spool(config.spool.directory, config.agent.node)


def boot() -> str:
    """The kernel's boot id; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def since_boot() -> float:
    """Seconds since the machine started, its sleep included; where no clock tells that, of one that never jumps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read(config: Config, run: Path = RUN) -> Status:
    """What the agent said last. Raises NoStatus if it said nothing, nothing lately, or nothing that can be read."""
    tried = places(config, run)
    path = next((path for path in tried if os.path.exists(path)), None)
    if path is None:
        raise NoStatus(f"no agent: nothing at {' or '.join(map(str, tried))}; systemctl status fleetpulse-agent")
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_BYTES))
        return _status(found, path, config.agent.node)
    except OSError as error:
        raise NoStatus(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NoStatus(f"{path}: is no status of an agent of this version: {type(error).__name__}") from error


def _status(found: Any, path: Path, node: str) -> Status:
    if found["version"] != VERSION:
        raise NoStatus(f"{path}: has version {found['version']!r}, wanted {VERSION}; restart the agent")
    if found["node"] != node:
        raise NoStatus(f"{path}: is of node {found['node']!r}, wanted {node!r}; see [agent] node")
    if found["simulated"]:
        raise NoStatus(f"{path}: is of a recording that is played back, not of this node")
    age = since_boot() - float(found["since_boot"])
    if found["boot"] != boot():
        raise NoStatus(f"{path}: is of another boot; the agent has not started yet")
    if not -1 <= age <= STALE_S:  # a file that is of the future, as after a restored machine, is no news either
        raise NoStatus(f"the agent has said nothing for {age:.0f} s ({path}); systemctl status fleetpulse-agent")
    states = {str(name): (str(state), str(reason)) for name, (state, reason) in found["collectors"].items()}
    return Status(age, states, tuple(condition(one) for one in found["conditions"]))


def condition(found: Mapping[str, Any]) -> Condition:
    """One condition of the file. Raises KeyError, TypeError or ValueError on anything else."""
    level = str(found["level"])
    if level not in LEVELS:
        raise ValueError(level)
    return Condition(str(found["name"]), str(found["entity"]), level, int(found["since"]), str(found["text"]))
