"""Finds congested leaves, leaves that lose packets without an error, and ports whose host receives too slowly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Cohorts
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.job_index import JobIndex
from detectors.base.state import N, State, memory
from detectors.base.statistics import grouped_mad, grouped_median
from detectors.base.topology_index import find_nodes, per_device_topology, per_topology
from detectors.link.counters import NewestReadings, pair_numbers
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Groups = NDArray[np.int32]
Members = tuple[Groups, Groups, Groups, Bools, Bools]
"""(N,) number of each port's job or node, of its leaf and of both, whether it is a host's, and its job known."""

WAIT = ("nic.port_tx_wait",)
BYTES, _SPEED = ("nic.tx_bytes", "nic.rx_bytes"), "nic.speed"
MARKS = ("nic.cnp_sent", "nic.cnp_handled", "nic.ecn_marked")
LOSSES = ("nic.out_of_sequence", "nic.sequence_errors", "nic.roce_adp_retrans", "nic.ack_timeouts")
ERRORS = ("nic.symbol_errors", "nic.crc_errors")
PAUSES = ("nic.tx_pause_duration", "nic.tx_pause")
PAUSED = ("nic.rx_pause_duration", "nic.rx_pause")
_KINDS = (
    *(("waits for credits", WAIT), ("congestion marks", MARKS), ("packets sent again", LOSSES)),
    *(("pauses by the switch", PAUSED), ("less traffic", BYTES)),
)
_MARKED, _PAUSED, _LESS = 1, 3, 4
"""Kinds of congestion, of Ethernet's pauses, and of traffic that is lost on one leaf alone though its ports count
nothing."""
_FLOORS = (1e4, 1.0, 1.0, 1e-3)
"""Ticks of waiting, marks and lost packets per second of a port at _USUAL_BYTES, and the share of the time for which it
is paused, below which nothing waits or is lost: 1e4 ticks are below a percent of a second at every known length of
tick; one packet a second is one in a million, and RoCE loses throughput from one in 10,000 on (Mittal et al., IRN,
SIGCOMM 2018); pauses are rare, since marks slow senders before buffers are full (DCQCN, SIGCOMM 2015)."""
_USUAL_BYTES = 5e9  # By/s: a tenth of a port of 400 Gb/s, to which the floors are scaled
_READ = (*WAIT, *MARKS, *LOSSES, *ERRORS, *PAUSES, *PAUSED, *BYTES)
MINUTE_S = 60.0  # s between two judgements
_MAX_GAP_S = 300.0  # s between two readings above which growth is an average over too much; chosen
_MIN_OTHERS = 3  # ports on other leaves from which the median of a job, or of a node, is not that of the leaf; chosen
_MIN_PEERS = 4  # ports whose pauses are compared, from which their median is not that of one; chosen
LEARN = 20  # minutes before a port is judged: the replay contract
_GAIN, _GAIN_IN_EXCESS = 1 / 240, 1 / 2400
"""Least learning rates: a memory of four hours, and of 40 while a port is in excess, or as far below the rest of its
job, which may be in excess itself, so that no excess is for ever."""
_OWN_MOVE = 2.0
"""Times its own move that the excess of a port counts at most: of two leaves of a job the one that moved more has
departed. The rest is of the others, as where congestion that they had ends."""
_RECENT = 1 / 5  # learning rate of the present traffic: five minutes
_PAUSE_QUANTA = 65_535 * 512  # bits for which one frame pauses at most (IEEE 802.1Qbb, 802.3 annex 31B)
_LEAST_PAUSED = 0.01  # share of the time below which pauses slow nothing that matters: a percent. Chosen
_TIMES_PEERS = 10.0  # times the pauses of the median port of its job; chosen
_SLOWER = 0.1  # share of its time by which a job is slowed, or of a port's traffic lost: Greyhound's change of the mean
_LOOKS = (2, 2, 2, 2, 5)
"""Minutes in a row before a suspect; of less traffic half of the hold, since bursts last a minute or two. Chosen."""
_STALE_AFTER = 600 * SECOND
"""us after which the condition of a leaf ends whose ports send nothing, since jobs pause: as long as the Desk waits."""


@dataclass
class PortTraffic(State):
    """Waits, marks and losses of each port per minute and per byte, against its job and its own past; and its pauses.

    Ports of one job do the same: their median on other leaves is what the job does (its phase, its share of the line,
    its pauses), and what differs from it belongs to the path of each port's traffic. A port is judged only beside as
    many others as it has learnt with: missing samples of others change no verdict.

    normal: (K, N) usual level of each kind, without what the job does.  past: (K, N) the same with it.
    counts: (K, N) minutes learnt from.  alone: (K, N) learnt without others.
    odd:    (K, N) minutes in a row in which that was different.
    excess: (K, N) logarithm above its own normal in this minute; NaN: not judged.
    share:  (N,) of the line rate that it sends.  errors: (N,) errors in this minute.
    load, usual_load: (N,) logarithm of bytes per second, of five minutes and of hours.  loads: (N,) minutes.
    paused: (N,) share of the time for which it pauses its switch.  pausing: (N,) minutes of which that is too much.
    job:    (N,) number of the job or node that it works for.
    """

    readings: NewestReadings = part(NewestReadings, kept=True)
    normal: Floats = memory(0.0, shape=(len(_KINDS), N))
    past: Floats = memory(np.nan, shape=(len(_KINDS), N))
    counts: Floats = memory(0.0, shape=(len(_KINDS), N))
    alone: Bools = memory(False, np.bool_, shape=(len(_KINDS), N))
    odd: Floats = memory(0.0, shape=(len(_KINDS), N))
    excess: Floats = memory(np.nan, shape=(len(_KINDS), N))
    share: Floats = memory(np.nan)
    errors: Floats = memory(0.0)
    load: Floats = memory(0.0)
    usual_load: Floats = memory(0.0)
    loads: Floats = memory(0.0)
    paused: Floats = memory(np.nan)
    usual_pause: Floats = memory(np.nan)
    pausing: Floats = memory(0.0)
    jobs: dict[str, str] = notes()  # node -> its job
    time: int = notes(int)

    def is_due(self, time: int) -> bool:
        """Returns whether a minute has passed since the last judgement."""
        seconds = (time - self.time) / SECOND
        return not 0 <= seconds < MINUTE_S - 0.5

    def add_minute(self, frame: Frame, groups: Members, least: float, doubled: float) -> None:
        """Judges the growth of all counters since the last minute.

        least:  share of the line that a busy port sends.   doubled: excess above which hardly anything is learnt.
        """
        n = len(frame.entities)
        self.grow(n)
        self.time = frame.time
        speed = self.readings.fresh_values(_SPEED, n) * 1e6 / 8
        speed = np.where(speed > 0, speed, np.nan)
        growth, seconds = self.readings.measure_growth((*_READ, _SPEED), n, _MAX_GAP_S)
        rate = {name: growth[name] / seconds for name in _READ}
        sent, received = (rate[name] for name in BYTES)
        self.share[:n] = sent / speed
        self.errors[:n] = np.nansum([growth[name] for name in ERRORS], axis=0)
        carries = self.share[:n] >= least
        per = np.where(carries, sent, np.nan) / _USUAL_BYTES
        for kind, (_, names) in enumerate(_KINDS[:_LESS]):
            amounts = [rate[name] for name in names]
            amount = _paused_share(rate, names, speed) if kind == _PAUSED else _sum_known(np.stack(amounts))
            self._update_excess(kind, np.log(np.maximum(amount, 0) / per + _FLOORS[kind]), groups, doubled)
        self._update_excess(_LESS, -np.log(per), groups, -float(np.log1p(-_SLOWER)))
        self.excess[_LESS, :n][self.alone[_LESS, :n]] = np.nan  # a job that does less
        self._update_pauses(rate, np.fmax(sent, received) >= least * speed, speed, groups)
        troubled = (self.excess[:, :n] > doubled / 2).any(axis=0) | (self.pausing[:n] > 0)
        # several troubled ports slow their whole job
        slowed = np.bincount(groups[0] + 1, troubled, int(groups[0].max(initial=-1)) + 2)[groups[0] + 1] >= _MIN_OTHERS
        troubled |= slowed & (groups[0] >= 0)
        self._update_load(np.where(carries, np.fmax(sent, received), np.nan), troubled)

    def _update_excess(self, kind: int, levels: Floats, groups: Members, doubled: float) -> None:
        """Removes what the rest of the job does, then the port's own normal; learns little while it is in excess."""
        n, (jobs, _, pairs, *_) = len(levels), groups
        common, others = median_on_other_leaves(levels, jobs, pairs)
        alone = others < _MIN_OTHERS
        count, normal, odd = self.counts[kind, :n], self.normal[kind, :n], self.odd[kind, :n]
        known, other = np.isfinite(levels), (alone != self.alone[kind, :n]) & (count > 0)
        odd[known] = np.where(other, odd + 1, 0.0)[known]
        changed = known & ((odd >= LEARN) | (count == 0))
        count[changed], odd[changed] = 0.0, 0.0
        self.alone[kind, :n] = np.where(changed, alone, self.alone[kind, :n])
        known &= alone == self.alone[kind, :n]
        departure = levels - np.where(alone, 0.0, common) - np.where(count > 0, normal, 0.0)
        past, first = self.past[kind, :n], (count == 0) | np.isnan(self.past[kind, :n])
        own = np.where(first | (kind == _LESS), np.inf, _OWN_MOVE * np.maximum(levels - past, 0.0))  # loads swing more
        self.excess[kind, :n] = np.where(known & (count >= LEARN), np.minimum(departure, own), np.nan)
        least = np.where((count < LEARN) | (np.abs(departure) < doubled / 2), _GAIN, _GAIN_IN_EXCESS)
        gain = np.where(count < LEARN, 1 / (count + 1), least)
        np.copyto(normal, np.where(count > 0, normal, 0.0) + gain * departure, where=known)
        np.copyto(past, np.where(first, levels, past + gain * (levels - past)), where=known)
        count += known

    def _update_load(self, now: Floats, troubled: Bools) -> None:
        n = len(now)
        load, usual, count = self.load[:n], self.usual_load[:n], self.loads[:n]
        known = now > 0  # false for NaN
        level, young = np.log(np.where(known, now, 1.0)), 1 / (count + 1)
        slow = np.where(troubled & (count >= LEARN), _GAIN_IN_EXCESS, np.maximum(young, _GAIN))
        for mean, gain in ((load, np.maximum(young, _RECENT)), (usual, slow)):
            mean += np.where(known, gain * (level - mean), 0.0)
        count += known

    def slowing(self, at: NDArray[np.intp], groups: Members) -> float:
        """Returns the share by which the job of some ports that is slowed most takes longer than usual in the last
        minutes; 0: none or not known.

        What a job does is the median of its ports on other leaves, if it has enough: those here may send less alone.
        """
        n, (jobs, _, pairs, _, known) = len(groups[0]), groups
        change = np.where(self.loads[:n] >= LEARN, self.usual_load[:n] - self.load[:n], np.nan)
        elsewhere, others = median_on_other_leaves(change, jobs, pairs)
        mine = np.where(known & (others >= _MIN_OTHERS), elsewhere, change)[at]
        found, size = grouped_median(mine, jobs[at])
        several = np.isfinite(found) & (size >= min(_MIN_OTHERS, len(at)))
        # ports of nodes without a known job are one
        alone = float(np.nanmedian(mine)) if np.isfinite(mine).any() else 0.0
        return float(np.expm1(np.max(found, where=several, initial=alone)))

    def _update_pauses(self, rate: Mapping[str, Floats], moves: Bools, speed: Floats, groups: Members) -> None:
        """Compares for which share of the time hosts pause their switches; only a port whose bytes move counts."""
        n, (jobs, _, _, hosts, _) = len(moves), groups
        paused = np.where(moves & hosts, _paused_share(rate, PAUSES, speed), np.nan)
        usual, size = grouped_median(paused, jobs)
        spread, _ = grouped_mad(paused, jobs)
        everywhere, total = grouped_median(paused, np.zeros(n, np.int32))
        few = size < _MIN_PEERS
        usual, size = np.where(few, everywhere, usual), np.where(few, total, size)
        spread = np.where(few, grouped_mad(paused, np.zeros(n, np.int32))[0], spread)
        much = (paused >= _LEAST_PAUSED) & (paused >= _TIMES_PEERS * np.maximum(usual, spread)) & (size >= _MIN_PEERS)
        minutes = self.pausing[:n]
        minutes[:] = np.where(much, minutes + 1, np.where(np.isfinite(paused), np.maximum(minutes - 2, 0), minutes))
        minutes[:] = np.minimum(np.where(moves, minutes, 0.0), 60.0)
        self.paused[:n], self.usual_pause[:n] = paused, usual

    def restart_where(self, moved: Bools) -> None:
        """Learns again on ports that have begun to work for another job."""
        self.counts[:, : len(moved)][:, moved] = 0.0
        self.loads[: len(moved)][moved] = 0.0


