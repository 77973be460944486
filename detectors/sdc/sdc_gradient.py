"""Finds ranks whose gradient norm alone is far too large or not finite, and jobs in which all ranks' norms spike.

How rare it is that spikes of one rank cluster by chance, whatever the tails of its norms: independent spikes come at
least k - 1 times within `steps` steps after one with a probability of at most C(steps, k - 1) rate^(k - 1); clusters
are sought by such scans since Naus (Journal of the American Statistical Association 77, 1982). The rate is the highest
of three: of the rank itself, of its stage and of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import DAY_S, GPUS
from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, memory, notes
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.statistics import grouped_median
from detectors.base.streams import USUAL_STEP
from pipeline.model.entity_names import entity_name, pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
SpikeRate = tuple[float, float]
"""(spikes, steps)."""
_NORM, _COUNT = "rank.gradient_norm", "rank.nonfinite"
SAMPLES = 1000 * GPUS * DAY_S / USUAL_STEP
"""Of ranks, in 1,000 node-days."""
SERIES_GAP_S = 86_400.0
"""s without a spike after which a GPU's earlier ones are dropped; chosen: one spike a day is chance."""
_MIN_SAMPLES = 20  # before a rank is judged: the replay contract
_GAIN = 0.01  # least learning rate of a rank's usual departure: a memory of about 100 samples; chosen
_MIN_DEVIATIONS = 6.0  # own mean deviations that a spike must exceed: ranks that spike often are left alone; chosen
_MAX_SHARE = 0.3  # of a stage, above which it is the batch and no rank is blamed, as in the common kernel
_MAX_HELD = 1000  # ranks; chosen
_CHANCE_TICKETS = 0.2  # in 1,000 node-days for each number of spikes, of which three count, and for all series
_HEAVY_SPREAD = 0.14  # spread of norms with heavy tails that the budget assumes
_PRIOR_RATE = 1e-5  # spikes per step, weighed like one spike, before any was seen: one in eleven days; chosen
_PRIOR_SHAPE = 0.5  # of the gamma law by which ranks and stages differ, as of memory errors of GPUs; chosen
_MAX_SERIES = 1000  # GPUs with a series that is kept; chosen
_SERIES_RATIO = 10.0  # times as often as each other rank of its stage a GPU to be tested spikes; chosen
_MIN_SERIES = 3  # spikes of a series at least; chosen: two that are far apart are chance
_MAX_PAUSES = 3.0  # usual pauses that end a series: of independent spikes one pause of 20 is longer; chosen
_MAX_SCORE = 1e6


def spike_rate(own: SpikeRate, stage: SpikeRate, fleet: SpikeRate) -> float:
    """Returns the usual spikes per step of a rank, from those of its past, of the ranks beside it and of all others."""
    base = (fleet[0] + 1.0) / (fleet[1] + 1.0 / _PRIOR_RATE)
    mine, beside = ((n + _PRIOR_SHAPE) / (steps + _PRIOR_SHAPE / base) for n, steps in (own, stage))
    return min(max(base, mine, beside), 1.0)


def chance_clusters(usual: float, spikes: int, steps: int) -> float:
    """Returns how many clusters of so many spikes, within `steps` after the first, chance makes in 1,000 node-days."""
    more, n = spikes - 1, max(steps, spikes - 1)
    ways = math.lgamma(n + 1) - math.lgamma(more + 1) - math.lgamma(n - more + 1)
    return SAMPLES * math.exp(min(ways + spikes * math.log(usual), 700.0))


def add_to_series(gpus: dict[str, dict[str, Any]], gpu: str, rank: tuple[int, float], time: int) -> dict[str, Any]:
    """Adds a spike to the series of a GPU and returns it: a job may run different ranks on it.

    rank: index of the rank that is on it, and that rank's step.
    spikes, steps: of the series, steps from the first to the newest spike.   by: rank -> its spikes on this GPU.
    """
    (i, at), known = rank, gpus.pop(gpu, None)
    if known is None or time - known["last"] > SERIES_GAP_S * SECOND:
        known = {"spikes": 0, "steps": 0, "first": time, "by": {}}
    elif known["of"] == i:
        known["steps"] += max(int(at - known["at"]), 1)
    else:  # steps of a rank elsewhere are not steps of this GPU: no more than the time allows
        known["steps"] += max(round((time - known["last"]) / SECOND / USUAL_STEP), 1)
    known["by"][str(i)] = known["by"].get(str(i), 0) + 1
    known |= {"spikes": known["spikes"] + 1, "of": i, "at": at, "last": time, "first": min(known["first"], time)}
    gpus[gpu] = known  # the newest is last
    for old in list(gpus)[:-_MAX_SERIES]:
        del gpus[old]
    return known


