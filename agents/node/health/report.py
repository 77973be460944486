"""The health of the agent's node: conditions kept from its events, and written for `fleetpulse check`.

The file is written atomically at each change and at least every 10 s, so that a missing write is a sign too. Conditions
that end only by a person or a reset survive a restart of the agent within one boot: they are read from the copy in the
spool.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agents.collector import Reading
from agents.node.health import status_file
from agents.node.health.rules import RULES, HealthRule
from agents.node.health.status_file import HealthCondition
from agents.node.spool.disk import FileWriter, ImmediateFileWriter
from agents.node.workers.worker import Worker
from pipeline.config.sections import Config
from pipeline.model.records import Event, Origin
from pipeline.model.signals import CATALOGUE

WRITE_INTERVAL_S = 10.0
"""How often the file is written if nothing changed; a third of the age at which it is stale."""
MAX_CONDITIONS = 256
"""Chosen: 16 GPUs with as many errors each. Newer ones are not listed: the node is unfit anyway."""
MAX_TEXT = 200
"""Characters of a text; chosen, what a scheduler shows of a reason."""
FILE_MODE = 0o644
"""Monitoring reads the file as another user; nothing in it is secret."""
_DRY = CATALOGUE["leak.state"].states.index("ok")
HEALTHY_VALUES = (
    ("gpu.present", 1, "gpu_lost"),
    ("gpu.recovery_action", 0, "recovery_action"),
    ("nic.state", 1, "link_down"),
    ("leak.state", _DRY, "leak"),
)
"""Signal, the value that ends a condition, and the rule of that condition."""
PERSISTENT = {rule.name for rule in RULES if rule.survives_restart}
Key = tuple[str, str]


class NodeHealth:
    """The conditions of one node. `paths`: where it writes; the first, by `files`, is read at the start."""

    def __init__(
        self,
        origin: Origin,
        paths: Iterable[Path],
        log: Callable[[str, str], None],
        files: FileWriter | None = None,
    ) -> None:
        self._files = files or ImmediateFileWriter()
        self._node, self._simulated, self._paths, self._log = origin.node, origin.simulated, tuple(paths), log
        self._boot, self._written = status_file.read_boot_id(), -WRITE_INTERVAL_S
        self._refused: set[Path] = set()
        self._conditions: dict[Key, HealthCondition] = {}
        if self._files.disk_responds:
            self._conditions = _load_conditions(self._paths[0], origin.node, self._boot)
        self._collectors: dict[str, tuple[str, str]] = {}
        self._expected = 0

    @property
    def conditions(self) -> tuple[HealthCondition, ...]:
        """The active conditions."""
        return tuple(self._conditions.values())

    def update(self, readings: Iterable[Reading], events: Iterable[Event], workers: Iterable[Worker], now: int) -> None:
        """Applies the readings and events since the last call; called at every iteration of the loop."""
        before, states = dict(self._conditions), self._collectors
        self._collectors = {w.collector.name: (w.state, w.reason[:MAX_TEXT]) for w in workers}
        for event in events:
            self._apply_event(event)
        for reading in readings:
            self._apply_values(reading)
        changed = (before, states) != (self._conditions, self._collectors)
        if changed or status_file.seconds_since_boot() - self._written >= WRITE_INTERVAL_S:
            self._write_status(now)

    def _apply_event(self, event: Event) -> None:
        """Begins and ends conditions by an event."""
        for rule in RULES:
            # only a GPU's: counters of a node are those of its kernel, and say nothing of its switches
            if event.kind in rule.ended_by and event.entity.startswith("gpu:"):
                self._end_condition(rule.name, event.entity)
            if event.kind == rule.kind:
                self._apply_rule(rule, event)
        if event.kind == "recovery_action" and event.data.get("to") == 0:  # the driver clears all errors of the GPU
            self._end_condition("xid", event.entity)
        if event.kind == "gpu_count" and event.data.get("source") == "nvml":
            self._expected = int(event.data.get("expected", 0))

    def _apply_values(self, reading: Reading) -> None:
        """Ends conditions by healthy values: a restarted collector sends no end of what it no longer remembers."""
        for signal, healthy, rule in HEALTHY_VALUES:
            column = reading.columns.get(signal)
            if column is not None and any(name.split(".")[0] == rule for name, _ in self._conditions):
                for i in np.flatnonzero(column == healthy):
                    self._end_condition(rule, reading.entities[i])
        present = reading.columns.get("gpu.present")
        if present is not None and np.count_nonzero(present == 1) >= self._expected:
            self._conditions.pop(("gpu_count.nvml", f"node:{self._node}"), None)
        found, expected = (reading.columns.get(signal) for signal in ("node.gpu_pci", "node.gpu_expected"))
        if found is not None and expected is not None and found[0] >= expected[0]:
            self._conditions.pop(("gpu_count.pci", f"node:{self._node}"), None)

    def _apply_rule(self, rule: HealthRule, event: Event) -> None:
        key, holds = (rule.condition_name(event), event.entity), rule.holds(event.data)
        if holds is False:
            self._conditions.pop(key, None)
        elif holds and (key in self._conditions or self._make_room(rule)):
            since = self._conditions[key].since if key in self._conditions else event.time
            self._conditions[key] = HealthCondition(*key, rule.level, since, rule.describe(event.data)[:MAX_TEXT])

    def _make_room(self, rule: HealthRule) -> bool:
        """Whether one more condition fits; a critical one replaces the newest warning."""
        if len(self._conditions) < MAX_CONDITIONS:
            return True
        warnings = [key for key, one in self._conditions.items() if one.level != "critical"]
        if rule.level != "critical" or not warnings:
            return False
        del self._conditions[warnings[-1]]
        return True

    def _end_condition(self, rule: str, entity: str) -> None:
        """Ends a rule's conditions of an entity; those of switches, which name the node, end with any of its GPUs."""
        entities = {entity, f"node:{self._node}"} if entity.startswith("gpu:") else {entity}
        for key in list(self._conditions):
            if key[0].split(".")[0] == rule and key[1] in entities:
                del self._conditions[key]

    def _write_status(self, now: int) -> None:
        self._written = status_file.seconds_since_boot()
        whole = {"version": status_file.VERSION, "node": self._node, "boot": self._boot, "since_boot": self._written}
        whole |= {"time": now, "simulated": self._simulated, "collectors": self._collectors}
        whole["conditions"] = [_condition_json(one) for one in self._conditions.values()]
        text = json.dumps(whole)
        self._files.write_later(self._paths[0], lambda: self._replace(self._paths[0], text))
        for path in self._paths[1:]:
            self._replace(path, text)

    def _replace(self, path: Path, text: str) -> None:
        try:
            _replace_file(path, text)
            if path in self._refused:
                self._log(f"status {path}", "is written again")
            self._refused.discard(path)
        except OSError as error:  # the check finds a stale file and returns UNKNOWN, which is right
            self._log(f"status {path}", f"cannot be written: {error.strerror}; fleetpulse check returns UNKNOWN")
            self._refused.add(path)


