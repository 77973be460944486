"""Finds ranks whose gradient alone leaps or stops being a number, and jobs of which all ranks' gradients leap.

How rare it is that leaps of one rank cluster by chance, whatever the tails of its norms.

Leaps that come independently of one another fall into `steps` steps after one at least k - 1 times with a chance of at
most C(steps, k - 1) rate^(k - 1); clusters are sought by such scans since Naus (Journal of the American Statistical
Association 77, 1982). The rate is the highest of three: of the rank itself, of its stage and of all ranks.
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
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.statistics import grouped_median
from detectors.base.streams import USUAL_STEP
from pipeline.model.records import SECOND, Finding, Frame, Level

SAMPLES = 1000 * GPUS * DAY_S / USUAL_STEP
"""Of ranks, in 1,000 node-days."""
_RATE = 1e-5  # leaps a step, believed like one leap, before any was seen: a rank leaps once in eleven days; chosen
_SHAPE = 0.5  # of the gamma law by which ranks and stages differ, as of memory errors of GPUs; chosen
Count = tuple[float, float]
FORGOTTEN = 86_400.0
"""Seconds without a leap after which a GPU's earlier ones are forgotten; chosen: one leap a day is a chance."""
_KEPT_GPUS = 1000  # GPUs of which leaps are remembered; chosen
_FAR = 10.0  # times as often as each other rank of its stage a GPU that is to be tested leaps; chosen
_SERIES = 3  # leaps of which a series consists at least; chosen: two that are far apart are a chance
_PAUSES = 3.0  # usual pauses of a series that end it: of independent leaps one pause of 20 is longer; chosen


def rate(own: Count, stage: Count, fleet: Count) -> float:
    """Leaps a step that are usual for a rank, from (leaps, steps) of its past, of those beside it and of all others."""
    base = (fleet[0] + 1.0) / (fleet[1] + 1.0 / _RATE)
    mine, beside = ((n + _SHAPE) / (steps + _SHAPE / base) for n, steps in (own, stage))
    return min(max(base, mine, beside), 1.0)


def by_chance(usual: float, leaps: int, steps: int) -> float:
    """Clusters of so many leaps, the others within `steps` after the first, in 1,000 node-days at most."""
    more, n = leaps - 1, max(steps, leaps - 1)
    ways = math.lgamma(n + 1) - math.lgamma(more + 1) - math.lgamma(n - more + 1)
    return SAMPLES * math.exp(min(ways + leaps * math.log(usual), 700.0))


def remember(gpus: dict[str, dict[str, Any]], gpu: str, rank: tuple[int, float], time: int) -> dict[str, Any]:
    """Counts a leap of a GPU, and gives all of its series: the job may show them on one rank now and on another then.

    rank: which one is on it, and that rank's step.
    leaps, steps: how many, and steps from the first to the newest one.   by: rank -> how many of them it showed.
    """
    (i, at), known = rank, gpus.pop(gpu, None)
    if known is None or time - known["last"] > FORGOTTEN * SECOND:
        known = {"leaps": 0, "steps": 0, "first": time, "by": {}}
    elif known["of"] == i:
        known["steps"] += max(int(at - known["at"]), 1)
    else:  # steps of a rank elsewhere are none of this GPU's: no more than the time allows
        known["steps"] += max(round((time - known["last"]) / SECOND / USUAL_STEP), 1)
    known["by"][str(i)] = known["by"].get(str(i), 0) + 1
    known |= {"leaps": known["leaps"] + 1, "of": i, "at": at, "last": time, "first": min(known["first"], time)}
    gpus[gpu] = known  # the newest stands last
    for old in list(gpus)[:-_KEPT_GPUS]:
        del gpus[old]
    return known