def is_series(known: dict[str, Any], spikes: Floats, seen: Floats, stage: Bools, most: float) -> bool:
    """Returns whether a GPU spikes repeatedly, however far apart, and far more often than ranks of its stage elsewhere.

    Its own spikes raise no rate by which it is judged; spikes that its rank had on other GPUs do: they come from its
    data. Each number of spikes may cost half the chance of the one before, so that all together cost `most`.
    """
    count, steps = int(known["spikes"]), int(known["steps"])
    if count < _MIN_SERIES:
        return False
    elsewhere = spikes.copy()
    for i, n in known["by"].items():
        elsewhere[int(i)] = max(elsewhere[int(i)] - n, 0.0)
    others = np.max((elsewhere[stage] - 1) / np.maximum(seen[stage], 1), initial=0.0)  # one spike each is chance
    if _SERIES_RATIO * others > (count - 1) / max(steps, 1):
        return False
    beside = (float(elsewhere[stage].sum()), float(seen[stage].sum()))
    usual = spike_rate(beside, beside, (float(elsewhere.sum()), float(seen.sum())))
    return chance_clusters(usual, count, steps) <= most / 2.0 ** min(count - _MIN_SERIES + 1, 1000)


def series_hold_s(known: dict[str, Any]) -> float:
    """Returns the seconds without another spike that end a series."""
    pause: float = (known["last"] - known["first"]) / SECOND / (known["spikes"] - 1)
    return min(_MAX_PAUSES * pause, SERIES_GAP_S)


def normal_tail(deviations: float) -> float:
    """Returns the chance that a normal sample is so many standard deviations above its mean."""
    return math.erfc(deviations / math.sqrt(2)) / 2


def student_tail(deviations: float) -> float:
    """Returns the same of a sample of Student's t with 4 degrees of freedom, by its closed form."""
    t2 = 2 * deviations**2  # its variance is 2
    return (1 - math.sqrt(t2 / (4 + t2)) * (1 + 2 / (4 + t2))) / 2


