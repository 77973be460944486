"""Problems in a site's topology: within the sources, between them, and against what agents report."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from pipeline.model.topology import ParentGraph, kind_of
from pipeline.topology.merge import MergedTopology
from pipeline.topology.physical import find_impossible, find_misspelt_kinds
from pipeline.topology.source import SourceTopology

LEAST_LIKENESS = 0.8
"""Similarity (difflib) from which a name is suggested. Chosen: one wrong character in a name of five."""
MOST_SUGGESTED = 200
"""Most names for which a similar one is searched, which takes 1 ms for each 1,000 candidates. Chosen."""
MOST_COMPARED = 20_000
"""Most candidates of a search. Chosen: more than the nodes of the largest site."""
_WHOLE = "export it again if it was cut; else end it with a line break"
_DIGITS = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. level: `fault`: not used, `warning`: doubtful, `note`: left out.

    hint: what to do; empty if it follows from the text.
    """

    level: str
    check: str
    source: str
    entity: str
    text: str
    hint: str = ""


def check_sources(named: Mapping[str, SourceTopology], merged: MergedTopology) -> list[Problem]:
    """Problems in the sources and between them."""
    problems: list[Problem] = []
    for (source, entity), why in merged.refused.items():
        problems.append(Problem("fault", "circle", source, entity, why, "remove one of these lines"))
    for source, found in named.items():
        for entity, places in found.duplicates.items():
            text = f"defined differently in {', '.join(places[:4])}; the first counts"
            problems.append(Problem("warning", "duplicate", source, entity, text))
        ends = dict.fromkeys(found.open_ends)
        problems += (Problem("warning", "one end", source, port, "its cable has no known far end") for port in ends)
        problems += (Problem("warning", "cut", source, "", text, _WHOLE) for text in found.doubts)
        problems += (Problem("note", "left out", source, "", text) for text in found.remarks)
        if found.more_remarks:
            problems.append(Problem("note", "left out", source, "", f"{found.more_remarks} more"))
    for conflict in merged.conflicts:
        text = f"{', '.join(conflict.used)}; {conflict.other_by} says {', '.join(conflict.other)}"
        problems.append(Problem("warning", "conflict", conflict.by, conflict.entity, text, "the first source counts"))
    for source, found in named.items():
        problems += _physical(source, found)
    return problems + list(_unknown_parents(merged)) + list(_near_misses(merged))


def _physical(source: str, found: SourceTopology) -> Iterator[Problem]:
    """Lines of one source that cannot be true, each with the place of its entity's first line."""
    for check, problems in (
        ("impossible", find_impossible(found.parents)),
        ("unknown kind", find_misspelt_kinds(found.parents)),
    ):
        for entity, text, hint in problems:
            place = found.places.get(entity, "")
            yield Problem("warning", check, source, entity, f"{place}: {text}" if place else text, hint)


def _unknown_parents(merged: MergedTopology) -> Iterator[Problem]:
    """Parents of a kind of which others have a line, but not they: usually a typing error."""
    lined = {kind_of(entity) for entity, above in merged.parents.items() if above}
    by_kind = {kind: _KnownNames(names) for kind, names in _by_kind(merged.parents).items()}
    searched = 0
    for (entity, parent), source in _first_of_each_parent(merged).items():
        kind = kind_of(parent)
        if parent not in merged.parents and kind in lined:
            close = by_kind[kind].closest(parent) if searched < MOST_SUGGESTED else ""
            searched += 1
            hint = f"did you mean {close}?" if close else f"add a line for {parent}"
            yield Problem("warning", "unknown parent", source, parent, f"has no line; first parent of {entity}", hint)


def _first_of_each_parent(merged: MergedTopology) -> dict[tuple[str, str], str]:
    seen: set[str] = set()
    first: dict[tuple[str, str], str] = {}
    for (entity, parent), source in merged.sources.items():
        if parent not in seen:
            seen.add(parent)
            first[entity, parent] = source
    return first


