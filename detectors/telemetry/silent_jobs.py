"""What the jobs of a silent node do: if they make steps, its agent is dead; if they stop or end, its host is.

Where the jobs report no steps, power and traffic of their other nodes show whether they stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from detectors.base.event_data import events_of
from detectors.base.state import N, State, memory, notes, part
from detectors.base.statistics import group_means, median_of
from detectors.base.topology_index import TopologyIndex, per_topology
from detectors.telemetry.silence import Bools, LastSamples
from pipeline.model.rank_changes import RankChanges
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

STEPS_ON = 30 * SECOND
"""A step that ends so long after a node fell silent did not wait for it; chosen: longer than most steps."""
HANGS = 300 * SECOND
"""No step of any other rank for so long is a hang: evaluations and checkpoints take some minutes; chosen."""
STOPS = 20 * SECOND
"""us beyond twice the usual time between steps after which a job stopped, if its last step was the node's last sample:
two frames; chosen. That a checkpoint begins just then is rare: one minute of thirty."""
WITH_IT = 15 * SECOND
"""A job that ended at most so long before the node's last sample ended with it; chosen: a frame of 10 s and 5 s of
jitter. A node that falls silent later may be rebooted between two jobs."""
AFTER = 600 * SECOND
"""A job that ends later than that after the node's last sample has another reason; the launcher waits for lost ranks:
NCCL's watchdog in PyTorch for 10 min by default."""
_KEPT = 3600 * SECOND  # us for which an ended job matters; chosen
_LOST = 30 * 24 * 3600 * SECOND  # us after which the end of a running job counts as lost; the topology has it; chosen
_LONGER, _FOLLOWS = 3.0, 0.1  # times the usual that one pause counts at most, so that no checkpoint does; its gain
_FELL = (0.7, 0.2, 0.6)
"""Shares of the usual power of GPUs, traffic of ports and output of supplies below which they stopped: a GPU that waits
in a collective draws 20 to 40 %, and sends nothing; a host that is down draws less than half. Chosen."""
_UNCHANGED = 0.8  # share of the usual output of its supplies from which a node still works; chosen
_MEMORY_S = 600.0  # s of which the usual is a mean: longer than a step, shorter than a phase of a job; chosen
_NEARLY_ALL = 0.75  # share of the other nodes of a job that must stop; a few may already wait, or start over. Chosen
_POWER, _TRAFFIC, _SUPPLY = range(3)
_SIGNALS = (("gpu", "gpu.power"), ("nic", "nic.tx_bytes"), ("psu", "psu.output_power"))
_MOST = 4096  # jobs that are kept: a fleet runs fewer at a time, so the ends of the oldest were lost; chosen
JobState = Literal["ended", "hangs", "running", "unknown", "none"]


@dataclass(frozen=True, slots=True)
class JobVerdict:
    """What the jobs of a node did after it fell silent, and the job that shows it."""

    state: JobState
    job: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _RankPlaces:
    """Ranks in the topology. nodes: (N,) number of each rank's node, -1 none; number: node -> its number;
    jobs: node -> jobs with ranks on it; ranks: job -> positions of its ranks."""

    nodes: NDArray[np.int32]
    number: Mapping[str, int]
    jobs: Mapping[str, list[str]]
    ranks: Mapping[str, NDArray[np.intp]]


@dataclass
class PortBytes(State):
    """Bytes that each port sent, as last read."""

    sent: NDArray[np.float64] = memory(np.nan)
    read: NDArray[np.int64] = memory(0, np.int64)

    def rates(self, now: NDArray[np.float64], time: int) -> NDArray[np.float64]:
        """Returns (N,) bytes a second since the last reading; NaN where there is none, or the counter fell."""
        self.grow(n := len(now))
        sent, read, there = self.sent[:n], self.read[:n], np.isfinite(now)
        rate = (now - sent) / np.maximum((time - read) / SECOND, 1.0)
        sent[there], read[there] = now[there], time
        return np.where(rate >= 0, rate, np.nan)


