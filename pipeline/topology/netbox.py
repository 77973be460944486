"""NetBox: answers of its REST API, as a list, as `{"results": [...]}`, or several of them in one object.

Read are devices, racks, cables, power feeds and power panels of /api/dcim/ (NetBox 3.3 and newer; cables of older
versions too). The kind of a row is that of its `url`. A device is what its role says; `roles` of the source adds roles.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.topology.documents import first_of, get_text, list_rows, parse_json, require_text
from pipeline.topology.source import Link, Naming, SourceFile, SourceTopology, add_link

_URL = re.compile(r"/api/dcim/([a-z-]{1,40})/")
_TABLES = ("sites", "locations", "racks", "power-panels", "power-feeds", "devices", "cables")
"""In this order: a part comes after its container."""
ROLES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"(^|[-_ ])(leaf|tor|access)", "leaf"),
        (r"(^|[-_ ])(super-?spine|core)", "core"),
        (r"(^|[-_ ])spine", "spine"),
        (r"switch", "switch"),
        (r"(^|[-_ ])r?pdu|power-?strip", "pdu"),
        (r"(^|[-_ ])(cdu|coolant|cooling)", "cdu"),
        (r"(^|[-_ ])(gpu|compute|server|node|worker|host)", "node"),
    )
)
"""Words in a role -> kind; the first that matches counts; roles are each site's own: `roles` comes first."""
MAX_ENDS = 64
"""Most terminations of an end of a cable, each of which meets each of the other end. Chosen: a breakout has eight."""
_GONE = frozenset({"offline", "decommissioning", "inventory", "planned", "staged"})
"""Values of `status` of devices that are not in service (NetBox, DeviceStatusChoices; `failed` ones are)."""
_POWERED = ("dcim.powerport", "dcim.poweroutlet", "dcim.powerfeed")
_JOINED = "jq -s '{results: map(.results[])}' PAGE1.json PAGE2.json"
_EXPECTED = "answers of NetBox's /api/dcim/ (devices, racks, cables, power-feeds)"


@dataclass
class _Known:
    """devices: id in NetBox -> entity.  unmapped: role -> number of devices."""

    devices: dict[str, str] = field(default_factory=dict)
    unmapped: dict[str, int] = field(default_factory=dict)


def read_netbox(files: Sequence[SourceFile], naming: Naming) -> SourceTopology:
    """Devices in racks, racks in locations and sites and on power feeds, nodes on the PDUs and switches of cables."""
    found, known = SourceTopology(), _Known()
    tables: dict[str, list[tuple[SourceFile, str, dict[str, Any]]]] = {}
    for file in files:
        for place, row in _rows(parse_json(file, _EXPECTED), file):
            url = _URL.search(get_text(row, "url"))
            if url is None:
                raise file.fault(f"{place}.url", f"{get_text(row, 'url')[:60]!r}", ".../api/dcim/devices/1/ or similar")
            tables.setdefault(url[1], []).append((file, place, row))
    add = {
        "locations": _add_location,
        "racks": _add_rack,
        "power-feeds": _add_feed,
        "devices": _add_device,
        "cables": _add_cable,
    }
    for table in _TABLES:
        for file, place, row in tables.get(table, ()):
            if table in add:
                add[table](found, known, file, place, row, naming)
    for table in sorted(tables.keys() - set(_TABLES)):
        found.remark(f"{len(tables[table])} rows of {table} are not read")
    for role, number in sorted(known.unmapped.items()):
        found.remark(f"{number} devices of role {role!r} left out; to include them: roles = {{ {role!r} = KIND }}")
    return found


