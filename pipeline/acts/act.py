"""An act: a requested change of nodes, its plan, approvals and state.

The states and who may move an act between them are data (`TRANSITIONS`). `executed` says that the command ran,
`verified` that a check afterwards saw its effect: the two are different words on purpose.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from pipeline.config.acts import Mode
from pipeline.model.errors import Refused, UsageError
from pipeline.model.records import iso, to_json

Verb = Literal["hold", "release", "evict", "diagnose", "reset", "reboot", "ticket"]
When = Literal["now", "when_idle", "after_checkpoint"]
State = Literal[
    "proposed",
    "planned",
    "awaiting_approval",
    "approved",
    "executing",
    "executed",
    "verifying",
    "verified",
    "refused",
    "expired",
    "cancelled",
    "failed",
    "rolled_back",
]
VERBS: tuple[Verb, ...] = get_args(Verb)
STATES: tuple[State, ...] = get_args(State)
ENDED: frozenset[State] = frozenset({"verified", "refused", "expired", "cancelled", "failed", "rolled_back"})
"""States that an act never leaves, except a hold in force (`Act.is_in_force`), which a person may undo."""


@dataclass(frozen=True, slots=True)
class VerbKind:
    """What a verb does. hard: cannot be undone, or stops work.  removes: takes a node out of service.  alone: only on a
    node that we hold and that runs no job."""

    hard: bool
    removes: bool
    alone: bool
    text: str


VERB_KINDS: Mapping[Verb, VerbKind] = {
    "hold": VerbKind(False, True, False, "gives the node no new work; running work continues"),
    "release": VerbKind(False, False, False, "gives a node that was held here new work again"),
    "evict": VerbKind(True, False, False, "ends the work that runs on a node that is held here"),
    "diagnose": VerbKind(False, False, False, "runs a named diagnostic on the node"),
    "reset": VerbKind(True, False, True, "resets GPUs of a node that is held and idle"),
    "reboot": VerbKind(True, False, True, "reboots a node that is held and idle"),
    "ticket": VerbKind(False, False, False, "opens a ticket for work by hand: cable, part, return to the vendor"),
}
TRANSITIONS: Mapping[State, tuple[State, ...]] = {
    "proposed": ("planned", "refused", "cancelled", "expired"),
    "planned": ("awaiting_approval", "approved", "refused", "cancelled", "expired"),
    "awaiting_approval": ("approved", "planned", "refused", "cancelled", "expired"),
    "approved": ("executing", "planned", "refused", "cancelled", "expired"),
    "executing": ("executed", "failed", "rolled_back"),
    "executed": ("verifying", "cancelled"),
    "verifying": ("verified", "failed", "cancelled", "rolled_back"),
    "verified": ("cancelled",),  # a person undid a hold that was in force
    "refused": (),
    "expired": (),
    "cancelled": (),
    "failed": (),
    "rolled_back": (),
}
POLICY = "policy:"
"""How the requester of an act begins that a policy proposed."""
MAX_TARGETS = 64
"""Most nodes of one act. Chosen: the racks of one coolant loop; the guards allow far fewer."""
MAX_REASON = 500
"""Characters of a reason. Chosen: longer text belongs into the incident's comments."""


@dataclass(frozen=True, slots=True)
class GuardResult:
    """One guard at one moment. `now` and `limit` are as people read them, such as "2 of 40 nodes"."""

    name: str
    now: str
    limit: str
    passed: bool
    overridable: bool = False

    @property
    def text(self) -> str:
        """Returns the result in words: `known node: not known: n99, expected known`."""
        return f"{self.name.replace('_', ' ')}: {self.now}, expected {self.limit}"


