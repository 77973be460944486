"""The guards: limits that hold even when the detectors, the scheduler or the people are wrong.

Each is a pure function of the request, the state of the scheduler and the facts of the pipeline. All are evaluated when
an act is planned and again immediately before it is executed. The numbers are chosen: no fleet has published limits of
its own; they are a tenth of the default of the breaker of NVIDIA's NVSentinel (50 % of the nodes).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.acts.act import VERB_KINDS, Act, GuardResult
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.config.acts import ActLimits
from pipeline.model.records import SECOND


@dataclass(frozen=True, slots=True)
class Facts:
    """What the pipeline knows about the targets of one act. Names are those of nodes, without `node:`.

    racks, domains: rack and NVLink domain of every node of the site, where known.
    automatic: a program asks, not a person.   condition: "open", "cleared", or "" without an incident.
    cause: of the incident.   cause_nodes: nodes below a cause that is a rack, loop or another group.
    silent: targets without telemetry now.   open_acts: other acts that may still do something, by target.
    recent: acts executed in the last 10 minutes.   excluded: patterns of nodes that are excluded from acts.
    recovery: what NVIDIA's driver or DCGM recommends, by target.   held: act in force, by target.
    checks: checks that ran on a target after it was held, by target.   breaker: why automation is stopped; "" if not.
    checkpoints: jobs that wrote a checkpoint since the act was approved.   running: jobs of the telemetry with ranks on
    a target, by target; both only for acts that wait for checkpoints.
    relapses: targets that were held again within the burn-in after an earlier release, with that release.
    deep_checks: targets that passed a diagnostic of level 3 or above after the hold.
    leaving: nodes of other holds that began and are not verified: the scheduler may not show them as out yet.
    failed_checks: diagnostics that failed on a target after the hold, and that none passed since which tests as much.
    """

    racks: Mapping[str, str] = field(default_factory=dict)
    domains: Mapping[str, str] = field(default_factory=dict)
    automatic: bool = False
    condition: str = ""
    cause: str = ""
    cause_nodes: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    open_acts: Mapping[str, str] = field(default_factory=dict)
    recent: int = 0
    excluded: tuple[str, ...] = ()
    recovery: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, str] = field(default_factory=dict)
    breaker: str = ""
    checkpoints: frozenset[str] = frozenset()
    running: Mapping[str, Sequence[str]] = field(default_factory=dict)
    relapses: Mapping[str, str] = field(default_factory=dict)
    deep_checks: frozenset[str] = frozenset()
    failed_checks: Mapping[str, str] = field(default_factory=dict)
    leaving: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Question:
    """One act at one moment, as the guards see it."""

    act: Act
    facts: Facts
    world: SchedulerState
    limits: ActLimits
    now: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the target nodes."""
        return tuple(target.partition(":")[2] for target in self.act.targets)

    @property
    def nodes(self) -> tuple[SchedulerNode, ...]:
        """The targets that the scheduler knows."""
        return tuple(self.world.nodes[name] for name in self.names if name in self.world.nodes)

    @property
    def out_after(self) -> frozenset[str]:
        """Names of all nodes that are out of service once the act, and other holds that began, are done."""
        return self.world.out | frozenset(self.names) | (self.facts.leaving & self.world.nodes.keys())


Guard = Callable[[Question], GuardResult]


def evaluate_guards(question: Question) -> tuple[GuardResult, ...]:
    """Returns all guards that apply to the verb, in the order in which people read them."""
    kind = VERB_KINDS[question.act.verb]
    chosen: list[Guard] = [*_ALWAYS]
    if kind.removes:
        chosen += _REMOVING
    if kind.alone or _is_deep_diagnostic(question.act):
        chosen.append(_held_and_idle)
    if question.act.verb in ("release", "evict"):
        chosen.append(_owner)
    if question.act.verb == "release":
        chosen += (_checked, _relapse)
    chosen.append(_recovery_action)
    if question.facts.automatic:
        chosen += _AUTOMATIC
    return tuple(guard(question) for guard in chosen)


def needed_people(question: Question, guards: Iterable[GuardResult]) -> tuple[int, tuple[str, ...]]:
    """Returns how many people must stand behind an act (1 or 2), and why two."""
    why = [f"{question.act.verb} cannot be undone"] if VERB_KINDS[question.act.verb].hard else []
    why += [f"overrides the guard {guard.name}" for guard in guards if not guard.passed]
    if VERB_KINDS[question.act.verb].removes:
        limit = question.limits.two_people_gpus
        jobs = question.world.jobs_on(frozenset(question.names))
        why += [f"job {job.id} has {job.gpus} GPUs, more than {limit}" for job in jobs if job.gpus > limit]
    return (2 if why else 1), tuple(why)


