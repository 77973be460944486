"""A scheduler in memory with the contract of the adapters, and a board over a real store, for tests of acts.

The scheduler checks each command against the limits itself, by its own arithmetic: it knows nothing of the guards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipeline.acts.act import VERBS, Act, Verb
from pipeline.acts.adapters.adapter import Adapter, Immediate, Outcome, write_note
from pipeline.acts.adapters.slurm import find_undo
from pipeline.acts.board import Board
from pipeline.acts.executor import Executor
from pipeline.acts.guards import Facts
from pipeline.acts.scheduler import SchedulerJob, SchedulerNode, SchedulerState
from pipeline.config.acts import ActLimits, Acts
from pipeline.engine.act_facts import find_held_since, find_leaving, find_relapses
from pipeline.model.errors import Unreachable
from pipeline.model.records import SECOND, Caller
from pipeline.store.database import Database
from tests.until import until

START = 1_800_000_000 * SECOND
ALICE, BOB, CAROL = (Caller(name, "operator", "10.0.0.1") for name in ("alice", "bob", "carol"))
ROOT = Caller("root", "admin", "10.0.0.1")
ROBOT = Caller("robot", "operator", "10.0.0.9")
ON = Acts(hold="on", release="on", evict="on", diagnose="on", reset="on", reboot="on", ticket="on", adapter="slurm")


class Killed(BaseException):
    """The executor was killed here."""


@dataclass
class Scheduler(Immediate):
    """Nodes n00, n01, ... in racks of eight, and jobs. `log` has each command that changed something."""

    size: int = 40
    nodes: dict[str, SchedulerNode] = field(default_factory=dict)
    jobs: dict[str, SchedulerJob] = field(default_factory=dict)
    log: list[tuple[str, str, str]] = field(default_factory=list)
    away: bool = False
    kill_at: int | None = None
    """Number of calls until the process that calls is killed: before, or after, the change."""
    name: str = "slurm"
    verbs: frozenset[Verb] = frozenset(VERBS)
    clock: Callable[[], int] = lambda: START
    most_out: int = 0

    def __post_init__(self) -> None:
        self.nodes = {f"n{i:02d}": SchedulerNode(f"n{i:02d}", False, "IDLE") for i in range(self.size)}

    def racks(self) -> dict[str, str]:
        return {name: f"r{int(name[1:]) // 8}" for name in self.nodes}

    def run(self, job: str, names: tuple[str, ...], gpus: int = 8) -> None:
        """Starts a job."""
        self.jobs[job] = SchedulerJob(job, names, gpus * len(names), "team")
        for name in names:
            self.nodes[name] = replace(self.nodes[name], jobs=(*self.nodes[name].jobs, job))

    def by_hand(self, name: str, out: bool, reason: str = "") -> None:
        """A person changes a node."""
        state = "DRAIN" if out else "IDLE"
        self.nodes[name] = replace(self.nodes[name], out=out, state=state, reason=reason if out else "")

    def read_state(self, now: int) -> SchedulerState:
        self._call()
        return SchedulerState(now, dict(self.nodes), dict(self.jobs))

    def list_commands(self, act: Act, world: SchedulerState) -> tuple[str, ...]:
        return tuple(f"{act.verb} {target}" for target in act.targets)

    def carry_out(self, act: Act, node: SchedulerNode) -> Outcome:
        self._call()
        found = self.nodes[node.name]
        if act.verb == "hold":
            if found.out and found.mark != act.mark:
                return Outcome(False, f"{node.name}: is out for {found.reason!r}")
            self.nodes[node.name] = replace(found, out=True, state="DRAIN", reason=write_note(act))
            self.most_out = max(self.most_out, sum(n.out for n in self.nodes.values()))
        elif act.verb == "release":
            if not found.mark or found.mark != node.mark:
                return Outcome(False, "is not ours")
            self.nodes[node.name] = replace(found, out=False, state="IDLE", reason="")
        elif act.verb == "evict":
            self.nodes[node.name] = replace(found, jobs=())
        self.log.append((act.verb, node.name, found.reason))
        self._call()
        return Outcome(True, "done")

    def undo(self, act: Act, node: SchedulerNode) -> Outcome:
        self._call()
        found = self.nodes[node.name]
        if found.mark != act.mark:
            return Outcome(False, "is not ours")
        self.nodes[node.name] = replace(found, out=False, state="IDLE", reason="")
        self.log.append(("undo", node.name, found.reason))
        return Outcome(True)

    def find_effect(self, act: Act, node: SchedulerNode) -> bool | None:
        if act.verb == "hold":
            return node.out and node.mark == act.mark
        if act.verb == "release":
            return not node.out or None
        return not node.jobs or None if act.verb == "evict" else True

    def _call(self) -> None:
        if self.kill_at is not None:
            self.kill_at -= 1
            if self.kill_at < 0:
                self.kill_at = None
                raise Killed
        if self.away:
            raise Unreachable("scontrol: Unable to contact slurm controller")


class World:
    """A board, an executor and a scheduler with one clock."""

    kind: type[Board] = Board

    def __init__(self, database: Database, config: Acts = ON, size: int = 40) -> None:
        """database: shared by tests; what they left there is removed."""
        for table in ("acts", "act_history", "act_breaker", "audit"):
            database.connection.execute(f"DELETE FROM {table}")
        self.database = database
        self.config, self.now = config, START
        self.scheduler = Scheduler(size, clock=lambda: self.now)
        self.facts: dict[str, object] = {}
        self.notices: list[str] = []
        self.board = self.kind(
            self.database,
            config,
            lambda: self.now,
            self.collect,
            lambda: size,
            lambda title, text: self.notices.append(title),
        )
        self.executor = self.start_executor()

    def start_executor(self) -> Executor:
        scheduler = self.scheduler
        return Executor(self.board, self.config, scheduler, lambda verb: scheduler, lambda: self.now)

    def collect(self, act: Act) -> Facts:
        """What the pipeline knows, of the acts in the store and of the facts that a test sets."""
        others = self.board.list_acts(only_open=True)
        busy = {
            t.partition(":")[2]: a.id for a in others if a.id != act.id and a.is_open and _began(a) for t in a.targets
        }
        holds = {target.partition(":")[2]: other for other in others for target in other.held}
        held = {name: other.id for name, other in holds.items()}
        ours = {name: holds[name] for t in act.targets if (name := t.partition(":")[2]) in holds}
        begun = find_held_since(self.database.connection, ours)
        back = find_relapses(self.database.connection, begun, self.config.burn_in_days) if act.verb == "release" else {}
        known: dict[str, object] = {
            "racks": self.scheduler.racks(),
            "open_acts": {name: id_ for name, id_ in busy.items() if held.get(name) != id_},
            "held": held,
            "leaving": find_leaving(others, act),
            "automatic": act.requested_by.startswith("policy:"),
            "breaker": self.board.read_breaker(),
            "excluded": self.config.excluded,
            "checks": dict.fromkeys(self.scheduler.nodes, "diagnose 3 passed"),
            "relapses": back,
        }
        return Facts(**{**known, **self.facts})  # type: ignore[arg-type] # a test sets fields by name

    def run(self, rounds: int = 1) -> None:
        """Lets the executor work, one second a round."""
        for _ in range(rounds):
            self.executor.run_once()
            self.now += SECOND

    def propose(self, verb: str, *names: str, who: Caller = ALICE, person: bool = True, **more: object) -> Act:
        """Proposes an act and lets the executor plan it."""
        targets = [f"node:{name}" for name in names]
        made = self.board.propose(verb, targets, who, "fault", is_person=person, **more)  # type: ignore[arg-type]
        self.run()
        return self.board.find(made.id)

    def approve(self, act: Act, who: Caller = BOB, person: bool = True, **more: object) -> Act:
        """Approves the present plan of an act."""
        plan = self.board.find(act.id).plan
        assert plan is not None
        typed = act.targets[0].partition(":")[2]
        return self.board.approve(act.id, who, plan.hash(act), person, **{"typed": typed, **more})  # type: ignore[arg-type]

    def state(self, act: Act) -> str:
        return self.board.find(act.id).state


class SchedulerSite(World):
    """A board whose executor works at a real scheduler."""

    def __init__(self, database: Database, limits: ActLimits, adapter: Adapter) -> None:
        self._adapter = adapter
        super().__init__(database, replace(ON, limits=limits))

    def start_executor(self) -> Executor:
        return Executor(self.board, self.config, self._adapter, lambda verb: self._adapter, lambda: self.now)

    def collect(self, act: Act) -> Facts:
        held = {target.partition(":")[2]: other.id for other in self.board.list_acts() for target in other.held}
        return Facts(held=held, checks=dict.fromkeys(held, "diagnose 3 passed"))

    def settle(self, act: Act, state: str) -> None:
        """Lets the executor work until the act has a state."""

        def has_state() -> bool:
            self.run()
            return self.state(act) == state

        try:
            until(has_state, 60)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.board.describe(act.id)['history']}") from error

    def check_undo_of_a_down_node(self, run: Callable[..., str], name: str) -> None:
        """Holds a node without slurmd that Slurm has marked down, and undoes that. run: a command of Slurm.

        With slurmd it could register at any moment, and be up again by ReturnToService=2.
        """
        run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=Node unexpectedly rebooted")
        before = self._adapter.read_state(self.now).nodes[name]
        act = self.propose("hold", name)
        self.approve(act)
        self.settle(act, "verified")
        held = self._adapter.read_state(self.now).nodes[name]
        assert find_undo(held, before) == ("UNDRAIN", "Node unexpectedly rebooted")
        assert self._adapter.undo(act, before).done
        after = self._adapter.read_state(self.now).nodes[name]
        assert ("DOWN" in after.state, "DRAIN" in after.state, after.reason) == (True, False, before.reason)


def _began(act: Act) -> bool:
    return act.state not in ("proposed", "planned", "awaiting_approval")
