"""The contract of a source of topology: text of files in, lines with parents and links out.

A source reads what one system of a site exports. It never reads half a file: a file with an error raises UsageError
that names the file, the place, the value found and the one expected. A part left out on purpose is a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.model.errors import UsageError
from pipeline.model.names import clean_text, escape_text, find_entity_fault, find_name_fault, quote_text
from pipeline.model.topology import kind_of

MAX_ENTITIES = 2_000_000
"""Most lines of a source. Chosen: 12,500 nodes with 8 GPUs and 100 other parts each are 1,350,000."""
MAX_PARENTS = 16
"""Most parents of an entity: as admission accepts from an inventory (docs/admission.md)."""
MAX_PLACE, MAX_FOUND = 200, 400
"""Most characters of a place and of what was found, in a message. Chosen: two names of the longest."""
MAX_NUMBER = 2**63 - 1
"""Largest number of an attribute: those of TOML and of the store have 64 bits."""
MAX_REMARKS = 100
"""Remarks that are kept; more are counted. Chosen: what a person reads."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as text. path: as in messages."""

    path: str
    text: str

    def fault(self, place: str, found: str, expected: str) -> UsageError:
        """The error for something wrong in this file."""
        where = f"{self.path}: {_shorten(place, MAX_PLACE)}" if place else self.path
        return UsageError(escape_text(f"{where}: {_shorten(found, MAX_FOUND)}; expected {expected}"))


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


@dataclass(frozen=True, slots=True)
class Link:
    """A cable between two ports. facts: of the cable, such as its serial number."""

    a: str
    b: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Naming:
    """How a site names things.

    kinds: kind of the source -> ours, such as block -> rack.  labels: Kubernetes label -> kind.
    roles: NetBox role -> kind.  short_names: names of nodes end before their first dot.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    short_names: bool = False

    def entity(self, kind: str, name: str) -> str:
        """The entity of a kind and a name in the source."""
        short = name.partition(".")[0] if self.short_names and kind == "node" else name
        return f"{self.kinds.get(kind, kind)}:{short}"


@dataclass(slots=True)
class SourceTopology:
    """What a source says. parents: entity -> its parents, nearest first.  open_ends: ports of cables with one end.

    duplicates: entity -> the places that describe it differently.
    doubts: signs of a file that was cut.  remarks: parts left out, and how many more.
    places: entity -> where its first line is, such as `line 12`.
    """

    parents: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: dict[str, dict[str, object]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    open_ends: list[str] = field(default_factory=list)
    duplicates: dict[str, list[str]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    more_remarks: int = 0
    places: dict[str, str] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)

    def add(self, file: SourceFile, place: str, entity: str, parents: Iterable[str], /, **facts: object) -> None:
        """Adds parents of an entity; those of an earlier line stay. Raises UsageError on a bad name.

        facts: of any name, which a file gives, so that the other arguments have none.
        """
        above = tuple(dict.fromkeys(parents))
        fresh = [name for name in (entity, *above) if name not in self._checked]
        if fresh and (fault := find_entity_fault(fresh)):
            raise file.fault(place, fault, "an entity like node:n042")
        self._checked.update(fresh)
        self.places.setdefault(entity, place)
        if entity in above:
            raise file.fault(place, f"{quote_text(entity)} is its own parent", "another parent")
        known = self.parents.get(entity)
        self.parents[entity] = above if known is None else tuple(dict.fromkeys((*known, *above)))
        if len(self.parents[entity]) > MAX_PARENTS:
            raise file.fault(place, f"{quote_text(entity)} has over {MAX_PARENTS} parents", f"at most {MAX_PARENTS}")
        if len(self.parents) > MAX_ENTITIES:
            raise file.fault(place, f"over {MAX_ENTITIES:,} entities", "a smaller file")
        if shown := {name: value for name, value in facts.items() if value not in ("", None)}:
            self.attributes.setdefault(entity, {}).update(self._check_facts(file, place, shown))

    def _check_facts(self, file: SourceFile, place: str, facts: Mapping[str, object]) -> dict[str, object]:
        """Facts as they are stored, texts without invalid characters. Raises UsageError for what no JSON can be."""
        names = facts.keys() - self._checked
        if fault := find_name_fault(names):
            raise file.fault(place, fault, "a name of an attribute like sku")
        self._checked.update(names)
        for name, value in facts.items():
            for part in value if isinstance(value, list) else (value,):
                is_number = isinstance(part, (int, float)) and abs(part) <= MAX_NUMBER
                if not is_number and not isinstance(part, str):
                    found = f"{name} is or contains {_describe(part)}"
                    raise file.fault(place, found, "texts, numbers of 64 bits, true or false, or a list of them")
        return {name: _clean(value) for name, value in facts.items()}

    def define(self, file: SourceFile, place: str, entity: str, parents: Iterable[str], /, **facts: object) -> None:
        """Like `add`, for the one line that defines an entity: two of them that differ are duplicates."""
        before, above = self.places.setdefault(entity, place), tuple(dict.fromkeys(parents))
        if before != place and self.parents.get(entity) != above:
            self.duplicates.setdefault(entity, [before]).append(place)
            return
        self.add(file, place, entity, above, **facts)

    def remark(self, text: str) -> None:
        """Notes a part that was left out."""
        if len(self.remarks) < MAX_REMARKS:
            self.remarks.append(text)
        else:
            self.more_remarks += 1


def _describe(value: object) -> str:
    return "a number of over 64 bits" if isinstance(value, (int, float)) else f"a value of type {type(value).__name__}"


def _clean(value: object) -> object:
    if isinstance(value, list):
        return [_clean(part) for part in value]
    return clean_text(value) if isinstance(value, str) else value


Reader = Callable[[Sequence[SourceFile], Naming], SourceTopology]
"""Reads the files of a source. Raises UsageError."""


def add_link(found: SourceTopology, file: SourceFile, place: str, link: Link, owners: Mapping[str, str]) -> None:
    """Adds a cable: both ports below their devices, and the port of a node below the switch that it is cabled to.

    owners: port -> the entity of its device.
    """
    for near, far in ((link.a, link.b), (link.b, link.a)):
        own, switch = owners[near], owners[far]
        hangs_on = kind_of(own) == "node" and kind_of(switch) not in ("node", "pdu", "feed", "cdu")
        found.add(file, place, near, (own, switch) if hangs_on else (own,))
    facts = {clean_text(name): clean_text(value) for name, value in link.facts.items()}
    found.links.append(Link(link.a, link.b, facts))
