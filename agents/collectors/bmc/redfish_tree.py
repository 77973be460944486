"""The resources of one BMC that are read: parses documents to rows and keeps the links between them, to drop what
disappears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.collectors.bmc.redfish_document import (
    MAX_PATH,
    PREFIX,
    EntityRow,
    ParseFaults,
    RedfishDocument,
    ResourceLink,
    ResourceScope,
    resource_path,
)
from agents.collectors.bmc.redfish_resources import RESOURCES, matches_kind, member_scope
from agents.collectors.bmc.redfish_schedule import PollSchedule, PollTarget
from agents.collectors.bmc.redfish_settings import BmcSettings

MAX_TARGETS = 4096
"""Most resources of one BMC. Chosen: a floor PDU with 1000 outlets has some 1100."""
MAX_MEMBERS = 1024
"""Most members of a collection in one response. Chosen likewise."""
MAX_PAGES = 32
"""Most further pages of a collection. Chosen: BMCs return 50 members per page, or more."""
_INLINE = {"@odata.id", "@odata.type", "@odata.etag", "@odata.context"}
"""A member with only these keys is a link."""


@dataclass
class ResourceTree:
    """Resources of a BMC. `on_removed` is called with each entity that no longer exists."""

    bmc: BmcSettings
    schedule: PollSchedule
    faults: ParseFaults
    on_removed: Callable[[str], None] = lambda entity: None
    targets: dict[str, PollTarget] = field(default_factory=dict)
    event_stream_path: str = ""
    """Path of the stream of server-sent events; empty if there is none."""
    _sources: dict[str, str] = field(default_factory=dict)
    _owner: dict[str, str] = field(default_factory=dict)
    _expand: str = ""

    def start(self) -> None:
        """Starts with the service root."""
        self._add_target("", ResourceLink("root", PREFIX, ResourceScope(self.bmc.name, (), self.bmc.parents)))

    def parse(self, target: PollTarget, body: Mapping[str, Any]) -> list[tuple[PollTarget, EntityRow]] | None:
        """Returns the rows of a document and of the documents in it, and schedules its links. None: not the expected
        kind.
        """
        document = RedfishDocument(body, target.path, self.faults)
        if not matches_kind(document, target.kind):
            return None
        rows: list[tuple[PollTarget, EntityRow]] = []
        if RESOURCES[target.kind].member:
            named = self._parse_collection(target, document, rows)
        else:
            named = self._parse_resource(target, document, rows)
        for path in target.children - named:
            self.remove(path)
        target.children = named
        return rows

    def _parse_resource(
        self, target: PollTarget, document: RedfishDocument, rows: list[tuple[PollTarget, EntityRow]]
    ) -> set[str]:
        if target.kind in ("root", "event_service"):
            self._read_service(target.kind, document)
        found = RESOURCES[target.kind].parse(document, target.scope)
        if target.kind == "leak_detection" and found.rows:
            target.kind, target.interval = "leak_groups", self.bmc.leaks
        if target.is_fast and not target.entities:
            self._remember_sensors(target.path, document)
        own: dict[str, EntityRow] = {}
        device = self._device_path(target)
        for row in found.rows:
            if row.entity in own or self._owner.setdefault(row.entity, device) != device:
                self.faults.add(f"{target.path}: {row.entity} twice; expected a unique Id")
            else:
                own[row.entity] = row
        for entity in target.entities - own.keys():
            self._remove_entity(target, entity)
        target.entities = set(own)
        rows += [(target, row) for row in own.values()]
        return {path for link in found.links if (path := self._add_target(target.path, link)) is not None}

    def _device_path(self, target: PollTarget) -> str:
        """Returns the path of the resource that represents the device.

        Metrics belong to the device that they describe.
        """
        above = self.targets.get(target.parent)
        while above is not None and (above.scope.ids, above.scope.parents) == (target.scope.ids, target.scope.parents):
            target, above = above, self.targets.get(above.parent)
        return target.path

    def _parse_collection(
        self, target: PollTarget, document: RedfishDocument, rows: list[tuple[PollTarget, EntityRow]]
    ) -> set[str]:
        """Parses members, which are links, or complete documents if the service expands them, requested or not."""
        kind, named, inline = RESOURCES[target.kind].member, set[str](), 0
        for number, member in enumerate(document.children("Members")):
            path = member.path("@odata.id")
            if number >= MAX_MEMBERS or path is None or path in named:
                self.faults.add(f"{target.path}: Members[{number}]: exceeds the limit, has no path, or is a duplicate")
                continue
            whole = not member.body.keys() <= _INLINE
            if (
                self._add_target(
                    target.path, ResourceLink(kind, path, member_scope(kind, target.scope, path)), read=False
                )
                is None
            ):
                continue
            named.add(path)
            if whole:
                inline += 1
                rows += self.parse(self.targets[path], member.body) or []
        self._update_coverage(target, named, inline == len(named))
        return named | self._add_next_page(target, document)

    def _update_coverage(self, target: PollTarget, named: set[str], whole: bool) -> None:
        """Sets whether a collection includes all its members.

        Then it is read at their interval, and they are not read.
        """
        target.covers_members = bool(named) and whole
        if not whole:
            target.expand = ""  # it supports $expand, but does not expand
        target.interval = getattr(self.bmc, target.interval_key)
        for path in named:
            if target.covers_members:
                self.schedule.unschedule(path)
            elif not self.schedule.is_scheduled(path):
                self.schedule.schedule(self.targets[path])

    def _add_next_page(self, target: PollTarget, document: RedfishDocument) -> set[str]:
        link = document.body.get("Members@odata.nextLink")
        if link is None:
            return set()
        sound = isinstance(link, str) and link.startswith(f"{PREFIX}/") and len(link) <= MAX_PATH
        if not sound or not link.isascii() or not link.isprintable() or " " in link or target.page >= MAX_PAGES:
            self.faults.add(f"{target.path}: its next page is not a path of the service, or exceeds the limit")
            return set()
        path = self._add_target(target.path, ResourceLink(target.kind, link, target.scope), page=target.page + 1)
        return set() if path is None else {path}

    def _read_service(self, kind: str, document: RedfishDocument) -> None:
        """Reads the features of the service."""
        if kind == "event_service":
            on = document.body.get("ServiceEnabled") is not False
            self.event_stream_path = (document.path("ServerSentEventUri") or "") if on else ""
            return
        query = document.child("ProtocolFeaturesSupported").child("ExpandQuery")
        able = next((sign for key, sign in (("NoLinks", "."), ("ExpandAll", "*")) if query.body.get(key) is True), "")
        levels = "($levels=1)" if query.body.get("Levels") is True else ""
        self._expand = f"?$expand={able}{levels}" if able else ""

    def _add_target(self, parent: str, link: ResourceLink, read: bool = True, page: int = 0) -> str | None:
        """Returns the path of a link's target; None if it is not read, leads back, or belongs to another resource."""
        resource, known = RESOURCES[link.part], self.targets.get(link.path)
        if resource.subject and resource.subject not in self.bmc.read:
            return None
        if known is not None:
            return link.path if known.parent == parent else None
        if len(self.targets) >= MAX_TARGETS:
            self.faults.add(f"{parent}: more than {MAX_TARGETS} resources")
            return None
        target = PollTarget(link.path, link.part, link.place, getattr(self.bmc, resource.interval), parent, page=page)
        if resource.member and page == 0:
            target.expand = self._expand
        self.targets[link.path] = target
        if read:
            self.schedule.schedule(target)
        return link.path

    def remove(self, path: str) -> None:
        """Removes a resource that is no longer linked, with everything below it."""
        target = self.targets.pop(path, None)
        if target is None:
            return
        self.schedule.unschedule(path)
        for entity in list(target.entities):
            self._remove_entity(target, entity)
        for child in target.children:
            self.remove(child)

    def _remove_entity(self, target: PollTarget, entity: str) -> None:
        target.entities.discard(entity)
        if not any(entity in other.entities for other in self.targets.values()):
            self._owner.pop(entity, None)
            self.on_removed(entity)

    def _remember_sensors(self, path: str, document: RedfishDocument) -> None:
        """Remembers which Sensors a fast resource contains, since events refer to them."""
        for key, value in document.body.items():
            source = value.get("DataSourceUri") if isinstance(value, Mapping) else None
            if isinstance(source, str) and len(self._sources) < MAX_TARGETS:
                self._sources[resource_path(source) or key] = path

    def target_for_event(self, path: str) -> PollTarget | None:
        """Returns the target that an event refers to, directly or by one of its sensors."""
        return self.targets.get(path) or self.targets.get(self._sources.get(path, ""))

    def target_to_read(self, path: str) -> PollTarget | None:
        """Returns the target to read for `path`: itself, or the collection that includes it."""
        target = self.targets.get(path)
        parent = self.targets.get(target.parent) if target is not None else None
        return parent if parent is not None and parent.covers_members else target
