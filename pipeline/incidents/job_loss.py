"""What one incident costs one job: compared with its own past, counted in GPU time without use.

All ranks of a job wait for the slowest, so the whole job counts: at a step time of v instead of b seconds the share
1 - b / v, all of it while the job makes no step, and after a restart the steps since its checkpoint. A job that reports
no steps has no slowdown, only what findings say about it. Times are event times (us).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.incidents.job_pace import MINUTE, SLOWER, JobPace
from pipeline.model.entity_names import entity_name, short_duration
from pipeline.model.job_effect import name_doubt
from pipeline.model.loss_owner import PAST, STEP_TIME, name_owner
from pipeline.model.records import SECOND, Finding, iso

HOUR = 3600 * SECOND
EARLIER = 15 * MINUTE
"""A job that became slower this long before the onset of an incident may still be its harm: onsets are estimates.

One that ended this long after it may have ended because of it.
"""
UNCOUNTED = 5 * MINUTE
"""Time that is counted only once it is clear whether the job is slower (us): that takes up to two minutes. Chosen."""
MOST_RANKS = 8
"""Ranks that are listed for a job. Chosen: what a line shows."""
RECOVERED = MINUTE
"""Loss of all GPUs of a job (us) from which a job at its old pace has recovered; below it was never slower. Chosen: a
minute of steps, the least that is measured."""
JobState = Literal["slow", "hanging", "lost", "ended", "recovered", "unaffected", "unknown"]
SUFFERS: frozenset[JobState] = frozenset({"slow", "hanging", "lost"})


@dataclass(frozen=True, slots=True)
class Fact:
    """What a finding says about an entity beyond numbers: it is lost, or makes no progress."""

    state: Literal["lost", "hanging"]
    time: int
    text: str


def read_fact(finding: Finding) -> Fact | None:
    """Returns what a finding says about lost or hanging work; None: nothing. Suspicions say nothing."""
    cause = finding.evidence.get("cause")
    if finding.level == "suspect":
        return None
    if finding.detector == "telemetry" and cause in ("host", "power"):
        return Fact("lost", finding.time, finding.summary)
    if finding.detector == "xid" and ("79" in (finding.evidence.get("xids") or {})):
        return Fact("lost", finding.time, finding.summary)
    if finding.detector == "straggler_job" and cause in ("hang", "stall"):
        return Fact("hanging", finding.time, finding.summary)
    return None


@dataclass(frozen=True, slots=True)
class Moment:
    """The known facts about a job as an incident is measured. fact: what findings say.  owner: the incident that counts
    what the job loses.  mine: this incident."""

    time: int
    onset: int
    fact: Fact | None
    owner: str
    mine: str


@dataclass(slots=True)
class JobLoss:
    """One job in one incident. lost: GPU time without use (GPU us).  counted: event time up to which it is counted.

    base: its step time before the onset (s).  share: of its GPUs that is lost now.  stopped: it ended while it hung or
    was lost, so that the time until it runs again is lost too.  doubt: since when its results are in doubt; 0: it is
    not known since when; None: they are not.  reached: false for a job that left before, of which only that is known.
    """

    job: str
    counted: int
    base: float | None = None
    lost: float = 0.0
    state: JobState = "unknown"
    slowdown: float | None = None
    basis: str = ""
    share: float = 0.0
    gpus: int = 0
    ranks: tuple[str, ...] = ()
    name: str = ""
    account: str = ""
    stopped: bool = False
    restarted: int = 0
    doubt: int | None = None
    reached: bool = True

    @property
    def rate(self) -> float:
        """GPU-hours lost per hour now."""
        return self.share * self.gpus

    @property
    def effect(self) -> str:
        """What explains the state, with the doubt about its results."""
        return name_doubt(self.basis, self.doubt)

    def as_json(self) -> dict[str, Any]:
        """Returns the job in the form of the API."""
        return {
            "job": self.job,
            "name": self.name,
            "account": self.account,
            "gpus": self.gpus,
            "ranks": len(self.ranks),
            "rank_names": list(self.ranks[:MOST_RANKS]),
            "slowdown": None if self.slowdown is None else round(self.slowdown, 4),
            "basis": self.effect,
            "state": self.state,
            "lost_gpu_hours": round(self.lost / HOUR, 3),
            "lost_gpu_hours_per_hour": round(self.rate, 3),
        }

    # --- measurement --------------------------------------------------------------------------------

    def end(self, ended: int, onset: int, fact: Fact | None) -> None:
        """The job ended: what it lost until then stays; nothing is counted until it runs again.

        It is lost if it hung or a part was lost, also if the finding came later: a scheduler may be faster.
        """
        if self.share and ended > self.counted:
            self.lost += self.rate * (ended - self.counted)
        self.counted = max(self.counted, ended)
        when = f"ended {iso(ended)[:19]}Z"
        if not self.basis.startswith("ended "):
            self.basis = f"{when}{self._describe_end(ended - onset)}"
        if fact is not None and fact.state == "lost" and ended >= onset and self.state != "lost":
            self.state, self.basis = "lost", f"{when}: {fact.text}"
        self.state = "lost" if self.state in ("hanging", "lost") else "ended"
        self.stopped = self.stopped or self.state == "lost"
        self.share, self.slowdown = 0.0, None

    def _describe_end(self, after: int) -> str:
        """Returns what is known about the reason of an end this long after the onset (us)."""
        if self.state in SUFFERS:
            return f", {self.state} until then"
        if not 0 <= after < EARLIER:
            return ""
        return f", {short_duration(after / SECOND)} after the onset; whether because of it is not known"

    def resume(self, runs_at: int | None, time: int) -> bool:
        """The job runs again after it stopped: the time between is lost. runs_at: its first step, None before it.

        Returns whether it runs; until then the whole job is lost.
        """
        until = min(time, time if runs_at is None else runs_at)
        self.lost += self.gpus * max(0, until - self.counted)
        self.counted, self.stopped = max(self.counted, until), runs_at is None
        if runs_at is None:
            self.state, self.share, self.slowdown, self.basis = "lost", 1.0, None, "restarting: no step yet"
        return not self.stopped

    def judge_by_facts(self, now: Moment) -> None:
        """Without steps: findings say whether a rank is lost, or the job makes no progress."""
        if now.fact is None:
            self.state, self.share = "unknown", 0.0
            self.basis = f"slowdown not measured: the job reports no steps{self._name_ranks()}"
        else:
            self.lost += self.gpus * max(0, now.time - self.counted)
            self.state, self.share, self.basis = now.fact.state, 1.0, f"{now.fact.text}; the job reports no steps"
        self.slowdown, self.counted = None, max(self.counted, now.time)

    def judge_by_steps(self, pace: JobPace, now: Moment) -> None:
        """Compares the steps since the onset with those before it."""
        if self.base is None:
            self.base = pace.base_before(now.onset)
        self.lost += self._count_restarts(pace)
        if pace.hangs_at(now.time) and pace.moved_at >= now.onset - EARLIER:
            self._hang(pace, now)
        elif self.base is None:
            known = f"only {max(0, now.onset - (pace.first_at or now.onset)) // MINUTE} min of steps before the onset"
            self.state, self.slowdown, self.share = "unknown", None, 0.0
            self.basis, self.counted = f"slowdown not measured: {known}", max(self.counted, now.time)
        else:
            self._compare(pace, self.base, now)

    def _compare(self, pace: JobPace, base: float, now: Moment) -> None:
        """Compares the pace with the past; counts up to the newest step while the next one is late."""
        end = min(now.time, max(pace.moved_at, self.counted)) if pace.pauses_at(now.time) else now.time
        if self.state in ("hanging", "lost") and self.share == 1 and pace.moved_at > self.counted:
            runs = int(pace.moved_at - base * SECOND)  # it runs again: all until its first step was lost
            self.lost += self.gpus * max(0, runs - self.counted)
            self.counted = max(self.counted, runs)
        recent = pace.recent(now.onset, now.time)
        if recent is None:
            return
        ratio = recent / base
        self.slowdown, self.share = ratio - 1, 0.0
        self.basis = f"{STEP_TIME}{format_seconds(recent)}, was {format_seconds(base)}{PAST}"
        if ratio < 1 + SLOWER:
            self.state = "recovered" if self.gpus and self.lost >= self.gpus * RECOVERED else "unaffected"
            self.counted = max(self.counted, end - UNCOUNTED)
            return
        self.state = "slow"
        if now.owner != now.mine:
            self.basis = name_owner(self.basis, now.owner)
        else:
            self.lost += self.gpus * max(0.0, pace.measure_loss(base, self.counted, end, now.time, False))
            self.share = 1 - 1 / ratio
        self.counted = max(self.counted, end)

    def _hang(self, pace: JobPace, now: Moment) -> None:
        text = f"no step for {short_duration((now.time - pace.moved_at) / SECOND)}"
        text += f": {now.fact.text}" if now.fact else self._name_ranks()
        self.state = "lost" if now.fact is not None and now.fact.state == "lost" else "hanging"
        self.slowdown, self.basis = None, text
        if now.owner != now.mine:
            self.share, self.basis = 0.0, name_owner(text, now.owner)
        else:
            if self.share < 1 and self.base is not None and now.time > self.counted:
                spent = pace.measure_loss(self.base, self.counted, now.time, now.time, True)
            else:
                spent = float(max(0, now.time - max(self.counted, pace.moved_at)))
            self.lost += self.gpus * max(0.0, spent)
            self.share = 1.0
        self.counted = max(self.counted, now.time)

    def _count_restarts(self, pace: JobPace) -> float:
        """Returns the GPU time of steps that a restart has to make again: those since its checkpoint."""
        found = [(at, steps or 0.0) for at, steps in pace.rewound if at > self.restarted]
        self.restarted = max([self.restarted, *(at for at, _ in found)])
        return self.gpus * sum(steps for _, steps in found) * (self.base or pace.usual or 0.0) * SECOND

    def _name_ranks(self) -> str:
        """Returns which of its ranks the incident reaches, as the end of a sentence; empty if there are none."""
        if not self.ranks:
            return ""
        more = f" and {len(self.ranks) - 1} more" if len(self.ranks) > 1 else ""
        return f"; reaches {entity_name(self.ranks[0])}{more}"


def format_seconds(value: float) -> str:
    """Returns three significant digits with the unit: `1.47 s`, `0.230 s`, `12.5 s`."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f} s"