def in_series(
    known: dict[str, Any], leaps: NDArray[np.float64], seen: NDArray[np.float64], stage: NDArray[np.bool_], most: float
) -> bool:
    """Whether a GPU leaps again and again, however far apart, and far more often than any rank of its stage elsewhere.

    What it showed itself raises no rate by which it is judged; leaps that its rank showed on other GPUs do: they are
    its data's. Each number of leaps may cost half the chance of the one before, so that all together cost `most`.
    """
    count, steps = int(known["leaps"]), int(known["steps"])
    if count < _SERIES:
        return False
    elsewhere = leaps.copy()
    for i, n in known["by"].items():
        elsewhere[int(i)] = max(elsewhere[int(i)] - n, 0.0)
    others = np.max((elsewhere[stage] - 1) / np.maximum(seen[stage], 1), initial=0.0)  # one leap each is a chance
    if _FAR * others > (count - 1) / max(steps, 1):
        return False
    beside = (float(elsewhere[stage].sum()), float(seen[stage].sum()))
    usual = rate(beside, beside, (float(elsewhere.sum()), float(seen.sum())))
    return by_chance(usual, count, steps) <= most / 2.0 ** min(count - _SERIES + 1, 1000)


def lasts(known: dict[str, Any]) -> float:
    """Seconds without another leap that end a series."""
    pause: float = (known["last"] - known["first"]) / SECOND / (known["leaps"] - 1)
    return min(_PAUSES * pause, FORGOTTEN)


def normal(deviations: float) -> float:
    """Chance that a normal sample is so far above its mean."""
    return math.erfc(deviations / math.sqrt(2)) / 2


def heavy(deviations: float) -> float:
    """The same of a sample of Student's t with 4 degrees of freedom, by its closed form."""
    t2 = 2 * deviations**2  # its variance is 2
    return (1 - math.sqrt(t2 / (4 + t2)) * (1 + 2 / (4 + t2))) / 2


