"""What people do: to incidents (acknowledge, assign, comment, resolve, reopen, merge, split, feedback), silences,
mutes, page budgets and calibration.

Each act is one transaction with its row of the audit, its history and its alerts, or nothing of it. `version` is what
the caller has read (If-Match); None: whatever it is now. Raises KeyError (NoSuchIncident) for an unknown id, Outdated
for another version, Refused and UsageError with the reason.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import duckdb

from pipeline.engine.engine import Engine
from pipeline.incidents import calibrations, ledger, wrong_pages
from pipeline.incidents.arrivals import LiveDesk
from pipeline.incidents.audit import AuditEntry, Outcome, describe_incident, write_audit
from pipeline.incidents.cases import NoSuchIncident
from pipeline.incidents.changes import Change, ChangeKind
from pipeline.incidents.matchers import Matcher, parse_matchers
from pipeline.incidents.silences import (
    MAX_SILENCES,
    Kind,
    Silence,
    check_silence,
    check_source,
    collect_labels,
    expire,
    from_mute,
    load_silences,
    make_scope_matchers,
    save_silence,
)
from pipeline.incidents.storms import may_silence
from pipeline.incidents.takeover import take_over
from pipeline.judging.mutes import MAX_MUTES, Mute, check_mute, warn_unknown_scopes
from pipeline.model.errors import Outdated, Refused, UsageError
from pipeline.model.records import SECOND, Event, Incident

T = TypeVar("T")
Calibrated = Literal["pin", "unpin", "rollback"]
Feedback = Literal["useful", "wrong", "known"]
FEEDBACK: Mapping[Feedback, str] = {
    "useful": "the page was right and needed a person",
    "wrong": "the page was wrong: counts against the page budget of its detector",
    "known": "the fault was known: counts neither way",
}
MAX_HOURS = 7 * 24.0
"""Longest acknowledgement (h). Chosen: a week; a longer pause is a silence."""


class People:
    """The acts of people on a running engine. Thread-safe, as the engine is."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def act(self, verb: str, incident: str, user: str, version: int | None, said: Mapping[str, Any]) -> Incident:
        """Does what a person asked for, by name. said: the body of the request, checked by the API."""
        comment = str(said["comment"])
        acts: Mapping[str, Callable[[], Incident]] = {
            "acknowledge": lambda: self.acknowledge(incident, user, comment, version, said.get("hours")),
            "comment": lambda: self.comment(incident, user, comment, version),
            "resolve": lambda: self.resolve(incident, user, comment, version),
            "not a fault": lambda: self.mark_normal(incident, user, comment, version),
            "assign": lambda: self.assign(incident, user, said["to"], comment, version),
            "reopen": lambda: self.reopen(incident, user, comment, version),
            "merge": lambda: self.merge(incident, said["incidents"], user, comment, version),
            "split": lambda: self.split(incident, said["entities"], user, comment, version),
            "feedback": lambda: self.give_feedback(incident, user, said["verdict"], comment, version),
        }
        return acts[verb]()

    def change_silence(
        self, verb: str, kind: str, id_: str, user: str, version: int | None, said: Mapping[str, Any]
    ) -> Silence:
        """Adds, edits or expires a silence or maintenance window. said: the body of the request."""
        if verb == "expire":
            return self.expire_silence(id_, user, version)
        given = said.get("matchers")
        matchers = None if given is None else parse_matchers(given)
        if verb == "edit":
            return self.edit_silence(id_, user, version, matchers, said["starts"], said["ends"], said["reason"])
        if said["ends"] is None:
            raise UsageError("ends: missing; expected an end, or seconds")
        found = make_scope_matchers(said["scopes"]) if matchers is None else matchers
        made: Kind = "silence" if kind == "silence" else "maintenance"
        return self.add_silence(made, found, said["starts"], said["ends"], said["reason"], user)

    # --- incidents ----------------------------------------------------------------------------------

    def acknowledge(
        self, incident: str, user: str, comment: str, version: int | None = None, hours: float | None = None
    ) -> Incident:
        """Acknowledges an incident until it expires, by default after [incidents] acknowledge_hours for a page.

        hours: other than the default; 0: it never expires. Acknowledging a storm acknowledges what it represents,
        except for what another person works on.
        """
        if hours is not None and not 0 <= hours <= MAX_HOURS:
            raise UsageError(f"hours = {hours:g}: expected 0 (never expires) to {MAX_HOURS:g}")
        life, now = self.engine.life, self.engine.clock()

        def make(shown: Incident, desk: LiveDesk, judged: Collection[str]) -> Change:
            default = life.acknowledged_until(shown, now)
            until = default if hours is None else now + int(hours * 3600 * SECOND) if hours else None
            set_ = {"acknowledged_by": str(user), "acknowledged_until": until}
            if shown.id in judged:
                return replace(desk.acknowledge(shown.id, user, comment, now), life=set_)
            return life.note(shown.id, "acknowledged", user, comment, now, **set_)

        def change(desk: LiveDesk) -> list[Change]:
            shown = self._require_open(incident, "acknowledged")
            judged = {i.id for i in desk.incidents.values() if i.resolved is None}  # once: it copies all of them
            pages = (one for one in life.list_pages(shown.id) if one.life.acknowledged_by in ("", str(user)))
            return [make(one, desk, judged) for one in (shown, *pages)]

        return self._change(incident, "acknowledge", user, comment, version, change)

    def comment(self, incident: str, user: str, comment: str, version: int | None = None) -> Incident:
        """Adds a comment, also to an incident that was resolved long ago."""
        return self._note(incident, "commented", "comment", user, comment, version)

    def assign(self, incident: str, user: str, to: str, comment: str, version: int | None = None) -> Incident:
        """Assigns an incident to a person; an empty `to` removes the assignee."""
        text = f"to {to}" if to else "to no one"
        said = f"{text}: {comment}" if comment else text
        return self._note(incident, "assigned", "assign", user, said, version, assignee=to)

    def give_feedback(
        self, incident: str, user: str, verdict: Feedback, comment: str, version: int | None = None
    ) -> Incident:
        """Records whether the incident was useful, a wrong page, or known; a wrong page counts in the page budget."""
        now = self.engine.clock()

        def count(connection: duckdb.DuckDBPyConnection, made: Sequence[Change]) -> None:
            wrong_pages.remove_wrong_page(connection, incident)
            if verdict == "wrong":
                wrong_pages.add_wrong_page(connection, made[0].incident, now, "marked as a wrong page")

        said = f"{verdict}: {comment}" if comment else verdict
        found = self._note(incident, "feedback", "feedback", user, said, version, count, feedback=verdict)
        self.engine.review_budget()
        return found

    def resolve(self, incident: str, user: str, comment: str, version: int | None = None) -> Incident:
        """Resolves an incident; its cause and detectors are muted up to their level until they clear once."""

        def change(desk: LiveDesk) -> list[Change]:
            now, shown = self.engine.clock(), self.engine.life.shown.get(incident)
            known = desk.incidents.get(incident)
            if shown is not None and shown.resolved is None and (known is None or known.resolved is not None):
                return [self.engine.life.end(incident, user, comment, now)]
            return [desk.resolve(incident, user, comment, now)]

        return self._change(incident, "resolve", user, comment, version, change)

    def mark_normal(self, incident: str, user: str, comment: str, version: int | None = None) -> Incident:
        """Resolves an incident as a false alarm: its detectors take the present values as normal and learn again.

        The verdict is an event, so that a restart evaluates it too.
        """
        engine = self.engine
        with engine.lock:
            now, time = engine.clock(), max(engine.clock(), engine.framer.closed)
            said = {"verdict": "not_a_fault", "incident": incident, "user": str(user), "comment": comment}
            blamed = engine.desk.list_conditions(incident)
            events = [Event(time, entity, "feedback", {**said, "detector": name}) for name, entity in blamed]
            found = self._change(
                incident,
                "not a fault",
                user,
                comment,
                version,
                lambda desk: [replace(desk.resolve(incident, user, comment, now), life={"feedback": "wrong"})],
                lambda connection, made: wrong_pages.add_wrong_page(
                    connection, made[0].incident, now, "marked as not a fault"
                ),
                events,
            )
            engine.review_budget()
        return found

    def reopen(self, incident: str, user: str, comment: str, version: int | None = None) -> Incident:
        """Reopens a resolved incident, also one of long ago; only a person resolves it then."""

        def change(desk: LiveDesk) -> list[Change]:
            stored = self._read(ledger.load_incident, incident)
            if stored is not None and incident not in desk.incidents and stored.resolved is not None:
                desk.adopt(self._read(ledger.load_case, stored))
            return [desk.reopen(incident, user, comment, self.engine.clock())]

        return self._change(incident, "reopen", user, comment, version, change)

    def merge(
        self, incident: str, others: Sequence[str], user: str, comment: str, version: int | None = None
    ) -> Incident:
        """Merges open incidents into one, which keeps its id and cause."""
        if not [other for other in others if other != incident]:
            raise UsageError("incidents: expected at least one other incident")
        now = self.engine.clock()

        def change(desk: LiveDesk) -> list[Change]:
            kept, *known = (self._require_open(one, "merged") for one in (incident, *others))
            made = desk.merge(incident, others, user, comment, now)
            known = [one for one in known if one.id != incident]
            return [*made, *take_over(kept, made[0].incident, known, desk.acknowledge, user, now)]

        self._change(incident, "merge", user, f"{', '.join(others)}: {comment}", version, change)
        return self.engine.life.shown[incident]

    def split(
        self, incident: str, entities: Sequence[str], user: str, comment: str, version: int | None = None
    ) -> Incident:
        """Moves some members of an incident into one of their own, and returns that."""
        now, made = self.engine.clock(), list[Change]()

        def change(desk: LiveDesk) -> list[Change]:
            self._require_open(incident, "split")
            made.extend(desk.split(incident, entities, user, comment, now))
            return made

        self._change(incident, "split", user, f"{', '.join(entities)}: {comment}", version, change)
        return self.engine.life.shown[made[1].incident.id]

    def _note(
        self,
        incident: str,
        kind: ChangeKind,
        action: str,
        user: str,
        comment: str,
        version: int | None,
        also: Callable[[duckdb.DuckDBPyConnection, Sequence[Change]], object] = lambda connection, made: None,
        **life: object,
    ) -> Incident:
        """Changes the life of an incident that may be resolved."""
        book, now = self.engine.life, self.engine.clock()

        def change(desk: LiveDesk) -> list[Change]:
            self._find(incident)
            return [book.note(incident, kind, user, comment, now, **life)]

        return self._change(incident, action, user, comment, version, change, also)

    def _change(
        self,
        incident: str,
        action: str,
        user: str,
        comment: str,
        version: int | None,
        change: Callable[[LiveDesk], list[Change]],
        also: Callable[[duckdb.DuckDBPyConnection, Sequence[Change]], object] = lambda connection, made: None,
        events: Sequence[Event] = (),
    ) -> Incident:
        """Applies a change of one incident with its audit."""
        engine = self.engine
        with engine.lock:
            if version is not None:
                self._check_version(f"incident {incident}", version, self.read_version(incident))
            before = engine.life.shown.get(incident)

            def write(connection: duckdb.DuckDBPyConnection, made: Sequence[Change]) -> None:
                also(connection, made)
                facts = None if before is None else describe_incident(before)
                entry = AuditEntry(user, action, incident, comment, "done", facts, describe_incident(made[0].incident))
                write_audit(connection, [entry], engine.clock())

            return engine.apply(change, events, also=write)[0].incident

    def read_version(self, incident: str) -> int:
        """Returns the version of an incident: the number of rows of its history."""
        return self._read(ledger.count_history, incident)

    def _check_version(self, what: str, given: int, now: int) -> None:
        if given != now:
            raise Outdated(f"{what}: is version {now} now, not {given}: it was changed; read it again")

    def _find(self, incident: str) -> Incident:
        """Returns an incident as people see it, also one of long ago. Raises NoSuchIncident."""
        shown = self.engine.life.shown
        if incident not in shown:
            stored = self._read(ledger.load_incident, incident)
            if stored is None:
                raise NoSuchIncident(f"incident {incident}: no such incident")
            shown[incident] = stored
        return shown[incident]

    def _read(self, load: Callable[[duckdb.DuckDBPyConnection, Any], T], what: Any) -> T:
        """Returns what a function of the ledger reads of committed rows, over a separate connection."""
        with contextlib.closing(self.engine.database.cursor()) as cursor:
            return load(cursor, what)

    def _require_open(self, incident: str, verb: str) -> Incident:
        found = self._find(incident)
        if found.resolved is not None:
            raise Refused(f"incident {incident}: already resolved, cannot be {verb}; write a comment instead")
        return found

    # --- silences and maintenance -------------------------------------------------------------------

    def add_silence(
        self,
        kind: Kind,
        matchers: Sequence[Matcher],
        starts: int | None,
        ends: int,
        reason: str,
        user: str,
        source: str = "api",
        id_: str = "",
    ) -> Silence:
        """Adds a silence or a maintenance window. id_: of an outside window, so that it is added once."""
        engine, now = self.engine, self.engine.clock()
        about = (reason.strip(), now, now, str(user))
        made = Silence(id_ or uuid.uuid4().hex[:12], kind, tuple(matchers), starts or now, ends, str(user), *about)
        check_silence(made, now)
        with engine.lock:
            if sum(s.state(now) != "expired" for s in engine.life.silences) >= MAX_SILENCES:
                raise UsageError(f"silences: {MAX_SILENCES} have not ended, which is the maximum; end some of them")
            return self._save_silence(replace(made, source=source), "add", user, None)

    def edit_silence(
        self,
        id_: str,
        user: str,
        version: int | None = None,
        matchers: Sequence[Matcher] | None = None,
        starts: int | None = None,
        ends: int | None = None,
        reason: str | None = None,
        by_source: bool = False,
    ) -> Silence:
        """Changes or extends a silence; a field that is None stays.

        by_source: as what the window follows has changed; one that has ended begins again.
        """
        with self.engine.lock:
            now, before = self.engine.clock(), self._find_silence(id_, version)
            if not by_source and (before.expired is not None or before.ends <= now):
                raise UsageError(f"{before.kind} {id_}: has ended; add a new one")
            made = replace(
                before,
                matchers=before.matchers if matchers is None else tuple(matchers),
                starts=before.starts if starts is None else starts,
                ends=before.ends if ends is None else ends,
                reason=before.reason if reason is None else reason.strip(),
                updated=now,
                updated_by=str(user),
                version=before.version + 1,
                expired=None,
                expired_by=None,
            )
            if not by_source:
                check_source(before, made)
            return self._save_silence(check_silence(made, now), "edit", user, before)

    def expire_silence(self, id_: str, user: str, version: int | None = None) -> Silence:
        """Ends a silence now; a maintenance window after its grace."""
        with self.engine.lock:
            before = self._find_silence(id_, version)
            return self._save_silence(expire(before, str(user), self.engine.clock()), "expire", user, before)

    def preview_silence(self, matchers: Sequence[Matcher]) -> list[Incident]:
        """Returns the open incidents that matchers match now, newest first."""
        engine = self.engine
        with engine.lock:
            shown = sorted(
                (i for i in engine.life.shown.values() if i.resolved is None), key=lambda i: (-i.opened, i.id)
            )
            labels = ((i, collect_labels(i, engine.topology, engine.life.site)) for i in shown)
            found = [incident for incident, own in labels if all(m.matches(own) for m in matchers)]
            return [incident for incident in found if may_silence(matchers, incident)]

    def list_silences(self, kind: Kind | None = None) -> list[Silence]:
        """Returns the silences of a kind or all of them, newest first."""
        with self.engine.database.lock:
            return [s for s in load_silences(self.engine.database.connection) if kind in (None, s.kind)]

    def _find_silence(self, id_: str, version: int | None) -> Silence:
        found = next((s for s in self.list_silences() if s.id == id_ and s.kind != "mute"), None)
        if found is None:
            raise KeyError(f"silence {id_}: no such silence")
        if version is not None:
            self._check_version(f"{found.kind} {id_}", version, found.version)
        return found

    def _save_silence(self, made: Silence, verb: str, user: str, before: Silence | None) -> Silence:
        """Stores a silence with its audit, and applies it to the open incidents."""
        engine, now = self.engine, self.engine.clock()
        facts = None if before is None else before.as_facts(now)
        entry = AuditEntry(user, f"{verb} {made.kind}", made.id, made.reason, "done", facts, made.as_facts(now))
        with engine.database.transaction() as connection:
            save_silence(connection, made)
            write_audit(connection, [entry], now)
        engine.life.silences = [*(s for s in engine.life.silences if s.id != made.id), made]
        engine.life.due = 0
        engine.advance_life()
        return made

    # --- mutes, budgets, calibration ----------------------------------------------------------------

    def mute(self, detector: str, scope: str, seconds: float, reason: str, user: str) -> Mute:
        """Mutes a detector in a scope from now on. Raises UsageError on invalid arguments."""
        engine = self.engine
        check_mute(detector, scope, seconds, reason, engine.judge.names)
        with engine.lock:
            now = engine.clock()
            engine.finding_filter.drop_expired(engine.progress.judged)
            if len(engine.finding_filter.mutes) >= MAX_MUTES:
                raise UsageError(f"mutes: {MAX_MUTES} are active, which is the maximum; end some of them")
            id_, until = uuid.uuid4().hex[:12], now + int(seconds * SECOND)
            mute = Mute(id_, detector, scope, now, until, reason.strip(), str(user))
            with engine.database.transaction() as connection:
                ledger.add_mute(connection, mute)
                entry = AuditEntry(user, "add mute", id_, mute.reason, after=mute.as_json())
                write_audit(connection, [entry], now)
            engine.finding_filter.mutes.append(mute)
        return mute

    def describe_unknown_scopes(self, scopes: Sequence[str]) -> str:
        """Returns a warning about unknown entities of a mute or maintenance window; "" if all are known."""
        return warn_unknown_scopes(scopes, self.engine.topology, self.engine.devices.has_device, self.engine.life.site)

    def unmute(self, id_: str, user: str, version: int | None = None) -> Mute:
        """Ends a mute now. Raises KeyError if there is no active mute of that id."""
        engine = self.engine
        with engine.lock:
            mutes = engine.finding_filter.mutes
            found = next((m for m in mutes if m.id == id_ and m.ended is None), None)
            if found is None:
                raise KeyError(id_)
            if version is not None:
                self._check_version(f"mute {id_}", version, found.version)
            over = replace(found, ended=min(engine.clock(), found.until), ended_by=str(user))
            with engine.database.transaction() as connection:
                save_silence(connection, from_mute(over))
                entry = AuditEntry(user, "expire mute", id_, "", "done", found.as_json(), over.as_json())
                write_audit(connection, [entry], engine.clock())
            mutes[mutes.index(found)] = over
        return over

    def reset_budget(self, detector: str, user: str = "") -> list[dict[str, Any]]:
        """Forgets the wrong pages of a detector until now; returns the budgets. Raises UsageError if it is unknown."""
        engine = self.engine
        if detector not in engine.judge.names:
            known = ", ".join(engine.judge.names)
            raise UsageError(f"detector = {detector!r}: no such detector; expected one of {known}")
        with engine.lock:
            budget, now = engine.finding_filter.budget, engine.clock()
            budget.resets[detector] = now
            with engine.database.transaction() as connection:
                ledger.save_snapshot(connection, "page_budget", now, budget.snapshot())
                write_audit(connection, [AuditEntry(user, "reset budget", detector)], now)
            engine.review_budget()
        return engine.list_budgets()

    def change_calibration(
        self, action: Calibrated, version: int | None, user: str, expected: int | None = None
    ) -> list[dict[str, Any]]:
        """Pins a version, or the one in force now; unpins; or returns to a version. Returns the versions.

        The decision is an event, so that a restart and a replay apply it too. Raises KeyError without that version.
        expected: the newest version that the caller has read.
        """
        engine = self.engine
        with engine.lock:
            if expected is not None:
                known = self._read(lambda cursor, _: calibrations.list_calibrations(cursor), None)
                self._check_version("calibration", expected, known[0]["version"] if known else 0)
            time = max(engine.clock(), engine.framer.closed)
            with engine.database.transaction() as connection:
                if action == "pin" and version is None:
                    document = json.dumps(engine.judge.calibration())
                    version = calibrations.add_calibration(connection, time, "learned", str(user), None, document)
                found = None if version is None else calibrations.load_calibration(connection, version)
                calibrations.add_calibration(connection, time, action, str(user), version, None)
                versions = calibrations.list_calibrations(connection)
            data = {"action": action, "version": version, "user": str(user), "calibration": found}
            entry = AuditEntry(user, f"{action} calibration", str(version or ""))
            engine.apply(lambda _: [], [Event(time, "site:all", "calibration", data)], audit=[entry])
        return versions

    def record_audit(self, user: str, action: str, target: str, reason: str, outcome: Outcome, id_: str = "") -> None:
        """Adds a row to the audit about something that changed no incident, such as an attempt that was refused."""
        entry = AuditEntry(user, action, target, reason, outcome, id=id_)
        with self.engine.database.transaction() as connection:
            write_audit(connection, [entry], self.engine.clock())
