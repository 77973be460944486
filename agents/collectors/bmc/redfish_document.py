"""Redfish documents and what parsers return. A missing value is None; a value of a wrong type is None and a fault.

A value is a plain number or an excerpt of a Sensor, `{"Reading": 21.5, "DataSourceUri": ...}` (DSP0266, excerpts). A
parser returns rows of values with attributes of their entities, and links to further resources.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from pipeline.model.signals.signal import HEALTH, HEALTHY

PREFIX = "/redfish/v1"
"""Path prefix of all resources of a service (DSP0266, 6.3)."""
MAX_PATH = 512
"""Longest path of a resource. Chosen: the longest of DMTF's mock-ups has 120 characters."""
MAX_TEXT = 256
"""Longest text that is kept of a document."""
MAX_EACH = 256
"""Most entries of an array in a document. Chosen: far above the number of phases, rails and groups."""
_HEALTH = {"OK": "ok", "Warning": "warning", "Critical": "critical"}
_STATES = {
    # Resource.State; other states are not a problem
    "Absent": "absent",
    "UnavailableOffline": "unavailable",
    "Disabled": "disabled",
    "StandbyOffline": "standby",
    "StandbySpare": "standby",
}


@dataclass
class ParseFaults:
    """Parts of responses that could not be read: their number, and the last one as text."""

    count: int = 0
    last: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, text: str) -> None:
        """Adds one. Called by both threads of a BMC."""
        with self._lock:
            self.count += 1
            self.last = text[:MAX_TEXT]


@dataclass
class RedfishDocument:
    """One JSON object. `where` identifies it in faults."""

    body: Mapping[str, Any]
    where: str = ""
    faults: ParseFaults = field(default_factory=ParseFaults)

    def number(self, key: str, factor: float = 1.0, reading: str = "Reading") -> float | None:
        """Returns a plain number, or the `reading` of an excerpt, times `factor`."""
        found = self.body.get(key)
        if isinstance(found, Mapping):
            found = found.get(reading)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            self.add_fault(key, found, "a number")
            return None
        try:
            value = float(found) * factor
        except OverflowError:  # an integer too large for a float
            value = math.inf
        if not math.isfinite(value):
            self.add_fault(key, found, "a finite number")
            return None
        return value

    def ratio(self, key: str) -> float | None:
        """Returns a percentage as a ratio."""
        return self.number(key, 0.01)

    def pressure(self, key: str) -> float | None:
        """Returns kilopascals as bar."""
        return self.number(key, 0.01)

    def energy(self, key: str) -> float | None:
        """Returns kilowatt-hours as whole joules."""
        found = self.number(key, 3.6e6)
        return None if found is None or found < 0 else float(round(found))

    def text(self, key: str) -> str | None:
        """Returns a short text; None if it is empty."""
        found = self.body.get(key)
        if found is None or isinstance(found, str):
            return found[:MAX_TEXT].strip() or None if found else None
        self.add_fault(key, found, "text")
        return None

    def enum_value(self, key: str, words: Mapping[str, int]) -> int | None:
        """Returns the number of a word. An unknown word is a fault, since it may be a new kind of problem."""
        found = self.body.get(key)
        if found is None:
            return None
        if isinstance(found, str) and found in words:
            return words[found]
        self.add_fault(key, found, f"one of {', '.join(words)}")
        return None

    def child(self, key: str) -> RedfishDocument:
        """Returns an object inside this one; an empty one if it is missing."""
        found = self.body.get(key)
        if found is not None and not isinstance(found, Mapping):
            self.add_fault(key, found, "an object")
        return RedfishDocument(found if isinstance(found, Mapping) else {}, f"{self.where} {key}", self.faults)

    def children(self, key: str) -> Iterator[RedfishDocument]:
        """Yields the objects of an array. Entries of another type are faults."""
        found = self.body.get(key)
        if found is not None and not isinstance(found, list):
            self.add_fault(key, found, "a list")
        for number, entry in enumerate(found[:MAX_EACH] if isinstance(found, list) else ()):
            if isinstance(entry, Mapping):
                yield RedfishDocument(entry, f"{self.where} {key}[{number}]", self.faults)
            elif entry is not None:
                self.add_fault(f"{key}[{number}]", entry, "an object")

    def numbers(self, key: str) -> list[float | None]:
        """Returns the readings of an array of plain numbers or excerpts, in order."""
        found = self.body.get(key)
        if found is not None and not isinstance(found, list):
            self.add_fault(key, found, "a list")
        entries = found[:MAX_EACH] if isinstance(found, list) else []
        return [RedfishDocument({key: entry}, self.where, self.faults).number(key) for entry in entries]

    def link(self, key: str) -> str | None:
        """Returns the path of a resource that `key` refers to; None if it belongs to another service."""
        found = self.body.get(key)
        if found is None:
            return None
        return self.child(key).path("@odata.id") if isinstance(found, Mapping) else self.path(key)

    def path(self, key: str) -> str | None:
        """Returns a path of this service. Anything else is a fault."""
        found = self.body.get(key)
        if found is None:
            return None
        if isinstance(found, str) and (path := resource_path(found)):
            return path
        self.add_fault(key, found, f"a path below {PREFIX}")
        return None

    @property
    def is_absent(self) -> bool:
        """Whether the BMC reports that the device itself is absent."""
        status = self.body.get("Status")
        return isinstance(status, Mapping) and status.get("State") == "Absent"

    def health(self, key: str = "Status") -> int | None:
        """Returns the number in HEALTH: absent first, then Status.Health if it is bad, then Status.State."""
        status = self.child(key)
        health, state = status.text("Health"), status.text("State")
        word = _HEALTH.get(health or "")
        if state == "Absent" or word in (None, "ok"):
            word = _STATES.get(state or "", word or ("ok" if state == "Enabled" else None))
        return None if word is None else HEALTH.index(word)

    def add_fault(self, key: str, found: object, wanted: str) -> None:
        """Adds a fault of a value."""
        self.faults.add(f"{self.where}: {key} is {str(found)[:40]!r}; expected {wanted}")