@dataclass
class SdcGradient(Detector):
    """A rank whose local gradient norm is `factor` times its stage's median, and times its own usual, is a suspect.

    It is a ticket, to test the GPU, if it spikes again sooner and more often than ranks do by chance, as learnt from
    it, its stage and all others; if ranks on its GPU spike repeatedly, even rarely, and no other GPU of its stage
    spikes nearly as often; or if it alone counts a loss or gradient that is not finite: data hardly causes that. One
    spike, however large, is not a ticket: tails are heavy. It never pages: norms show few corruptions, and data and
    numerics cause spikes too; a canary or the digest of a replica must confirm. It stays for `hold` seconds after the
    last spike, or for three usual pauses of a GPU with a series of spikes.

    If a large part of a stage spikes together, the cause is the batch (a loss spike). Where norms are reported after
    the all-reduce, it may also be one GPU among many. Then only the job is a suspect, and its results are in doubt.

    Source: the factor of 5 is ByteRobust's (SOSP 2025) for loss and gradient norm; that under half of the corruptions
    show so: SDCHunter (OSDI 2026); 1 % of them end as NaN or infinity: "Anatomy of GPU SDC" (DSN 2026); spikes are
    counted as Naus (Journal of the American Statistical Association 77, 1982) scans for clusters. Rest chosen.
    """

    name: ClassVar[str] = "sdc_gradient"
    family: ClassVar[str] = "silent data corruption"
    device_class: ClassVar[str] = "rank"
    needs: ClassVar[tuple[str, ...]] = (_NORM,)
    wants: ClassVar[tuple[str, ...]] = (_COUNT,)
    cannot_see: ClassVar[str] = (
        "Small errors, which are most; which GPU it is where norms are reported after the all-reduce, or a third of a "
        "stage spikes together; GPUs of one stage that spike alike, however often; stages of fewer than four ranks."
    )

    factor: float = 5.0
    least: int = 4
    hold: float = 600.0

    usual: Floats = memory(0.0)
    spread: Floats = memory(0.0)
    seen: Floats = memory(0.0)
    level: Floats = memory(np.nan)  # usual logarithm of its stage's median
    spikes: Floats = memory(0.0)  # of the rank alone, in all
    last: Floats = memory(np.nan)
    count: Floats = memory(np.nan)
    series: dict[str, dict[str, Any]] = notes()  # GPU -> its spikes, whichever rank was on it
    held: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()
    _peers: Peers = field(default_factory=lambda: Peers(("stage",), ("job",), least=4), init=False, repr=False)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on ranks whose gradient norm spikes or is not finite."""
        frame = frames.get("rank")
        if frame is None:
            return []
        size = len(frame.entities)
        if size and (_NORM in frame.values or _COUNT in frame.values):
            self.grow(size)
            groups = self._peers.groups(frame)
            self._update_spikes(frame, groups)
            self._count_nonfinite(frame, groups)
        return self._findings(frame) if self.held or self.conditions else []

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Resets the ranks on a GPU or of a job: what they show from now on is their usual."""
        for known in (self.held, self.series):
            known.pop(entity, None)
        frame = frames.get("rank")
        if frame is None:
            return
        for i, rank in enumerate(frame.entities[: len(self.seen)]):
            if entity == rank or entity in frame.topology.ancestors(rank):
                self.usual[i] = self.spread[i] = self.seen[i] = self.spikes[i] = 0.0
                self.level[i] = np.nan
                self.series.pop(_gpu_of(frame, rank), None)

    def drop_ranks(self, kept: NDArray[np.bool_]) -> None:
        """See `Detector.drop_ranks`; a series of spikes names ranks by their columns."""
        self.keep_cells(kept)
        place = {int(column): new for new, column in enumerate(np.flatnonzero(kept))}
        for known in self.series.values():
            known["of"] = place.get(known["of"], -1)
            known["by"] = {str(place[int(i)]): n for i, n in known["by"].items() if int(i) in place}

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests."""
        sure = _MIN_DEVIATIONS * math.sqrt(
            2 / math.pi
        )  # in standard deviations: of normal samples one is 1.25 mean deviations
        suspects, spread = SAMPLES * normal_tail(sure), math.expm1(math.log(self.factor) / sure)
        many = SAMPLES * student_tail(math.log(self.factor) / _HEAVY_SPREAD)
        return [
            f"spikes: {self.factor:g} times the median, and {sure:.1f} standard deviations of the rank's own"
            f" logarithms: where these are normal at most {suspects:,.0f} suspects per 1,000 node-days at"
            f" {USUAL_STEP:g} s if a norm varies by {spread:.0%} or more, almost none if less; where tails are heavy"
            f" (Student's t of 4, {_HEAVY_SPREAD:.0%}) about {many:,.0f}",
            f"tickets: clusters of spikes within {self.hold:g} s, with a chance of {_CHANCE_TICKETS:g} per 1,000"
            " node-days for each number of spikes, at the rate of spikes of ranks, stage and fleet: below 1 per 1,000"
            " node-days whatever the tails, once a stage of such ranks has had a few spikes, if spikes are independent;"
            f" {_CHANCE_TICKETS:g} of these for GPUs that spike repeatedly, at most {SERIES_GAP_S / 3600:g} h apart,"
            " at the rate of all others; never a page",
            "losses that are not finite: a rule on a counter, no statistical alarm rate",
        ]

    def _update_spikes(self, frame: Frame, groups: NDArray[np.int32]) -> None:
        norm = frame[_NORM]
        size = len(norm)
        fresh = (norm > 0) & np.isfinite(norm) & (groups >= 0)
        if not fresh.any():
            return
        y = np.where(fresh, np.log(np.where(fresh, norm, 1.0)), np.nan)
        median, members = grouped_median(y, groups)
        residual = y - median
        judged = fresh & (members >= self.least)
        new = norm != self.last[:size]  # of another step than the reading before
        together = self._find_stage_spikes(frame, y, median, judged & new, groups)
        departure = np.where(judged, residual - self.usual[:size], 0.0)
        limit = math.log(self.factor)
        spike = judged & (self.seen[:size] >= _MIN_SAMPLES) & (residual >= limit) & (departure >= limit)
        spike &= departure >= _MIN_DEVIATIONS * self.spread[:size]
        if spike.any():
            moved = judged & (departure >= limit / 2)  # where half of a stage spikes, its median lies between
            mine = spike & new & _where_minority(moved, groups, judged)
            for i in np.flatnonzero(mine).tolist():
                peers = int(members[i]) - 1
                ratio = math.exp(float(residual[i]))
                gpu = self._hold_gpu(frame, i, "spike", float(norm[i]), math.exp(float(median[i])), ratio, peers)
                self._count_spike(self.held[gpu], frame, i, groups)
        self._learn(judged & new & ~spike & ~together, departure)
        self.last[:size] = np.where(fresh, norm, self.last[:size])

    def _count_spike(self, record: dict[str, Any], frame: Frame, i: int, groups: NDArray[np.int32]) -> None:
        """Counts a spike of a held rank: a ticket if chance hardly makes so many so soon."""
        if record.get("counted") == frame.time:  # of another rank on the same GPU
            return
        rank, size, beside = frame.entities[i], len(groups), groups == groups[i]
        if record.get("of") is None:
            record["own"] = [float(self.spikes[i]), float(self.seen[i])]
        self.spikes[i] += 1
        at, spikes, seen = float(self.seen[i] + self.spikes[i]), self.spikes[:size], self.seen[:size]
        if record.get("of") is None:
            record |= {"spikes": 1, "steps": 0}
        else:
            record["spikes"] += 1
            record["steps"] += int(at - record["at"]) if record["of"] == rank else 1
        record |= {"of": rank, "at": at, "counted": frame.time}
        others = [(float((spikes * m).sum() - spikes[i]), float((seen * m).sum() - seen[i])) for m in (beside, 1.0)]
        usual = spike_rate((record["own"][0], record["own"][1]), others[0], others[1])
        if record["spikes"] > 1 and chance_clusters(usual, record["spikes"], record["steps"]) <= _CHANCE_TICKETS:
            record["sure"] = True
        gpu = _gpu_of(frame, rank)
        known = add_to_series(self.series, gpu, (i, at), frame.time)
        if is_series(known, spikes, seen, beside, _CHANCE_TICKETS):
            record |= {"sure": True, "hold": max(self.hold, series_hold_s(known))}

    def _find_stage_spikes(
        self, frame: Frame, y: Floats, median: Floats, judged: Bools, groups: NDArray[np.int32]
    ) -> Bools:
        """Returns (N,) ranks of stages that spike as a whole or in large part: the job's results are in doubt."""
        size, limit = len(y), math.log(self.factor)
        level, known = self.level[:size], judged & (self.seen[:size] >= _MIN_SAMPLES)
        above = np.where(judged, median - level, 0.0)
        rise = np.where(known, y - level - self.usual[:size], 0.0)
        spiked = (rise >= limit) & (rise >= _MIN_DEVIATIONS * self.spread[:size])
        over = known & (above >= limit)
        if spiked.any():
            over |= spiked & ~_where_minority(spiked, groups, judged)
        together = np.zeros(size, bool)
        for i in np.unique(groups[over], return_index=True)[1].tolist() if over.any() else ():
            first = int(np.flatnonzero(over)[i])
            mine = judged & (groups == groups[first])
            together |= mine
            self._hold_job(frame, first, np.exp(y[mine & spiked | mine & over]), math.exp(float(level[first])), mine)
        np.copyto(level, median, where=judged & np.isnan(level))
        level += _GAIN * np.clip(np.where(judged, median - level, 0.0), -limit, limit)
        return together

    def _hold_job(self, frame: Frame, i: int, norms: Floats, usual: float, stage: Bools) -> None:
        """Holds the job of a stage that spikes together, once per instant."""
        job = frame.topology.ancestor_of_kind(frame.entities[i], "job")
        if job is not None and self.held.get(job, {}).get("last") != frame.time:
            now, all_ = float(np.median(norms)), int(np.count_nonzero(stage))
            self._update_record(frame, i, job, "job", (now, usual, now / usual, all_ - 1))
            self.held[job]["many"] = "" if len(norms) == all_ else f"{len(norms)} of {all_} ranks of "

    def _learn(self, mask: Bools, departure: Floats) -> None:
        """Learns the usual departure of each rank, except from spikes and from steps that were read before."""
        size = len(mask)
        self.seen[:size] += mask
        gain = np.where(mask, np.maximum(1 / np.maximum(self.seen[:size], 1), _GAIN), 0.0)
        self.usual[:size] += gain * departure
        self.spread[:size] += gain * (np.abs(departure) - self.spread[:size])

    def _count_nonfinite(self, frame: Frame, groups: NDArray[np.int32]) -> None:
        count = frame.values.get(_COUNT)
        if count is None:
            return
        size = len(count)
        more = (count > self.count[:size]) & (groups >= 0)
        there = ~np.isnan(count)
        if more.any():
            members = np.bincount(groups[there & (groups >= 0)], minlength=int(groups.max()) + 1)
            for i in np.flatnonzero(_where_minority(more, groups, there & (groups >= 0))).tolist():
                peers = int(members[groups[i]]) - 1
                if peers + 1 >= self.least:
                    self._hold_gpu(frame, i, "nonfinite", float(count[i] - self.count[i]), 0.0, math.inf, peers)
        self.count[:size] = np.where(there, count, self.count[:size])

    def _hold_gpu(
        self, frame: Frame, i: int, what: str, value: float, expected: float, ratio: float, peers: int
    ) -> str:
        """Holds the GPU of a rank and returns it."""
        rank = frame.entities[i]
        gpu = _gpu_of(frame, rank)
        self._update_record(frame, i, gpu, what, (value, expected, ratio, peers))
        return gpu

    def _update_record(
        self, frame: Frame, i: int, entity: str, what: str, numbers: tuple[float, float, float, int]
    ) -> None:
        """Updates the record of a GPU or a job. numbers: value, expected value, their ratio, number of peers."""
        value, expected, ratio, peers = numbers
        record = self.held.setdefault(entity, {"since": frame.time, "times": 0, "sure": False, "hold": self.hold})
        if record.get("last") != frame.time:
            record["times"] += 1
        record["sure"] |= what == "nonfinite"
        record |= {"what": what, "value": value, "expected": expected, "ratio": ratio, "peers": peers}
        record |= {"last": frame.time, "cohort": self._peers.cohort_name(frame, i), "rank": frame.entities[i]}
        for old in list(self.held)[:-_MAX_HELD]:
            del self.held[old]

    def _findings(self, frame: Frame) -> list[Finding]:
        time = frame.time
        for record in self.held.values():  # the clock may have gone back
            record["last"], record["since"] = min(record["last"], time), min(record["since"], time)
        for entity in [e for e, r in self.held.items() if time - r["last"] > r["hold"] * SECOND]:
            del self.held[entity]
        close_ended(self.conditions, set(self.held))
        found = []
        for entity, record in sorted(self.held.items()):
            level: Level = "ticket" if record["sure"] else "suspect"
            if due := due_report(self.conditions, entity, time, record["since"], level):
                build = self._job_finding if record["what"] == "job" else self._gpu_finding
                found.append(build(entity, time, due, record))
        return found

    def _job_finding(self, job: str, time: int, due: tuple[int, Level], record: Mapping[str, Any]) -> Finding:
        value, usual, ratio = record["value"], record["expected"], record["ratio"]
        ranks = record["many"].removesuffix(" of ") or "all ranks of a stage"
        return self.finding(
            *(time, job, due),
            score=min(ratio, _MAX_SCORE),
            summary=pager_title(job, f"gradient norms of {ranks} {ratio:.1f} x usual, results in doubt"),
            signals=(_NORM,),
            clears=f"{self.hold / 60:g} min without another",
            compared=Comparison(value, usual, None, "own past", 0, ratio - 1, "1"),
            times=record["times"],
            cannot_tell=True,
        )

    def _gpu_finding(self, gpu: str, time: int, due: tuple[int, Level], record: Mapping[str, Any]) -> Finding:
        peers, cohort, value, ratio = record["peers"], record["cohort"], record["value"], record["ratio"]
        rank = entity_name(record["rank"])
        if record["what"] == "spike":
            title = f"gradient norm of {rank} {ratio:.1f} x its {peers} peers"
            compared = Comparison(value, record["expected"], None, cohort, peers, ratio - 1, "1")
            signals = (_NORM, _COUNT)
        else:
            title = f"{value:.0f} losses or gradients of {rank} not finite"
            compared = Comparison(value, 0.0, None, cohort, peers, value, "{value}")
            signals = (_COUNT, _NORM)
        return self.finding(
            *(time, gpu, due),
            score=min(ratio, _MAX_SCORE),
            summary=pager_title(gpu, title),
            signals=signals,
            clears=f"{record['hold'] / 60:.0f} min without another",
            compared=compared,
            rank=record["rank"],
            times=record["times"],
            retest="needed: no canary or digest has confirmed it",
        )


def _gpu_of(frame: Frame, rank: str) -> str:
    """Returns the GPU of a rank; the rank itself if none is known."""
    return frame.topology.ancestor_of_kind(rank, "gpu") or rank


def _where_minority(marked: Bools, groups: NDArray[np.int32], there: Bools) -> Bools:
    """Returns (N,) the marked ranks of groups in which at most _MAX_SHARE are marked."""
    number = int(groups.max()) + 1
    hit, all_ = np.bincount(groups[marked], minlength=number), np.bincount(groups[there], minlength=number)
    return np.asarray(marked & np.append(hit <= _MAX_SHARE * all_, False)[groups])
