"""What a parser gives: rows of values with what is known of their entities, and links to further resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agents.sources.redfish.document import Document
from pipeline.model.signals.signal import HEALTH, WELL

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
    return max(found, key=lambda health: health if HEALTH[health] not in WELL else -1, default=None)
