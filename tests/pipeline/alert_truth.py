"""What is true of the incidents of an alert world, and since when: the measure of what receivers hold."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.incidents.changes import Change
from pipeline.model.records import SECOND, Incident
from pipeline.model.topology import Topology
from pipeline.notify.alertmanager import locate_entity, make_labels
from tests.pipeline.alert_receivers import freeze
from tests.pipeline.alert_settings import Setting

NEVER = 1 << 60
HOLDS = ("resolved", "silenced", "storm", "inhibitor")
"""Facts that keep an incident from being sent."""


class Since(NamedTuple):
    """step: number of the event of the world.   time: UTC us."""

    step: int
    time: int


class Facts(NamedTuple):
    """What is true of an incident. storm, inhibitor: what holds it back; empty: nothing."""

    resolved: bool
    silenced: bool
    owned: bool
    storm: str
    inhibitor: str
    labels: tuple[tuple[str, str], ...]

    @property
    def pages(self) -> bool:
        """Whether receivers are to show it."""
        return not (self.resolved or self.silenced or self.owned or self.storm or self.inhibitor)


class Truth:
    """The facts of each incident, with the event since which each of them holds without a break."""

    def __init__(self, topology: Topology, setting: Setting) -> None:
        self.setting, self.step, self.now = setting, 0, 0
        self.facts: dict[str, Facts] = {}
        self.changed: dict[str, int] = {}  # incident -> step of its newest row of the history, or fact
        self.configured = 0  # step of the newest configuration
        self.kinds: dict[str, list[tuple[int, str]]] = {}  # incident -> (step, kind of its history)
        self.since: dict[tuple[str, str], Since] = {}
        self._free: dict[tuple[str, str], int] = {}  # incident, fact -> step until which it was open without the fact
        self._locate = functools.partial(locate_entity, topology)

    def label(self, incident: Incident) -> dict[str, str]:
        return make_labels(incident, "here", self._locate(incident.entity))

    def update(self, shown: Iterable[Incident], made: Sequence[Change] = ()) -> None:
        """Takes over the incidents as they are committed now."""
        incidents = {i.id: i for i in shown}
        firing = {i.id: self.label(i) for i in incidents.values() if i.resolved is None}
        for change in made:
            if change.kind != "retitled":
                self.kinds.setdefault(change.incident.id, []).append((self.step, change.kind))
                self.changed[change.incident.id] = self.step
        for one in incidents.values():
            is_open = one.resolved is None
            facts = Facts(
                resolved=not is_open,
                silenced=is_open and bool(one.life.silenced_by),
                owned=is_open and bool(one.life.acknowledged_by),
                storm="".join(one.life.inhibited_by[:1]) if is_open else "",
                inhibitor=self.setting.find_inhibitor(one.id, firing) if is_open else "",
                labels=freeze(self.label(one)),
            )
            self._note(one.id, facts)

    def _note(self, id_: str, facts: Facts) -> None:
        known = self.facts.get(id_)
        now = Since(self.step, self.now)
        for name in (*Facts._fields, "pages", "open"):
            value = not facts.resolved if name == "open" else getattr(facts, name)
            old = None if known is None else not known.resolved if name == "open" else getattr(known, name)
            is_same = bool(old) == bool(value) if name in ("storm", "inhibitor") else old == value
            if known is None or not is_same:
                self.since[id_, name] = now
                self.changed[id_] = self.step
        for name in HOLDS:
            was_free = known is not None and not known.resolved and not getattr(known, name)
            if not facts.resolved and not getattr(facts, name):
                self._free[id_, name] = NEVER
            elif was_free:
                self._free[id_, name] = self.step
        self.facts[id_] = facts

    def free_until(self, id_: str, name: str) -> int:
        """Returns the step until which an incident was open without a fact of HOLDS; NEVER if it still is, -1 if it
        never was."""
        return self._free.get((id_, name), -1)

    def held_since(self, id_: str, name: str) -> int:
        """Returns the step since which a fact is true; NEVER if it is not."""
        facts = self.facts.get(id_)
        if facts is None:
            return NEVER
        value: Any = not facts.resolved if name == "open" else getattr(facts, name)
        return self.since[id_, name].step if value else NEVER

    def age_s(self, id_: str, name: str) -> float:
        """Returns for how long a fact has had its value (s)."""
        return (self.now - self.since[id_, name].time) / SECOND

    def describe(self, id_: str) -> str:
        """Returns the facts of an incident in one line."""
        facts = self.facts.get(id_)
        if facts is None:
            return "unknown"
        labels: Mapping[str, str] = dict(facts.labels)
        said = ["resolved" if facts.resolved else "open", labels["severity"], labels["cause"]]
        said += ["silenced"] * facts.silenced + ["acknowledged"] * facts.owned
        said += [f"in storm {facts.storm}"] * bool(facts.storm)
        said += [f"inhibited by {facts.inhibitor}"] * bool(facts.inhibitor)
        return " ".join(said)
