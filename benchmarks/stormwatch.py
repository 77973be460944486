"""Checks of the agent in the storm: each tick, each hang, its processes and handles."""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.model.errors import GapError
from pipeline.model.records import SECOND, TELEMETRY
from pipeline.transport import wire
from pipeline.transport.spool import SpoolTransport

if TYPE_CHECKING:
    from agents.node.agent import Agent
    from benchmarks.mischief import FaultInjector

REPORTED_S = 30.0
"""DESIGN.md section 6: a hang is visible within 30 s."""
BACK_S = 1300.0
"""Longest time until a repaired collector works again: the longest wait before a restart, 600 s, twice (worker.py)."""
READ_EVERY_S, COUNT_EVERY_S = 60.0, 600.0
_LINE = re.compile(r"^\S+ collector (\w+): (\w+(?: data)?)")


@dataclass
class Hang:
    """One collector that was made to hang; times in s of the storm."""

    name: str
    began: float
    reported: float | None = None
    repaired: float | None = None
    back: float | None = None


@dataclass
class Count:
    """Resources of the agent at one moment."""

    processes: int
    zombies: int
    handles: int
    threads: int
    memory_kib: int


@dataclass
class Watch(io.StringIO):
    """Records the agent's log and reads its spool."""

    spool: Path
    now: Callable[[], int]
    agent: Agent | None = None
    ticks: list[int] = field(default_factory=list)
    stored: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    hangs: list[Hang] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()
        self._began, self._read, self._counted = self.now(), 0.0, 0.0
        self._transport = SpoolTransport(self.spool, "pipeline")
        self._offsets: dict[object, int] = {}

    # --- the agent's side --------------------------------------------------------------------------------------------

    def write(self, text: str) -> int:
        """Receives one line of the agent's log."""
        if found := _LINE.match(text):
            name, state = found[1], found[2]
            self.states[state] += 1
            elapsed = self._elapsed()
            for hang in self.hangs:
                # where its process was killed before the deadline of the reading, its trouble is reported as that end
                if hang.name == name and state in ("hung", "fault") and hang.reported is None:
                    hang.reported = elapsed
                if hang.name == name and state == "ok" and hang.repaired is not None and hang.back is None:
                    hang.back = elapsed
        return len(text)

    def _elapsed(self) -> float:
        return (self.now() - self._began) / SECOND

    # --- the storm's side --------------------------------------------------------------------------------------------

    def run_between_ticks(self, elapsed: float) -> None:
        """Runs between two ticks."""
        if elapsed:
            self.ticks.append(self.now())
        if elapsed - self._read >= READ_EVERY_S:
            self._read = elapsed
            self.follow()
        if elapsed - self._counted >= COUNT_EVERY_S:
            self._counted = elapsed
            self.counts.append(count())

    def hung(self, name: str, now: float) -> None:
        self.hangs.append(Hang(name, now))

    def repaired(self, name: str, now: float) -> None:
        for hang in self.hangs:
            if hang.name == name and hang.repaired is None:
                hang.repaired = now
                if hang.reported is None:  # it was released before its deadline, or never read
                    hang.back = now

    def follow(self) -> None:
        """Reads as a pipeline does, so that the writer may delete read segments."""
        for partition in self._transport.partitions():
            _, end = self._transport.bounds(partition)
            offset = self._offsets.get(partition, 0)
            while offset < end:
                try:
                    found = self._transport.read(partition, offset, 200, 1 << 20)
                except GapError as gap:
                    self.lost += gap.next_offset - offset if partition.topic == TELEMETRY else 0
                    offset = gap.next_offset
                    continue
                offset += len(found)
                if partition.topic == TELEMETRY:
                    self.stored.update(
                        wire.unpack_envelope(m.value).sent for m in found
                    )  # the clock does not advance during a tick
            self._offsets[partition] = offset
            self._transport.commit_offset(partition, offset)

    def finish(self) -> None:
        """Reads the rest after the agent has ended."""
        self.follow()
        self._transport.close()


