"""Which loop feeds which coolant unit, and which unit which loop: parents that connectors and loops name. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agents.collector import Device


def fed(devices: Mapping[str, Device], loops: Mapping[str, str]) -> dict[str, Device]:
    """The devices with loops and units as parents of what they feed. loops: path of a CoolingLoop -> its entity.

    A primary connector is fed by its loop, and so is its unit; a secondary one feeds its loop. What would make a
    circle is left out, since nobody is his own ancestor.
    """
    found = dict(devices)
    for child, parent in _pairs(devices, loops):
        if child in found and parent in found and child not in {parent, *_above(found, parent)}:
            device = found[child]
            if parent not in device.parents:
                found[child] = Device((parent, *device.parents), device.attributes)
    return found


def _pairs(devices: Mapping[str, Device], loops: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(who is fed, by whom), in a fixed order, so that of a circle always the same is left out."""
    for entity in sorted(devices):
        device = devices[entity]
        loop = loops.get(str(device.attributes.get("loop")))
        if entity.startswith("connector:") and loop is not None and device.parents:
            unit = device.parents[0]
            if unit.startswith("cdu:"):
                yield (loop, unit) if device.attributes.get("side") == "secondary" else (unit, loop)
        elif entity.startswith("loop:"):
            named = device.attributes.get("consumers") or ()
            for unit in sorted(devices):
                if unit.startswith("cdu:") and devices[unit].attributes.get("name") in named:
                    yield unit, entity


def _above(devices: Mapping[str, Device], entity: str) -> set[str]:
    above: set[str] = set()
    level = [entity]
    while level:
        level = [p for e in level if e in devices for p in devices[e].parents if p not in above]
        above.update(level)
    return above