def _is_deep_diagnostic(act: Act) -> bool:
    """Returns whether a diagnostic disturbs work: `dcgmi diag -r 1` does not, 2 and above do."""
    return act.verb == "diagnose" and act.params.get("level", "1") != "1"


# --- every verb ---------------------------------------------------------------------------------------


def _known(q: Question) -> GuardResult:
    unknown = [name for name in q.names if name not in q.world.nodes]
    return GuardResult("known_node", f"not known: {_some(unknown)}" if unknown else "known", "known", not unknown)


def _state_age(q: Question) -> GuardResult:
    age = (q.now - q.world.taken) / SECOND
    limit = q.limits.state_seconds
    return GuardResult("scheduler_state", f"{age:.0f} s old", f"at most {limit:.0f} s", 0 <= age + 1 <= limit + 1)


def _one_act(q: Question) -> GuardResult:
    busy = [f"{name}: {q.facts.open_acts[name]}" for name in q.names if name in q.facts.open_acts]
    return GuardResult("one_act_per_node", _some(busy) or "none", "no other open act", not busy)


def _excluded(q: Question) -> GuardResult:
    hit = [name for name in q.names if any(fnmatch.fnmatchcase(name, pattern) for pattern in q.facts.excluded)]
    return GuardResult("exclusion_list", _some(hit) or "not listed", "not listed", not hit)


def _rate(q: Question) -> GuardResult:
    limit = q.limits.acts_per_10_minutes
    return GuardResult("acts_per_10_minutes", str(q.facts.recent + 1), f"at most {limit}", q.facts.recent < limit, True)


_ALWAYS: tuple[Guard, ...] = (_known, _state_age, _one_act, _excluded, _rate)


# --- verbs that take nodes out of service -------------------------------------------------------------


def _foreign(q: Question) -> GuardResult:
    """A node that was taken out of service keeps its state and reason."""
    foreign = [f"{n.name}: {n.reason or n.state}" for n in q.nodes if n.is_taken and n.mark != q.act.mark]
    return GuardResult("in_service", _some(foreign) or "in service", "not out of service already", not foreign)


def _groups(q: Question, name: str, groups: Mapping[str, str], limit: int) -> GuardResult:
    touched = {groups[n] for n in q.names if n in groups}
    counts = {g: sum(1 for n in q.out_after if groups.get(n) == g) for g in touched}
    worst = max(counts, key=lambda g: (counts[g], g), default="")
    now = f"{counts[worst]} out in {worst}" if worst else "unknown group"
    return GuardResult(name, now, f"at most {limit}", all(count <= limit for count in counts.values()), True)


def _rack(q: Question) -> GuardResult:
    return _groups(q, "nodes_out_per_rack", q.facts.racks, q.limits.rack_nodes)


def _domain(q: Question) -> GuardResult:
    return _groups(q, "nodes_out_per_nvlink_domain", q.facts.domains, q.limits.domain_nodes)


def _job(q: Question) -> GuardResult:
    worst, passed = "no job", True
    for job in q.world.jobs_on(frozenset(q.names)):
        out = sum(1 for name in job.nodes if name in q.out_after)
        limit = _at_least_one(q.limits.job_share, len(job.nodes))
        if out > limit or worst == "no job":
            worst = f"{out} of {len(job.nodes)} nodes of job {job.id}"
        passed = passed and out <= limit
    return GuardResult("nodes_out_per_job", worst, f"at most {q.limits.job_share:.0%}, or 1 node", passed, True)


def _fleet_share(q: Question, name: str, share: float, overridable: bool) -> GuardResult:
    total, limit = len(q.world.nodes), _at_least_one(share, len(q.world.nodes))
    now = f"{len(q.out_after)} of {total} nodes out from all causes"
    return GuardResult(name, now, f"at most {limit}", len(q.out_after) <= limit, overridable)


def _fleet(q: Question) -> GuardResult:
    return _fleet_share(q, "nodes_out_in_fleet", q.limits.fleet_share, True)


def _ceiling(q: Question) -> GuardResult:
    return _fleet_share(q, "fleet_ceiling", q.limits.ceiling_share, False)


def _condition(q: Question) -> GuardResult:
    """An act for an incident is for a condition that is still there."""
    return GuardResult(
        "condition", q.facts.condition or "no incident", "not cleared", q.facts.condition != "cleared", True
    )


def _group_plan(q: Question) -> GuardResult:
    """A fault of a rack or loop gets one plan for all its nodes: single holds would empty the group one by one."""
    if not q.facts.cause_nodes:
        return GuardResult("group_plan", "the cause is not a group", "all nodes of the cause", True, True)
    missing = q.facts.cause_nodes - frozenset(q.names)
    now = f"{len(missing)} of {len(q.facts.cause_nodes)} nodes of {q.facts.cause} are not in the plan"
    return GuardResult("group_plan", now, "all nodes of the cause", not missing, True)


