"""The executor: plans and carries out acts with the credentials of the scheduler, in a separate process.

The intent is written before the first command, the guards are evaluated again at that moment, and after an interruption
the scheduler is read first: a finished step is not repeated, and an unknown state is read, not assumed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pipeline.acts.act import MAX_REASON, Act, GuardResult, JobHit, Plan, State
from pipeline.acts.adapters.adapter import (
    GIVE_UP_DIAGNOSTIC_S,
    GIVE_UP_S,
    Adapter,
    NotYet,
    Outcome,
    StillRunning,
)
from pipeline.acts.board import Work
from pipeline.acts.guards import Facts, Question, evaluate_guards, needed_people
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.config.acts import Acts, Mode
from pipeline.model.errors import ConfigError, FleetpulseError, Outdated, Refused, Unreachable
from pipeline.model.records import SECOND

log = logging.getLogger("fleetpulse.executor")
REBOOT_MINUTES = 30.0
"""How long a node has to be back after a reboot, if verify_minutes is less. Chosen: twice what a slow one takes."""
MODES: tuple[Mode, ...] = ("off", "dry-run", "on")
"""Modes of a verb, the strictest first."""
MAX_JOBS_SHOWN = 5
"""Jobs of a node that a reason to wait names. Chosen: fits a line."""
MAX_WAITS = 1000
"""Most acts of which the executor says what they wait for. Chosen: more than any guard lets begin in an hour."""


class BoardAccess(Protocol):
    """What the executor needs of the board: the board itself, or its client over HTTP."""

    def claim(self, who: str, instance: str = "", waits: Mapping[str, str] | None = None) -> list[Work]: ...
    def collect_facts(self, id_: str) -> Facts: ...
    def plan(self, id_: str, plan: Plan) -> Act: ...
    def begin(self, id_: str, failing: Sequence[str], who: str, instance: str = "", again: bool = False) -> Act: ...
    def report(self, id_: str, state: str, who: str, result: Mapping[str, Any], comment: str = "") -> Act: ...
    def report_undone(self, id_: str, target: str, seen: str, who: str) -> Act: ...


class Executor:
    """Does one round of work at a time, one act after the other: no two acts are ever carried out together.

    find_adapter: the adapter of a verb.   scheduler: the one that knows the nodes, for the guards.
    instance: of this process: two executors with one name must not work at the same time.
    """

    def __init__(
        self,
        board: BoardAccess,
        config: Acts,
        scheduler: Adapter,
        find_adapter: Callable[[str], Adapter],
        clock: Callable[[], int],
        name: str = "executor",
        instance: str = "",
    ) -> None:
        self.board, self.config, self.clock = board, config, clock
        self.name, self.instance = name, instance
        self._scheduler, self._find_adapter = scheduler, find_adapter
        self._seen: SchedulerState | None = None
        self.waiting: set[str] = set()
        """Acts whose programs go on."""
        self._begun: set[str] = set()
        """Acts that this process began, or went on with."""
        self._waits: dict[str, str] = {}
        """What acts wait for, as the last round found it."""
        self._asked: dict[str, dict[str, Outcome | None]] = {}
        """Of acts that go on: the targets that were asked, with what came of it; None: it goes on."""
        self._shown_since: dict[str, int] = {}
        """Since when the scheduler shows the effect of an act that is not verified yet (UTC us)."""

    def run_once(self, only_waiting: bool = False) -> int:
        """Does what there is to do; returns how many acts it worked on. Raises Unreachable without the board.

        only_waiting: begins nothing, and asks after the programs that go on.
        """
        waits = dict(itertools.islice(self._waits.items(), MAX_WAITS))
        work, self._seen = self.board.claim(self.name, self.instance, waits), None
        if only_waiting:
            work = [task for task in work if task.act.id in self.waiting]
        self.waiting, self._waits = set(), {}
        self._asked = {task.act.id: self._asked[task.act.id] for task in work if task.act.id in self._asked}
        for task in work:
            self._try(task)
        return len(work)

    def _try(self, task: Work) -> None:
        """Does one task. Whatever happens, it must not stop the other acts, nor keep its own open for ever."""
        act = task.act
        try:
            self._do(task)
        except StillRunning as error:
            self.waiting.add(act.id)
            self._wait(act, str(error))
            self._fail_if_overdue(act, str(error), self._find_adapter(act.verb).find_limit(act))
        except NotYet as error:
            log.warning("act %s: %s; tried again", act.id, error)
            self._wait(act, str(error))
            self._fail_if_refused_for_long(act, str(error))
        except (Refused, Outdated) as error:
            log.info("%s", error)
            self._wait(act, str(error))
        except Unreachable as error:
            log.warning("act %s: %s; tried again", act.id, error)
            self._wait(act, str(error))
            self._fail_if_overdue(act, str(error), GIVE_UP_DIAGNOSTIC_S if act.verb == "diagnose" else GIVE_UP_S)
        except FleetpulseError as error:
            log.warning("act %s: %s", act.id, error)
            self._wait(act, str(error))
            self._fail_if_overdue(act, str(error), GIVE_UP_S, ("executing", "verifying"))
        except Exception as error:  # a fault of ours, or an unknown answer of a scheduler
            log.exception("act %s", act.id)
            said = f"an error of the executor, see its log: {error!r}"
            self._wait(act, said)
            self._fail_if_overdue(act, said, GIVE_UP_S, ("executing", "verifying"))

    def _wait(self, act: Act, why: str) -> None:
        """Notes what an act waits for, for the people who look at it."""
        self._waits[act.id] = why[:MAX_REASON]

    def _do(self, task: Work) -> None:
        if task.job == "plan":
            self.board.plan(task.act.id, self._plan(task.act, task.facts, self._read_once()))
        elif task.job == "execute":
            self._execute(task.act)
        elif task.job == "resume":
            self._resume(task.act)
        elif task.job == "verify":
            self._verify(task.act)
        elif task.act.is_in_force:
            self._watch(task.act)

    # --- planning -----------------------------------------------------------------------------------

    def _plan(self, act: Act, facts: Facts, world: SchedulerState) -> Plan:
        """Returns the plan of an act against a state of the scheduler."""
        question = Question(act, facts, world, self.config.limits, self.clock())
        guards = evaluate_guards(question)
        people, why = needed_people(question, guards)
        adapter = self._find_adapter(act.verb)
        able, own = act.verb in adapter.verbs, self.config.mode_of(act.verb)
        said, commands = f"{adapter.name} {'can' if able else 'cannot'} {act.verb}", tuple[str, ...]()
        try:
            commands = adapter.list_commands(act, world) if able else ()
        except ConfigError as error:
            able, said = False, str(error)
        if MODES.index(own) < MODES.index(act.mode):  # its own file decides, whatever the pipeline is configured to do
            able, said = False, f"[acts] {act.verb} is {own} at the executor, {act.mode} at the pipeline"
        guards += (GuardResult("adapter", said, "can", able),)
        hits = [JobHit(j.id, len(j.nodes), j.gpus, j.account) for j in world.jobs_on(frozenset(question.names))]
        before = {n: _show(world.nodes[n]) if n in world.nodes else "unknown" for n in question.names}
        return Plan(self.clock(), adapter.name, commands, guards, tuple(hits), before, people, why)

    # --- carrying out -------------------------------------------------------------------------------

    def _execute(self, act: Act) -> None:
        """Evaluates the guards again, writes the intent, and carries the act out."""
        facts, world = self.board.collect_facts(act.id), self._scheduler.read_state(self.clock())
        if why := find_wait(act, facts, world):
            self._wait(act, why)
            return
        fresh = self._plan(act, facts, world)
        if changes := find_changes(act, fresh):
            self.board.report(act.id, "refused", self.name, {"reason": f"the plan has changed: {'; '.join(changes)}"})
            return
        begun = self.board.begin(act.id, [guard.name for guard in fresh.failing], self.name, self.instance)
        if begun.attempts > 1:  # this process was slow, and lost the right to act: a program must not run twice
            raise Refused(f"act {act.id}: another executor began it in between")
        self._begun.add(act.id)
        self._carry_out(begun, world)
        self._seen = None

    def _resume(self, act: Act) -> None:
        """Goes on after an interruption: reads the scheduler, and does only what it does not show."""
        world, adapter = self._scheduler.read_state(self.clock()), self._find_adapter(act.verb)
        if adapter.is_waiting(act):
            self._carry_out(act, world)
            return
        if act.mode == "on" and act.verb not in adapter.repeatable:
            said = "interrupted while it ran; whether it was done is unknown: look at the node"
            self.board.report(act.id, "failed", self.name, {"reason": said})
            return
        left = _list_unreleased(act, world, adapter)
        fresh = self._plan(replace(act, targets=left), self.board.collect_facts(act.id), world) if left else None
        if fresh is not None and (new := _newly_failing(act, fresh)):
            held = [t for t in act.targets if _carries(world, t, act.mark)]
            said = f"interrupted, and not continued: {'; '.join(new)}"
            self.board.report(act.id, "failed", self.name, {"reason": said, "held": held})
            return
        begun = self.board.begin(act.id, (), self.name, self.instance, act.id in self._begun)
        self._begun.add(act.id)
        self._carry_out(begun, world)

    def _carry_out(self, act: Act, world: SchedulerState) -> None:
        if act.mode == "dry-run":
            self.board.report(act.id, "executed", self.name, {"dry_run": True}, "dry run: no command was run")
            return
        outcomes = self._ask_all(act, world)
        result = {"targets": {t: {"done": o.done, "output": o.output, **o.facts} for t, o in outcomes.items()}}
        if all(outcome.done for outcome in outcomes.values()):
            self.board.report(act.id, "executed", self.name, result)
        else:
            self._roll_back(act, outcomes, world, result)

    def _ask_all(self, act: Act, world: SchedulerState) -> dict[str, Outcome]:
        """Returns what came of each target that was asked; after a refusal nothing more is begun.

        What goes on at one node delays no other node of the act. Raises StillRunning until all that began has ended.
        """
        adapter, outcomes, running, refused = self._find_adapter(act.verb), dict[str, Outcome](), list[str](), False
        asked = self._asked.setdefault(act.id, {})
        for target in act.targets:
            if refused and target not in asked:
                continue
            known = asked.get(target)
            try:
                outcomes[target] = known or self._ask(adapter, act, target, world)
            except StillRunning as error:
                asked[target] = None
                running.append(str(error))
                continue
            refused |= not outcomes[target].done
            if act.verb not in ("hold", "release"):  # of those the scheduler says more: it may have lost one
                asked[target] = outcomes[target]
        if running:
            raise StillRunning("; ".join(running))
        return outcomes

    def _ask(self, adapter: Adapter, act: Act, target: str, world: SchedulerState) -> Outcome:
        """Carries the act out on one target, unless the scheduler shows its effect."""
        node = world.nodes.get(target.partition(":")[2])
        if node is None:
            return Outcome(False, "the scheduler no longer has this node")
        if act.verb in ("hold", "release") and adapter.find_effect(act, node):
            return Outcome(True, "was done before the interruption" if act.attempts > 1 else "is so")
        return adapter.carry_out(act, node)

    def _roll_back(
        self, act: Act, outcomes: Mapping[str, Outcome], world: SchedulerState, result: dict[str, Any]
    ) -> None:
        """Undoes what a failed hold did to its other nodes; other verbs cannot be undone."""
        adapter, done = self._find_adapter(act.verb), [t for t, outcome in outcomes.items() if outcome.done]
        why = next(f"{t}: {o.output}" for t, o in outcomes.items() if not o.done)
        undone = {}
        if act.verb == "hold":
            undone = {t: adapter.undo(act, world.nodes[t.partition(":")[2]]) for t in done}
        result |= {"reason": why, "undone": {t: outcome.done for t, outcome in undone.items()}}
        result["held"] = [t for t, outcome in undone.items() if not outcome.done]
        complete = bool(done) and act.verb == "hold" and all(outcome.done for outcome in undone.values())
        self.board.report(act.id, "rolled_back" if complete else "failed", self.name, result, why)

    # --- afterwards ---------------------------------------------------------------------------------

    def _read_once(self) -> SchedulerState:
        """Returns the scheduler's state of this round, for plans and checks: acts under way read it again."""
        self._seen = self._seen or self._scheduler.read_state(self.clock())
        return self._seen

    def _verify(self, act: Act) -> None:
        """Looks whether the scheduler shows the effect on all targets, for [acts] verify_minutes."""
        if act.state == "executed":
            act = self.board.report(act.id, "verifying", self.name, {})
        world, adapter = self._read_once(), self._find_adapter(act.verb)
        seen = {}
        for target in act.targets:
            node = world.nodes.get(target.partition(":")[2])
            seen[target] = None if node is None else adapter.find_effect(act, node)
        if self._is_lasting(act.id, all(seen.values()), adapter.saved_after_s):
            shown = {t: _show(world.nodes[t.partition(":")[2]]) for t in act.targets}
            self.board.report(act.id, "verified", self.name, {"after": shown})
        elif all(seen.values()):
            self._wait(act, f"the scheduler shows it; verified once that has lasted {adapter.saved_after_s:g} s")
        elif self.clock() - act.updated > self._minutes_to_verify(act) * 60 * SECOND:
            held = [t for t in act.targets if _carries(world, t, act.mark)]
            self.board.report(act.id, "failed", self.name, {"reason": _say_unseen(seen, world), "held": held})
        else:
            self._wait(act, _say_unseen(seen, world))

    def _minutes_to_verify(self, act: Act) -> float:
        """Returns how long the scheduler may take to show the effect of an act."""
        minutes = self.config.verify_minutes
        return max(minutes, REBOOT_MINUTES) if act.verb == "reboot" else minutes

    def _is_lasting(self, id_: str, shown: bool, seconds: float) -> bool:
        """Returns whether the scheduler has shown an effect for so long that it no longer loses it in a crash."""
        if not shown:
            self._shown_since.pop(id_, None)
            return False
        now = self.clock()
        if now - self._shown_since.setdefault(id_, now) < seconds * SECOND:
            return False
        self._shown_since.pop(id_)
        return True

    def _watch(self, act: Act) -> None:
        """Looks whether the held nodes still carry our mark; if not, a person has undone it, and it stays undone."""
        world = self._read_once()
        for target in act.held:
            node = world.nodes.get(target.partition(":")[2])
            if node is not None and (not node.out or node.mark != act.mark):
                self.board.report_undone(act.id, target, _show(node), self.name)

    def _fail_if_overdue(self, act: Act, why: str, limit: float, states: tuple[State, ...] = ("executing",)) -> None:
        if act.state in states and self.clock() - (act.began or act.updated) > limit * SECOND:
            said = f"its effect is unknown for {limit / 60:.0f} min: {why}"
            held = list(act.targets) if act.verb == "hold" else []
            self.board.report(act.id, "failed", self.name, {"reason": said, "held": held})

    def _fail_if_refused_for_long(self, act: Act, why: str) -> None:
        minutes = self.config.verify_minutes
        if act.state == "executing" and self.clock() - (act.began or act.updated) > minutes * 60 * SECOND:
            self.board.report(act.id, "failed", self.name, {"reason": f"tried for {minutes:g} min: {why}"})