@dataclass(frozen=True, slots=True)
class JobHit:
    """A job that runs on a target, with its size in nodes and GPUs."""

    job: str
    nodes: int
    gpus: int
    account: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done: the exact commands, the guards, the jobs on the targets, the targets' state before.

    made: when (UTC us).  commands: as an operator would type or send them.  before: per target, as the scheduler shows.
    people: how many people must stand behind it, and why.
    """

    made: int
    adapter: str
    commands: tuple[str, ...]
    guards: tuple[GuardResult, ...]
    jobs: tuple[JobHit, ...]
    before: Mapping[str, str]
    people: int
    people_why: tuple[str, ...]

    @property
    def failing(self) -> tuple[GuardResult, ...]:
        """The guards that do not pass."""
        return tuple(g for g in self.guards if not g.passed)

    @property
    def is_refused(self) -> bool:
        """Whether a guard fails that has no override."""
        return any(not g.overridable for g in self.failing)

    def hash(self, act: Act) -> str:
        """What an approval is about: the act, its commands, the failing guards, and for hard verbs the jobs it ends."""
        said: list[Any] = [act.id, act.verb, sorted(act.targets), dict(act.params), act.mode, self.adapter]
        said += [list(self.commands), sorted(g.name for g in self.failing), self.people]
        if VERB_KINDS[act.verb].hard:
            said.append(sorted(hit.job for hit in self.jobs))
        return hashlib.sha256(json.dumps(to_json(said), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Approval:
    """One person's approval of one plan. break_glass: alone, where two people are required.   subject: who it is at the
    provider of the login, "" if unknown: the name may change."""

    who: str
    time: int
    plan: str
    comment: str = ""
    break_glass: bool = False
    policy: bool = False
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Act:
    """One act. Times in UTC us. `version` rises with each change. by_person: the requester is a person, no program.

    released: targets that are no longer held: released here, or by a person at the scheduler.
    attempts: how often its execution began.  began: when it first did, 0 before.
    expires: when it ends by itself unless it was executed before.   subject: of the requester, as of an approval.
    """

    id: str
    verb: Verb
    targets: tuple[str, ...]
    requested_by: str
    reason: str
    created: int
    expires: int
    mode: Mode
    incident: str = ""
    key: str = ""
    by_person: bool = False
    when: When = "now"
    params: Mapping[str, str] = field(default_factory=dict)
    state: State = "proposed"
    plan: Plan | None = None
    approvals: tuple[Approval, ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 0
    updated: int = 0
    version: int = 1
    released: tuple[str, ...] = ()
    began: int = 0
    subject: str = ""

    @property
    def mark(self) -> str:
        """The owner mark: how the scheduler's record of a held node names this act."""
        return f"fleetpulse:{self.id}"

    @property
    def is_open(self) -> bool:
        """Whether it may still do something."""
        return self.state not in ENDED and not (self.state == "executed" and self.mode == "dry-run")

    @property
    def is_in_force(self) -> bool:
        """Whether its nodes are out of service because of it."""
        return bool(self.held)

    @property
    def held(self) -> tuple[str, ...]:
        """Its targets that are out of service because of it; of a failed act those that it could not give back."""
        began = self.state in ("executing", "executed", "verifying", "verified", "failed")
        holds = self.verb == "hold" and self.mode == "on" and began
        return tuple(t for t in self.targets if t not in self.released) if holds else ()

    def move(self, state: State, now: int, **changes: Any) -> Act:
        """Returns the act in another state. Raises Refused if it cannot go there."""
        if state not in TRANSITIONS[self.state]:
            raise Refused(f"act {self.id}: is {self.state}; it cannot become {state}")
        return replace(self, state=state, updated=now, version=self.version + 1, **changes)

    def change(self, now: int, **changes: Any) -> Act:
        """Returns the act with changed fields in the same state."""
        return replace(self, updated=now, version=self.version + 1, **changes)

    def as_json(self) -> dict[str, Any]:
        """Returns the act in the form of the API, with `plan.hash`, which an approval names."""
        table = to_json(asdict(self))
        for name in ("created", "expires", "updated"):
            table[name] = iso(table[name])
        table["began"] = iso(self.began) if self.began else None
        del table["subject"]  # for the rule of two people, and no matter of those who read
        for approval in table["approvals"]:
            approval["time"] = iso(approval["time"])
            del approval["subject"]
        if self.plan is not None:
            table["plan"] |= {"made": iso(self.plan.made), "hash": self.plan.hash(self)}
            table["plan"]["refused"] = self.plan.is_refused
        table |= {"open": self.is_open, "in_force": self.is_in_force, "held": list(self.held)}
        return {**table, "mark": self.mark, "text": describe(self)}


def describe(act: Act) -> str:
    """Returns the act in a few words: "hold n042", "evict 3 nodes"."""
    names = [target.partition(":")[2] for target in act.targets]
    return f"{act.verb} {names[0] if len(names) == 1 else f'{len(names)} nodes'}"


def parse_act(table: Mapping[str, Any]) -> Act:
    """Returns the act that `encode_act` wrote."""
    plan = table["plan"]
    known = {f.name for f in fields(Act)}
    return Act(
        **{
            **{name: value for name, value in table.items() if name in known},
            "targets": tuple(table["targets"]),
            "released": tuple(table["released"]),
            "plan": None if plan is None else parse_plan(plan),
            "approvals": tuple(Approval(**a) for a in table["approvals"]),
        }
    )


def encode_act(act: Act) -> str:
    """Returns the act as JSON text for the store."""
    return json.dumps(to_json(asdict(act)))


def parse_plan(table: Mapping[str, Any]) -> Plan:
    """Returns a plan from its JSON. Raises KeyError or TypeError if it is none."""
    return Plan(
        made=int(table["made"]),
        adapter=str(table["adapter"]),
        commands=tuple(map(str, table["commands"])),
        guards=tuple(GuardResult(**g) for g in table["guards"]),
        jobs=tuple(JobHit(**j) for j in table["jobs"]),
        before={str(k): str(v) for k, v in table["before"].items()},
        people=int(table["people"]),
        people_why=tuple(map(str, table["people_why"])),
    )


def check_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """Returns the targets, sorted, each once. Raises UsageError unless all are nodes."""
    for target in targets:
        kind, _, name = target.partition(":")
        if kind != "node" or not name or name.startswith("-") or any(c.isspace() or c in ",[]" for c in name):
            raise UsageError(f"target = {target!r}: expected a node such as node:n042")
    if not 1 <= len(set(targets)) <= MAX_TARGETS:
        raise UsageError(f"targets: {len(set(targets))} nodes; expected 1 to {MAX_TARGETS}")
    return tuple(sorted(set(targets)))


PARAMS: Mapping[str, re.Pattern[str]] = {
    "level": re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}"),
    "gpu": re.compile(r"[A-Za-z0-9][A-Za-z0-9:.-]{0,63}"),
}
"""What the parameters may be that become words of a program: a name, number, UUID or PCI address, never an option."""


def check_params(params: Mapping[str, str]) -> dict[str, str]:
    """Returns the parameters. Raises UsageError for one that could be read as an option of a program."""
    for name, pattern in PARAMS.items():
        if name in params and pattern.fullmatch(params[name]) is None:
            raise UsageError(f"params.{name} = {params[name]!r}: expected a name or number, such as 3")
    return dict(params)