def _rows(document: Any, file: SourceFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of all tables in a document."""
    if isinstance(document, dict) and "results" in document:
        _refuse_page(document, file, "")
        yield from list_rows(document["results"], file, "results")
    elif isinstance(document, dict):
        for name, part in document.items():
            if isinstance(part, dict):
                _refuse_page(part, file, f"{name[:60]}.")
            inside = part.get("results") if isinstance(part, dict) else part
            yield from list_rows(inside, file, name)
    else:
        yield from list_rows(document, file, "")


def _refuse_page(answer: Mapping[str, Any], file: SourceFile, place: str) -> None:
    """Raises UsageError for a part of an answer: NetBox gives at most MAX_PAGE_SIZE rows a page, whatever `limit`."""
    for name, which in (("next", "a further page"), ("previous", "an earlier page")):
        if get_text(answer, name):
            found = f"names {which}, so that rows are missing here"
            raise file.fault(f"{place}{name}", found, f"all rows: read each `next`, then {_JOINED}")


def _add_location(
    found: SourceTopology, known: _Known, file: SourceFile, place: str, row: Mapping[str, Any], naming: Naming
) -> None:
    above = [naming.entity("location", n) for n in (get_text(row, "parent", "name"),) if n]
    above += [naming.entity("site", n) for n in (get_text(row, "site", "slug"),) if n and not above]
    found.add(file, place, naming.entity("location", require_text(row, file, place, "name")), above)


def _add_rack(
    found: SourceTopology, known: _Known, file: SourceFile, place: str, row: Mapping[str, Any], naming: Naming
) -> None:
    above = [naming.entity("location", n) for n in (get_text(row, "location", "name"),) if n]
    above += [naming.entity("site", n) for n in (get_text(row, "site", "slug"),) if n]
    name = require_text(row, file, place, "name")
    found.define(file, place, naming.entity("rack", name), above, serial=get_text(row, "serial"))


def _add_feed(
    found: SourceTopology, known: _Known, file: SourceFile, place: str, row: Mapping[str, Any], naming: Naming
) -> None:
    panel = get_text(row, "power_panel", "name")
    feed = naming.entity("feed", ".".join(filter(None, (panel, require_text(row, file, place, "name")))))
    found.define(
        file, place, feed, [naming.entity("panel", panel)] if panel else [], type=get_text(row, "type", "value")
    )
    if rack := get_text(row, "rack", "name"):
        found.add(file, place, naming.entity("rack", rack), (feed,))
    known.devices[f"dcim.powerfeed {get_text(row, 'id')}"] = feed


def _add_device(
    found: SourceTopology, known: _Known, file: SourceFile, place: str, row: Mapping[str, Any], naming: Naming
) -> None:
    role = first_of(row, (("role", "slug"), ("device_role", "slug"), ("role", "name"), ("device_role", "name")))
    kind = naming.roles.get(role) or next((k for pattern, k in ROLES if pattern.search(role.lower())), "")
    if not kind or get_text(row, "status", "value") in _GONE or not get_text(row, "name").strip():
        if not kind:
            known.unmapped[role[:60]] = known.unmapped.get(role[:60], 0) + 1
        return
    entity = naming.entity(kind, get_text(row, "name").strip())
    rack = get_text(row, "rack", "name")
    above = [naming.entity("rack", rack)] if rack and kind not in ("pdu", "cdu") else []
    facts = {
        "serial": get_text(row, "serial"),
        "model": get_text(row, "device_type", "model"),
        "rack_unit": get_text(row, "position"),
    }
    found.define(file, place, entity, above, **facts)
    known.devices[require_text(row, file, place, "id")] = entity
    if rack and kind in ("pdu", "cdu"):  # they supply their own rack
        found.add(file, place, naming.entity("rack", rack), (entity,))


def _add_cable(
    found: SourceTopology, known: _Known, file: SourceFile, place: str, row: Mapping[str, Any], naming: Naming
) -> None:
    ends = [list(_cable_end(row, side, file, place)) for side in "ab"]
    if (most := max(map(len, ends))) > MAX_ENDS:
        raise file.fault(place, f"a cable with {most} terminations at one end", f"at most {MAX_ENDS}")
    facts = {"label": get_text(row, "label"), "type": get_text(row, "type"), "cable": get_text(row, "id")}
    for near, far in itertools.product(*ends):
        _join_ends(found, known, file, place, (near, far), facts)
    for _, device, name in (*ends[0], *ends[1]) if not all(ends) else ():
        if owner := known.devices.get(device):
            found.open_ends.append(f"port:{owner.partition(':')[2]}.{name}")


_End = tuple[str, str, str]
"""Type of the termination, id of its device (of a feed: its own), name."""


def _cable_end(row: Mapping[str, Any], side: str, file: SourceFile, place: str) -> Iterator[_End]:
    if f"{side}_terminations" in row:  # since NetBox 3.3
        for _, end in list_rows(row[f"{side}_terminations"], file, f"{place}.{side}_terminations"):
            kind, inside = get_text(end, "object_type"), end.get("object")
            yield _end_of(kind, inside, get_text(end, "object_id"))
    elif get_text(row, f"termination_{side}_type"):
        kind, inside = get_text(row, f"termination_{side}_type"), row.get(f"termination_{side}")
        yield _end_of(kind, inside, get_text(row, f"termination_{side}_id"))


def _end_of(kind: str, inside: Any, own: str) -> _End:
    device = f"dcim.powerfeed {own}" if kind == "dcim.powerfeed" else get_text(inside, "device", "id")
    return kind, device, get_text(inside, "name").strip()


def _join_ends(
    found: SourceTopology,
    known: _Known,
    file: SourceFile,
    place: str,
    ends: tuple[_End, _End],
    facts: Mapping[str, str],
) -> None:
    """Adds what a cable means: a node is supplied by its PDU, a PDU by its feed, a port is cabled to another."""
    devices = [known.devices.get(end[1]) for end in ends]
    first, second = devices
    if first is None or second is None or first == second:
        return
    if all(end[0] in _POWERED for end in ends):
        for (kind, _, _), entity, other in zip(ends, devices, reversed(devices), strict=True):
            if kind == "dcim.powerport" and entity is not None and other is not None:
                found.add(file, place, entity, (other,))
        return
    if all(end[0] == "dcim.interface" and end[2] for end in ends):
        ports = [f"port:{e.partition(':')[2]}.{end[2]}" for e, end in zip((first, second), ends, strict=True)]
        add_link(found, file, place, Link(ports[0], ports[1], facts), dict(zip(ports, (first, second), strict=True)))