def find_changes(act: Act, fresh: Plan) -> list[str]:
    """Returns what differs between the approved plan and the one of now; empty if it may be carried out."""
    approved = act.plan
    if approved is None:
        return ["there is no approved plan"]
    changes = _newly_failing(act, fresh)
    if fresh.commands != approved.commands or fresh.adapter != approved.adapter:
        changes.append("the commands are others now")
    if fresh.people > approved.people:
        changes.append(f"{fresh.people} people must stand behind it now: {'; '.join(fresh.people_why)}")
    return changes


def _newly_failing(act: Act, fresh: Plan) -> list[str]:
    """Returns the guards that fail now and passed when the plan was approved."""
    known = {guard.name for guard in act.plan.failing} if act.plan is not None else set()
    failing = [guard for guard in fresh.failing if guard.name not in known]
    return [f"a guard fails now: {guard.text}" for guard in failing]


def _list_unreleased(act: Act, world: SchedulerState, adapter: Adapter) -> tuple[str, ...]:
    """Returns the targets for which the guards are evaluated again: of a release those that still carry the mark."""
    if act.verb != "release":
        return act.targets
    nodes = {target: world.nodes.get(target.partition(":")[2]) for target in act.targets}
    return tuple(t for t, node in nodes.items() if node is None or not adapter.find_effect(act, node))


