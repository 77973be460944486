"""Acts on machines as the API answers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.json_values import require_list
from pipeline.model.records import from_iso


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard of a plan."""

    name: str
    now: str
    limit: str
    passed: bool
    overridable: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done. hash: what an approval names.   people: how many must stand behind it, and why two."""

    hash: str
    commands: tuple[str, ...]
    guards: tuple[Guard, ...]
    jobs: tuple[tuple[str, int, int, str], ...]
    before: Mapping[str, str]
    people: int
    people_why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Act:
    """One act. approvals: (who, comment).   history: (time, state, actor, comment), oldest first.

    open: whether it may still do something.   in_force: whether it keeps nodes out of service: those of `held`.
    waits_for: what it waits for that no person has to do, "" if nothing.
    by_person: a person requested it, no program.   version: rises with each change.
    """

    id: str
    text: str
    verb: str
    state: str
    mode: str
    targets: tuple[str, ...]
    requested_by: str
    reason: str
    incident: str
    created: int
    expires: int
    open: bool
    in_force: bool
    held: tuple[str, ...]
    plan: Plan | None
    approvals: tuple[tuple[str, str], ...]
    outcome: str
    waits_for: str = ""
    by_person: bool = False
    version: int = 0
    history: tuple[tuple[int, str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ActList:
    """All acts, newest first; why policies are stopped, "" if they are not; the mode of each verb."""

    acts: tuple[Act, ...]
    breaker: str
    modes: Mapping[str, str]


def parse_acts(table: Mapping[str, Any]) -> ActList:
    """Parses GET /api/v1/acts."""
    acts = tuple(map(parse_act, require_list(table["acts"])))
    return ActList(acts, str(table.get("breaker") or ""), {str(k): str(v) for k, v in table["modes"].items()})


def parse_act(table: Mapping[str, Any]) -> Act:
    """Parses one act."""
    return Act(
        id=str(table["id"]),
        text=str(table["text"]),
        verb=str(table["verb"]),
        state=str(table["state"]),
        mode=str(table["mode"]),
        targets=tuple(map(str, require_list(table["targets"]))),
        requested_by=str(table["requested_by"]),
        reason=str(table["reason"]),
        incident=str(table.get("incident") or ""),
        created=from_iso(table["created"]),
        expires=from_iso(table["expires"]),
        open=bool(table["open"]),
        in_force=bool(table["in_force"]),
        held=tuple(map(str, require_list(table["held"]))),
        plan=None if table.get("plan") is None else _plan(table["plan"]),
        approvals=tuple((str(a["who"]), str(a["comment"])) for a in require_list(table["approvals"])),
        outcome=str((table.get("result") or {}).get("reason", "")),
        waits_for=str(table.get("waits_for") or ""),
        by_person=bool(table["by_person"]),
        version=int(table["version"]),
        history=tuple(
            (from_iso(s["time"]), str(s["state"]), str(s["actor"]), str(s["comment"]))
            for s in require_list(table.get("history") or [])
        ),
    )


def _plan(table: Mapping[str, Any]) -> Plan:
    return Plan(
        hash=str(table["hash"]),
        commands=tuple(map(str, require_list(table["commands"]))),
        guards=tuple(
            Guard(str(g["name"]), str(g["now"]), str(g["limit"]), bool(g["passed"]), bool(g["overridable"]))
            for g in require_list(table["guards"])
        ),
        jobs=tuple(
            (str(j["job"]), int(j["nodes"]), int(j["gpus"]), str(j["account"])) for j in require_list(table["jobs"])
        ),
        before={str(k): str(v) for k, v in table["before"].items()},
        people=int(table["people"]),
        people_why=tuple(map(str, require_list(table["people_why"]))),
    )
