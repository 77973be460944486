"""Finds ports that are up but carry no traffic while the ports beside them do: a NIC whose firmware has stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, memory, notes, part, parts
from detectors.base.event_data import read_text
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.job_index import JobIndex
from detectors.base.state import State, piece_of
from detectors.base.topology_index import find_nodes, per_topology
from detectors.link.cable_ends import FarEnds
from detectors.link.counters import CounterGenerations, CounterReadings, Floats, Indices
from pipeline.model.compiling import compiled
from pipeline.model.entity_names import pager_title, short_duration
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level

FAR_WAIT, OWN_PAUSE = "nic.port_tx_wait", "nic.tx_pause"
WAITS = (FAR_WAIT, OWN_PAUSE)
ERRORS = (
    *("nic.ack_timeouts", "nic.req_cqe_errors", "nic.resp_cqe_errors"),
    *("nic.transport_retries_exceeded", "nic.phy_tx_errors"),
)
"""What a NIC counts when its work fails: something sends through it, and nothing goes out."""
_DRIVER_ERRORS = frozenset(
    ("mlx5_health", "mlx5_unrecoverable", "mlx5_internal_error", "mlx5_command_timeout", "transmit_timeout")
)
"""Lines of the kernel log in which a driver reports that its NIC does not respond."""
_WAITS_FOR = 600 * SECOND  # us without traffic in which data that waits is first looked for; chosen
_CONFIRM = 3  # equal readings in a row: a counter may be refreshed less often than it is read. Chosen
_MIN_COHORT = 4  # ports of a cohort, itself among them, from which the others show anything; chosen
_LOG_LIFETIME = 600 * SECOND  # us for which a line of the kernel log counts; chosen


@dataclass
class PendingData(State):
    """Data that waits for ports without traffic: the far end has no credits, or the port pauses its switch.

    IBTA specification 16.1.4, PortXmitWait: ticks in which a port had data and sent none for lack of credits. If the
    receiver takes no byte for as long, it is the receiver that gives no credits. On Ethernet a port pauses its switch
    (IEEE 802.1Qbb). A job that ended, or that hangs in its software, leaves no data waiting.

    stood:    (N,) without traffic in the last frame: growth before that may be of when there was traffic.
    readings: (N,) in which the far end's waits, or its own pauses, grew while it had no traffic.
    """

    stood: NDArray[np.bool_] = memory(False, np.bool_)
    readings: NDArray[np.int64] = memory(0, np.int64)
    counters: dict[str, CounterReadings] = part(lambda: {signal: CounterReadings() for signal in WAITS})

    def update(self, frame: Frame, stands: NDArray[np.bool_], far: Indices, restarted: Indices) -> None:
        """Reads an instant. stands: (N,) ports that just lost steady traffic.

        far: (N,) index of the far end, -1: not known.   restarted: ports whose counters started again.
        """
        n = len(stands)
        self.grow(n)
        if not stands.any():  # the readings of the first instant without traffic count nothing
            self.readings[:n], self.stood[:n] = 0, False
            return
        grew = np.zeros(n, np.bool_)
        if theirs := self._grown_ports(FAR_WAIT, frame, restarted):
            waits = np.zeros(n + 1, np.bool_)  # the last cell is for a far end that is not known
            waits[theirs] = True
            grew |= waits[far]
        grew[self._grown_ports(OWN_PAUSE, frame, restarted)] = True
        self.readings[:n] += grew & self.stood[:n] & stands
        self.readings[:n][~stands] = 0
        self.stood[:n] = stands

    def _grown_ports(self, signal: str, frame: Frame, restarted: Indices) -> list[int]:
        if signal not in frame.values and not len(restarted):
            return []
        at, _, _ = self.counters[signal].measure_growth(frame[signal], frame.time, restarted)
        return at.tolist() if signal in frame.values else []


@dataclass
class LinkStall(Detector):
    """A port that is up, had traffic in each of `steady` readings, and then none in either direction for `hold` s.

    Page: most ports beside it (of its node and role, else of its leaf) have traffic, and its counters of failed work
    grow in `failing` readings; or its driver logged that the NIC does not respond; or data waits for it: the far end of
    its cable has waited for credits in `failing` readings, or it pauses its switch, and no port beside it does.
    Suspect: most ports beside it have traffic, those of its job too, and nothing else is known; or none has, and it
    alone counts failed work (it, or the port to which it sends: the sender counts, not the silent receiver), or data
    waits for several. If the others have no traffic either and no data waits, a job pauses, has ended or hangs, and no
    port is blamed: ports of InfiniBand carry nothing at all while unused.

    Source: RDMA traffic that falls to nothing as the sign of a hang (ByteRobust, SOSP 2025, which waits 10 min as it
    watches whole jobs); the health poll of the mlx5 driver; PortXmitWait of the IBTA specification 16.1.4: data to
    send and no credit, which the receiver causes if it receives no byte. `hold`, `steady` and `failing` are chosen:
    six readings of 10 s, after which every retry of a queue pair (4 s each) has been counted; half of those ten
    minutes; and two, since a job that is killed flushes its queue pairs within one.
    """

    name: ClassVar[str] = "link_stall"
    family: ClassVar[str] = "link degradation"
    device_class: ClassVar[str] = "nic"
    needs: ClassVar[tuple[str, ...]] = ("nic.state", "nic.rx_bytes", "nic.tx_bytes")
    wants: ClassVar[tuple[str, ...]] = (
        *(*ERRORS, *WAITS, "nic.generation", "event:kernel", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "NICs that stall while unused or that carry little traffic, and whole jobs without traffic while neither "
        "their driver nor the switch at the far end of a cable reports anything."
    )

    hold: float = 60.0
    steady: int = 30
    failing: int = 2
    most: float = 0.5

    last: Floats = memory(np.nan)
    seen: NDArray[np.int64] = memory(0, np.int64)
    since: NDArray[np.int64] = memory(0, np.int64)
    moves: NDArray[np.int64] = memory(0, np.int64)
    equal: NDArray[np.int64] = memory(0, np.int64)
    up: NDArray[np.bool_] = memory(False, np.bool_)
    failed: Floats = memory(0.0)
    failures: NDArray[np.int64] = memory(0, np.int64)
    driver_errors: dict[str, int] = notes()
    conditions: OpenConditions = notes()
    gates: Gates = part(Gates)
    generations: CounterGenerations = part(CounterGenerations, kept=True)
    pending: PendingData = part(PendingData, kept=True)
    counters: dict[str, CounterReadings] = parts(CounterReadings, kept=True)
    _jobs: JobIndex = field(default_factory=JobIndex, init=False, repr=False)
    _ends: FarEnds = field(default_factory=FarEnds, init=False, repr=False)
    _peers: Peers = field(
        default_factory=lambda: Peers(("node", "@role"), ("node",), ("leaf",), least=_MIN_COHORT),
        init=False,
        repr=False,
    )

    def budget(self) -> list[str]:
        """Returns that it has no statistical test."""
        return ["a rule on counters that stop or grow: no statistical alarm rate"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings of ports without traffic."""
        self.gates.update(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        n = len(frame.entities)
        self.grow(n)
        self.pending.grow(n)
        self._read_kernel_log(frame)
        state = frame["nic.state"]
        np.copyto(self.up[:n], state >= 1, where=np.isfinite(state))
        rates = self._update_rates(frame)
        restarted, _ = self.generations.find_restarted(frame["nic.generation"])
        self._count_failed_work(frame, restarted)
        young = (frame.time - self.since[:n] < _WAITS_FOR) | (self.pending.readings[:n] > 0)
        still = (self.since[:n] > 0) & (self.moves[:n] >= self.steady) & young
        self.pending.update(frame, still, self._ends.find_far_ends(frame), restarted)
        stands = (self.since[:n] > 0) & (self.moves[:n] >= self.steady) & self.up[:n]
        stands &= (self.seen[:n] - self.since[:n] >= self.hold * SECOND) & (self.equal[:n] >= _CONFIRM)
        if not stands.any():
            self.conditions.clear()
            return []
        return self._findings(frame, np.flatnonzero(stands), rates)

    def _read_kernel_log(self, frame: Frame) -> None:
        for event in frame.events:
            if event.kind == "kernel" and read_text(event.data.get("pattern")) in _DRIVER_ERRORS:
                self.driver_errors[event.entity] = event.time
        old = [p for p, at in self.driver_errors.items() if frame.time - at > _LOG_LIFETIME]
        for port in [p for p in old if p not in self.conditions]:
            del self.driver_errors[port]

    def _update_rates(self, frame: Frame) -> Floats:
        """Returns (N,) bytes per second in both directions since the last reading; notes which ports have traffic."""
        n, time = len(frame.entities), frame.time
        last, seen = self.last[:n], self.seen[:n]
        total = frame["nic.rx_bytes"] + frame["nic.tx_bytes"]
        with np.errstate(invalid="ignore", divide="ignore"):
            rates = (total - last) * SECOND / (time - seen)
        still, failing = (self.since, self.moves, self.equal), (self.failed, self.failures)
        update_byte_totals(total, self.up, (last, seen), still, failing, time)
        return np.asarray(rates)

    def _count_failed_work(self, frame: Frame, restarted: Indices) -> None:
        """Adds failed work of ports without traffic."""
        grew: dict[int, float] = {}
        for signal in ERRORS:
            if signal in frame.values:
                readings = piece_of(self.counters, signal, CounterReadings)
                at, growth, _ = readings.measure_growth(frame.values[signal], frame.time, restarted)
                for i, count in zip(at.tolist(), growth.tolist(), strict=True):
                    if self.since[i] > 0:
                        grew[i] = grew.get(i, 0.0) + count
        for i, count in grew.items():
            self.failed[i] += count
            self.failures[i] += 1

    def _findings(self, frame: Frame, stands: NDArray[np.intp], rates: Floats) -> list[Finding]:
        groups = self._peers.groups(frame)
        # like with like: ports without steady work before show nothing
        read, going = np.isfinite(rates) & (self.moves[: len(rates)] >= self.steady), rates != 0
        size = np.bincount(groups[read & (groups >= 0)], minlength=int(groups.max()) + 1)
        moving = np.bincount(groups[read & going & (groups >= 0)], minlength=len(size))
        jobs = self._jobs_of_ports(frame)
        mine = read & (jobs >= 0)
        total = int(jobs.max(initial=-1)) + 1
        count, busy = (np.bincount(jobs[ports], minlength=total) for ports in (mine, mine & going))
        found, holding = [], set()
        for i in stands.tolist():
            port, g = frame.entities[i], int(groups[i])
            beside, others = (int(moving[g]), int(size[g]) - int(read[i])) if g >= 0 else (0, 0)
            others_move = others >= _MIN_COHORT - 1 and beside > self.most * others
            pauses = jobs[i] >= 0 and count[jobs[i]] > 1 and busy[jobs[i]] <= self.most * (count[jobs[i]] - 1)
            level = self._level(i, port, (others_move, bool(pauses)), frame, groups)
            if level is None or self.gates.in_maintenance(port, frame.topology, frame.time):
                continue
            holding.add(port)
            due = due_report(self.conditions, port, frame.time, int(self.since[i]), level)
            if due is not None and read[i]:
                found.append(self._port_finding(frame, i, due, others, rates[(groups == g) & (g >= 0) & read]))
        close_ended(self.conditions, holding)
        return found

    @per_topology
    def _jobs_of_ports(self, frame: Frame) -> NDArray[np.int32]:
        """Returns (N,) number of the job of each port's node, -1 without one."""
        numbers: dict[str, int] = {}
        jobs = (self._jobs.job_of_node(node, frame.topology) if node else None for node in find_nodes(frame))
        found = [-1 if job is None else numbers.setdefault(job, len(numbers)) for job in jobs]
        return np.array(found, np.int32)

    def _level(
        self, i: int, port: str, others: tuple[bool, bool], frame: Frame, groups: NDArray[np.int32]
    ) -> Level | None:
        """Returns the level of a port without traffic, or None if no port is to blame.

        others: most ports beside it have traffic; most of its job have none, which pauses.
        """
        others_move, pauses = others
        facts = frame.topology.attributes.get(port, {})
        fails = bool(self.failures[i] >= self.failing)
        level: Level | None = None
        waits = bool(self.pending.readings[i] >= self.failing)
        only = waits and self._is_only_one(i, groups, self.pending.readings)
        if port in self.driver_errors or only or (others_move and fails):
            level = "page"
        elif (others_move and not pauses) or waits or (fails and self._is_only_one(i, groups, self.failures)):
            level = "suspect"
        highest: Level = "suspect" if facts.get("role") == "unused" or facts.get("wireless") is True else "page"
        if facts.get("role") == "management":
            highest = "ticket"
        return None if level is None else min(level, highest, key=LEVELS.index)

    def _is_only_one(self, i: int, groups: NDArray[np.int32], readings: NDArray[np.int64]) -> bool:
        """Returns whether no other port of its cohort has enough of these readings."""
        failing = (groups == groups[i]) & (readings[: len(groups)] >= self.failing)
        return bool(groups[i] >= 0 and np.count_nonzero(failing) == 1)

    def _port_finding(self, frame: Frame, i: int, due: tuple[int, Level], others: int, rates: Floats) -> Finding:
        port = frame.entities[i]
        seconds, failed = (frame.time - int(self.since[i])) / SECOND, int(self.failed[i])
        driver = port in self.driver_errors
        usual = float(np.median(rates)) if len(rates) else 0.0
        title = f"up, but no traffic for {short_duration(seconds)}" + (", its NIC does not respond" if driver else "")
        return self.finding(
            *(frame.time, port, (min(due[0], frame.time), due[1])),
            score=seconds / self.hold,
            summary=pager_title(port, title),
            signals=("nic.tx_bytes", "nic.rx_bytes", *(s for s in ERRORS if failed and s in frame.values)),
            clears="the port has traffic again, or goes down",
            compared=Comparison(0.0, usual, None, self._peers.cohort_name(frame, i), others, -usual, "By/s"),
            still_s=round(seconds, 1),
            failed=failed,
            driver_says_so=driver,
            data_waited_readings=int(self.pending.readings[i]),
        )


@compiled
def update_byte_totals(
    total: Floats,
    up: NDArray[np.bool_],
    read: tuple[Floats, NDArray[np.int64]],
    still: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    failing: tuple[Floats, NDArray[np.int64]],
    time: int,
) -> None:
    """Adds one reading of the bytes of each port. read: last total and its time. still: since when, readings with
    traffic, and equal readings since.

    A port that has traffic again starts from zero; a port that is down does not stall.
    """
    (last, seen), (since, moves, equal), (failed, failures) = read, still, failing
    for i in range(len(total)):
        if np.isfinite(total[i]):
            if total[i] == last[i]:
                equal[i] += 1
                if since[i] == 0:
                    since[i], equal[i] = seen[i], 1
            else:
                moves[i] = 1 if since[i] > 0 else moves[i] + 1
                since[i], failed[i], failures[i] = 0, 0.0, 0
                last[i] = total[i]
            seen[i] = time
        if not up[i]:
            since[i] = 0