def resource_path(text: str) -> str | None:
    """Returns `text` as the path of a resource of this service, without a trailing slash; None if it is not one."""
    plain = text.isascii() and text.isprintable() and " " not in text and len(text) <= MAX_PATH
    inside = text == PREFIX or text.startswith(PREFIX + "/")
    if not plain or not inside or "#" in text or "?" in text or ".." in text.split("/"):
        return None
    return text.rstrip("/")


def last_segment(path: str) -> str:
    """Returns the last segment of a path, which is the Id of a member (DSP0266, Id), as part of an entity's name."""
    return name_part(unquote(path.rstrip("/").rpartition("/")[2]))


def name_part(text: str) -> str:
    """Returns `text` as part of an entity's name."""
    return "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in text[:MAX_TEXT]) or "-"


RowValues = Mapping[str, float | None]
_ATTRIBUTES = {
    # property -> attribute
    "Name": "name",
    "Manufacturer": "manufacturer",
    "Model": "model",
    "PartNumber": "part",
    "SerialNumber": "serial",
    "FirmwareVersion": "firmware",
}


@dataclass(frozen=True, slots=True)
class ResourceScope:
    """Names and parents of a resource's entities: its BMC, the Ids in entity names, and what the entities are part of.

    side: of a coolant connector, `primary`, `secondary` or empty.
    """

    bmc: str
    ids: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()
    side: str = ""

    def entity_name(self, kind: str, *more: str) -> str:
        """Returns the name of an entity of this kind."""
        return f"{kind}:{'.'.join((self.bmc, *self.ids, *more))}"

    def within(self, parent: str, *more: str) -> ResourceScope:
        """Returns the scope of the parts of `parent`."""
        return replace(self, ids=(*self.ids, *more), parents=(parent, *self.parents))

    def extend(self, *more: str, side: str = "") -> ResourceScope:
        """Returns the same scope with longer names."""
        return replace(self, ids=(*self.ids, *more), side=side or self.side)


@dataclass(frozen=True, slots=True)
class EntityRow:
    """Values of one entity. None or no entry: not reported. parents and attributes go to the inventory."""

    entity: str
    device_class: str
    values: RowValues
    parents: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResourceLink:
    """A further resource. `part` is its key in RESOURCES."""

    part: str
    path: str
    place: ResourceScope


@dataclass(frozen=True, slots=True)
class ParsedResource:
    """The result of parsing one document."""

    rows: tuple[EntityRow, ...] = ()
    links: tuple[ResourceLink, ...] = ()


def common_attributes(document: RedfishDocument, **more: Any) -> dict[str, Any]:
    """Returns attributes of a device for the inventory, with `more` where not None."""
    found: dict[str, Any] = {name: document.text(key) for key, name in _ATTRIBUTES.items()}
    return {key: value for key, value in (found | more).items() if value is not None}


def resource_links(document: RedfishDocument, place: ResourceScope, **parts: str) -> tuple[ResourceLink, ...]:
    """Returns links of a document by property: `Pumps="pumps"`."""
    found = ((part, document.link(key)) for key, part in parts.items())
    return tuple(ResourceLink(part, path, place) for part, path in found if path is not None)


def worst_redundancy(document: RedfishDocument, key: str) -> int | None:
    """Returns the worst health in a list of groups (RedundantGroup), or of the only group."""
    body = document.body.get(key)
    groups = list(document.children(key)) if isinstance(body, list) else [document.child(key)]
    found = [health for group in groups if (health := group.health()) is not None]
    return max(found, key=lambda health: health if HEALTH[health] not in HEALTHY else -1, default=None)