def _near_misses(merged: MergedTopology) -> Iterator[Problem]:
    """Names that differ only in case, in `-`, `_` and `.`, or in leading zeros of a number."""
    groups: dict[tuple[str, str], list[str]] = {}
    every = dict.fromkeys((*merged.parents, *(p for above in merged.parents.values() for p in above)))
    for entity in every:
        kind, _, name = entity.partition(":")
        groups.setdefault((kind, _plain(name)), []).append(entity)
    for alike in groups.values():
        for entity in alike[1:]:
            text = f"differs from {alike[0]} only in case, separators or zeros"
            yield Problem("warning", "near miss", "", entity, text, "use one name")


def _plain(name: str) -> str:
    """The name without what people write in two ways."""
    out, digits = [], ""
    for c in name.casefold():
        if c.isascii() and c.isdigit():
            digits += c
            continue
        if digits:
            out.append(digits.lstrip("0") or "0")
            digits = ""
        out.append("." if c in "-_. " else c)
    return "".join(out) + (digits.lstrip("0") or ("0" if digits else ""))


def check_against_telemetry(
    merged: MergedTopology, reported: Mapping[str, Collection[str]], graph: ParentGraph
) -> list[Problem]:
    """What sources and agents do not both know. reported: kind -> entities that agents report; graph: of both."""
    problems: list[Problem] = []
    for kind in ("node", "gpu"):
        ours = {e for e in merged.parents if kind_of(e) == kind}
        seen = set(reported.get(kind, ()))
        if not ours or not seen:
            continue
        problems += _missing(sorted(seen - ours), ours, "not in sources", "agents report it; no source has it")
        if kind == "node":
            problems += _missing(sorted(ours - seen), seen, "not reported", "a source has it; no agent reports it")
    if any(kind_of(parent) == "rack" for above in merged.parents.values() for parent in above):
        for gpu in sorted(reported.get("gpu", ())):
            if not any(kind_of(e) == "rack" for e in _ancestors(graph, gpu)):
                problems.append(Problem("warning", "no rack", "", gpu, "neither it nor its node is in a rack"))
    return problems


def _missing(missing: list[str], others: set[str], check: str, text: str) -> Iterator[Problem]:
    known = _KnownNames(others)
    for number, entity in enumerate(missing):
        close = known.closest(entity) if number < MOST_SUGGESTED else ""
        yield Problem("warning", check, "", entity, text, f"did you mean {close}?" if close else "")


class _KnownNames:
    """Names of one kind, to find the one that was meant.

    Names with other numbers are never meant: node 41 is not a misspelt node 42.
    """

    def __init__(self, entities: Iterable[str]) -> None:
        self._by_numbers: dict[tuple[int, ...], list[str]] = {}
        self._by_host: dict[str, str] = {}
        for entity in islice(entities, MOST_COMPARED):
            self._by_numbers.setdefault(_numbers(entity), []).append(entity)
            if kind_of(entity) == "node":
                self._by_host.setdefault(entity.partition(".")[0], entity)

    def closest(self, entity: str) -> str:
        """The name that is most similar, or empty; the short name of a host is similar to its long one."""
        host = self._by_host.get(entity.partition(".")[0])
        if host is not None and host != entity:
            return f"{host} (short_names = true)"
        near = difflib.get_close_matches(entity, self._by_numbers.get(_numbers(entity), ()), 1, LEAST_LIKENESS)
        return near[0] if near else ""


def _numbers(entity: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in _DIGITS.findall(entity.partition(":")[2]))


def _by_kind(entities: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entity in entities:
        found.setdefault(kind_of(entity), []).append(entity)
    return found


def _ancestors(graph: ParentGraph, entity: str) -> set[str]:
    found: set[str] = set()
    level = [entity]
    while level:
        level = [p for e in level for p in graph.parents.get(e, ()) if p not in found]
        found.update(level)
    return found
