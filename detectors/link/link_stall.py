"""Finds ports that are up and move nothing, while the ports beside them do: a NIC whose firmware stands still.

Data that wait for ports which move nothing: the far end has no credits, or is held back with pause frames.

IBTA specification 16.1.4, PortXmitWait: ticks in which a port had data and sent none for lack of credits. Where the
receiver takes no byte for as long, it is the receiver that gives no credits. On Ethernet it says so itself, by pausing
its switch (IEEE 802.1Qbb). A job that ended or hangs by its software leaves no data waiting.
What counts as growth is told by `Readings`: two sources that tell of a counter in turn make none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, memory, part
from detectors.base.detector import notes as plain
from detectors.base.event_data import read_text
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.kernel import compiled
from detectors.base.state import grown
from detectors.link.counters import Floats, Lives, Places, Readings
from detectors.link.cable_ends import Ends
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level

FAR, OWN = "nic.port_tx_wait", "nic.tx_pause"
WAITS = (FAR, OWN)


@dataclass
class Waiting:
    """What grew since a port began to stand still. A part() of a detector.

    stood:    (N,) whether it stood still at the last look: what grew before that may be of when it moved.
    readings: (N,) in which the far end's waits, or its own pauses, grew while it stood.
    counters: by signal.
    """

    stood: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    readings: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    counters: dict[str, Readings] = field(default_factory=lambda: {signal: Readings() for signal in WAITS})

    def look(self, frame: Frame, stands: NDArray[np.bool_], far: NDArray[np.int64], anew: Places) -> None:
        """Takes an instant. stands: (N,) who moved nothing. far: (N,) place of the far end; -1: not known.

        anew: ports whose counters began a new life.
        """
        n = len(stands)
        self.readings, self.stood = grown(self.readings, n, 0), grown(self.stood, n, False)
        grew = np.zeros(n, np.bool_)
        if theirs := self._grew(FAR, frame, anew):
            waits = np.zeros(n + 1, np.bool_)  # the last cell stands for a far end that is not known
            waits[theirs] = True
            grew |= waits[far]
        grew[self._grew(OWN, frame, anew)] = True
        self.readings[:n] += grew & self.stood[:n] & stands
        self.readings[:n][~stands] = 0
        self.stood[:n] = stands

    def _grew(self, signal: str, frame: Frame, anew: Places) -> list[int]:
        if signal not in frame.values and not len(anew):
            return []
        at, _, _ = self.counters[signal].growth(frame[signal], frame.time, anew)
        return at.tolist() if signal in frame.values else []

    def snapshot(self) -> dict[str, Any]:
        counters = {signal: readings.snapshot() for signal, readings in self.counters.items()}
        return {"stood": self.stood.copy(), "readings": self.readings.copy(), "counters": counters}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.readings = np.array(state["readings"])
        self.stood = np.array(state.get("stood", np.zeros(len(self.readings), np.bool_)))
        for signal, saved in state.get("counters", {}).items():
            self.counters[signal].restore(saved)


ERRORS = (
    *("nic.ack_timeouts", "nic.req_cqe_errors", "nic.resp_cqe_errors"),
    *("nic.transport_retries_exceeded", "nic.phy_tx_errors"),
)
"""What a NIC counts whose work is not done: somebody wants to send through it, and nothing goes out."""
_ILL = frozenset(
    ("mlx5_health", "mlx5_unrecoverable", "mlx5_internal_error", "mlx5_command_timeout", "transmit_timeout")
)
"""Lines of the kernel log in which a driver itself says that its NIC does not answer."""
_WITNESSES = 4  # ports of a cohort, itself among them, below which they are no witnesses; chosen
_TOLD = 600 * SECOND  # how long a line of the kernel log speaks for what follows; chosen


@dataclass
class LinkStall(Detector):
    """A port that is up, has moved bytes in each of `steady` readings, and then none in either direction for `hold` s.

    Page: most ports beside it move (of its node and role, else of its leaf), and it counts failing work in `failing`
    readings; or its driver said that the NIC does not answer; or data wait for it: the far end of its cable has waited
    for credits in `failing` readings, or it holds its switch back with pause frames, and no other beside it does.
    Suspect: most ports beside it move, it counts nothing; or all stand still and it alone counts failing work (it, or
    whom it sends to: who waits for an answer in vain counts, not who is silent), or data wait for several. Where the
    others stand still too and no data wait, a job has ended or hangs, and no port is to blame: ports of InfiniBand
    send nothing at all when nobody uses them.

    Source: RDMA traffic that falls to nothing as the sign of a hang (ByteRobust, SOSP 2025, which waits 10 min as it
    looks at whole jobs); the health poll of the mlx5 driver; PortXmitWait of the IBTA specification 16.1.4: data to
    send and no credit, which is the receiver's doing where no byte moves. `hold`, `steady` and `failing` are chosen:
    six readings of 10 s, past which every retry of a queue pair (4 s each) has been counted; half of those ten minutes;
    and two, since a job that is killed flushes its queue pairs within one.
    """

    name: ClassVar[str] = "link_stall"
    family: ClassVar[str] = "link degradation"
    device_class: ClassVar[str] = "nic"
    needs: ClassVar[tuple[str, ...]] = ("nic.state", "nic.rx_bytes", "nic.tx_bytes")
    wants: ClassVar[tuple[str, ...]] = (
        *(*ERRORS, *WAITS, "nic.generation", "event:kernel", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "NICs that stall while nobody uses them, that move a little, or whose whole job stands still while neither "
        "their driver nor the switch at the far end of their cable says anything."
    )

    hold: float = 60.0
    steady: int = 30
    failing: int = 2
    most: float = 0.5

    last: Floats = memory(np.nan)
    seen: NDArray[np.int64] = memory(0, np.int64)
    since: NDArray[np.int64] = memory(0, np.int64)
    moves: NDArray[np.int64] = memory(0, np.int64)
    up: NDArray[np.bool_] = memory(False, np.bool_)
    failed: Floats = memory(0.0)
    failures: NDArray[np.int64] = memory(0, np.int64)
    ill: dict[str, int] = plain()
    conditions: OpenConditions = plain()
    gates: Gates = part(Gates)
    lives: Lives = part(Lives)
    waiting: Waiting = part(Waiting)
    counters: Counters = part(lambda: Counters())
    _ends: Ends = field(default_factory=Ends, init=False, repr=False)
    _peers: Peers = field(
        default_factory=lambda: Peers(("node", "@role"), ("node",), ("leaf",), least=_WITNESSES), init=False, repr=False
    )

    def budget(self) -> list[str]:
        return ["a rule on counters that stand still or grow: no statistical alarm rate"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.update(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        n = len(frame.entities)
        self.grow(n)
        self._hear(frame)
        state = frame["nic.state"]
        np.copyto(self.up[:n], state >= 1, where=np.isfinite(state))
        rates = self._move(frame)
        anew, _ = self.lives.changed(frame["nic.generation"])
        self._fail(frame, anew)
        self.waiting.look(frame, self.since[:n] > 0, self._ends.of(frame), anew)
        stands = (self.since[:n] > 0) & (self.moves[:n] >= self.steady) & self.up[:n]
        stands &= self.seen[:n] - self.since[:n] >= self.hold * SECOND
        if not stands.any():
            self.conditions.clear()
            return []
        return self._findings(frame, np.flatnonzero(stands), rates)

    def _hear(self, frame: Frame) -> None:
        for event in frame.events:
            if event.kind == "kernel" and read_text(event.data.get("pattern")) in _ILL:
                self.ill[event.entity] = event.time
        for port in [p for p, at in self.ill.items() if frame.time - at > _TOLD and p not in self.conditions]:
            del self.ill[port]

    def _move(self, frame: Frame) -> Floats:
        """(N,) bytes per second since the last reading, both directions; notes who moves and who stands still."""
        n, time = len(frame.entities), frame.time
        last, seen = self.last[:n], self.seen[:n]
        total = frame["nic.rx_bytes"] + frame["nic.tx_bytes"]
        with np.errstate(invalid="ignore", divide="ignore"):
            rates = (total - last) * SECOND / (time - seen)
        still, failing = (self.since, self.moves), (self.failed, self.failures)
        bytes_step(total, self.up, (last, seen), still, failing, time)
        return np.asarray(rates)

    def _fail(self, frame: Frame, anew: Places) -> None:
        """Notes failing work of ports that stand still."""
        grew: dict[int, float] = {}
        for signal in ERRORS:
            if signal in frame.values:
                at, growth = self.counters.growth(signal, frame.values[signal], frame.time, anew)
                for i, count in zip(at.tolist(), growth.tolist(), strict=True):
                    if self.since[i] > 0:
                        grew[i] = grew.get(i, 0.0) + count
        for i, count in grew.items():
            self.failed[i] += count
            self.failures[i] += 1

    def _findings(self, frame: Frame, stands: Places, rates: Floats) -> list[Finding]:
        groups = self._peers.groups(frame)
        read, going = np.isfinite(rates), rates != 0
        size = np.bincount(groups[read & (groups >= 0)], minlength=int(groups.max()) + 1)
        moving = np.bincount(groups[read & going & (groups >= 0)], minlength=len(size))
        found, holding = [], set()
        for i in stands.tolist():
            port, g = frame.entities[i], int(groups[i])
            beside, others = (int(moving[g]), int(size[g]) - int(read[i])) if g >= 0 else (0, 0)
            level = self._level(i, port, others >= _WITNESSES - 1 and beside > self.most * others, frame, groups)
            if level is None or self.gates.in_maintenance(port, frame.topology, frame.time):
                continue
            holding.add(port)
            due = due_report(self.conditions, port, frame.time, int(self.since[i]), level)
            if due is not None and read[i]:
                found.append(self._finding(frame, i, due, (beside, others), rates[(groups == g) & (g >= 0) & read]))
        close_ended(self.conditions, holding)
        return found

    def _level(self, i: int, port: str, others_move: bool, frame: Frame, groups: NDArray[np.int32]) -> Level | None:
        """How loud, or None if nobody is to blame."""
        facts = frame.topology.attributes.get(port, {})
        fails = bool(self.failures[i] >= self.failing)
        level: Level | None = None
        waits = bool(self.waiting.readings[i] >= self.failing)
        only = waits and self._alone(i, groups, self.waiting.readings)
        if port in self.ill or only or (others_move and fails):
            level = "page"
        elif others_move or waits or (fails and self._alone(i, groups, self.failures)):
            level = "suspect"
        highest: Level = "suspect" if facts.get("role") == "unused" or facts.get("wireless") is True else "page"
        if facts.get("role") == "management":
            highest = "ticket"
        return None if level is None else min(level, highest, key=LEVELS.index)

    def _alone(self, i: int, groups: NDArray[np.int32], readings: NDArray[np.int64]) -> bool:
        """Whether it is the only one of its cohort of which enough readings speak."""
        failing = (groups == groups[i]) & (readings[: len(groups)] >= self.failing)
        return bool(groups[i] >= 0 and np.count_nonzero(failing) == 1)

    def _finding(self, frame: Frame, i: int, due: tuple[int, Level], beside: tuple[int, int], rates: Floats) -> Finding:
        port, (moving, others) = frame.entities[i], beside
        seconds, failed = (frame.time - int(self.since[i])) / SECOND, int(self.failed[i])
        says = [f"{port} is up but has moved no byte for {seconds:.0f} s"]
        cohort = self._peers.cohort_name(frame, i)
        says += [f"{moving} of {others} ports beside it ({cohort}) move"] if others else []
        says += [f"{failed} timeouts and failed completions since"] if failed else []
        says += ["its driver says that the NIC does not answer"] if port in self.ill else []
        says += ["data wait for it and it takes none"] if self.waiting.readings[i] >= self.failing else []
        verdict = "the NIC or its firmware" if due[1] != "suspect" else "the NIC, or nobody uses it"
        usual = float(np.median(rates)) if len(rates) else 0.0
        compared = Comparison(0.0, usual, None, cohort, others, -usual, "By/s")
        more = {"still_s": round(seconds, 1), "failed": failed, "driver_says_so": port in self.ill}
        more |= {"data_waited_readings": int(self.waiting.readings[i])}
        shown = make_evidence("it moves bytes again, or goes down", compared, **more)
        signals = ("nic.tx_bytes", "nic.rx_bytes", *(s for s in ERRORS if failed and s in frame.values))
        score = seconds / self.hold
        return Finding(
            frame.time,
            min(due[0], frame.time),
            port,
            self.name,
            due[1],
            score,
            f"{', '.join(says)}: {verdict}",
            shown,
            signals,
        )


class Counters:
    """Readings of several counters by signal."""

    def __init__(self) -> None:
        self._of: dict[str, Readings] = {}

    def growth(self, signal: str, now: Floats, time: int, anew: Places) -> tuple[Places, Floats]:
        at, grew, _ = self._of.setdefault(signal, Readings()).growth(now, time, anew)
        return at, grew

    def snapshot(self) -> dict[str, object]:
        return {signal: readings.snapshot() for signal, readings in self._of.items()}

    def restore(self, state: Mapping[str, Mapping[str, object]]) -> None:
        self._of = {}
        for signal, saved in state.items():
            self._of[signal] = Readings()
            self._of[signal].restore(saved)


@compiled
def bytes_step(
    total: Floats,
    up: NDArray[np.bool_],
    read: tuple[Floats, NDArray[np.int64]],
    still: tuple[NDArray[np.int64], NDArray[np.int64]],
    failing: tuple[Floats, NDArray[np.int64]],
    time: int,
) -> None:
    """One reading of what each port has moved. read: last total and when. still: since when, and readings it moved in.

    Who moves again after it stood begins to be known anew; a port that is down does not stall.
    """
    (last, seen), (since, moves), (failed, failures) = read, still, failing
    for i in range(len(total)):
        if np.isfinite(total[i]):
            if total[i] == last[i]:
                if since[i] == 0:
                    since[i] = seen[i]
            else:
                moves[i] = 1 if since[i] > 0 else moves[i] + 1
                since[i], failed[i], failures[i] = 0, 0.0, 0
                last[i] = total[i]
            seen[i] = time
        if not up[i]:
            since[i] = 0