@dataclass
class NodeActivity(State):
    """Power of the GPUs, traffic of the ports and output of the supplies of each node: now, usually, and since when
    (us) they are far below their usual; 0: they are not."""

    now: NDArray[np.float64] = memory(np.nan, shape=(3, N))
    usual: NDArray[np.float64] = memory(np.nan, shape=(3, N))
    read: NDArray[np.int64] = memory(0, np.int64, shape=(3, N))
    fell: NDArray[np.int64] = memory(0, np.int64, shape=(3, N))
    ports: PortBytes = part(PortBytes, of="nic")
    _indexes: dict[str, TopologyIndex] = field(default_factory=dict, init=False, repr=False)

    def update(self, frames: Mapping[str, Frame], last: LastSamples) -> None:
        """Adds an instant."""
        nodes = last.names("node")
        self.grow(len(nodes))
        for row, (device_class, signal) in enumerate(_SIGNALS):
            frame = frames.get(device_class)
            if frame is None or signal not in frame.values or not len(nodes):
                continue
            index = self._indexes.setdefault(device_class, TopologyIndex())
            index.update(frame.entities, frame.topology)
            values, owner = frame[signal], index.node_positions(nodes)
            values = self.ports.rates(values, last.time) if row == _TRAFFIC else values
            self._add(row, group_means(values, owner, len(nodes)), last.time)

    def _add(self, row: int, means: NDArray[np.float64], time: int) -> None:
        cells = (self.now, self.usual, self.read, self.fell)
        now, usual, read, fell = (each[row, : len(means)] for each in cells)
        np.minimum(read, time, out=read)  # the clock may have been set back
        there = np.isfinite(means)
        below = there & (means < _FELL[row] * usual)
        fell[below & (fell == 0)] = time
        fell[there & ~below] = 0
        share = 1 - np.exp((read - time) / (_MEMORY_S * SECOND))
        usual[:] = np.where(there, np.where(np.isnan(usual), means, usual + share * (means - usual)), usual)
        now[there], read[there] = means[there], time

    def stopped(self, nodes: NDArray[np.intp], since: int, time: int, every: int) -> bool:
        """Returns whether nearly all of some nodes stopped work and traffic, whichever are measured, at `since`.

        every: usual time between two samples.
        """
        rows = [self._stopped(row, nodes, since, time, every) for row in (_POWER, _TRAFFIC)]
        return any(rows) and all(row is not False for row in rows)

    def _stopped(self, row: int, nodes: NDArray[np.intp], since: int, time: int, every: int) -> bool | None:
        fell, usual = self.fell[row, nodes], self.usual[row, nodes]
        measured = (time - self.read[row, nodes] <= STEPS_ON + 2 * every) & (usual > 0)
        if not len(nodes) or 2 * np.count_nonzero(measured) < len(nodes):
            return None
        with_it = measured & (fell >= since - WITH_IT - every) & (fell <= since + STEPS_ON + every)
        with_it &= time - fell >= STOPS
        return bool(np.count_nonzero(with_it) >= _NEARLY_ALL * np.count_nonzero(measured))

    def supplied(self, node: int, since: int, mates: NDArray[np.intp]) -> str:
        """Returns "alive" if the supplies of a node, read after `since`, give as much as before, "dead" if they give
        little, "" if neither is known.

        mates: reporting nodes of its job. Little is measured by them: all draw half in a checkpoint or evaluation.
        """
        if node >= self.now.shape[1] or self.read[_SUPPLY, node] < since + STOPS:
            return ""
        share = self.now[_SUPPLY] / self.usual[_SUPPLY]
        read = mates[self.read[_SUPPLY, mates] >= since]
        of_mates = float(np.fmin(median_of(share[read])[0], 1.0)) if len(read) else 1.0
        if self.fell[_SUPPLY, node] >= since - WITH_IT:
            return "dead" if not share[node] >= _FELL[_SUPPLY] * of_mates else ""
        return "alive" if share[node] >= _UNCHANGED else ""


