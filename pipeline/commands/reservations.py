"""Slurm's maintenance reservations (flag MAINT) as maintenance windows: added, changed and ended with them.

`scontrol` runs on this host, as any user may. A hung one is ended after its time limit; the known windows stay.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.engine.people import People
from pipeline.incidents.silences import make_scope_matchers
from pipeline.judging.mutes import MAX_MUTE_US
from pipeline.model.errors import FleetpulseError, Unreachable
from pipeline.model.records import SECOND, Caller

log = logging.getLogger("fleetpulse.slurm")
TIMEOUT_S = 30.0
"""Time limit of one scontrol (s). Chosen: three times Slurm's own message timeout."""
SOURCE = "slurm:"
USER = Caller("slurm", "operator", "scontrol")
Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Reservation:
    """A maintenance reservation: its name, times (UTC us) and nodes."""

    name: str
    starts: int
    ends: int
    nodes: tuple[str, ...]

    @property
    def id(self) -> str:
        """The id of its window: fixed by name and start, so that a later one of the same name is another."""
        return f"slurm-{hashlib.sha256(f'{self.name} {self.starts}'.encode()).hexdigest()[:8]}"


def run_scontrol(words: Sequence[str]) -> str:
    """Returns the output of scontrol, with times in seconds since 1970. Raises Unreachable."""
    environ = {**os.environ, "SLURM_TIME_FORMAT": "%s", "TZ": "UTC"}
    try:
        ran = subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, timeout=TIMEOUT_S, env=environ, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"scontrol {' '.join(words)}: {error}") from error
    if ran.returncode:
        raise Unreachable(f"scontrol {' '.join(words)}: {ran.stderr.strip() or ran.returncode}")
    return ran.stdout


def read_reservations(run: Run = run_scontrol) -> list[Reservation]:
    """Returns the maintenance reservations with nodes. Raises Unreachable."""
    found = []
    for line in run(["-o", "show", "reservation"]).splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        nodes = facts.get("Nodes", "(null)")
        if "MAINT" not in facts.get("Flags", "").split(",") or nodes in ("", "(null)"):
            continue
        names = tuple(run(["show", "hostnames", nodes]).split())
        times = (int(facts["StartTime"]) * SECOND, int(facts["EndTime"]) * SECOND)
        found.append(Reservation(facts["ReservationName"], *times, names))
    return found


def apply_reservations(people: People, reservations: Sequence[Reservation]) -> int:
    """Adds, changes and ends maintenance windows so that they are as the reservations; returns how many changed."""
    now, changed = people.engine.clock(), 0
    wanted = {r.id: r for r in reservations if r.ends > now}
    known = {s.id: s for s in people.list_silences("maintenance") if s.source.startswith(SOURCE)}
    for id_, reservation in wanted.items():
        matchers = make_scope_matchers([f"node:{name}" for name in reservation.nodes])
        ends, starts = min(reservation.ends, max(now, reservation.starts) + MAX_MUTE_US), reservation.starts
        reason = f"Slurm reservation {reservation.name}"
        before = known.get(id_)
        if before is None:
            source = f"{SOURCE}{reservation.name}"
            people.add_silence("maintenance", matchers, starts, ends, reason, USER, source, id_)
        elif before.expired is None and (before.matchers != matchers or abs(before.ends - ends) > 60 * SECOND):
            people.edit_silence(id_, USER, None, matchers, None, ends)
        else:
            continue
        changed += 1
    for id_, silence in known.items():
        if id_ not in wanted and silence.expired is None and silence.ends > now:
            people.expire_silence(id_, USER)
            changed += 1
    return changed


def watch_reservations(find_people: Callable[[], People], seconds: float, stop: threading.Event) -> None:
    """Applies the reservations every so many seconds until `stop`; an error is logged once and tried again."""
    said = ""
    while not stop.wait(seconds):
        try:
            apply_reservations(find_people(), read_reservations())
            said = ""
        except (FleetpulseError, ValueError, KeyError) as error:
            if str(error) != said:
                said = str(error)
                log.warning("maintenance reservations of Slurm are not read: %s", said)