def count() -> Count:
    """Returns the resources of this process, which is the agent, and of its children."""
    below = _below(os.getpid())
    zombies = sum(state == "Z" for state in below.values())
    handles, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    status = Path("/proc/self/status").read_text()
    memory = int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index] # proc(5): always there
    return Count(len(below), zombies, handles, threads, memory)


def _below(root: int) -> dict[int, str]:
    """Returns the state of every process below one, by process id."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # ended in between
                continue
            parents[int(entry.name)] = int(fields[1]), fields[0]
    found: dict[int, str] = {}
    grown = True
    while grown:
        new = {p: s for p, (up, s) in parents.items() if p not in found and (up == root or up in found)}
        found, grown = found | new, bool(new)
    return found


def report(watch: Watch, mischief: FaultInjector, elapsed: float, took: float) -> int:
    """Prints events and failed checks; returns 0 if there are none."""
    assert watch.agent is not None
    refused, reported = watch.agent.spools.refused, [h for h in watch.hangs if h.reported is not None]
    waits = [h.reported - h.began for h in reported if h.reported is not None]
    backs = [h.back - h.repaired for h in reported if h.back is not None and h.repaired is not None]
    print(f"{elapsed / 3600:.1f} h in {took:.0f} s: {len(watch.ticks)} ticks, {sum(mischief.done.values())} faults")
    print("  " + ", ".join(f"{n} x {what}" for what, n in mischief.done.most_common()))
    print("  collector messages:  " + ", ".join(f"{n} x {state}" for state, n in watch.states.most_common()))
    print(f"  ticks stored {len(watch.stored)}, lost and counted {watch.lost + refused}, of them refused {refused}")
    print(
        f"  {len(reported)} of {len(watch.hangs)} hangs reported within {max(waits, default=0):.0f} s; the others ended"
    )
    print(f"  before their deadline. Back {max(backs, default=0):.0f} s after the repair at most")
    half = len(watch.counts) // 2
    for name in ("processes", "zombies", "handles", "threads", "memory_kib"):
        values = [getattr(c, name) for c in watch.counts] or [0]
        first, second = max(values[:half], default=0), max(values[half:])
        print(f"  {name:12s} at most {first} in the first half, {second} in the second; {values[-1]} at the end")
    troubles = failures(watch, refused)
    for trouble in troubles:
        print(f"  FAILED: {trouble}")
    print(f"  {len(troubles)} checks failed" if troubles else "  0 agent deaths, all checks passed")
    return int(bool(troubles))


def failures(watch: Watch, refused: int) -> list[str]:
    """Returns the failed checks."""
    found, ticks, stored = [], len(watch.ticks), len(watch.stored)
    if ticks != stored + watch.lost + refused:
        found.append(f"{ticks} ticks, {stored} stored and {watch.lost + refused} counted as lost")
    found += [f"tick {t} is stored {n} times" for t, n in watch.stored.items() if n > 1][:5]
    for hang in watch.hangs:
        lasted = (hang.repaired or float("inf")) - hang.began
        if hang.reported is None and lasted > REPORTED_S:
            found.append(f"{hang.name} hung at {hang.began:.0f} s and was not reported in {lasted:.0f} s")
        elif hang.reported is not None and hang.reported - hang.began > REPORTED_S:
            found.append(f"{hang.name} hung at {hang.began:.0f} s, reported after {hang.reported - hang.began:.0f} s")
        if hang.back is None or (hang.repaired is not None and hang.back - hang.repaired > BACK_S):
            found.append(f"{hang.name} that hung at {hang.began:.0f} s did not recover")
    return found + _leaks(watch.counts, sum(worker.own_process for worker in watch.agent.pool.workers))


def _leaks(counts: list[Count], alone: int) -> list[str]:
    """Returns what grew: compares the quiet end with the maximum of the first half.

    alone: collectors that hung once and so have a process, and a handle of the agent, of their own by now.
    """
    half, found = counts[: len(counts) // 2], []
    for name, spare in (("processes", 2 + alone), ("handles", 4 + alone), ("threads", 4), ("memory_kib", 8192)):
        most, end = max((getattr(c, name) for c in half), default=0), getattr(counts[-1], name) if counts else 0
        if half and end > most + spare:
            found.append(f"{name}: {end} at the end, {most} at most in the first half")
    return found
