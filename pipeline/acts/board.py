"""The board of acts: who may ask, approve, cancel and carry out what, in which order. It calls no scheduler itself.

People and policies propose. The executor, a separate process with the credentials, asks for work (`claim`), plans it
against the scheduler, and reports. An act is executed only if the plan that people approved is still the plan. Each
change is one transaction with its history and audit; a refused attempt is an audit row too.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pipeline.acts import breaker, ledger
from pipeline.acts.act import (
    MAX_REASON,
    POLICY,
    VERBS,
    Act,
    Approval,
    Plan,
    When,
    check_params,
    check_targets,
    describe,
)
from pipeline.acts.approval import check_approval, drop_lapsed, has_enough_people
from pipeline.acts.guards import Facts
from pipeline.acts.lease import Lease
from pipeline.config.acts import Acts
from pipeline.incidents.audit import AuditEntry, write_audit
from pipeline.model.errors import NotAllowed, Outdated, Refused, UsageError
from pipeline.model.records import SECOND, Caller
from pipeline.store.database import Database

EXECUTOR = "executor"
T = TypeVar("T")
Job = Literal["plan", "execute", "resume", "verify", "watch"]


@dataclass(frozen=True, slots=True)
class Work:
    """One thing for the executor to do. facts: for a plan; before an act is executed they are collected again."""

    job: Job
    act: Act
    facts: Facts


class Board:
    """All acts of a store. Thread-safe. collect_facts: what the pipeline knows about the targets of an act.

    fleet_nodes: size of the fleet, 0 if unknown.
    notify: notifies all operators of break-glass and of an open breaker.
    """

    def __init__(
        self,
        database: Database,
        config: Acts,
        clock: Callable[[], int],
        collect_facts: Callable[[Act], Facts],
        fleet_nodes: Callable[[], int] = lambda: 0,
        notify: Callable[[str, str], None] = lambda title, text: None,
    ) -> None:
        self.database, self.config, self.clock = database, config, clock
        self._collect_facts, self.fleet_nodes, self._notify = collect_facts, fleet_nodes, notify
        self._lease = Lease()
        self._lock = threading.RLock()  # taken before that of the engine, which `collect_facts` and `notify` may take

    # --- reading ------------------------------------------------------------------------------------

    def list_acts(self, only_open: bool = False, incident: str | None = None) -> list[Act]:
        """Returns acts, newest first."""
        with self._lock:
            return self.read(ledger.load_acts, only_open, incident)

    def find(self, id_: str) -> Act:
        """Returns one act. Raises KeyError."""
        with self._lock:
            return self.read(ledger.load_act, id_)

    @contextlib.contextmanager
    def hold_version(self, id_: str, version: int | None) -> Iterator[None]:
        """Keeps all acts as they are in the body, in which this one has the version; None: any. Raises KeyError,
        Outdated."""
        with self._lock:
            if version is not None and (now := self.find(id_).version) != version:
                raise Outdated(f"act {id_}: is version {now} now, not {version}: it was changed; read it again")
            yield

    def describe(self, id_: str) -> dict[str, Any]:
        """Returns one act with its history, in the form of the API. Raises KeyError."""
        with self._lock:
            act, steps = self.find(id_), self.read(ledger.load_steps, id_)
            return {**self.show(act), "history": [step.as_json() for step in steps]}

    def show(self, act: Act) -> dict[str, Any]:
        """Returns an act in the form of the API, with what it waits for; while it waits for approval with the approvals
        that still hold."""
        now = self.clock()
        shown = self._drop_lapsed(act, now) if act.state == "awaiting_approval" else act
        return {**shown.as_json(), "waits_for": self._lease.find_wait(act, now)}

    def list_modes(self) -> dict[str, str]:
        """Returns the mode of each verb."""
        return {verb: self.config.mode_of(verb) for verb in VERBS}

    def read_breaker(self) -> str:
        """Returns why automation is stopped; "" if it is not."""
        with self._lock:
            return self.read(ledger.read_breaker)

    def read(self, load: Callable[..., T], *arguments: Any) -> T:
        """Returns what a function of the ledger reads."""
        with self.database.lock:
            return load(self.database.connection, *arguments)

    # --- people and policies ------------------------------------------------------------------------

    def propose(
        self,
        verb: str,
        targets: Sequence[str],
        who: Caller,
        reason: str,
        incident: str = "",
        params: Mapping[str, str] | None = None,
        when: When = "now",
        key: str = "",
        is_person: bool = False,
    ) -> Act:
        """Adds an act, which the executor plans next. The same idempotency key returns the same act.

        Raises UsageError on wrong words, Refused if the verb is off, or the key was used for something else.
        """
        if verb not in VERBS:
            raise UsageError(f"verb = {verb!r}: expected one of {', '.join(VERBS)}")
        if not reason.strip():
            raise UsageError("reason: is empty; expected why, for the approver")
        found, mode, now = check_targets(targets), self.config.mode_of(verb), self.clock()
        if mode == "off":
            self.refuse(who, f"propose {verb}", ", ".join(found), f"[acts] {verb} is off")
        made = Act(
            id=f"ACT-{secrets.token_hex(4)}",
            verb=verb,
            targets=found,
            requested_by=str(who),
            reason=reason.strip()[:MAX_REASON],
            created=now,
            updated=now,
            expires=now + round(self.config.proposal_hours * 3600 * SECOND),
            mode=mode,
            incident=incident,
            key=key,
            by_person=is_person,
            subject=who.subject,
            when=when,
            params=check_params(params or {}),
        )
        return self._add(made, who)

    def _add(self, made: Act, who: Caller) -> Act:
        """Stores a new act, or returns that of the same idempotency key."""
        with self._lock:
            known = self.read(ledger.find_by_key, made.key) if made.key else None
            if known is None:
                return self._save(made, who, "propose act", made.reason)
            if _list_wishes(known) != _list_wishes(made):
                self.refuse(who, f"propose {made.verb}", known.id, "this idempotency key was used for another act")
            return known

    def approve(
        self,
        id_: str,
        who: Caller,
        plan: str,
        is_person: bool,
        comment: str = "",
        break_glass: bool = False,
        typed: str = "",
    ) -> Act:
        """Approves the plan with this hash. typed: the node's name, as a person typed it, for hard verbs.

        Raises Refused with the reason: a token, the requester alone, a plan that has changed, an act that has expired.
        """
        with self._lock:
            now = self.clock()
            act = self._drop_lapsed(self.find(id_), now)
            used = self.read(ledger.count_steps, ["break_glass"], now - 3600 * SECOND)
            reason = check_approval(act, who, plan, is_person, now, comment, break_glass, typed)
            if break_glass and used >= self.config.break_glass_per_hour:
                reason = reason or f"break-glass was used {used} times within the hour, which is the maximum"
            if reason:
                self.refuse(who, "approve act", id_, reason)
            given = Approval(str(who), now, plan, comment, break_glass, subject=who.subject)
            changed = replace(act, approvals=(*act.approvals, given))
            if not has_enough_people(changed):
                said = f"approved; one more person must approve: {'; '.join(act.plan.people_why if act.plan else ())}"
                return self._save(changed.change(now), who, "approve act", said)
            approved = changed.move("approved", now, expires=now + self._approved_for(act))
            done = self._save(approved, who, "approve act", comment, break_glass)
            if break_glass:
                said = f"{comment}. Review it tomorrow: act {act.id}."
                self._notify(f"Break-glass: {who} alone approved {describe(act)}", said)
            return done

    def _drop_lapsed(self, act: Act, now: int) -> Act:
        return drop_lapsed(act, now - self._approved_for(act))

    def _approved_for(self, act: Act) -> int:
        """Returns how long an approval holds (us); for one that waits for idle nodes as long as a proposal."""
        minutes = self.config.approval_minutes if act.when == "now" else self.config.proposal_hours * 60
        return round(minutes * 60 * SECOND)

    def cancel(self, id_: str, who: Caller, comment: str) -> Act:
        """Cancels an act that has not begun. Raises Refused if it has: then it is released, not cancelled."""
        with self._lock:
            act = self.find(id_)
            if act.state not in ("proposed", "planned", "awaiting_approval", "approved"):
                self.refuse(who, "cancel act", id_, f"it is {act.state}; a release undoes it")
            return self._save(act.move("cancelled", self.clock()), who, "cancel act", comment)

    def close_breaker(self, who: Caller, is_person: bool, reason: str) -> None:
        """Lets automation act again. Only a person may, with a reason."""
        if not is_person or not reason.strip():
            self.refuse(who, "close breaker", "acts", "only a person closes the breaker, with a reason")
        with self.database.transaction() as connection:
            ledger.close_breaker(connection, who, reason.strip(), self.clock())

    # --- the executor -------------------------------------------------------------------------------

    def claim(self, who: str, instance: str = "", waits: Mapping[str, str] | None = None) -> list[Work]:
        """Returns what the executor has to do now, oldest first. Raises Refused while another one is at work.

        instance: of the process, since two executors may have one name.   waits: what acts wait for, by act.
        """
        with self._lock:
            self._lease.take(who, instance, waits or {}, self.clock())
            self.expire_due()
            acts = self.list_acts(only_open=True)
            leaving = {t for act in acts if _is_releasing(act) for t in act.targets}
            jobs = [(job, act) for act in reversed(acts) if (job := _next_job(act, leaving)) is not None]
            return [Work(job, act, self._collect_facts(act) if job == "plan" else Facts()) for job, act in jobs]

    def collect_facts(self, id_: str) -> Facts:
        """Returns the facts for an act as they are now, for the guards before it is executed."""
        return self._collect_facts(self.find(id_))

    def plan(self, id_: str, plan: Plan, who: str = EXECUTOR) -> Act:
        """Records the plan of an act: refused by a guard without an override, else it waits for approval."""
        with self._lock:
            act, now = self.find(id_), self.clock()
            if act.state not in ("proposed", "planned", "awaiting_approval", "approved"):
                raise Refused(f"act {id_}: is {act.state}; it is no longer planned")
            planned = act.move("planned", now, plan=plan, approvals=()) if act.state != "planned" else act
            planned = replace(planned, plan=plan, approvals=())
            if plan.is_refused:
                why = "; ".join(g.text for g in plan.failing)
                return self._save(planned.move("refused", now, result={"reason": why}), who, "refuse act", why)
            waiting = planned.move("awaiting_approval", now)
            policy = self.read(breaker.find_approving_policy, waiting, self.config.policies, now)
            if policy is not None:
                given = Approval(f"{POLICY}{policy}", now, plan.hash(waiting), "approved by the policy", policy=True)
                expires = now + self._approved_for(waiting)
                done = replace(waiting, approvals=(given,)).move("approved", now, expires=expires)
                return self._save(done, f"{POLICY}{policy}", "approve act", "approved by the policy")
            return self._save(waiting, who, "plan act", "; ".join(plan.commands)[:MAX_REASON])

    def begin(self, id_: str, failing: Sequence[str], who: str, instance: str = "", again: bool = False) -> Act:
        """Records the intent before the first command. failing: guards that fail now, at most those approved.

        again: this process began the act, and asks only whether it may still go on: no row for each of its tries.
        Raises Refused unless the act is approved, its plan unchanged, its approval not expired, and the executor still
        the one that is at work.
        """
        with self._lock:
            act, now = self.find(id_), self.clock()
            self._lease.check(who, instance, now)
            if act.state == "executing" and again:
                return act
            if act.state == "executing":
                return self._save(
                    act.change(now, attempts=act.attempts + 1), who, "resume act", "after an interruption"
                )
            why = self._reason_not_to_begin(act, failing, now)
            if why:
                state: Literal["expired", "refused"] = "expired" if now >= act.expires else "refused"
                if act.state == "approved":
                    self._save(act.move(state, now, result={"reason": why}), who, "refuse act", why)
                raise Refused(f"act {id_}: {why}")
            return self._save(act.move("executing", now, attempts=1, began=now), who, "begin act", "")

    def _reason_not_to_begin(self, act: Act, failing: Sequence[str], now: int) -> str:
        if act.state != "approved" or act.plan is None:
            return f"is {act.state}; it may begin only if it is approved"
        if now >= act.expires:
            return "its approval has expired; plan it again"
        if self.config.mode_of(act.verb) != act.mode:
            return f"[acts] {act.verb} is {self.config.mode_of(act.verb)} now, {act.mode} when it was approved"
        if not has_enough_people(act):
            return "its approvals are not for this plan, or too few"
        new = sorted(set(failing) - {guard.name for guard in act.plan.failing})
        return f"guards that passed when it was approved fail now: {', '.join(new)}" if new else ""

    def report(self, id_: str, state: str, who: str, result: Mapping[str, Any], comment: str = "") -> Act:
        """Records what the executor did or saw: executed, verifying, verified, failed, rolled_back, refused."""
        if state not in ("executed", "verifying", "verified", "failed", "rolled_back", "refused"):
            raise UsageError(
                f"state = {state!r}: expected executed, verifying, verified, failed, rolled_back or refused"
            )
        with self._lock:
            act, now = self.find(id_), self.clock()
            self._lease.keep(who, now)
            if act.state == state:
                return act
            moved = act.move(state, now, result={**act.result, **result})  # type: ignore[arg-type] # one of the above
            if state == "failed":  # what it could not give back stays ours, so that a person can release it
                left = set(result.get("held", ()))
                moved = replace(moved, released=tuple(t for t in act.targets if t not in left))
            if moved.verb == "release" and state == "verified" and moved.mode == "on":
                # first: after a kill in between the release is verified again, and no hold without a mark is left,
                # which would be recorded as undone by a person
                self._end_holds(moved, who, now)
            done = self._save(moved, who, f"{state} act", comment)
            if state in breaker.FAILED:
                self._open_breaker_if_due()
            return done

    def _end_holds(self, release: Act, who: str, now: int) -> None:
        """Ends the holds of released nodes, so that they no longer count as ours."""
        for act in self.list_acts(only_open=True):
            if ended := set(act.held) & set(release.targets):
                released = tuple(sorted({*act.released, *ended}))
                self._save(act.change(now, released=released), who, "end hold", f"released by {release.id}")

    def report_undone(self, id_: str, target: str, seen: str, who: str) -> Act:
        """Records that a held node lost our mark: a person undid the hold, which is a cancel and is never fought, or a
        release that failed on another of its nodes gave this one back."""
        with self._lock:
            act, now = self.find(id_), self.clock()
            if target not in act.held:
                return act
            left = act.change(now, released=tuple(sorted({*act.released, target})))
            if release := self.read(ledger.find_failed_release, target, act.began):
                said = f"{target}: {release}, which failed, or a person gave it back ({seen})"
                return self._save(left, who, "end hold", said)
            said = f"{target}: a person changed it at the scheduler ({seen}); it stays as it is"
            if not left.held and act.state != "failed":
                left = replace(act, released=left.released).move("cancelled", now)
            return self._save(left, who, "hold undone", said)

    # --- limits -------------------------------------------------------------------------------------

    def expire_due(self) -> None:
        """Ends acts whose time is over before they began."""
        now = self.clock()
        for act in self.list_acts(only_open=True):
            if now >= act.expires and act.state in ("proposed", "planned", "awaiting_approval", "approved"):
                self._save(act.move("expired", now), "fleetpulse", "expire act", f"not begun while it was {act.state}")

    def _open_breaker_if_due(self) -> None:
        if reason := self.read(breaker.find_reason, self.clock(), self.fleet_nodes()):
            self.open_breaker(reason)

    def open_breaker(self, reason: str) -> None:
        """Stops automation until a person closes the breaker, and notifies all operators; once."""
        with self._lock:
            if self.read_breaker():
                return
            with self.database.transaction() as connection:
                ledger.open_breaker(connection, reason, self.clock())
            self._notify("Acts by programs are stopped", f"{reason}. People still may act; only a person closes it.")

    def review(self) -> None:
        """Opens the breaker if its condition holds; called after each proposal of a policy."""
        with self._lock:
            self._open_breaker_if_due()

    def refuse(self, who: Caller | str, action: str, target: str, reason: str) -> None:
        """Records a refused attempt, and raises NotAllowed."""
        with self.database.transaction() as connection:
            write_audit(connection, [AuditEntry(who, action, target, reason, "refused")], self.clock())
        raise NotAllowed(f"{action} {target}: {reason}")

    def _save(self, act: Act, who: Caller | str, action: str, comment: str, break_glass: bool = False) -> Act:
        """Stores an act; with its approval also the use of break-glass, so that no kill separates the two.

        Raises Outdated if it changed since it was read.
        """
        with self.database.transaction() as connection:
            found = connection.execute("SELECT version, state FROM acts WHERE id = $1", [act.id]).fetchone()
            if found is not None and int(found[0]) >= act.version:
                raise Outdated(f"act {act.id}: has changed; it is now {found[1]}")
            after = {"state": act.state, "targets": list(act.targets), "verb": act.verb, "mode": act.mode}
            before = None if found is None else {"state": found[1]}
            outcome: Literal["refused", "done"] = "refused" if act.state == "refused" else "done"
            if break_glass:
                ledger.save_break_glass(connection, act.id, who, comment, self.clock())
            entry = AuditEntry(who, action, act.id, comment, outcome, before, after)
            ledger.save_act(connection, act, str(who), comment, [entry], self.clock())
        return act


def _list_wishes(act: Act) -> tuple[Any, ...]:
    """Returns what a repeated request must have in common with the first one of its idempotency key."""
    return act.verb, act.targets, dict(act.params), act.when, act.requested_by


def _is_releasing(act: Act) -> bool:
    """Returns whether a release is at work: until it is verified or failed its nodes are still held."""
    return act.verb == "release" and act.mode == "on" and act.state in ("executing", "executed", "verifying")


def _next_job(act: Act, leaving: set[str]) -> Job | None:
    """Returns what the executor has to do with an act; None while people have to.

    leaving: targets of releases at work. Their holds are not watched: that the mark is gone is no person's undo.
    """
    if act.state == "executed" and act.mode == "dry-run":
        return None
    if act.state in ("verified", "failed") and not leaving.isdisjoint(act.held):
        return None
    jobs: Mapping[str, Job] = {
        "proposed": "plan",
        "approved": "execute",
        "executing": "resume",
        "executed": "verify",
        "verifying": "verify",
        "verified": "watch",
        "failed": "watch",
    }
    return jobs.get(act.state)
