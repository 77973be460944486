"""`lldpcli -f json show neighbors`: which switch and port each interface is cabled to.

lldpd writes one thing in several shapes (lldpctl(8)): a list where there are several, the thing itself where there is
one; interfaces and chassis as objects keyed by their name, or, in `json0`, as objects that bear it. All are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST_NEIGHBOURS = 256
"""Most interfaces that are taken; chosen: ten times those of the largest server."""
_TEXT = 128
"""Characters of a text that are kept; chosen: names of systems and ports have 255 at most and 30 in practice."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Who answers at the far end; empty is what it did not say. chassis: what never changes about a switch, its id."""

    switch: str
    chassis: str
    port: str
    description: str
    management: str

    @property
    def place(self) -> tuple[str, str]:
        """What a cable that was moved changes."""
        return self.chassis or self.switch, self.port


def parse_neighbours(text: str) -> dict[str, Neighbour]:
    """Interface -> neighbour. Of several on one interface (a hub, or CDP beside LLDP) the first that LLDP tells holds.

    Raises ValueError where the text is not JSON; what is of another form in it is left out.
    """
    try:
        whole = json.loads(text or "{}")
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    found: dict[str, tuple[bool, Neighbour]] = {}
    for name, facts in _interfaces(whole):
        via = _text(facts.get("via")) in ("", "LLDP")
        neighbour = _neighbour(facts)
        if (
            (neighbour.switch or neighbour.chassis)
            and len(found) < MOST_NEIGHBOURS
            and (name not in found or via > found[name][0])
        ):
            found[name] = via, neighbour
    return {name: neighbour for name, (_, neighbour) in found.items()}


def _interfaces(whole: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and content of each interface, whatever the shape."""
    for lldp in _each(_get(whole, "lldp")):
        for entry in _each(_get(lldp, "interface")):
            if not isinstance(entry, dict):
                continue
            if "chassis" in entry or "port" in entry:
                yield _text(entry.get("name")), entry
                continue
            for name, facts in entry.items():
                yield from ((name[:_TEXT], one) for one in _each(facts) if isinstance(one, dict))


def _neighbour(facts: Mapping[str, Any]) -> Neighbour:
    chassis, name = _chassis(facts.get("chassis"))
    port = _first(facts.get("port"))
    description, number = _text(_get(port, "descr")), _text(_get(port, "id"))
    # a port that is identified by an address is known to people by its description
    address = _get(_first(_get(port, "id")), "type") == "mac"
    return Neighbour(
        switch=name,
        chassis=_text(_get(chassis, "id")),
        port=description if address and description else number or description,
        description=description,
        management=_text(_get(chassis, "mgmt-ip")),
    )


def _chassis(found: Any) -> tuple[Any, str]:
    """Facts and name: `{"sw1": {...}}` where it has a name, `{"id": ...}` where it has none, `[{"name": ...}]`."""
    chassis = _first(found)
    if not isinstance(chassis, dict):
        return {}, ""
    if "id" in chassis:
        return chassis, _text(chassis.get("name"))
    return next(((_first(facts), _tidy(name)) for name, facts in chassis.items()), ({}, ""))


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _first(value: Any) -> Any:
    return next(iter(_each(value)), None)


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _text(value: Any) -> str:
    """A text, the `value` of an object, or the first of several."""
    one = _first(value)
    if isinstance(one, dict):
        one = one.get("value")
    return _tidy(one) if isinstance(one, str) else str(one) if type(one) is int else ""


def _tidy(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:_TEXT]).strip()
