"""The site of an alert world: a real store, the real life of incidents, a real notifier, and an injected clock.

Only the detectors are left out: what they find is an act of the world. Each change is written as the engine writes it:
history, incidents and messages in one transaction.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config.sections import Incidents
from pipeline.incidents import ledger
from pipeline.incidents.changes import QUIET_END, Change
from pipeline.incidents.desk import ACTOR
from pipeline.incidents.life import KEPT, LifeBook
from pipeline.incidents.matchers import parse_matchers
from pipeline.incidents.silences import Silence, expire, load_silences, save_silence
from pipeline.incidents.storms import STORM, decode_pages, encode_pages
from pipeline.model.records import SECOND, Incident
from pipeline.model.topology import Topology
from pipeline.notify.alertmanager import locate_entity
from pipeline.notify.outbox import Notifier
from pipeline.store.database import Database
from tests.pipeline.alert_settings import Setting

START = 1_790_000_000 * SECOND
KEY = "0123456789abcdef0123456789ABCDEF"
PARENTS = {
    **{f"gpu:n{n}.{g}": (f"node:n{n}",) for n in range(9) for g in range(2)},
    **{f"node:n{n}": (f"rack:r{n // 3}",) for n in range(9)},
    **{f"cdu:c{r}": (f"rack:r{r}",) for r in range(3)},
}
_BUSY = "SELECT receiver FROM outbox WHERE state IN ('pending', 'held') UNION SELECT receiver FROM notify_groups"
Killed = type("Killed", (BaseException,), {"__doc__": "As kill -9: nothing after it runs, and memory is lost."})


class FragileStore:
    """The store as the notifier sees it; `left` transactions later the process is killed. before: not committed."""

    def __init__(self, database: Database) -> None:
        self.cursor, self._database = database.cursor, database
        self.left, self.before = -1, False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        self.left -= 1
        if self.left == 0 and self.before:
            raise Killed
        with self._database.transaction() as connection:
            yield connection
        if self.left == 0:
            raise Killed


class WorldSite:
    """A running pipeline. on_change: called after each commit.   desk: incidents as detectors' findings make them."""

    def __init__(self, folder: Path, empty: Path, urls: Mapping[str, str], setting: Setting, storm_pages: int) -> None:
        self.folder, self.urls, self.setting, self.now = folder, urls, setting, START
        self.key = folder / "key"
        self.key.write_text(KEY)
        self.key.chmod(0o600)
        shutil.copy(empty, folder / "store.duckdb")
        self.topology = Topology(PARENTS)
        self.rules = Incidents(storm_pages=storm_pages)
        self.desk: dict[str, Incident] = {}
        self.silences: list[str] = []
        self.on_change: Callable[[Sequence[Change]], None] = lambda made: None
        self.database: Database | None = None
        self.start()

    # --- the process ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts from the files on disk, as the service does after kill -9."""
        if self.database is not None:
            self.database.close()
        self.database = Database(self.folder / "store.duckdb")
        self.store = FragileStore(self.database)
        notify, locate = self.setting.build(self.urls, self.key), functools.partial(locate_entity, self.topology)
        self.notifier = Notifier(
            *(self.store, notify, "here", lambda: self.now),
            timeout_s=5.0,
            monotonic=lambda: self.now / SECOND,
            locate=locate,
        )
        self.life = LifeBook(self.rules, self.topology, "here", find_inhibited=self.notifier.find_inhibited)
        self.life.list_receivers = self.notifier.list_receivers_of
        connection = self.database.connection
        self.life.silences = load_silences(connection, self.now)
        self.life.load(ledger.load_lives(connection, self.now - KEPT))
        if (pages := ledger.load_snapshot(connection, "life")) is not None:
            self.life.pages = decode_pages(pages[1])
        self.notifier._clean_outbox()  # as `run` does first
        self.cleaned, self._idle = self.now, set[str]()  # receivers that had a round since the start

    def pass_time(self, seconds: float) -> None:
        """Moves the clock, and makes the changes that are due by it."""
        self.now += int(seconds * SECOND)
        if self.now >= self.life.due:
            before = self.life.copy_state()
            self._write(self.life.advance(self.now), before)
        if self.now - self.cleaned >= 3600 * SECOND:
            self.notifier._clean_outbox()  # as `run` does every hour
            self.cleaned = self.now

    def send_round(self) -> None:
        """One round of each receiver's thread; a round in which nothing could be sent costs a world most of its time,
        so it is left out."""
        assert self.database is not None
        busy = {name for (name,) in self.database.connection.execute(_BUSY).fetchall()}
        for name in self.notifier.receivers:
            self.notifier.send_watchdog(name)
            fails = self.notifier.health[name].failures
            if name not in busy and name in self._idle and not fails:
                continue
            (self._idle.discard if fails else self._idle.add)(name)
            for _ in range(50):
                if not self.notifier.send_due(name):
                    break

    def _write(self, made: Sequence[Change], before: Any) -> None:
        """Writes changes as the engine does, or none of them."""
        assert self.database is not None
        try:
            with self.database.transaction() as connection:
                ledger.write_changes(connection, [], made, self.notifier.make_payloads(made, self.now), self.now)
                ledger.save_snapshot(connection, "life", self.now, encode_pages(self.life.pages))
        except BaseException:
            self.life.restore_state(before)
            raise
        self.on_change(made)

    def publish(self, *changes: Change) -> None:
        """Applies changes of detectors or people."""
        before = self.life.copy_state()
        self._write(self.life.publish(changes, self.now), before)
        self.desk.update({c.incident.id: c.incident for c in changes if c.kind != "acknowledged"})

    # --- incidents ------------------------------------------------------------------------------------

    def find(self, cause: str) -> Incident | None:
        """Returns the newest incident of a cause as the Desk has it."""
        return next((i for i in reversed(self.desk.values()) if i.cause == cause or i.entity == cause), None)

    def list_open(self) -> list[Incident]:
        return [i for i in self.desk.values() if self.is_open(i.id)]

    def is_open(self, id_: str) -> bool:
        return id_ in self.life.shown and self.life.shown[id_].resolved is None

    def open(self, *causes: str, severity: Any, detector: str) -> None:
        """Detectors find something new."""
        changes = []
        for cause in causes:
            known = self.find(cause)
            if known is not None and self.is_open(known.id):
                continue
            id_ = f"inc-{cause.replace(':', '-')}-{sum(i.entity == cause for i in self.desk.values())}"
            about = (severity, f"{cause}: {detector}", detector, cause, (cause,))
            made = Incident(id_, cause, self.now, self.now, *about, updated=self.now)
            changes.append(Change("opened", made, self.now, ACTOR))
        if changes:
            self.publish(*changes)

    def change(self, kind: Any, cause: str, /, actor: str = ACTOR, comment: str = "", **more: Any) -> None:
        """An open incident changes. more: fields of the incident."""
        known = self.find(cause)
        if known is None or not self.is_open(known.id):
            return
        if known.resolved is not None and actor == ACTOR:  # its findings ended; it is only shown as open
            return
        now = replace(known, updated=self.now, **more)
        self.publish(Change(kind, now, self.now, actor, comment, (), known))

    def end(self, cause: str, by_person: bool) -> None:
        actor, comment = ("ann", "done") if by_person else (ACTOR, QUIET_END)
        self.change("resolved", cause, actor, comment, resolved=self.now, state="resolved")

    def reopen(self, cause: str, by_person: bool) -> None:
        known = self.find(cause)
        is_known = known is not None and known.id in self.life.shown
        if known is None or not is_known or (self.is_open(known.id) and known.resolved is None):
            return
        now = replace(known, resolved=None, state="open", updated=self.now)
        self.publish(Change("reopened", now, self.now, "ann" if by_person else ACTOR, "it returned", (), known))

    def acknowledge(self, cause: str, hours: float | None = None) -> None:
        """A person takes an incident; of a storm also those that it represents."""
        if cause != STORM:
            found = self.find(cause)
            takes = [found.id] if found is not None and self.is_open(found.id) else []
        else:
            storms = [i for i in self.life.shown.values() if i.detector == STORM and i.resolved is None]
            takes = [id_ for i in storms for id_ in (i.id, *i.life.represents) if self.is_open(id_)]
        changes = []
        for id_ in takes:
            shown = self.life.shown[id_]
            default = 2.0 if shown.severity == "page" else 0.0
            length = default if hours is None else hours
            until = self.now + int(length * 3600 * SECOND) if length else None
            before = self.desk.get(id_, shown)
            before = shown if before.resolved is not None else before
            set_ = {"acknowledged_by": "ann", "acknowledged_until": until}
            changes.append(Change("acknowledged", before, self.now, "ann", "mine", (), before, life=set_))
        if changes:
            self.publish(*changes)

    def merge(self, cause: str, other: str) -> None:
        """A person makes one incident part of another; the worse severity stays."""
        kept, left = self.find(cause), self.find(other)
        if kept is None or left is None or kept.id == left.id or not (self.is_open(kept.id) and self.is_open(left.id)):
            return
        severity: Any = "page" if "page" in (kept.severity, left.severity) else "ticket"
        whole = replace(kept, members=(*kept.members, *left.members), severity=severity, updated=self.now)
        gone = replace(left, resolved=self.now, state="resolved", updated=self.now)
        said = f"merged into {kept.id}"
        self.publish(
            Change("merged", whole, self.now, "ann", "one fault", (), kept),
            Change("resolved", gone, self.now, "ann", said, (), left, folded_into=kept.id),
        )

    def blame(self, cause: str) -> None:
        """The suspected cause moves from a device to its node or rack, or back: the labels change."""
        known = self.find(cause)
        if known is not None and self.is_open(known.id):
            above = PARENTS.get(known.entity, ("site:here",))[0]
            now = above if known.cause == known.entity else known.entity
            self.change("cause_changed", cause, comment=f"from {known.cause} to {now}", cause=now)

    # --- silences -------------------------------------------------------------------------------------

    def add_silence(self, text: str, seconds: float) -> None:
        id_ = f"s{len(self.silences)}"
        times = (self.now, self.now + int(seconds * SECOND), "ann", "work", self.now, self.now, "ann")
        self.silences.append(id_)
        self._save_silence(Silence(id_, "silence", parse_matchers([text]), *times))

    def expire_silence(self) -> None:
        """A person ends the oldest silence that holds."""
        active = [s for s in self.life.silences if s.state(self.now) == "active" and s.expired is None]
        if active:
            self._save_silence(expire(active[0], "ann", self.now))

    def _save_silence(self, made: Silence) -> None:
        assert self.database is not None
        with self.database.transaction() as connection:
            save_silence(connection, made)
        self.life.silences = [*(s for s in self.life.silences if s.id != made.id), made]
        self.life.due = 0
        self.pass_time(0)
