"""A Redfish document as its parsers see it: what is missing is None, what is of a wrong type is None and a fault.

A value is a plain number or an excerpt of a Sensor, `{"Reading": 21.5, "DataSourceUri": ...}` (DSP0266, excerpts).

What a parser gives: rows of values with what is known of their entities, and links to further resources.
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
"""Below this all resources of a service lie (DSP0266, 6.3)."""
MAX_PATH = 512
"""Longest path of a resource that is followed; chosen: the longest of DMTF's mock-ups has 120 characters."""
MAX_TEXT = 256
"""Longest text that is kept of a document."""
MAX_EACH = 256
"""Most entries of an array inside a document; chosen: far above the phases, rails and groups that there are."""
_HEALTH = {"OK": "ok", "Warning": "warning", "Critical": "critical"}
_STATES = {
    # Resource.State; what is not here says nothing bad
    "Absent": "absent",
    "UnavailableOffline": "unavailable",
    "Disabled": "disabled",
    "StandbyOffline": "standby",
    "StandbySpare": "standby",
}


@dataclass
class Faults:
    """Parts of answers that could not be read: how many, and the newest in words."""

    count: int = 0
    newest: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, text: str) -> None:
        """One more; both threads of a BMC do so."""
        with self._lock:
            self.count += 1
            self.newest = text[:MAX_TEXT]


@dataclass
class Document:
    """One JSON object. `where` says in faults which one it is."""

    body: Mapping[str, Any]
    where: str = ""
    faults: Faults = field(default_factory=Faults)

    def number(self, key: str, factor: float = 1.0, reading: str = "Reading") -> float | None:
        """A plain number, or the `reading` of an excerpt, times `factor`."""
        found = self.body.get(key)
        if isinstance(found, Mapping):
            found = found.get(reading)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            self.fault(key, found, "a number")
            return None
        try:
            value = float(found) * factor
        except OverflowError:  # an integer beyond all floats
            value = math.inf
        if not math.isfinite(value):
            self.fault(key, found, "a finite number")
            return None
        return value

    def share(self, key: str) -> float | None:
        """A percentage as a share of 1."""
        return self.number(key, 0.01)

    def pressure(self, key: str) -> float | None:
        """Kilopascal as bar."""
        return self.number(key, 0.01)

    def energy(self, key: str) -> float | None:
        """Kilowatt-hours as whole joules."""
        found = self.number(key, 3.6e6)
        return None if found is None or found < 0 else float(round(found))

    def text(self, key: str) -> str | None:
        """A short text; None if it is empty."""
        found = self.body.get(key)
        if found is None or isinstance(found, str):
            return found[:MAX_TEXT].strip() or None if found else None
        self.fault(key, found, "text")
        return None

    def one_of(self, key: str, words: Mapping[str, int]) -> int | None:
        """The number of a word; a word that is not known is a fault, since it may be a new kind of trouble."""
        found = self.body.get(key)
        if found is None:
            return None
        if isinstance(found, str) and found in words:
            return words[found]
        self.fault(key, found, f"one of {', '.join(words)}")
        return None

    def inner(self, key: str) -> Document:
        """An object inside this one; an empty one where it is missing."""
        found = self.body.get(key)
        if found is not None and not isinstance(found, Mapping):
            self.fault(key, found, "an object")
        return Document(found if isinstance(found, Mapping) else {}, f"{self.where} {key}", self.faults)

    def each(self, key: str) -> Iterator[Document]:
        """The objects of an array; entries of another type are faults."""
        found = self.body.get(key)
        if found is not None and not isinstance(found, list):
            self.fault(key, found, "a list")
        for number, entry in enumerate(found[:MAX_EACH] if isinstance(found, list) else ()):
            if isinstance(entry, Mapping):
                yield Document(entry, f"{self.where} {key}[{number}]", self.faults)
            elif entry is not None:
                self.fault(f"{key}[{number}]", entry, "an object")

    def values(self, key: str) -> list[float | None]:
        """Readings of an array of plain numbers or excerpts, in its order."""
        found = self.body.get(key)
        if found is not None and not isinstance(found, list):
            self.fault(key, found, "a list")
        entries = found[:MAX_EACH] if isinstance(found, list) else []
        return [Document({key: entry}, self.where, self.faults).number(key) for entry in entries]

    def link(self, key: str) -> str | None:
        """Path of a resource that this one names under `key`; None for one of another service."""
        found = self.body.get(key)
        if found is None:
            return None
        return self.inner(key).path("@odata.id") if isinstance(found, Mapping) else self.path(key)

    def path(self, key: str) -> str | None:
        """A path of this service; anything else is a fault."""
        found = self.body.get(key)
        if found is None:
            return None
        if isinstance(found, str) and (path := path_of(found)):
            return path
        self.fault(key, found, f"a path below {PREFIX}")
        return None

    @property
    def absent(self) -> bool:
        """Whether the BMC says that the thing itself is not there."""
        status = self.body.get("Status")
        return isinstance(status, Mapping) and status.get("State") == "Absent"

    def health(self, key: str = "Status") -> int | None:
        """Number in HEALTH: absent first, then Status.Health where it is bad, then Status.State."""
        status = self.inner(key)
        health, state = status.text("Health"), status.text("State")
        word = _HEALTH.get(health or "")
        if state == "Absent" or word in (None, "ok"):
            word = _STATES.get(state or "", word or ("ok" if state == "Enabled" else None))
        return None if word is None else HEALTH.index(word)

    def fault(self, key: str, found: object, wanted: str) -> None:
        self.faults.add(f"{self.where}: {key} is {str(found)[:40]!r}; wanted {wanted}")


