"""What the agent says of its node's fitness for a job: kept from its events, written for `fleetpulse check`.

The file is written atomically at each change and at least every 10 s, so that silence tells too. What a person or a
reset must mend outlives a restart of the agent within one boot: it is read back from the copy in the spool.
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
from agents.node.health.rules import RULES, Rule
from agents.node.health.status_file import Condition
from agents.node.spool.disk import AtOnce, SmallFiles
from agents.node.workers.worker import Worker
from pipeline.config.sections import Config
from pipeline.model.records import Event, Origin
from pipeline.model.signals import CATALOGUE

EVERY_S = 10.0
"""How often the file is written though nothing changed; a third of what makes it stale."""
MOST = 256
"""Most conditions; chosen: 16 GPUs with as many of their errors. The newest beyond that go unsaid: it is unfit."""
MOST_TEXT = 200
"""Characters of a text; chosen, what a scheduler shows of a reason."""
READABLE = 0o644
"""Monitoring reads as a user of its own; nothing here is secret."""
_DRY = CATALOGUE["leak.state"].states.index("ok")
SOUND = (
    ("gpu.present", 1, "gpu_lost"),
    ("gpu.recovery_action", 0, "recovery_action"),
    ("nic.state", 1, "link_down"),
    ("leak.state", _DRY, "leak"),
)
"""Signal, the value that ends a condition, and the rule of that condition."""
OUTLIVING = {rule.name for rule in RULES if rule.outlives}
Key = tuple[str, str]


class Fitness:
    """Of one node. `paths`: where it is written; the first, by `files`, is read back at the start."""

    def __init__(
        self,
        origin: Origin,
        paths: Iterable[Path],
        say: Callable[[str, str], None],
        files: SmallFiles | None = None,
    ) -> None:
        self._files = files or AtOnce()
        self._node, self._simulated, self._paths, self._say = origin.node, origin.simulated, tuple(paths), say
        self._boot, self._written = status_file.boot(), -EVERY_S
        self._refused: set[Path] = set()
        self._conditions: dict[Key, Condition] = {}
        if self._files.answers:
            self._conditions = _kept(self._paths[0], origin.node, self._boot)
        self._collectors: dict[str, tuple[str, str]] = {}
        self._expected = 0

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What holds now."""
        return tuple(self._conditions.values())

    def take(self, readings: Iterable[Reading], events: Iterable[Event], workers: Iterable[Worker], now: int) -> None:
        """Called at every turn of the loop, with what was seen and what happened since the last."""
        before, states = dict(self._conditions), self._collectors
        self._collectors = {w.collector.name: (w.state, w.reason[:MOST_TEXT]) for w in workers}
        for event in events:
            self._follow(event)
        for reading in readings:
            self._mend(reading)
        if (before, states) != (
            self._conditions,
            self._collectors,
        ) or status_file.since_boot() - self._written >= EVERY_S:
            self._write(now)

    def _follow(self, event: Event) -> None:
        """Begins and ends what an event says."""
        for rule in RULES:
            if event.kind in rule.ended_by:
                self._end(rule.name, event.entity)
            if event.kind == rule.kind:
                self._judge(rule, event)
        if event.kind == "recovery_action" and event.data.get("to") == 0:  # the driver's all-clear is of all its errors
            self._end("xid", event.entity)
        if event.kind == "gpu_count" and event.data.get("source") == "nvml":
            self._expected = int(event.data.get("expected", 0))

    def _mend(self, reading: Reading) -> None:
        """Ends what values show to be over: a collector that was started anew tells no ends of what it forgot."""
        for signal, sound, rule in SOUND:
            column = reading.columns.get(signal)
            if column is not None and any(name.split(".")[0] == rule for name, _ in self._conditions):
                for i in np.flatnonzero(column == sound):
                    self._end(rule, reading.entities[i])
        present = reading.columns.get("gpu.present")
        if present is not None and np.count_nonzero(present == 1) >= self._expected:
            self._conditions.pop(("gpu_count.nvml", f"node:{self._node}"), None)
        found, expected = (reading.columns.get(signal) for signal in ("node.gpu_pci", "node.gpu_expected"))
        if found is not None and expected is not None and found[0] >= expected[0]:
            self._conditions.pop(("gpu_count.pci", f"node:{self._node}"), None)

    def _judge(self, rule: Rule, event: Event) -> None:
        key, holds = (rule.called(event), event.entity), rule.holds(event.data)
        if holds is False:
            self._conditions.pop(key, None)
        elif holds and (key in self._conditions or self._room(rule)):
            since = self._conditions[key].since if key in self._conditions else event.time
            self._conditions[key] = Condition(*key, rule.level, since, rule.says(event.data)[:MOST_TEXT])

    def _room(self, rule: Rule) -> bool:
        """Whether there is room for one more; a critical condition takes that of the newest one that only warns."""
        if len(self._conditions) < MOST:
            return True
        lesser = [key for key, one in self._conditions.items() if one.level != "critical"]
        if rule.level != "critical" or not lesser:
            return False
        del self._conditions[lesser[-1]]
        return True

    def _end(self, rule: str, entity: str) -> None:
        """Ends the conditions of a rule at an entity; those of switches, told of the node, end with any of its GPUs."""
        places = {entity, f"node:{self._node}"} if entity.startswith("gpu:") else {entity}
        for key in list(self._conditions):
            if key[0].split(".")[0] == rule and key[1] in places:
                del self._conditions[key]

    def _write(self, now: int) -> None:
        self._written = status_file.since_boot()
        whole = {"version": status_file.VERSION, "node": self._node, "boot": self._boot, "since_boot": self._written}
        whole |= {"time": now, "simulated": self._simulated, "collectors": self._collectors}
        whole["conditions"] = [_plain(one) for one in self._conditions.values()]
        text = json.dumps(whole)
        self._files.later(self._paths[0], lambda: self._replace(self._paths[0], text))
        for path in self._paths[1:]:
            self._replace(path, text)

    def _replace(self, path: Path, text: str) -> None:
        try:
            _put(path, text)
            if path in self._refused:
                self._say(f"status {path}", "is written again")
            self._refused.discard(path)
        except OSError as error:  # the check then finds it stale and says that it does not know: that is right
            self._say(f"status {path}", f"cannot be written: {error.strerror}; fleetpulse check will not know")
            self._refused.add(path)