@dataclass
class SilentJobs(State):
    """The nodes and the end of each job, from job_start and job_end, and when each rank made its last step.

    gap: usual time between two steps of each rank (us).
    """

    _jobs: dict[str, dict[str, Any]] = notes()  # job -> nodes, ended (us or None), newest_event
    _step: NDArray[np.float64] = memory(np.nan)
    _stepped: NDArray[np.int64] = memory(0, np.int64)
    _gap: NDArray[np.float64] = memory(np.nan)
    activity: NodeActivity = part(NodeActivity, of="node")
    _ranks: tuple[str, ...] = field(default=(), init=False, repr=False)
    _on: dict[str, list[str]] | None = field(default=None, init=False, repr=False)  # node -> its jobs; None: unknown
    _changes: RankChanges = field(default_factory=RankChanges, init=False, repr=False)
    _found: dict[str, tuple[str | None, tuple[str, ...]]] = field(default_factory=dict, init=False, repr=False)
    _newest: dict[str, tuple[int, float]] = field(default_factory=dict, init=False, repr=False)
    _newest_of: tuple[_RankPlaces, int] | None = field(default=None, init=False, repr=False)  # of `_newest`
    _last: LastSamples = field(default_factory=lambda: LastSamples({}), init=False, repr=False)

    def keep_cells(self, kept: NDArray[np.bool_]) -> None:
        """See `State.keep_cells`; the ranks come with the next frame."""
        super().keep_cells(kept)
        self._ranks, self._newest_of = (), None

    def update(self, frames: Mapping[str, Frame], time: int, last: LastSamples | None = None) -> None:
        """Reads the events and steps of an instant. last: samples of nodes and devices, this instant's too; None: all
        nodes report."""
        if last is not None:
            self._last = last
            self.activity.update(frames, last)
        for event in events_of(frames, "job_start", "job_end"):
            self._record(event, next(iter(frames.values())).topology)
        frame = frames.get("rank")
        if frame is not None and "rank.step" in frame.values:
            self._follow_steps(frame, time)
        over = [j for j, known in self._jobs.items() if self._is_over(known, time)]
        for job in over:
            del self._jobs[job]
        most = list(self._jobs)[: max(0, len(self._jobs) - _MOST)]
        for job in most:
            del self._jobs[job]
        self._on = None if over or most else self._on

    def _is_over(self, known: dict[str, Any], time: int) -> bool:
        """Returns whether a job no longer matters: it ended, or had no event for so long that its end was lost."""
        if known["ended"]:
            return bool(time - known["ended"] > _KEPT)
        return bool(time - known.setdefault("newest_event", time) > _LOST)

    def _record(self, event: Event, topology: Topology) -> None:
        job = self._jobs.pop(event.entity, {"nodes": {}, "ended": None})
        self._jobs[event.entity] = job  # the newest ones last
        self._on = None
        job["newest_event"] = event.time
        if event.kind == "job_end":
            job["ended"] = max(event.time, job["ended"] or 0)
            return
        if job["ended"] is not None and event.time > job["ended"]:
            job["nodes"], job["ended"] = {}, None
        ranks = event.data.get("ranks")
        for place in ranks.values() if isinstance(ranks, Mapping) else ():
            gpu = place.get("gpu") if isinstance(place, Mapping) else None
            node = topology.ancestor_of_kind(gpu, "node") if isinstance(gpu, str) else None
            if node is not None:
                job["nodes"][node] = 1

    def _follow_steps(self, frame: Frame, time: int) -> None:
        steps = frame["rank.step"]
        self.grow(len(steps))
        moved = np.flatnonzero(~np.isnan(steps) & (steps != self._step[: len(steps)]))
        np.minimum(self._stepped, time, out=self._stepped)  # the clock may have been set back
        gap, took = self._gap[moved], np.where(self._stepped[moved] > 0, time - self._stepped[moved], np.nan)
        took = np.fmin(took, _LONGER * gap)
        self._gap[moved] = np.where(np.isnan(gap), took, gap + _FOLLOWS * np.nan_to_num(took - gap))
        self._step[moved], self._stepped[moved] = steps[moved], time
        self._newest_of = None
        self._ranks = tuple(frame.entities) if len(frame.entities) != len(self._ranks) else self._ranks

    def verdict(self, node: str, since: int, time: int, topology: Topology) -> JobVerdict:
        """Returns what the jobs did that ran on a node with its last sample at `since`."""
        mine, every = self._started_on(node), self._last.interval()
        before = since - max(WITH_IT, every)
        ended = [j for j in mine if (at := self._jobs[j]["ended"]) and before <= at <= since + AFTER]
        if ended:
            return JobVerdict("ended", ended[-1])
        mine = [job for job in mine if self._jobs[job]["ended"] is None]
        places = self._places_in(topology)
        here = places.jobs.get(node, [])
        if moved := [job for job in mine if job in places.ranks and job not in here]:
            return JobVerdict("ended", moved[-1])  # its ranks run elsewhere since, though no end was reported
        mine += [job for job in here if job not in mine]
        if not mine:
            return JobVerdict("none")
        newest = {job: self._newest_step(job, places) for job in mine}
        # one more step may end after the last sample, and be read an interval later
        limit = {job: max(STEPS_ON, 2 * every + gap) for job, (_, gap) in newest.items()}
        on = next((job for job, (at, _) in newest.items() if at > since + limit[job]), None)
        if on is not None:
            return JobVerdict("running", on)
        hung = next((job for job in mine if self._hangs(job, *newest[job], since, time, places)), None)
        return JobVerdict("unknown", mine[0]) if hung is None else JobVerdict("hangs", hung)

    def _hangs(self, job: str, at: int, gap: float, since: int, time: int, places: _RankPlaces) -> bool:
        """Returns whether a job with its last step at `at` stopped with a node that fell silent at `since`."""
        if at <= 0:
            return self._stops(job, since, time, places)
        every = self._last.interval()
        stops = at >= since - gap - max(WITH_IT, every) and time - at > 2 * gap + max(STOPS, every)
        return bool(stops or (since - HANGS < at and time - at > HANGS))

    def _stops(self, job: str, since: int, time: int, places: _RankPlaces) -> bool:
        """Returns whether the other nodes of a job without steps stopped work and traffic as a node fell silent."""
        mine = self._reporting_nodes(job, places)
        return self.activity.stopped(mine, since, time, self._last.interval())

    def supplied(self, node: str, since: int, job: str, topology: Topology) -> str:
        """Returns whether the host of a silent node is "alive" or "dead" as its supplies show, "" if unknown."""
        mates = self._reporting_nodes(job, self._places_in(topology))
        return self.activity.supplied(list(self._last.names("node")).index(node), since, mates)

    def reports_elsewhere(self, job: str, topology: Topology) -> bool:
        """Returns whether a node of a job reports: what a silent one did to the job would show there."""
        return len(self._reporting_nodes(job, self._places_in(topology))) > 0

    def _places_in(self, topology: Topology) -> _RankPlaces:
        """Returns the places of the ranks that are known to run, else of all in the topology."""
        return self._places(self._ranks or self._all_ranks(topology), topology)

    def _reporting_nodes(self, job: str, places: _RankPlaces) -> NDArray[np.intp]:
        nodes = set(self._jobs.get(job, {"nodes": {}})["nodes"]) or {
            n for n, jobs in places.jobs.items() if job in jobs
        }
        reporting = self._last.reporting("node")
        found = (i for i, name in enumerate(self._last.names("node")) if name in nodes and reporting[i])
        return np.fromiter(found, np.intp)

    def ended_since(self, node: str, time: int) -> bool:
        """Returns whether a job on a node ended at `time` or later, within the last hour."""
        return any((self._jobs[job]["ended"] or 0) >= time for job in self._started_on(node))

    def _started_on(self, node: str) -> list[str]:
        """Returns the jobs with a job_start on a node, the newest ones last."""
        if self._on is None:
            self._on = {}
            for job, known in self._jobs.items():
                for each in known["nodes"]:
                    self._on.setdefault(each, []).append(job)
        return self._on.get(node, [])

    @per_topology
    def _all_ranks(self, topology: Topology) -> tuple[str, ...]:
        """Returns the ranks of the topology, for jobs that report no steps."""
        return tuple(entity for entity in topology.parents if entity.startswith("rank:"))

    @per_topology
    def _places(self, names: tuple[str, ...], topology: Topology) -> _RankPlaces:
        """Looks up nodes and jobs of all ranks."""
        number: dict[str, int] = {}
        own: dict[str, dict[str, None]] = {}
        ranks: dict[str, list[int]] = {}
        nodes = np.full(len(names), -1, np.int32)
        changed = self._changes.read(topology)
        self._found = {} if changed is None else self._found
        for rank in changed or ():
            self._found.pop(rank, None)
        for i, rank in enumerate(names):
            if (known := self._found.get(rank)) is None:
                known = self._found[rank] = _find_place(rank, topology)
            node, jobs = known
            for job in jobs:
                ranks.setdefault(job, []).append(i)
            if node is not None:
                nodes[i] = number.setdefault(node, len(number))
                own.setdefault(node, {}).update(dict.fromkeys(jobs))
        own_jobs = {node: list(jobs) for node, jobs in own.items()}
        return _RankPlaces(nodes, number, own_jobs, {job: np.array(mine, np.intp) for job, mine in ranks.items()})

    def _newest_step(self, job: str, places: _RankPlaces) -> tuple[int, float]:
        """Returns when a rank of the job on a node that reports made its last step, 0 if there is none, and the usual
        time between two steps: nothing is known of ranks whose node is silent."""
        if self._newest_of is None or self._newest_of[0] is not places or self._newest_of[1] != self._last.time:
            self._newest_of, self._newest = (places, self._last.time), {}
        if job not in places.ranks or not self._ranks:
            return 0, 0.0
        if job not in self._newest:
            mine = places.ranks[job]
            mine = mine[self._rank_reports(places)[mine]]
            gaps = self._gap[mine][np.isfinite(self._gap[mine])]
            gap = float(np.median(gaps)) if len(gaps) else HANGS / 2.0
            self._newest[job] = int(self._stepped[mine].max(initial=0)), gap
        return self._newest[job]

    def _rank_reports(self, places: _RankPlaces) -> Bools:
        """Returns (N,) ranks whose node reports; all where no node does or is known."""
        names, reporting = self._last.names("node"), self._last.reporting("node")
        silent = [places.number[names[i]] for i in np.flatnonzero(~reporting).tolist() if names[i] in places.number]
        return np.asarray(~np.isin(places.nodes, silent))


def _find_place(rank: str, topology: Topology) -> tuple[str | None, tuple[str, ...]]:
    """Returns the node of a rank and its jobs, by its parents: the ancestors of GPUs and jobs are cached, those of each
    rank are its own."""
    parents = topology.parents.get(rank, ())
    node = next((n for p in parents if (n := topology.ancestor_of_kind(p, "node"))), None)
    jobs = (job for p in parents for job in (p, *topology.ancestors(p)) if job.startswith("job:"))
    return node, tuple(dict.fromkeys(jobs))