_NORM, _COUNT = "rank.gradient_norm", "rank.nonfinite"
_LEARN = 20  # samples before a rank is judged: the replay contract
_GAIN = 0.01  # least learning rate of a rank's usual departure: a memory of about 100 samples; chosen
_SURE = 6.0  # own mean deviations that a leap must exceed: ranks of which leaps are usual are left alone; chosen
_MOST = 0.3  # share of a stage above which it is the batch and nobody's fault, as in the common kernel
_KEPT = 1000  # ranks held at once; chosen
_TICKETS = 0.2  # by chance in 1,000 node-days for each number of leaps, of which three count, and for all series
_HEAVY = 0.14  # spread of norms with heavy tails, of which the budget tells
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass
class SdcGradient(Detector):
    """A rank whose local gradient norm is `factor` times its stage's median, and times its usual, is a suspect.

    It is a ticket, to test the GPU, if it leaps again sooner and more often than ranks do by chance, as learnt from it,
    its stage and all others; if its GPU, whichever rank is on it, leaps on and on, however seldom, and no other of its
    stage does nearly so; or if it alone counts a loss or gradient that is no number: data alone hardly does that. One
    leap, however large, is none: tails are heavy. It never pages: norms show few corruptions, and data and numerics
    leap too; a canary or a replica's digest must confirm. It stays for `hold` seconds after the last time, or for three
    usual pauses of a GPU that leaps on and on.

    What a large part of a stage shows together is the batch (a loss spike) or, where norms are told after the
    all-reduce, may be one GPU among many: the job is a silent suspect, its results in doubt, and no GPU is blamed.

    Source: the factor of 5 is ByteRobust's (SOSP 2025) for loss and gradient norm; that under half of the corruptions
    show so: SDCHunter (OSDI 2026); 1 % of them end as NaN or infinity: "Anatomy of GPU SDC" (DSN 2026); leaps are
    counted as Naus (Journal of the American Statistical Association 77, 1982) scans for clusters. Rest chosen.
    """

    name: ClassVar[str] = "sdc_gradient"
    family: ClassVar[str] = "silent data corruption"
    device_class: ClassVar[str] = "rank"
    needs: ClassVar[tuple[str, ...]] = (_NORM,)
    wants: ClassVar[tuple[str, ...]] = (_COUNT,)
    cannot_see: ClassVar[str] = (
        "Small errors, which are most; whose fault it is where norms are told after the all-reduce, or a third of a "
        "stage leaps at once; GPUs of one stage that leap alike, however often; stages of fewer than four ranks."
    )

    factor: float = 5.0
    least: int = 4
    hold: float = 600.0

    usual: Floats = memory(0.0)
    spread: Floats = memory(0.0)
    seen: Floats = memory(0.0)
    level: Floats = memory(np.nan)  # usual logarithm of its stage's median
    leaps: Floats = memory(0.0)  # of the rank alone, ever
    last: Floats = memory(np.nan)
    count: Floats = memory(np.nan)
    series: dict[str, dict[str, Any]] = notes()  # GPU -> its leaps, whichever rank was on it
    held: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()
    _peers: Peers = field(default_factory=lambda: Peers(("stage",), ("job",), least=4), init=False, repr=False)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        frame = frames.get("rank")
        if frame is None:
            return []
        size = len(frame.entities)
        if size and (_NORM in frame.values or _COUNT in frame.values):
            self.grow(size)
            groups = self._peers.groups(frame)
            self._leaps(frame, groups)
            self._no_numbers(frame, groups)
        return self._findings(frame) if self.held or self.conditions else []

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """What the ranks on that GPU show from now on is their usual; of a job, what its stages show."""
        for known in (self.held, self.series):
            known.pop(entity, None)
        frame = frames.get("rank")
        if frame is None:
            return
        for i, rank in enumerate(frame.entities[: len(self.seen)]):
            if entity == rank or entity in frame.topology.ancestors(rank):
                self.usual[i] = self.spread[i] = self.seen[i] = self.leaps[i] = 0.0
                self.level[i] = np.nan
                self.series.pop(_gpu(frame, rank), None)

    def budget(self) -> list[str]:
        sure = _SURE * math.sqrt(2 / math.pi)  # in standard deviations: of normal samples one is 1.25 mean deviations
        suspects, spread = SAMPLES * normal(sure), math.expm1(math.log(self.factor) / sure)
        many = SAMPLES * heavy(math.log(self.factor) / _HEAVY)
        return [
            f"leaps: {self.factor:g} times the median, and {sure:.1f} standard deviations of the rank's own logarithms:"
            f" where these are normal at most {suspects:,.0f} silent suspects per 1,000 node-days at {USUAL_STEP:g} s"
            f" if a norm varies by {spread:.0%} and more, next to none if less; where their tails are heavy"
            f" (Student's t of 4, {_HEAVY:.0%}) about {many:,.0f}",
            f"tickets: leaps that cluster within {self.hold:g} s by a chance of {_TICKETS:g} per 1,000 node-days for"
            " each number of them, at the rate of leaps that ranks, stage and fleet show: below 1 per 1,000 node-days"
            " whatever the tails, once a stage of such ranks has leapt a few times, if its leaps come independently of"
            f" one another; {_TICKETS:g} of these for GPUs that leap on and on, at most {FORGOTTEN / 3600:g} h apart,"
            " at the rate of all others; never a page",
            "losses that are no number: a rule on a counter, no statistical alarm rate",
        ]

    def _leaps(self, frame: Frame, groups: NDArray[np.int32]) -> None:
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
        together = self._jobs(frame, y, median, judged & new, groups)
        departure = np.where(judged, residual - self.usual[:size], 0.0)
        limit = math.log(self.factor)
        leap = judged & (self.seen[:size] >= _LEARN) & (residual >= limit) & (departure >= limit)
        leap &= departure >= _SURE * self.spread[:size]
        if leap.any():
            moved = judged & (departure >= limit / 2)  # where half of a stage leaps, its median lies between
            mine = leap & new & _few(moved, groups, judged)
            for i in np.flatnonzero(mine).tolist():
                peers = int(members[i]) - 1
                ratio = math.exp(float(residual[i]))
                gpu = self._hold(frame, i, "leap", float(norm[i]), math.exp(float(median[i])), ratio, peers)
                self._cluster(self.held[gpu], frame, i, groups)
        self._learn(judged & new & ~leap & ~together, departure)
        self.last[:size] = np.where(fresh, norm, self.last[:size])

    def _cluster(self, record: dict[str, Any], frame: Frame, i: int, groups: NDArray[np.int32]) -> None:
        """Counts a leap of a rank that is held: a ticket where chance hardly makes so many so soon."""
        if record.get("counted") == frame.time:  # of another rank on the same GPU
            return
        rank, size, beside = frame.entities[i], len(groups), groups == groups[i]
        if record.get("of") is None:
            record["own"] = [float(self.leaps[i]), float(self.seen[i])]
        self.leaps[i] += 1
        at, leaps, seen = float(self.seen[i] + self.leaps[i]), self.leaps[:size], self.seen[:size]
        if record.get("of") is None:
            record |= {"leaps": 1, "steps": 0}
        else:
            record["leaps"] += 1
            record["steps"] += int(at - record["at"]) if record["of"] == rank else 1
        record |= {"of": rank, "at": at, "counted": frame.time}
        others = [(float((leaps * m).sum() - leaps[i]), float((seen * m).sum() - seen[i])) for m in (beside, 1.0)]
        usual = rate((record["own"][0], record["own"][1]), others[0], others[1])
        if record["leaps"] > 1 and by_chance(usual, record["leaps"], record["steps"]) <= _TICKETS:
            record["sure"] = True
        gpu = _gpu(frame, rank)
        known = remember(self.series, gpu, (i, at), frame.time)
        if in_series(known, leaps, seen, beside, _TICKETS):
            record |= {"sure": True, "hold": max(self.hold, lasts(known))}

    def _jobs(self, frame: Frame, y: Floats, median: Floats, judged: Bools, groups: NDArray[np.int32]) -> Bools:
        """(N,) ranks of stages that leap, as a whole or a large part of them, of which the job is in doubt."""
        size, limit = len(y), math.log(self.factor)
        level, known = self.level[:size], judged & (self.seen[:size] >= _LEARN)
        above = np.where(judged, median - level, 0.0)
        rise = np.where(known, y - level - self.usual[:size], 0.0)
        leapt = (rise >= limit) & (rise >= _SURE * self.spread[:size])
        struck = known & (above >= limit)
        if leapt.any():
            struck |= leapt & ~_few(leapt, groups, judged)
        together = np.zeros(size, bool)
        for i in np.unique(groups[struck], return_index=True)[1].tolist() if struck.any() else ():
            first = int(np.flatnonzero(struck)[i])
            mine = judged & (groups == groups[first])
            together |= mine
            self._in_doubt(frame, first, np.exp(y[mine & leapt | mine & struck]), math.exp(float(level[first])), mine)
        np.copyto(level, median, where=judged & np.isnan(level))
        level += _GAIN * np.clip(np.where(judged, median - level, 0.0), -limit, limit)
        return together

    def _in_doubt(self, frame: Frame, i: int, norms: Floats, usual: float, stage: Bools) -> None:
        """Holds the job of a stage that leaps together, once an instant."""
        job = frame.topology.ancestor_of_kind(frame.entities[i], "job")
        if job is not None and self.held.get(job, {}).get("last") != frame.time:
            now, all_ = float(np.median(norms)), int(np.count_nonzero(stage))
            self._enter(frame, i, job, "job", (now, usual, now / usual, all_ - 1))
            self.held[job]["many"] = "" if len(norms) == all_ else f"{len(norms)} of {all_} ranks of "

    def _learn(self, mask: Bools, departure: Floats) -> None:
        """What is usual for each rank; a step that was seen already teaches nothing, a leap neither."""
        size = len(mask)
        self.seen[:size] += mask
        gain = np.where(mask, np.maximum(1 / np.maximum(self.seen[:size], 1), _GAIN), 0.0)
        self.usual[:size] += gain * departure
        self.spread[:size] += gain * (np.abs(departure) - self.spread[:size])

    def _no_numbers(self, frame: Frame, groups: NDArray[np.int32]) -> None:
        count = frame.values.get(_COUNT)
        if count is None:
            return
        size = len(count)
        more = (count > self.count[:size]) & (groups >= 0)
        there = ~np.isnan(count)
        if more.any():
            members = np.bincount(groups[there & (groups >= 0)], minlength=int(groups.max()) + 1)
            for i in np.flatnonzero(_few(more, groups, there & (groups >= 0))).tolist():
                peers = int(members[groups[i]]) - 1
                if peers + 1 >= self.least:
                    self._hold(frame, i, "nonfinite", float(count[i] - self.count[i]), 0.0, math.inf, peers)
        self.count[:size] = np.where(there, count, self.count[:size])

    def _hold(self, frame: Frame, i: int, what: str, value: float, expected: float, ratio: float, peers: int) -> str:
        """Holds the GPU of a rank; which it is."""
        rank = frame.entities[i]
        gpu = _gpu(frame, rank)
        self._enter(frame, i, gpu, what, (value, expected, ratio, peers))
        return gpu

    def _enter(self, frame: Frame, i: int, entity: str, what: str, numbers: tuple[float, float, float, int]) -> None:
        """Holds a GPU or a job. numbers: value, what was expected, their ratio, and how many peers there are."""
        value, expected, ratio, peers = numbers
        record = self.held.setdefault(entity, {"since": frame.time, "times": 0, "sure": False, "hold": self.hold})
        if record.get("last") != frame.time:
            record["times"] += 1
        record["sure"] |= what == "nonfinite"
        record |= {"what": what, "value": value, "expected": expected, "ratio": ratio, "peers": peers}
        record |= {"last": frame.time, "cohort": self._peers.cohort_name(frame, i), "rank": frame.entities[i]}
        for old in list(self.held)[:-_KEPT]:
            del self.held[old]

    def _findings(self, frame: Frame) -> list[Finding]:
        time = frame.time
        for record in self.held.values():  # a time that stepped back is no future
            record["last"], record["since"] = min(record["last"], time), min(record["since"], time)
        for entity in [e for e, r in self.held.items() if time - r["last"] > r["hold"] * SECOND]:
            del self.held[entity]
        close_ended(self.conditions, set(self.held))
        found = []
        for entity, record in sorted(self.held.items()):
            level: Level = "ticket" if record["sure"] else "suspect"
            if due := due_report(self.conditions, entity, time, record["since"], level):
                words = self._of_job if record["what"] == "job" else self._of_gpu
                found.append(words(entity, time, due, record))
        return found

    def _of_job(self, job: str, time: int, due: tuple[int, Level], record: Mapping[str, Any]) -> Finding:
        value, usual, ratio = record["value"], record["expected"], record["ratio"]
        what = f"gradient norms of {record['many']}{record['cohort']} leapt together"
        words = f"{job}: {what} to {value:.3g}, {ratio:.1f} times the usual"
        words += "; a batch, or a GPU that computes wrongly: its results since are in doubt"
        compared = Comparison(value, usual, None, "own past", 0, ratio - 1, "1")
        facts = make_evidence(
            f"{self.hold / 60:g} min without another", compared, times=record["times"], cannot_tell=True
        )
        return Finding(time, due[0], job, self.name, due[1], min(ratio, 1e6), words, facts, (_NORM,))

    def _of_gpu(self, entity: str, time: int, due: tuple[int, Level], record: Mapping[str, Any]) -> Finding:
        peers, cohort, leap = record["peers"], record["cohort"], record["what"] == "leap"
        if leap:
            what = f"a gradient norm of {record['value']:.3g}, {record['ratio']:.1f} times the median of {peers} peers"
            compared = Comparison(record["value"], record["expected"], None, cohort, peers, record["ratio"] - 1, "1")
        else:
            what = f"{record['value']:.0f} losses or gradients that are no number, and none of its {peers} peers did"
            compared = Comparison(record["value"], 0.0, None, cohort, peers, record["value"], "{value}")
        words = f"{record['rank']} on {entity} told {what} ({cohort}); a wrong result is possible, test the GPU"
        facts = make_evidence(
            f"{record['hold'] / 60:.0f} min without another",
            compared,
            rank=record["rank"],
            times=record["times"],
            retest="wanted: no canary or digest has confirmed it",
        )
        signals = (_NORM, _COUNT) if leap else (_COUNT, _NORM)
        score = min(record["ratio"], 1e6)
        return Finding(time, due[0], entity, self.name, due[1], score, words, facts, signals)


def _gpu(frame: Frame, rank: str) -> str:
    """The GPU that a rank is on; the rank where none is known."""
    return frame.topology.ancestor_of_kind(rank, "gpu") or rank


def _few(struck: Bools, groups: NDArray[np.int32], there: Bools) -> Bools:
    """(N,) those struck in groups of which at most a part is."""
    number = int(groups.max()) + 1
    hit, all_ = np.bincount(groups[struck], minlength=number), np.bincount(groups[there], minlength=number)
    return np.asarray(struck & np.append(hit <= _MOST * all_, False)[groups])
