"""Slurm's maintenance reservations (flag MAINT) as maintenance windows: added, changed and ended with them.

`scontrol` runs on this host, as any user may. A hung one is ended after its time limit; the known windows stay. Each
reservation is applied on its own: an error of one leaves its window as it is and stops no other.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.engine.people import People
from pipeline.incidents.matchers import Matcher, are_equal
from pipeline.incidents.silences import SLURM, Silence, make_scope_matchers
from pipeline.judging.mutes import MAX_MUTE_US, find_unknown_scopes
from pipeline.model.errors import FleetpulseError, Retryable, Unreachable, UsageError
from pipeline.model.records import SECOND, Caller, iso

log = logging.getLogger("fleetpulse.slurm")
TIMEOUT_S = 30.0
"""Time limit of one scontrol (s). Chosen: three times Slurm's own message timeout."""
MAX_ARGUMENT = 100_000
"""Characters of node names in one call of scontrol. Source: Linux takes 131,072 bytes an argument (MAX_ARG_STRLEN)."""
SHOWN = 3
"""Failures that one line of the log names; all are in the API. Chosen."""
NONE = "No reservations in the system"
"""What scontrol prints without reservations. Source: Slurm 22.05.8, tried."""
USER = Caller("slurm", "operator", "scontrol")
Run = Callable[[Sequence[str]], str]
Failures = dict[str, str]
"""Name of a reservation -> why it is not applied."""


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


def read_reservations(run: Run = run_scontrol) -> tuple[list[Reservation], Failures]:
    """Returns the maintenance reservations with nodes, and those that cannot be read. Raises Unreachable."""
    found, failures = list[Reservation](), Failures()
    for line in _list_lines(run(["-o", "show", "reservation"])):
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        try:
            nodes, flags = facts["Nodes"], facts["Flags"]
            if "MAINT" not in flags.split(",") or nodes in ("", "(null)"):
                continue
            times = (int(facts["StartTime"]) * SECOND, int(facts["EndTime"]) * SECOND)
            names = [name for part in split_names(nodes) for name in run(["show", "hostnames", part]).split()]
            found.append(Reservation(facts["ReservationName"], *times, tuple(names)))
        except (FleetpulseError, ValueError) as error:
            failures[facts.get("ReservationName", "")] = str(error)
        except KeyError as error:
            failures[facts.get("ReservationName", "")] = f"scontrol shows no {error.args[0]} of it"
    return found, failures


def _list_lines(text: str) -> list[str]:
    """Returns the line of each reservation. Raises Unreachable on an answer without any that does not say so: windows
    end with their reservations, and an answer that lacks them by mistake would end all."""
    lines = [line for line in text.splitlines() if line.strip()]
    if [line.strip() for line in lines] == [NONE]:
        return []
    strange = [line for line in lines if not line.startswith("ReservationName=")]
    if strange or not lines:
        shown = repr(strange[0][:100]) if strange else "nothing"
        raise Unreachable(f"scontrol show reservation: printed {shown}; expected ReservationName=..., or {NONE!r}")
    return lines


def split_names(nodes: str, longest: int = MAX_ARGUMENT) -> Iterator[str]:
    """Yields the parts of a list of nodes such as `n[1-3,7],m1` that are at most `longest` characters, cut at commas
    outside of brackets; a longer part that has none is whole."""
    part = ""
    for one in re.findall(r"(?:[^,\[]|\[[^]]*\])+", nodes):
        if part and len(part) + 1 + len(one) > longest:
            yield part
            part = ""
        part = f"{part},{one}" if part else one
    if part:
        yield part


def apply_reservations(
    people: People, reservations: Sequence[Reservation], failures: Mapping[str, str] | None = None
) -> tuple[int, Failures]:
    """Ends, adds and changes maintenance windows so that they are as the reservations. Returns how many changed, and
    why which reservations failed.

    failures: reservations that could not be read: their windows stay as they are; "": one without a name, so that none
    is ended now, since it may be any.
    """
    now, changed, failed = people.engine.clock(), 0, dict(failures or {})
    wanted = {r.id: r for r in reservations if r.ends > now}
    known = {s.id: s for s in people.list_silences("maintenance") if s.source.startswith(SLURM)}
    for id_, silence in known.items():
        name = silence.source.removeprefix(SLURM)
        is_gone = id_ not in wanted and "" not in failed and name not in failed
        if is_gone and silence.expired is None and silence.ends > now:
            try:
                people.expire_silence(id_, USER, silence.version)
                changed += 1
            except (FleetpulseError, ValueError) as error:  # a person changed it since
                failed[name] = str(error)
    for id_, reservation in wanted.items():
        try:
            changed += _apply_one(people, reservation, known.get(id_), now)
        except (FleetpulseError, ValueError) as error:
            failed[reservation.name] = str(error)
    return changed, failed