_REMOVING: tuple[Guard, ...] = (_foreign, _rack, _domain, _job, _fleet, _ceiling, _condition, _group_plan)


# --- single verbs -------------------------------------------------------------------------------------


def _held_and_idle(q: Question) -> GuardResult:
    ours = {name: f"fleetpulse:{act}" for name, act in q.facts.held.items()}
    bad = [n.name for n in q.nodes if not n.out or n.mark != ours.get(n.name)]
    bad += [f"{n.name} runs {_some(n.jobs)}" for n in q.nodes if n.jobs]
    return GuardResult("held_and_idle", _some(bad) or "held here, no job", "held here, no job", not bad)


def _owner(q: Question) -> GuardResult:
    """Only what we hold is released or emptied: the mark must name an act in force for this very node."""
    ours = {name: f"fleetpulse:{act}" for name, act in q.facts.held.items()}
    foreign = [f"{n.name}: {n.reason or n.state}" for n in q.nodes if not n.mark or n.mark != ours.get(n.name)]
    return GuardResult("owner", _some(foreign) or "held here", "held here", not foreign)


def _checked(q: Question) -> GuardResult:
    """A diagnostic that failed counts until one that tests as much has passed: a shorter one, or a canary, does not."""
    failed = [f"{n}: {q.facts.failed_checks[n]}" for n in q.names if n in q.facts.failed_checks]
    missing = [name for name in q.names if not q.facts.checks.get(name)]
    now = f"no check of {_some(missing)}" if missing else _some(f"{n}: {q.facts.checks[n]}" for n in q.names)
    limit = "a check that passed after the hold, none that failed"
    return GuardResult("checked_after", _some(failed) or now, limit, not missing and not failed, True)


def _relapse(q: Question) -> GuardResult:
    """A node that failed in its burn-in comes back only after a long diagnostic, or by two people."""
    back = [f"{n}: {q.facts.relapses[n]}" for n in q.names if n in q.facts.relapses and n not in q.facts.deep_checks]
    limit = "no failure in it, or a level 3 since the hold"
    return GuardResult("burn_in", _some(back) or "not failed in a burn-in", limit, not back, True)


NVML_ACTIONS: Mapping[str, str] = {
    "none": "NONE",
    "reset GPU": "GPU_RESET",
    "reboot node": "NODE_REBOOT",
    "drain peer-to-peer": "DRAIN_P2P",
    "drain and reset GPU": "DRAIN_AND_RESET",
    "recover IMEX domain": "RECOVER_IMEX_DOMAIN",
    "reset bus": "BUS_RESET",
    "reboot system": "SYSTEM_REBOOT",
}
"""State of `gpu.recovery_action` -> NVML_GPU_RECOVERY_ACTION_..., shown verbatim. DCGM field 1523 has the same."""
_RESTORING = ("reset", "reboot", "release")
"""Verbs after which a GPU is meant to work again: the others come before a recovery, and undercut nothing."""
_ENOUGH: Mapping[str, tuple[str, ...]] = {
    "release": ("", "none"),
    "reset": ("", "none", "reset GPU", "drain peer-to-peer", "drain and reset GPU"),
}
"""Recommendations that a verb covers, "" if there is none. A reboot covers all; a bus and an IMEX domain need more than
the reset of a GPU."""


def _recovery_action(q: Question) -> GuardResult:
    """Never less than NVIDIA's driver recommends: no reset where it says reboot, no release while it says anything."""
    allowed = _ENOUGH.get(q.act.verb)
    said = {name: q.facts.recovery.get(name, "") for name in q.names}
    less = [name for name, text in said.items() if allowed is not None and text not in allowed]
    shown = (f"{name}: {_name_recovery(text)}" for name, text in said.items() if text)
    limit = "not less than recommended" if q.act.verb in _RESTORING else "shown for the next step"
    return GuardResult("recovery_action", _some(shown) or "none reported", limit, not less)


def _name_recovery(text: str) -> str:
    """Returns a recovery action with NVML's own name, for which vendor documentation can be searched."""
    name = NVML_ACTIONS.get(text)
    return f"{text} (NVML_GPU_RECOVERY_ACTION_{name})" if name else text


# --- what programs must pass and people need not ------------------------------------------------------


def _telemetry(q: Question) -> GuardResult:
    silent = sorted(q.facts.silent & frozenset(q.names))
    return GuardResult("telemetry", _some(silent) or "present", "no node in a telemetry gap", not silent)


def _breaker(q: Question) -> GuardResult:
    return GuardResult("breaker", q.facts.breaker or "closed", "closed", not q.facts.breaker)


_AUTOMATIC: tuple[Guard, ...] = (_telemetry, _breaker)


def _at_least_one(share: float, total: int) -> int:
    return max(1, math.floor(share * total + 1e-9))


def _some(items: Iterable[str]) -> str:
    """Returns the first three, and how many more there are."""
    found = list(items)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