def path_of(text: str) -> str | None:
    """`text` as the path of a resource of this service, without a slash at its end; None if it is something else."""
    plain = text.isascii() and text.isprintable() and " " not in text and len(text) <= MAX_PATH
    inside = text == PREFIX or text.startswith(PREFIX + "/")
    if not plain or not inside or "#" in text or "?" in text or ".." in text.split("/"):
        return None
    return text.rstrip("/")


def last_of(path: str) -> str:
    """Last segment of a path, which is the Id of a member (DSP0266, Id), as part of an entity's name."""
    return named(unquote(path.rstrip("/").rpartition("/")[2]))


def named(text: str) -> str:
    """`text` as part of an entity's name."""
    return "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in text[:MAX_TEXT]) or "-"


Values = Mapping[str, float | None]
_FACTS = {
    # property -> attribute
    "Name": "name",
    "Manufacturer": "manufacturer",
    "Model": "model",
    "PartNumber": "part",
    "SerialNumber": "serial",
    "FirmwareVersion": "firmware",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a resource stands: its BMC, the Ids that its entities are named after, and what they are part of.

    side: of a coolant connector, `primary`, `secondary` or nothing.
    """

    bmc: str
    ids: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()
    side: str = ""

    def entity(self, kind: str, *more: str) -> str:
        return f"{kind}:{'.'.join((self.bmc, *self.ids, *more))}"

    def under(self, parent: str, *more: str) -> Place:
        """A place for the parts of `parent`."""
        return replace(self, ids=(*self.ids, *more), parents=(parent, *self.parents))

    def at(self, *more: str, side: str = "") -> Place:
        """The same with longer names."""
        return replace(self, ids=(*self.ids, *more), side=side or self.side)


@dataclass(frozen=True, slots=True)
class Row:
    """Values of one entity. None or no entry: not told. parents and attributes go into the inventory."""

    entity: str
    device_class: str
    values: Values
    parents: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """A further resource: `part` names its line in the catalogue of resources."""

    part: str
    path: str
    place: Place


@dataclass(frozen=True, slots=True)
class Found:
    """What one document gave."""

    rows: tuple[Row, ...] = ()
    links: tuple[Link, ...] = ()


def facts(document: Document, **more: Any) -> dict[str, Any]:
    """What is known of a device, for its inventory; `more` where it is not None."""
    found: dict[str, Any] = {name: document.text(key) for key, name in _FACTS.items()}
    return {key: value for key, value in (found | more).items() if value is not None}


def links(document: Document, place: Place, **parts: str) -> tuple[Link, ...]:
    """Links of a document by property: `Pumps="pumps"`."""
    found = ((part, document.link(key)) for key, part in parts.items())
    return tuple(Link(part, path, place) for part, path in found if path is not None)


def redundancy(document: Document, key: str) -> int | None:
    """The worst of a list of groups (RedundantGroup), or of the one that there is."""
    body = document.body.get(key)
    groups = list(document.each(key)) if isinstance(body, list) else [document.inner(key)]
    found = [health for group in groups if (health := group.health()) is not None]
    return max(found, key=lambda health: health if HEALTH[health] not in HEALTHY else -1, default=None)