def _describe_unknown(people: People, reservation: Reservation) -> str:
    """Returns a text about nodes that no agent and no source of topology names: they may be misspelt; "" if none is."""
    scopes = [f"node:{name}" for name in reservation.nodes]
    engine = people.engine
    unknown = find_unknown_scopes(scopes, engine.topology, engine.devices.has_device, engine.life.site)
    if not unknown:
        return ""
    shown = ", ".join(unknown[:SHOWN]) + (", ..." if len(unknown) > SHOWN else "")
    return f"{len(unknown):,} of its {len(scopes):,} nodes are not known: {shown}"


def _apply_one(people: People, wanted: Reservation, before: Silence | None, now: int) -> bool:
    """Adds or changes the window of a reservation; returns whether it did. Raises UsageError."""
    was_ended = before is not None and before.expired is not None
    if before is not None and was_ended and before.expired_by != USER:
        return False  # a person ended it
    if not wanted.nodes:
        raise UsageError("scontrol names no node of it")
    matchers: Sequence[Matcher] = make_scope_matchers([f"node:{name}" for name in wanted.nodes])
    ends = _find_end(wanted, before, now)
    if before is None:
        reason, source = f"Slurm reservation {wanted.name}", f"{SLURM}{wanted.name}"
        people.add_silence("maintenance", matchers, wanted.starts, ends, reason, USER, source, wanted.id)
        return True
    if are_equal(before.matchers, matchers):
        matchers = before.matchers
        if abs(before.ends - ends) <= 60 * SECOND and not was_ended:
            return False
    people.edit_silence(before.id, USER, before.version, matchers, None, ends, by_source=True)
    return True


def _find_end(wanted: Reservation, before: Silence | None, now: int) -> int:
    """Returns the end of a window: that of its reservation, at most MAX_MUTE_US from now or from its start. One that is
    cut is extended when less than half of that is left, not at each reading."""
    latest = max(now, wanted.starts) + MAX_MUTE_US
    if wanted.ends <= latest:
        return wanted.ends
    is_long_enough = before is not None and before.ends - max(now, wanted.starts) >= MAX_MUTE_US // 2
    return min(before.ends, wanted.ends) if before is not None and is_long_enough else latest


@dataclass
class ReservationWatch:
    """Applies the reservations regularly. read: when scontrol last answered (UTC us); None: never.   applied: number
    of windows that are as their reservations.   failures: why which are not; under "" why none could be read.
    warnings: doubts about those that are windows."""

    seconds: float = 0.0
    read: int | None = None
    applied: int = 0
    failures: Failures = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)

    def run(self, find_people: Callable[[], People], stop: threading.Event) -> None:
        """Applies the reservations every so many seconds until `stop`. New failures are logged."""
        while not stop.wait(self.seconds):
            before = self.failures
            try:
                people = find_people()
            except Retryable:
                continue  # the pipeline is starting
            try:
                self.apply(people)
            except (FleetpulseError, ValueError, KeyError) as error:
                self.failures = {"": str(error)}
            fresh = [f"{name or 'all'}: {why}" for name, why in self.failures.items() if before.get(name) != why]
            if fresh:
                more = f" (and {len(fresh) - SHOWN} more)" if len(fresh) > SHOWN else ""
                log.warning("maintenance reservations of Slurm are not applied: %s%s", "; ".join(fresh[:SHOWN]), more)

    def apply(self, people: People) -> None:
        """Reads and applies them once. Raises Unreachable."""
        found, failed = read_reservations()
        now = people.engine.clock()
        _, failures = apply_reservations(people, found, failed)
        current = [r for r in found if r.ends > now]
        ended = {s.id for s in people.list_silences("maintenance") if s.expired is not None}  # by a person
        self.read, self.applied = now, sum(r.name not in failures and r.id not in ended for r in current)
        self.failures = failures
        found_odd = {r.name: _describe_unknown(people, r) for r in current if r.name not in failures}
        self.warnings = {name: text for name, text in found_odd.items() if text}

    def count(self) -> dict[str, float]:
        """Returns the metrics; none where reservations are not read."""
        if not self.seconds:
            return {}
        name = "fleetpulse_maintenance_reservations"
        states = {"applied": self.applied, "failed": len(self.failures)}
        return {f'{name}{{state="{state}"}}': float(number) for state, number in states.items()}

    def as_json(self) -> dict[str, Any]:
        """Returns the state in the form of the API."""
        failures, warnings = (
            [{"reservation": name, "reason": why} for name, why in sorted(told.items())]
            for told in (self.failures, self.warnings)
        )
        read = None if self.read is None else iso(self.read)
        return {
            "seconds": self.seconds,
            "read": read,
            "applied": self.applied,
            "failures": failures,
            "warnings": warnings,
        }
