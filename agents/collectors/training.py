"""Training steps that scripts report through agents.training: lengths of steps, loss, gradient norm, replica digests.

docs/training.md shows the script's side.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, Rhythm, wall_clock
from agents.sources.jobs.membership import memory_of_jobs
from agents.sources.training.doorway import Doorway
from agents.sources.training.owners import JobOwners, uids_of
from agents.sources.training.place import SYSTEM, places
from agents.sources.training.ranks import COUNTERS, GAUGES, Ranks
from pipeline.config.settings import wants

_REFUSED_S = 60.0
SAY_S = 600.0
"""At most one line about what was refused in so long; chosen: 144 a day, whoever sends what."""


def _is_mode(text: str) -> bool:
    """Whether it is a file mode in octal, as chmod takes it."""
    return len(text) in (3, 4) and all(digit in "01234567" for digit in text)


@dataclass
class Training(Collector):
    """rank.*: one entity per rank whose script reports steps to the socket.

    socket: its path; "" = FLEETPULSE_TRAINING_SOCKET, else /run/fleetpulse/agent/training.sock where that folder is
    ours to write, else in XDG_RUNTIME_DIR. mode: who may send; 0666: every user, since training runs as any.
    trusted: users who may report for any job. facts, jobs: what says whose a job is: the files of Slurm's prolog, and
    what the collector `jobs` keeps (in the service's state folder).
    """

    name: ClassVar[str] = "training"
    signals: ClassVar[tuple[str, ...]] = (*GAUGES, *COUNTERS, "node.training_refused")
    events: ClassVar[tuple[str, ...]] = ("replica_digest", "checkpoint")
    remote: ClassVar[bool] = True
    socket: str = ""
    mode: str = field(default="0666", metadata=wants('a file mode in octal, such as "0666"', _is_mode))
    trusted: tuple[str, ...] = ("root", "slurm")
    facts: Path = Path("/run/fleetpulse/jobs")
    jobs: Path | None = field(default_factory=memory_of_jobs)
    _wall: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _clock: Callable[[], float] = field(default_factory=lambda: time.monotonic, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _said: int = field(default=0, init=False, repr=False)
    _say_at: float = field(default=-math.inf, init=False, repr=False)
    _door: Doorway | None = field(default=None, init=False, repr=False)
    _trusted: frozenset[int] = field(default=frozenset(), init=False, repr=False)

    def open(self, node: str) -> None:
        self.close()
        self._node, self._rhythm, self._said = node, Rhythm(node, self._wall), 0
        self._owners, self._trusted = JobOwners(node, self.facts, self.jobs, self._clock), uids_of(self.trusted)
        self._ranks = Ranks(node, self._wall, self._clock, self._owners.of, self._trusted)
        self._door = Doorway(self._path(), int(self.mode, 8), self._ranks.receive)

    def read(self) -> tuple[Reading, ...]:
        if self._door is None:
            raise NoData("closed; wanted a socket")
        self._door.check()
        found = self._ranks.look()
        ranks = Reading("rank", found.entities, found.columns, found.events)
        self._say(found.refused)
        if not found.refused or not self._rhythm.due(_REFUSED_S):
            return (ranks,)
        refused = {"node.training_refused": np.array([found.refused], np.uint64)}
        return ranks, Reading("node", (f"node:{self._node}",), refused)

    def _say(self, refused: int) -> None:
        """A line for the journal when something was refused, one in SAY_S at most: any user can have it written."""
        if refused > self._said and self._clock() >= self._say_at:
            reason = "".join(c if c.isprintable() else "?" for c in self._ranks.reason)
            sys.stderr.write(f"collector training: {refused - self._said} datagrams refused, the last one {reason}\n")
            self._said, self._say_at = refused, self._clock() + SAY_S

    def inventory(self) -> Mapping[str, Device]:
        """Ranks with what they say of themselves; what the collector `jobs` knows of them comes first."""
        found: dict[str, Device] = {}
        for entity, (sender, uid) in self._ranks.senders().items():
            job = f"job:{sender.job}"
            stage = (f"stage:{sender.job}.{sender.stage}",) if sender.stage else ()
            gpu = (f"gpu:{self._node}.{sender.gpu}",) if sender.gpu >= 0 else ()
            if gpu and uid not in self._trusted and not self._owners.may_name(gpu[0], uid):
                gpu = ()  # of another user's job: digests of this rank must not page it, nor clear it
            # `node` marks who told of it, so that it leaves the topology when it ends (pipeline/model/membership.py)
            facts = {"node": self._node, "world_size": sender.world or None, "group": sender.group or None, "uid": uid}
            told = {key: value for key, value in facts.items() if value is not None}
            found[entity] = Device((*stage, job, *gpu, f"node:{self._node}"), told)
            found.setdefault(job, Device())
            found |= {name: Device((job,)) for name in stage if name not in found}
        if self._ranks.refused:
            found[f"node:{self._node}"] = Device((), {"training_refused": self._ranks.reason})
        return found

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def _path(self) -> Path:
        """Where to listen; a user's own folder is made."""
        if self.socket:
            return Path(self.socket)
        own = os.environ.get("XDG_RUNTIME_DIR", "")
        for path in map(Path, places(os.environ)):
            if own and path.parent.parent == Path(own) and path.parent.parent.is_dir():
                path.parent.mkdir(mode=0o700, exist_ok=True)
            if os.access(path.parent, os.W_OK):
                return path
        raise NoData(
            f"{Path(SYSTEM).parent}: not there, or not ours to write; wanted a folder for the socket of training "
            "steps: RuntimeDirectory=fleetpulse/agent in the agent's unit, or `socket` of [collector.training]"
        )