def open_fitness(
    config: Config,
    origin: Origin,
    say: Callable[[str, str], None],
    environment: Mapping[str, str] = os.environ,
    files: SmallFiles | None = None,
) -> Fitness:
    """In the spool, where it outlives the agent, and where everybody may read: the service's RuntimeDirectory=."""
    node = origin.node
    kept = status_file.in_spool(config.spool.directory, node)
    shared = config.check.status_file
    if shared is None and environment.get("RUNTIME_DIRECTORY"):  # several with colons between: ours is the first
        shared = Path(environment["RUNTIME_DIRECTORY"].split(":")[0]) / status_file.file_name(node)
        with contextlib.suppress(OSError):  # where it cannot be made, the first writing says so
            shared.parent.mkdir(exist_ok=True)
    return Fitness(origin, (kept,) if shared is None else (kept, shared), say, files)


def _put(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, READABLE)
    with os.fdopen(handle, "w") as file:
        os.fchmod(handle, READABLE)  # the service's umask closes it to others
        file.write(text)
    os.replace(new, path)


def _plain(one: Condition) -> dict[str, Any]:
    return {"name": one.name, "entity": one.entity, "level": one.level, "since": one.since, "text": one.text}


def _kept(path: Path, node: str, boot: str) -> dict[Key, Condition]:
    """What an agent of the same boot left; nothing if there was none, or it is not what we wrote."""
    try:
        found = json.loads(path.read_bytes()[: status_file.MOST_BYTES])
        if (found["version"], found["node"], found["boot"]) != (status_file.VERSION, node, boot):
            return {}
        kept = [status_file.condition(one) for one in found["conditions"][:MOST]]
        return {(one.name, one.entity): one for one in kept if one.name.partition(".")[0] in OUTLIVING}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