def open_health(
    config: Config,
    origin: Origin,
    log: Callable[[str, str], None],
    environment: Mapping[str, str] = os.environ,
    files: FileWriter | None = None,
) -> NodeHealth:
    """The health of a node, written to the spool, where it outlives the agent, and to RuntimeDirectory=."""
    node = origin.node
    kept = status_file.spool_status_path(config.spool.directory, node)
    shared = config.check.status_file
    if shared is None and environment.get("RUNTIME_DIRECTORY"):  # several separated by colons: ours is the first
        shared = Path(environment["RUNTIME_DIRECTORY"].split(":")[0]) / status_file.status_file_name(node)
        with contextlib.suppress(OSError):  # if it cannot be made, the first write reports that
            shared.parent.mkdir(exist_ok=True)
    return NodeHealth(origin, (kept,) if shared is None else (kept, shared), log, files)


def _replace_file(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE)
    with os.fdopen(handle, "w") as file:
        os.fchmod(handle, FILE_MODE)  # the service's umask would hide it from others
        file.write(text)
    os.replace(new, path)


def _condition_json(one: HealthCondition) -> dict[str, Any]:
    return {"name": one.name, "entity": one.entity, "level": one.level, "since": one.since, "text": one.text}


def _load_conditions(path: Path, node: str, boot: str) -> dict[Key, HealthCondition]:
    """The conditions that an agent of the same boot saved; empty if there are none, or the file is invalid."""
    try:
        found = json.loads(path.read_bytes()[: status_file.MAX_BYTES])
        if (found["version"], found["node"], found["boot"]) != (status_file.VERSION, node, boot):
            return {}
        kept = [status_file.parse_condition(one) for one in found["conditions"][:MAX_CONDITIONS]]
        return {(one.name, one.entity): one for one in kept if one.name.partition(".")[0] in PERSISTENT}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
