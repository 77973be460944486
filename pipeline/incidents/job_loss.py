"""What one incident costs one job: compared with its own past, counted in GPU time without use.

All ranks of a job wait for the slowest, so the whole job counts: at a step time of v instead of b seconds the share
1 - b / v, all of it while the job makes no step, and after a restart the steps since its checkpoint. A job that reports
no steps has no slowdown, only what findings say about it. Times are event times (us).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.incidents.facts import Fact
from pipeline.incidents.job_pace import MINUTE, SLOWER, Gap, JobPace
from pipeline.incidents.loss_claims import LossClaims
from pipeline.model.entity_names import entity_name, short_duration
from pipeline.model.job_effect import name_doubt
from pipeline.model.loss_owner import PAST, STEP_TIME, drop_owner, find_owner, name_owner
from pipeline.model.records import SECOND, iso

HOUR = 3600 * SECOND
EARLIER = 15 * MINUTE
"""A job that became slower this long before the onset of an incident may still be its harm: onsets are estimates.

One that ended this long after it may have ended because of it.
"""
UNCOUNTED = 5 * MINUTE
"""Time that is counted only once it is clear whether the job is slower (us): that takes up to two minutes. Chosen."""
MOST_RANKS = 8
"""Ranks that are listed for a job. Chosen: what a line shows."""
SURVIVES = 2 * MINUTE
"""A job that makes steps this long after its link went down (us) does not end because of it. Chosen: the least hang."""
RECOVERED = MINUTE
"""Loss of all GPUs of a job (us) from which a job at its old pace has recovered; below it was never slower. Chosen: a
minute of steps, the least that is measured."""
JobState = Literal["slow", "hanging", "lost", "ended", "recovered", "unaffected", "unknown"]
SUFFERS: frozenset[JobState] = frozenset({"slow", "hanging", "lost"})


Kind = Literal["pace", "stop", "fact"]
"""What a job loses by: a slower pace, its time without steps or a restart; an end while it hung; what findings say."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The known facts about a job as an incident is measured. fact: what findings say.  mine: this incident.
    find_owner: (when it began, us; kind) -> the incident that counts what the job loses.  claims: counted losses.
    started: when the job began (us)."""

    time: int
    onset: int
    fact: Fact | None
    mine: str
    find_owner: Callable[[int | None, Kind], str]
    claims: LossClaims
    started: int = 0


def _explains_end(fact: Fact, ended: int, moved: int, onset: int) -> bool:
    """Returns whether a job whose newest step is `moved` (us; 0: it reports none) ended because of a fact."""
    if not 0 <= ended - onset < EARLIER:
        return fact.state == "lost" and ended >= onset
    return fact.state != "cut" or moved < onset + SURVIVES


@dataclass(slots=True)
class JobLoss:
    """One job in one incident. lost: GPU time without use (GPU us).  counted: event time up to which it is counted.

    base: its step time in the hour before the onset (s).  near: just before it.  share: of its GPUs that is lost now.
    stopped: it ended while it hung or was lost, so that the time until it runs again is lost too; stopped_at: its
    newest step before that.  doubt: since when its results are in doubt; 0: it is not known since when; None: they are
    not.  reached: false for a job that left before, of which only that is known.  hung: what of `lost` is counted
    since `hung_from`, the begin of a hang; the steps after it show whether it was one.
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
    stopped_at: int = 0
    near: float | None = None
    hung: float = 0.0
    hung_from: int = 0

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

    def end(self, ended: int, moved: int, now: Moment) -> None:
        """The job ended: what it lost until then stays; nothing is counted until it runs again. moved: its newest step.

        It is lost if it hung or a part was lost, also if the finding came later: a scheduler may be faster. What was
        counted after the end, before that was known, is taken back.
        """
        since = max(ended, now.onset)
        if self.share and ended > self.counted:
            self.lost += self.share * self._take(self.counted, ended, now)
        elif share := self.share or bool(self.hung):  # a hang without reports goes on by no share
            self.lost = max(0.0, self.lost - share * self.gpus * max(0, self.counted - since))
            now.claims.release(self.job, since, now.mine)
        self.counted = since
        when, fact = f"ended {iso(ended)[:19]}Z", now.fact
        if not self.basis.startswith("ended "):
            self.basis = f"{when}{self._describe_end(ended - now.onset)}"
        if fact is not None and self.state != "lost" and _explains_end(fact, ended, moved, now.onset):
            self.state, self.basis = "lost", f"{when}: {fact.text}"
        self.state = "lost" if self.state in ("hanging", "lost") and ended >= now.onset else "ended"
        if self.state == "lost" and not self.stopped:
            self.stopped, self.stopped_at = True, min(ended, moved or ended)
        self.share, self.slowdown, self.hung = 0.0, None, 0.0

    def _describe_end(self, after: int) -> str:
        """Returns the known reason of an end this long after the onset (us)."""
        if after < 0:
            return f", {short_duration(-after / SECOND)} before the onset"
        if self.state in SUFFERS:
            return f", {self.state} until then"
        if after >= EARLIER:
            return ""
        return f", {short_duration(after / SECOND)} after the onset; whether because of it is not known"

    def reopen(self, pace: JobPace | None, time: int) -> None:
        """The incident was resolved and is open again: losses in between count only if its steps show it."""
        self.share = 0.0
        runs = pace is not None and pace.moved_at > self.counted
        reported = pace is not None and (not pace.waits_at(time) or time - pace.reported_at <= MINUTE)
        if self.stopped or not reported:
            self.counted, self.hung, self.stopped = max(self.counted, time), 0.0, self.stopped and not runs

    def resume(self, runs_at: int | None, now: Moment) -> bool:
        """The job runs again after it stopped: the time between is lost. runs_at: its first step, None before it.

        Returns whether it runs; until then the whole job is lost.
        """
        until = min(now.time, now.time if runs_at is None else runs_at)
        owner = now.find_owner(self.stopped_at, "stop")
        if owner == now.mine:
            self.lost += self._take(self.counted, until, now)
        self.counted, self.stopped = max(self.counted, until), runs_at is None
        if runs_at is None:
            self.state, self.share, self.slowdown, self.basis = "lost", 1.0, None, "restarting: no step yet"
            self._leave_to(owner, now)
        return not self.stopped

    def wait(self, now: Moment) -> None:
        """The telemetry is not read up to the onset yet: the known state of the job stays, which is mostly none."""
        if not self.basis:
            self.basis = f"slowdown not measured: telemetry is read up to {iso(now.time)[:19]}Z"

    def judge_by_facts(self, now: Moment) -> None:
        """Without steps: findings say whether a rank is lost, or the job makes no progress."""
        if now.fact is None or now.fact.state == "cut":
            self.state, self.share = "unknown", 0.0
            self.basis = f"slowdown not measured: the job reports no steps{self._name_ranks()}"
        else:
            owner = now.find_owner(None, "fact")
            self.state, self.share, self.basis = now.fact.state, 1.0, f"{now.fact.text}; the job reports no steps"
            self._leave_to(owner, now)
            if owner == now.mine:
                self.lost += self._take(self.counted, now.time, now)
        self.slowdown, self.counted = None, max(self.counted, now.time)

    def _leave_to(self, owner: str, now: Moment) -> None:
        """Counts nothing of what the job loses now if another incident does, and names that one."""
        if owner != now.mine:
            self.share, self.basis = 0.0, name_owner(self.basis, owner)

    def _take(self, start: int, end: int, now: Moment) -> int:
        """Returns the time of all GPUs in [start, end) (GPU us) that no other incident has counted, and counts it."""
        return self.gpus * sum(last - first for first, last in now.claims.take(self.job, start, end, now.mine))

    def _take_slow(self, pace: JobPace, base: float, end: int, now: Moment) -> float:
        """Returns what the job lost from `counted` to `end` against its pace before (GPU us), and counts that time."""
        free = now.claims.take(self.job, self.counted, end, now.mine)
        return self.gpus * max(0.0, sum(pace.measure_loss(base, *span, now.time) for span in free))

    def judge_by_steps(self, pace: JobPace, now: Moment) -> None:
        """Compares the steps since the onset with those before it."""
        if self.base is None:
            self.base = pace.base_before(now.onset)
        self.lost += self._count_restarts(pace, now)
        for gap in pace.gaps:
            if gap.end > self.counted or (self.hung and gap.start <= self.hung_from < gap.end):
                self._settle(gap, pace, now)
        if pace.waits_at(now.time):
            self._hang(pace, now)
        elif self.base is None:
            known = f"only {max(0, now.onset - (pace.first_at or now.onset)) // MINUTE} min of steps before the onset"
            self.state, self.slowdown, self.share = "unknown", None, 0.0
            self.basis, self.counted = f"slowdown not measured: {known}", max(self.counted, now.time)
        else:
            owner = now.find_owner(pace.changed_at, "pace")
            if self._is_earlier(pace.changed_at, owner, now):
                self.near = self.near or pace.pace_at(now.onset)
                self._compare(pace, self.near or self.base, owner, now)
            else:
                self._compare(pace, self.base, owner, now)

    def _is_earlier(self, began: int | None, owner: str, now: Moment) -> bool:
        """Returns whether a loss began too early to be the harm of this incident. Onsets are estimates, so that a loss
        that no other incident explains may have begun before the onset."""
        return began is not None and began < now.onset - (EARLIER if owner == now.mine else UNCOUNTED)

    def _compare(self, pace: JobPace, base: float, owner: str, now: Moment) -> None:
        """Compares the pace with that of before, `base` s; counts up to the newest step while the next one is late."""
        end = min(now.time, max(pace.moved_at, self.counted)) if pace.pauses_at(now.time) else now.time
        if self.state in ("hanging", "lost") and self.share == 1 and pace.moved_at > self.counted:
            runs = int(pace.moved_at - base * SECOND)  # it runs again: all until its first step was lost
            self.lost += self._take(self.counted, runs, now)
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
        self.state, self.share = "slow", 1 - 1 / ratio
        self._leave_to(owner, now)
        if owner == now.mine:
            self.lost += self._take_slow(pace, base, end, now)
        self.counted = max(self.counted, end)

    def _hang(self, pace: JobPace, now: Moment) -> None:
        """No step is seen: all of it is lost as far as reports or findings show it, unless it hung before the onset."""
        owner = now.find_owner(pace.moved_at, "pace")
        self.slowdown, self.share = None, 0.0
        silent = max(pace.reported_at, pace.moved_at) < now.onset - MINUTE  # it may have ended: that is known late
        if silent or self._is_earlier(pace.moved_at, owner, now):
            since = short_duration((now.onset - pace.moved_at) / SECOND)
            self.state, self.basis = "unknown", f"slowdown not measured: no step since {since} before the onset"
            self.counted = max(self.counted, now.time)
            return
        found = now.fact is not None and now.fact.state != "cut"
        known = now.time if found else pace.known_at(now.time)
        unread = now.time - known
        if not found and not pace.hangs_at(now.time):  # what it lost is counted by its next steps, if there are any
            said = short_duration(unread / SECOND)
            self.state, self.basis = "unknown", f"slowdown not measured: no report of its ranks for {said}"
            return
        text = f"no step for {short_duration((known - pace.moved_at) / SECOND)}"
        text += f", then no report for {short_duration(unread / SECOND)}" if unread > MINUTE else ""
        self.basis = text + (f": {now.fact.text}" if now.fact else self._name_ranks())
        self.state = "lost" if now.fact is not None and now.fact.state == "lost" else "hanging"
        self.share = 0.0 if unread > MINUTE else 1.0
        self._leave_to(owner, now)
        if owner == now.mine:
            self._count_hang(pace, known, now)
        self.counted = max(self.counted, known)

    def _count_hang(self, pace: JobPace, until: int, now: Moment) -> None:
        """Counts the whole job from its newest step on, and what it lost before that."""
        if self.hung_from < pace.moved_at:
            if self.base is not None:
                self.lost += self._take_slow(pace, self.base, pace.moved_at, now)
            self.hung, self.hung_from = 0.0, max(self.counted, pace.moved_at)
        taken = self._take(max(self.counted, pace.moved_at), until, now)
        self.lost, self.hung = self.lost + taken, self.hung + taken

    def _settle(self, gap: Gap, pace: JobPace, now: Moment) -> None:
        """Counts a time without steps that has ended by the steps made in it, instead of the earlier estimate."""
        base = self.near or self.base or pace.usual
        hung = self.hung if gap.start <= self.hung_from < gap.end else 0.0
        owner = now.find_owner(gap.start, "pace")
        if hung or (owner == now.mine and gap.start >= now.started and not self._is_earlier(gap.start, owner, now)):
            if self.base is not None and self.counted < gap.start:
                self.lost += self._take_slow(pace, self.base, gap.start, now)
            start = self.hung_from if hung else max(self.counted, gap.start)
            if gap.steps is not None and base is not None:
                used = min(1.0, gap.steps * base * SECOND / (gap.end - gap.start))
                self.lost += (1 - used) * self._take(start, gap.end, now) - hung
            elif hung:  # all until its first step, as it was reported
                self.lost += self._take(self.counted, gap.end - int((base or 0.0) * SECOND), now)
        self.counted, self.share, self.hung = max(self.counted, gap.end), 0.0, 0.0

    def _count_restarts(self, pace: JobPace, now: Moment) -> float:
        """Returns the GPU time of steps that a restart has to make again, those since its checkpoint, if this incident
        counts what stopped the job."""
        found = [restart for restart in pace.rewound if restart.time > self.restarted]
        self.restarted = max([self.restarted, *(restart.time for restart in found)])
        steps = 0.0
        for restart in found:
            owns = now.find_owner(restart.stopped, "pace") == now.mine
            if owns and now.claims.take_restart(self.job, restart.time, now.mine):
                steps += restart.steps or 0.0
        if not steps:
            return 0.0
        base = self.base or pace.usual or 0.0  # of a slow hour too: making them again takes no longer than it does
        return self.gpus * steps * min(base, pace.recent(self.restarted, now.time) or base) * SECOND

    # --- merged incidents ---------------------------------------------------------------------------

    def join(self, kept: JobLoss | None, gone: str) -> JobLoss:
        """Returns the loss of the incident that is kept after `gone`, whose loss this is, was merged into it."""
        if kept is None:
            return replace(self)
        made = replace(
            kept,
            lost=kept.lost + self.lost,
            counted=max(kept.counted, self.counted),
            restarted=max(kept.restarted, self.restarted),
            share=max(kept.share, self.share),
            stopped=kept.stopped or self.stopped,
            stopped_at=kept.stopped_at if kept.stopped else self.stopped_at,
            reached=kept.reached or self.reached,
            doubt=self.doubt if kept.doubt is None else kept.doubt,
            hung=kept.hung + self.hung,
            hung_from=min([loss.hung_from for loss in (kept, self) if loss.hung], default=0),
        )
        if self.state in SUFFERS and (kept.state not in SUFFERS or find_owner(kept.basis) == gone):
            made.state, made.slowdown, made.basis = self.state, self.slowdown, self.basis
        return made

    def hand_over(self, kept: str) -> JobLoss:
        """Returns this loss as it is shown after its incident was merged into `kept`, which counts it."""
        return replace(self, lost=0.0, share=0.0, hung=0.0, basis=name_owner(drop_owner(self.basis), kept))

    def _name_ranks(self) -> str:
        """Returns which of its ranks the incident reaches, as the end of a sentence; empty if there are none."""
        if not self.ranks:
            return ""
        more = f" and {len(self.ranks) - 1} more" if len(self.ranks) > 1 else ""
        return f"; reaches {entity_name(self.ranks[0])}{more}"


def format_seconds(value: float) -> str:
    """Returns three significant digits with the unit: `1.47 s`, `0.230 s`, `12.5 s`."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f} s"
