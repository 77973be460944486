"""The resources of one BMC that are read: documents -> rows, and who named whom, so that what goes is followed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.collectors.bmc.redfish_document import MAX_PATH, PREFIX, Document, Faults, Link, Place, Row, path_of
from agents.collectors.bmc.redfish_resources import RESOURCES, fits, member_place
from agents.collectors.bmc.redfish_schedule import Schedule, Target
from agents.collectors.bmc.redfish_settings import Bmc

MAX_TARGETS = 4096
"""Most resources of one BMC; chosen: a floor PDU with 1000 outlets has some 1100."""
MAX_MEMBERS = 1024
"""Most members of a collection in one answer; chosen likewise."""
MAX_PAGES = 32
"""Most further pages of a collection; chosen: BMCs give 50 members a page, and more."""
_INLINE = {"@odata.id", "@odata.type", "@odata.etag", "@odata.context"}
"""A member with no more than these is a link."""


@dataclass
class Tree:
    """What is read of a BMC. `gone` is called with each entity that is no longer there."""

    bmc: Bmc
    schedule: Schedule
    faults: Faults
    gone: Callable[[str], None] = lambda entity: None
    targets: dict[str, Target] = field(default_factory=dict)
    events: str = ""
    """Path of the stream of server-sent events; empty where there is none."""
    _sources: dict[str, str] = field(default_factory=dict)
    _owner: dict[str, str] = field(default_factory=dict)
    _expand: str = ""

    def plant(self) -> None:
        """Begins with the service root."""
        self._add("", Link("root", PREFIX, Place(self.bmc.name, (), self.bmc.parents)))

    def take(self, target: Target, body: Mapping[str, Any]) -> list[tuple[Target, Row]] | None:
        """The rows of a document and of those in it; what it leads to is scheduled. None: it is not what was wanted."""
        document = Document(body, target.path, self.faults)
        if not fits(document, target.kind):
            return None
        rows: list[tuple[Target, Row]] = []
        if RESOURCES[target.kind].member:
            named = self._members(target, document, rows)
        else:
            named = self._one(target, document, rows)
        for path in target.children - named:
            self.drop(path)
        target.children = named
        return rows

    def _one(self, target: Target, document: Document, rows: list[tuple[Target, Row]]) -> set[str]:
        if target.kind in ("root", "event_service"):
            self._service(target.kind, document)
        found = RESOURCES[target.kind].read(document, target.place)
        if target.kind == "leak_detection" and found.rows:
            target.kind, target.every = "leak_groups", self.bmc.leaks
        if target.fast and not target.entities:
            self._sensors(target.path, document)
        own: dict[str, Row] = {}
        device = self._device(target)
        for row in found.rows:
            if row.entity in own or self._owner.setdefault(row.entity, device) != device:
                self.faults.add(f"{target.path}: {row.entity} twice; wanted an Id for each")
            else:
                own[row.entity] = row
        for entity in target.entities - own.keys():
            self._leave(target, entity)
        target.entities = set(own)
        rows += [(target, row) for row in own.values()]
        return {path for link in found.links if (path := self._add(target.path, link)) is not None}

    def _device(self, target: Target) -> str:
        """Path of the resource that stands for the device: metrics are told of under the name of what they are of."""
        above = self.targets.get(target.parent)
        while above is not None and (above.place.ids, above.place.parents) == (target.place.ids, target.place.parents):
            target, above = above, self.targets.get(above.parent)
        return target.path

    def _members(self, target: Target, document: Document, rows: list[tuple[Target, Row]]) -> set[str]:
        """Members are links, or documents of their own where the service expands them, asked or not."""
        kind, named, inline = RESOURCES[target.kind].member, set[str](), 0
        for number, member in enumerate(document.each("Members")):
            path = member.path("@odata.id")
            if number >= MAX_MEMBERS or path is None or path in named:
                self.faults.add(f"{target.path}: Members[{number}]: one too many, without a path, or twice the same")
                continue
            whole = not member.body.keys() <= _INLINE
            if self._add(target.path, Link(kind, path, member_place(kind, target.place, path)), read=False) is None:
                continue
            named.add(path)
            if whole:
                inline += 1
                rows += self.take(self.targets[path], member.body) or []
        self._cover(target, named, inline == len(named))
        return named | self._page(target, document)

    def _cover(self, target: Target, named: set[str], whole: bool) -> None:
        """A collection that brings all its members along is read as often as they would be, and they are not."""
        target.covers = bool(named) and whole
        if not whole:
            target.expand = ""  # it promised to expand, and does not
        target.every = getattr(self.bmc, target.pace)
        for path in named:
            if target.covers:
                self.schedule.drop(path)
            elif not self.schedule.waits(path):
                self.schedule.put(self.targets[path])

    def _page(self, target: Target, document: Document) -> set[str]:
        link = document.body.get("Members@odata.nextLink")
        if link is None:
            return set()
        sound = isinstance(link, str) and link.startswith(f"{PREFIX}/") and len(link) <= MAX_PATH
        if not sound or not link.isascii() or not link.isprintable() or " " in link or target.page >= MAX_PAGES:
            self.faults.add(f"{target.path}: its next page is no path of the service, or one too many")
            return set()
        path = self._add(target.path, Link(target.kind, link, target.place), page=target.page + 1)
        return set() if path is None else {path}

    def _service(self, kind: str, document: Document) -> None:
        """What the service can do."""
        if kind == "event_service":
            on = document.body.get("ServiceEnabled") is not False
            self.events = (document.path("ServerSentEventUri") or "") if on else ""
            return
        query = document.inner("ProtocolFeaturesSupported").inner("ExpandQuery")
        able = next((sign for key, sign in (("NoLinks", "."), ("ExpandAll", "*")) if query.body.get(key) is True), "")
        levels = "($levels=1)" if query.body.get("Levels") is True else ""
        self._expand = f"?$expand={able}{levels}" if able else ""

    def _add(self, parent: str, link: Link, read: bool = True, page: int = 0) -> str | None:
        """Makes a target of a link; None where it is not read, leads back, or belongs to somebody else."""
        resource, known = RESOURCES[link.part], self.targets.get(link.path)
        if resource.subject and resource.subject not in self.bmc.read:
            return None
        if known is not None:
            return link.path if known.parent == parent else None
        if len(self.targets) >= MAX_TARGETS:
            self.faults.add(f"{parent}: more than {MAX_TARGETS} resources")
            return None
        target = Target(link.path, link.part, link.place, getattr(self.bmc, resource.pace), parent, page=page)
        if resource.member and page == 0:
            target.expand = self._expand
        self.targets[link.path] = target
        if read:
            self.schedule.put(target)
        return link.path

    def drop(self, path: str) -> None:
        """A resource is no longer named: with it goes all that it led to."""
        target = self.targets.pop(path, None)
        if target is None:
            return
        self.schedule.drop(path)
        for entity in list(target.entities):
            self._leave(target, entity)
        for child in target.children:
            self.drop(child)

    def _leave(self, target: Target, entity: str) -> None:
        target.entities.discard(entity)
        if not any(entity in other.entities for other in self.targets.values()):
            self._owner.pop(entity, None)
            self.gone(entity)

    def _sensors(self, path: str, document: Document) -> None:
        """Remembers which Sensors a fast resource shows, since events name those."""
        for key, value in document.body.items():
            source = value.get("DataSourceUri") if isinstance(value, Mapping) else None
            if isinstance(source, str) and len(self._sources) < MAX_TARGETS:
                self._sources[path_of(source) or key] = path

    def about(self, path: str) -> Target | None:
        """The target that an event is about, which may name one of its sensors."""
        return self.targets.get(path) or self.targets.get(self._sources.get(path, ""))

    def bringer(self, path: str) -> Target | None:
        """The target to ask for what is at `path`: itself, or the collection that brings it along."""
        target = self.targets.get(path)
        parent = self.targets.get(target.parent) if target is not None else None
        return parent if parent is not None and parent.covers else target