def _carries(world: SchedulerState, target: str, mark: str) -> bool:
    """Returns whether the scheduler shows our mark on a target."""
    node = world.nodes.get(target.partition(":")[2])
    return node is not None and node.out and node.mark == mark


def _say_unseen(seen: Mapping[str, Any], world: SchedulerState) -> str:
    """Returns on which targets the scheduler shows no effect, with what it shows of them."""
    nodes = {t: world.nodes.get(t.partition(":")[2]) for t, found in seen.items() if not found}
    shown = (f"{t} ({'unknown' if node is None else _show(node)})" for t, node in nodes.items())
    return f"the scheduler shows no effect on {', '.join(shown)}"


def find_wait(act: Act, facts: Facts, world: SchedulerState) -> str:
    """Returns what an approved act waits for, as its requester asked; "" if it may begin."""
    names = [target.partition(":")[2] for target in act.targets]
    busy = [world.nodes[name] for name in names if name in world.nodes and world.nodes[name].jobs]
    if act.when == "when_idle" and busy:
        return f"until no job is on the nodes: {'; '.join(_show_jobs(node.name, node.jobs) for node in busy)}"
    if act.when == "after_checkpoint":
        late = [_show_jobs(node.name, jobs) for node in busy if (jobs := _list_without_checkpoint(node, facts))]
        return f"for a checkpoint since the approval: {'; '.join(late)}" if late else ""
    return ""


def _list_without_checkpoint(node: SchedulerNode, facts: Facts) -> list[str]:
    """Returns the jobs on a node that are not known to have written a checkpoint.

    Jobs are the same by name. Those that the scheduler and the telemetry name differently are the same if as many of
    both are on the node.
    """
    running, held = set(facts.running.get(node.name, ())), set(node.jobs)
    if late := held & running - facts.checkpoints:
        return sorted(late)
    unmatched, others = held - running - facts.checkpoints, running - held
    known = len(unmatched) == len(others) and others <= facts.checkpoints
    return [] if known else sorted(unmatched)


def _show_jobs(node: str, jobs: Sequence[str]) -> str:
    """Returns the jobs on a node for people; of many the first."""
    more = f" and {len(jobs) - MAX_JOBS_SHOWN} more" if len(jobs) > MAX_JOBS_SHOWN else ""
    return f"{node} has {', '.join(jobs[:MAX_JOBS_SHOWN])}{more}"


def _show(node: SchedulerNode) -> str:
    """Returns a node's state for people."""
    return " ".join(filter(None, (node.state, node.reason)))