def median_on_other_leaves(levels: Floats, jobs: Groups, pairs: Groups) -> tuple[Floats, NDArray[np.int64]]:
    """Returns (N,) the median of the medians of the other leaves that have ports of the same job, and how many ports
    these are; NaN and 0 without any. pairs: (N,) number of each port's job and leaf."""
    of_port, size = grouped_median(levels, pairs)
    total, mine = int(pairs.max(initial=-1)) + 1, pairs >= 0
    median, job, ports = np.full(total, np.nan), np.zeros(total, np.int64), np.zeros(total, np.int64)
    median[pairs[mine]], job[pairs[mine]], ports[pairs[mine]] = of_port[mine], jobs[mine], size[mine]
    known = np.flatnonzero(np.isfinite(median))
    order = known[np.lexsort((median[known], job[known]))]
    _, first, inverse, count = np.unique(job[order], return_index=True, return_inverse=True, return_counts=True)
    many, rank = count[inverse], np.arange(len(order)) - first[inverse]
    several, ranked = many > 1, median[order]
    found, others = np.full(total + 1, np.nan), np.zeros(total + 1, np.int64)  # the last cell is for those of no pair
    # of the sorted medians of a job without its own one
    at = [first[inverse] + k + (k >= rank) for k in ((many - 2) // 2, (many - 1) // 2)]
    low, high = (ranked[np.where(several, place, 0)] if len(order) else ranked for place in at)
    found[order] = np.where(several, (low + high) / 2, np.nan)
    others[order] = np.bincount(inverse, ports[order], len(first))[inverse] - ports[order]
    return found[pairs], others[pairs]


def _paused_share(rate: Mapping[str, Floats], names: tuple[str, ...], speed: Floats) -> Floats:
    """Returns (N,) the share of the time that pauses take: as counted, else of as many frames at most."""
    duration, frames = (rate[name] for name in names)
    counted = np.where(np.isfinite(duration), duration / 1e6, frames * (_PAUSE_QUANTA / (8 * speed)))
    return np.asarray(np.minimum(counted, 1.0))


def _sum_known(values: Floats) -> Floats:
    """Returns (N,) sums over the known values; NaN where there are none."""
    return np.where(np.isfinite(values).any(axis=0), np.nansum(values, axis=0), np.nan)


@dataclass
class LinkCongestion(Detector):
    """Waits, congestion marks and lost packets of each port for the bytes it sends, each minute, leaf by leaf; pauses.

    Ticket: on `share` of the ports of a leaf that carry traffic, and on `ports` of them at least, one of these is
    `factor` times the normal of each, or traffic is 10 % below it, for `hold` s, or half of it where a job is 10 %
    slower; a suspect after two minutes, or five of traffic alone. Three ports are enough while their jobs are 10 %
    slower: flows that collide slow none.
    Normal is the port's own past, after the median of the ports of its job (without one: of its node) on other leaves
    has removed what the job does; where fewer than three of them are on other leaves, another phase of the job may look
    the same, and it stays a suspect unless the job's traffic is 10 % lower too. Page: the same without more congestion
    marks, while a job of these ports is 10 % slower, as its ports on other leaves show: a leaf that loses packets or
    holds up data without a cause; where nothing but traffic shows it, two jobs at least, else it is a suspect. A leaf
    on which a tenth of the ports have errors, and more than elsewhere, is left to the detector `link`. Only minutes
    count in which enough ports are over. Ends when a third of the ports are left, or none sends for ten minutes.

    A host's port that pauses its switch for more than 1 % of the time and ten times as long as the ports of its job,
    while bytes move, receives too slowly: suspect after two minutes, ticket after `pause_hold` s, page where its
    job is 10 % slower since.

    Source: errors and load distinguish corruption from congestion, as in CorrOpt (SIGCOMM 2017); half of a leaf's
    ports as for a leaf that is down; six ports, since flows that collide on an uplink are two to four; the hold is
    twice the longest burst that training causes itself (a checkpoint). A slow receiver as the cause of pauses: Guo et
    al., RDMA over commodity Ethernet at scale (SIGCOMM 2016, section 4.4). `factor` chosen: waits vary by a third.
    """

    name: ClassVar[str] = "link_congestion"
    family: ClassVar[str] = "link degradation"
    device_class: ClassVar[str] = "nic"
    needs: ClassVar[tuple[str, ...]] = ("nic.tx_bytes", "nic.speed")
    wants: ClassVar[tuple[str, ...]] = (
        *(name for name in _READ if name != "nic.tx_bytes"),
        *("nic.generation", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "Congestion that is as strong on all leaves of a job, leaves with fewer than three busy ports, which flow"
        " or job causes it, congestion of spines that no port reports, and receivers that are slow without pauses."
    )

    factor: float = 2.0
    share: float = 0.5
    ports: int = 6
    hold: float = 600.0
    least_load: float = 0.02  # below, requests of users decide what a port sends, not a collective; chosen
    pause_hold: float = 300.0

    traffic: PortTraffic = part(PortTraffic, kept=True)
    gates: Gates = part(Gates)
    crowded: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()
    _leaf: Cohorts = field(default_factory=lambda: Cohorts("leaf"), init=False, repr=False)
    _jobs: JobIndex = field(default_factory=JobIndex, init=False, repr=False)

    def budget(self) -> list[str]:
        """Returns that it has no statistical test."""
        many = f"on {self.ports:g} ports of a leaf together, for {self.hold:g} s"
        return [
            f"a rule on waits {self.factor:g} times the usual {many}: no statistical alarm rate",
            f"a rule on pauses {_TIMES_PEERS:g} times those of the job's other ports: no statistical alarm rate",
        ]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings of congested leaves and of ports that receive too slowly."""
        self.gates.update(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        self.traffic.readings.update(frame, (*_READ, _SPEED))
        if self.traffic.is_due(frame.time):
            self._note_moved(frame)
            groups = self._groups(frame)
            self.traffic.add_minute(frame, groups, self.least_load, float(np.log(self.factor)))
            self._update_leaves(frame, groups)
            for leaf in [e for e, known in self.crowded.items() if abs(frame.time - known["seen"]) > _STALE_AFTER]:
                del self.crowded[leaf]
        pausing = np.flatnonzero(self.traffic.pausing[: len(frame.entities)] >= 2).tolist()
        if not self.crowded and not self.conditions and not pausing:
            return []
        return self._findings(frame, pausing)

    def _work(self, frame: Frame) -> tuple[Groups, Bools, Bools]:
        """Returns (N,) number of the job of each port's node, else of the node; whether it is of a host, with a job."""
        numbers: dict[str, int] = {}
        jobs, (hosts, known) = np.full(len(frame.entities), -1, np.int32), np.zeros((2, len(frame.entities)), np.bool_)
        job_of = self._node_jobs(frame)
        for i, node in enumerate(find_nodes(frame)):
            if node:
                job = job_of[node]
                jobs[i], hosts[i], known[i] = numbers.setdefault(job, len(numbers)), True, job != node
        return jobs, hosts, known

    @per_topology
    def _groups(self, frame: Frame) -> Members:
        """Returns what each port belongs to."""
        (jobs, hosts, known), leaves = self._work(frame), self._leaf.groups(frame)
        return jobs, leaves, pair_numbers(jobs, leaves), hosts, known

    def _job_of(self, frame: Frame, node: str) -> str:
        """Returns the job of all ranks of a node; the node itself if it has none, or several."""
        return self._jobs.job_of_node(node, frame.topology) or node

    def _note_moved(self, frame: Frame) -> None:
        """Restarts learning about the ports of nodes that work for another job than before."""
        mine = self._node_jobs(frame)
        before = self.traffic.jobs
        if mine is before or mine == before:
            return
        moved = frozenset(node for node, job in mine.items() if before.get(node, job) != job)
        if moved:
            self.traffic.grow(len(frame.entities))
            self.traffic.restart_where(np.fromiter((node in moved for node in find_nodes(frame)), bool))
        self.traffic.jobs = mine

    @per_topology
    def _node_jobs(self, frame: Frame) -> dict[str, str]:
        return {node: self._job_of(frame, node) for node in set(find_nodes(frame)) if node}

    @per_device_topology
    def _leaf_numbers(self, frame: Frame) -> dict[str, int]:
        """Returns the number of each leaf, as in `_leaf`, with 0 for none."""
        groups, first = np.unique(self._leaf.groups(frame), return_index=True)
        above = frame.topology.ancestor_of_kind
        found = zip(groups.tolist(), first.tolist(), strict=True)
        return {above(frame.entities[i], "leaf") or "": g + 1 for g, i in found if g >= 0}

    def _update_leaves(self, frame: Frame, of: Members) -> None:
        """Counts the ports of each leaf in excess; a leaf is crowded from the first minute in which most are, fewer
        where their jobs are slower, which flows that collide do not cause."""
        n, groups = len(frame.entities), of[1] + 1  # 0: on no leaf
        excess, total = self.traffic.excess[:, :n], int(groups.max(initial=0)) + 1
        judged = np.isfinite(excess).any(axis=0)
        limits = np.log([*[self.factor] * _LESS, 1 / (1 - _SLOWER)])
        over = excess > limits[:, None]  # false for NaN
        if self.conditions or over.sum() >= self.ports:
            judged &= ~self.gates.maintenance_mask(frame)
            over &= judged
        size = np.bincount(groups, judged, total)
        errs = np.bincount(groups, judged & (self.traffic.errors[:n] > 0), total)
        counts = np.stack([np.bincount(groups, kind, total) for kind in over])
        most = counts.max(axis=0)
        elsewhere = (errs.sum() - errs) / np.maximum(size.sum() - size, 1)  # a site may have errors everywhere
        least = np.maximum(self.share * size, _MIN_OTHERS)
        begins = (most >= least) & (errs <= (0.1 + 2 * elsewhere) * size)
        stays = most > least / 1.5
        for leaf, group in self._leaf_numbers(frame).items() if (begins | stays)[1:].any() or self.crowded else ():
            if stays[group] and (begins[group] or leaf in self.crowded):
                self._update_leaf(frame, leaf, np.flatnonzero(groups == group), over, of)
            elif size[group] >= self.ports:
                self.crowded.pop(leaf, None)

    def _has_pausing_port(self, ports: NDArray[np.intp]) -> bool:
        """Returns whether a port of the leaf pauses it: those beside it are paused more than their job elsewhere is."""
        return bool((self.traffic.pausing[ports] > 0).any())

    def _update_leaf(self, frame: Frame, leaf: str, ports: NDArray[np.intp], over: Bools, groups: Members) -> None:
        """Notes how crowded a leaf is in this minute."""
        traffic, counts = self.traffic, over[:, ports].sum(axis=1)
        kind = int(np.argmax(counts[:_LESS])) if counts[:_LESS].max() * 2 >= counts[_LESS] else _LESS
        if kind == _PAUSED and self._has_pausing_port(ports):
            self.crowded.pop(leaf, None)  # a slow receiver: pauses spread from its switch to those that send to it
            return
        mine = ports[over[kind, ports]]
        excess = traffic.excess[:, mine]
        judged, beside = ports[np.isfinite(traffic.excess[kind, ports])], bool(traffic.alone[kind, mine].mean() < 0.5)
        slower = traffic.slowing(judged, groups)
        # marks for each byte rise also where nothing but bytes are lost
        marked = (excess[_MARKED] - np.fmax(excess[_LESS], 0) > np.log(self.factor)).sum() * 2 > len(mine)
        few = len(mine) < self.ports and not (beside and slower >= _SLOWER)
        if few and leaf not in self.crowded:
            return
        began = frame.time - int(MINUTE_S * SECOND)  # within the minute that was read
        known = self.crowded.setdefault(leaf, {"onset": began, "looks": 0})
        known |= {"seen": frame.time, "looks": known["looks"] + 1, "kind": kind, "few": few, "beside": beside}
        known["full"] = known.get("full", 0) + (not few)
        known |= {"ports": len(mine), "of": len(judged), "slower": slower, "marked": bool(marked)}
        known["factor"] = float(np.exp(np.median(traffic.excess[kind, mine])))
        known["load"] = float(np.nanmedian(traffic.share[judged]))
        known["errors"] = int(np.nansum(traffic.errors[ports]))
        known["jobs"] = len(np.unique(groups[0][mine]))

    def _findings(self, frame: Frame, pausing: list[int]) -> list[Finding]:
        crowded = {leaf: known for leaf, known in self.crowded.items() if known["looks"] >= _LOOKS[known["kind"]]}
        seen = {leaf: known for leaf, known in crowded.items() if known["seen"] == self.traffic.time}
        gated = self.gates.maintenance_mask(frame)
        ports = {frame.entities[i]: i for i in pausing if not gated[i]}
        close_ended(self.conditions, {*crowded, *ports})
        found = [self._leaf_finding(frame, leaf, known) for leaf, known in sorted(seen.items())]
        found += [self._pause_finding(frame, port, i) for port, i in sorted(ports.items())]
        return [finding for finding in found if finding is not None]

    def _leaf_finding(self, frame: Frame, leaf: str, known: dict[str, Any]) -> Finding | None:
        # minutes in which most of its ports did not send, or few were in excess, prove nothing
        held = min((frame.time - known["onset"]) / SECOND, known["full"] * MINUTE_S)
        harms = known["slower"] >= _SLOWER
        slows, shared = harms and not known["marked"], known["kind"] != _LESS or known["jobs"] > 1
        level: Level = "suspect"
        if held >= self.hold / (2 if harms else 1) and shared and not known["few"] and (known["beside"] or harms):
            level = "page" if slows and held >= self.hold else "ticket"
        due = due_report(self.conditions, leaf, frame.time, known["onset"], level)
        if due is None:
            return None
        what, signals = _KINDS[known["kind"]]
        title = f"{known['factor']:.1f} x {what} on {known['ports']} of {known['of']} busy ports"
        if known["kind"] == _LESS:
            title = f"{100 - 100 / known['factor']:.0f} % {what} on {known['ports']} of {known['of']} busy ports"
        else:
            title = f"jobs {100 * known['slower']:.0f} % slower, {title}" if slows else f"congested, {title}"
        return self.finding(
            *(frame.time, leaf, due),
            score=known["factor"],
            summary=pager_title(leaf, title),
            signals=signals,
            clears=f"fewer than a third of the ports are at {self.factor:g} times their normal",
            compared=Comparison(known["factor"], 1.0, None, "own past", 0, known["factor"] - 1, "share"),
            **{name: known[name] for name in ("ports", "of", "errors")},
            load=round(known["load"], 3),
            slower=round(known["slower"], 3),
            minutes=round(held / 60, 1),
        )

    def _pause_finding(self, frame: Frame, port: str, i: int) -> Finding | None:
        traffic = self.traffic
        held, paused, usual = traffic.pausing[i] * MINUTE_S, float(traffic.paused[i]), float(traffic.usual_pause[i])
        slower = traffic.slowing(np.array([i]), self._groups(frame))
        level: Level = "suspect" if held < self.pause_hold else "page" if slower >= _SLOWER else "ticket"
        if not np.isfinite(paused):  # nothing was read in this minute
            return None
        due = due_report(self.conditions, port, frame.time, traffic.time - int(held * SECOND), level)
        if due is None:
            return None
        title = f"pauses its switch {100 * paused:.1f} % of the time, peers {100 * usual:.1f} %"
        title += f"; its job {100 * slower:.0f} % slower" if slower >= _SLOWER else ""
        return self.finding(
            *(frame.time, port, due),
            score=paused / _LEAST_PAUSED,
            summary=pager_title(port, title),
            signals=PAUSES,
            clears="it pauses its switch for less than 1 % of the time, or as long as its peers, for some minutes",
            compared=Comparison(paused, usual, None, "ports of its job", 0, paused - usual, ""),
            slower=round(slower, 3),
        )
