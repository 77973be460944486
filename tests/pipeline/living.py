"""A site whose incidents live by an injected clock: an engine on a real store and outbox, without telemetry."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config.receivers import InhibitRule, Notify, Webhook
from pipeline.config.sections import Incidents
from pipeline.engine.engine import Engine
from pipeline.engine.people import People
from pipeline.incidents import ledger
from pipeline.incidents.storms import STORM
from pipeline.model.records import SECOND, Finding, Incident
from pipeline.model.topology import Topology
from pipeline.notify.alertmanager import locate_entity
from pipeline.notify.outbox import Notifier
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from tests.pipeline.test_engine import HotForThree

NOON = 1_790_000_000 * SECOND
MINUTE = 60 * SECOND
HOUR = 3600 * SECOND
PARENTS = {
    **{f"gpu:n{n}.{g}": (f"node:n{n}",) for n in range(8) for g in range(4)},
    **{f"node:n{n}": (f"rack:r{n // 4}",) for n in range(8)},
    "rank:1.0": ("job:1", "gpu:n0.0"),
}


class LivingSite:
    """The engine, what people do (`people`), and the clock. `active`: findings that detectors report at each step."""

    def __init__(
        self,
        path: Path,
        rules: Incidents | None = None,
        receivers: tuple[str, ...] = ("on-call", "boss"),
        inhibit_rules: tuple[InhibitRule, ...] = (),
        **notify: Any,
    ):
        self.path, self.rules, self.now = path, rules or Incidents(), NOON
        self.active: dict[tuple[str, str], Finding] = {}
        self.silent: set[str] = set()
        self.topology = Topology(PARENTS)
        self.webhooks = tuple(Webhook(name, "http://127.0.0.1:1/") for name in receivers)
        self.notify = Notify(webhooks=self.webhooks, inhibit_rules=inhibit_rules)
        self.notify = replace(self.notify, **notify)
        self.start()

    def start(self):
        self.database = Database(self.path)
        locate = functools.partial(locate_entity, self.topology)
        self.notifier = Notifier(self.database, self.notify, "local", lambda: self.now, locate=locate)
        devices, clock, step = Devices(self.database.connection), lambda: self.now, 10 * SECOND
        self.engine = Engine(
            self.database,
            devices,
            self.topology,
            HotForThree(),
            self.notifier.make_payloads,
            clock,
            step,
            rules=self.rules,
        )
        self.engine.life.find_inhibited = self.notifier.find_inhibited
        self.engine.life.list_receivers = self.notifier.list_receivers_of
        self.people = People(self.engine)

    def restart(self):
        """Starts again from the files on disk, as after kill -9: nothing of the process is kept."""
        self.database.close()
        self.start()

    def report(self, *entities: str, level="page", detector="hot", onset=None) -> str:
        """Detectors report entities from now on; returns the incident of the first."""
        for entity in entities:
            made = Finding(self.now, onset or self.now, entity, detector, level, 1.0, f"{entity}: {detector}")
            self.active[detector, entity] = made
        self.step()
        return self.incident_of(entities[0])

    def incident_of(self, entity: str) -> str:
        known = [i for i in self.shown().values() if entity in i.members and i.resolved is None and i.detector != STORM]
        return known[-1].id if known else ""

    def clear(self, *entities: str):
        self.active = {key: f for key, f in self.active.items() if key[1] not in entities}

    def step(self):
        found = [replace(f, time=self.now) for f in self.active.values()]
        present = lambda entity: entity not in self.silent  # noqa: E731
        now = self.now
        self.engine.apply(lambda desk: desk.observe(now, now + 1, found, present, now), (), found)
        self.engine.advance_life()

    def wait(self, minutes: float):
        """Lets time pass, in steps of a minute, longer ones for long times."""
        end, step = self.now + int(minutes * MINUTE), max(MINUTE, int(minutes * MINUTE / 20))
        while self.now < end:
            self.now = min(end, self.now + step)
            self.step()

    def shown(self) -> dict[str, Incident]:
        return self.engine.life.shown

    def stored(self, id_: str) -> Incident:
        found = ledger.load_incident(self.database.connection, id_)
        assert found is not None
        return found

    def state(self, id_: str) -> str:
        return self.stored(id_).state

    def kinds(self, id_: str) -> list[str]:
        """The kinds of the history of an incident, in order."""
        rows = self.database.connection.execute("SELECT kind FROM history WHERE incident = ? ORDER BY number", [id_])
        return [kind for (kind,) in rows.fetchall()]

    def comments(self, id_: str) -> list[str]:
        rows = self.database.connection.execute("SELECT comment FROM history WHERE incident = ? ORDER BY number", [id_])
        return [comment for (comment,) in rows.fetchall()]

    def alerts(self, receiver="on-call") -> list[tuple[str, str]]:
        """(incident, firing or resolved) of each alert for a receiver, in order."""
        rows = self.database.connection.execute(
            "SELECT incident, kind FROM outbox WHERE receiver = ? ORDER BY created, rowid", [receiver]
        )
        return [(incident, kind) for incident, kind in rows.fetchall()]

    def bodies(self, receiver="on-call") -> list[dict]:
        rows = self.database.connection.execute(
            "SELECT payload FROM outbox WHERE receiver = ? ORDER BY created, rowid", [receiver]
        )
        return [json.loads(text) for (text,) in rows.fetchall()]
