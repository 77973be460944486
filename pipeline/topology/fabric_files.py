"""What tools of the network wrote: `ibnetdiscover` of an InfiniBand fabric, `lldpcli -f json show neighbors` of a node.

The names are those of the agents (docs/fabric.md), so that lines of a file and of an agent are about the same entities.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from pipeline.model.names import clean_text, quote_text
from pipeline.model.switch_names import AGGREGATION, unique_switch_names
from pipeline.topology.documents import parse_json
from pipeline.topology.source import Link, Naming, SourceFile, SourceTopology, add_link

# infiniband-diags, ibnetdiscover.c: out_switch, out_switch_port
_SWITCH = re.compile(r'Switch\s+\d{1,3} "S-([0-9a-f]{16})"\s+# "(.*?)"')
_PORT = re.compile(
    r'\[(\d{1,3})\](?:\[[^\]]*\])?(?:\([0-9a-f]{1,16}\))?\s+"([SHR])-([0-9a-f]{16})"\[(\d{1,3})\](?:\[[^\]]*\])?'
    r'(?:\(([0-9a-f]{1,16})\))?\s+# "(.*)" lid (\d{1,5})'
)
_HOST = re.compile(r'(?:Ca|Rt)\s+\d{1,3} (?:"[HR]-([0-9a-f]{16})")?')
_FACT = re.compile(r"(vendid|devid|sysimgguid|switchguid|caguid|rtguid)=")
_ADAPTER = re.compile(r"([A-Za-z0-9._-]{1,900})[ /:]+((?:mlx|HCA|ib|bnxt|hfi|irdma|efa)[A-Za-z0-9_-]{0,40})", re.ASCII)
_OF_SWITCHES = frozenset({"Bridge", "Router"})
"""Capabilities of switches, as lldpd names them (others: Other, Repeater, Wlan, Tel, Docsis, Station)."""
MAX_LINE = 1024
"""Longest line. Chosen: a line with two full descriptions has 240 characters."""


@dataclass
class _Fabric:
    """descriptions: of switches, by GUID.  ends: (GUID, port) of a switch -> (kind, GUID, port, description).

    hosts: GUIDs of adapters and routers that have lines of their own.
    """

    descriptions: dict[str, str] = field(default_factory=dict)
    ends: dict[tuple[str, int], tuple[str, str, int, str]] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)


def read_ibnetdiscover(files: Sequence[SourceFile], naming: Naming) -> SourceTopology:
    """Ports of hosts below their node and leaf, leaves below spines, and all cables."""
    found = SourceTopology()
    for file in files:
        fabric = _parse_fabric(file)
        if not fabric.ends:
            raise file.fault("", "no port of a switch", "the whole output of ibnetdiscover")
        _refuse_part(file, fabric)
        _add_fabric(found, file, fabric, naming)
    return found


def _parse_fabric(file: SourceFile) -> _Fabric:
    fabric, switch = _Fabric(), ""
    for number, line in enumerate(file.text.splitlines(), 1):
        head = _SWITCH.match(line) if len(line) <= MAX_LINE else None
        if head is not None:
            switch = head[1]
            fabric.descriptions[switch] = head[2]
        elif line.startswith("[") and switch:
            end = _PORT.match(line) if len(line) <= MAX_LINE else None
            if end is None:
                raise file.fault(f"line {number}", f"{line[:80]!r}", "a port as ibnetdiscover prints it")
            fabric.ends[switch, int(end[1])] = (end[2], end[3], int(end[4]), end[6])
        elif (host := _HOST.match(line)) is not None:
            switch = ""  # its ports are those of switches again
            fabric.hosts.add(host[1] or "")
        elif line.strip() and not line.startswith(("#", "[")) and not _FACT.match(line) and not _is_other(line):
            raise file.fault(f"line {number}", f"{line[:80]!r}", "the output of ibnetdiscover")
    return fabric


def _refuse_part(file: SourceFile, fabric: _Fabric) -> None:
    """Raises UsageError for an output that was cut: ibnetdiscover writes lines of each device that a port names."""
    missing = {
        guid: f"{kind}-{guid} ({text[:60]})"
        for kind, guid, _, text in fabric.ends.values()
        if guid not in (fabric.descriptions if kind == "S" else fabric.hosts)
    }
    if missing:
        shown = (
            f"{len(missing)} devices that ports name have no lines of their own, first {next(iter(missing.values()))}"
        )
        raise file.fault("", shown, "the whole output of ibnetdiscover; was the file cut?")


def _is_other(line: str) -> bool:
    """Whether a line is of a kind that is not read: headings of chassis and of node groups."""
    return line.startswith(("Chassis", "Spine", "Line", "Non-Chassis", "Hostname"))


def _add_fabric(found: SourceTopology, file: SourceFile, fabric: _Fabric, naming: Naming) -> None:
    names = unique_switch_names(fabric.descriptions)
    leaves = {guid for (guid, _), end in fabric.ends.items() if end[0] == "H" and not AGGREGATION.search(end[3])}
    entity = {guid: naming.entity("leaf" if guid in leaves else "spine", name) for guid, name in names.items()}
    for guid in fabric.descriptions:
        found.add(file, names[guid], entity[guid], ())
    done: set[tuple[str, int]] = set()
    for (guid, port), (kind, far, far_port, description) in fabric.ends.items():
        near, place = f"port:{names[guid]}.{port}", f"{names[guid][:60]}[{port}]"
        if kind == "S" and (guid, port) not in done:
            done.add((far, far_port))
            other = f"port:{names[far]}.{far_port}"
            add_link(found, file, place, Link(near, other), {near: entity[guid], other: entity[far]})
            lower, upper = (guid, far) if guid in leaves else (far, guid)
            if lower in leaves and upper not in leaves:
                found.add(file, place, entity[lower], (entity[upper],))
        elif kind == "H" and (host := _ADAPTER.fullmatch(description.strip())):
            node = naming.entity("node", host[1])
            other = f"port:{node.partition(':')[2]}.{host[2]}"
            add_link(found, file, place, Link(near, other), {near: entity[guid], other: node})
        elif kind == "H" and not AGGREGATION.search(description):
            found.remark(f"{place}: host {description[:60]!r} does not say its node and adapter (rdma-ndd sets it)")


def read_lldp(files: Sequence[SourceFile], naming: Naming) -> SourceTopology:
    """Ports of nodes below their switches. Each file is of the node that its name says: n042.json, or an object
    with one answer a node."""
    found = SourceTopology()
    for file in files:
        document = parse_json(file, "the output of lldpcli -f json show neighbors")
        if not isinstance(document, dict):
            raise file.fault("", f"is {type(document).__name__}", "an object")
        answers = {PurePath(file.path).stem: document} if "lldp" in document else document
        for name, answer in answers.items():
            if not isinstance(answer, dict) or "lldp" not in answer:
                raise file.fault(name[:60], "has no `lldp`", "the output of lldpcli -f json show neighbors")
            node = naming.entity("node", name)
            for port, switch, far, is_host in _neighbors(answer["lldp"]):
                place = f"{name[:60]} {port[:40]}"
                if is_host:
                    found.remark(f"{place}: neighbor {quote_text(switch)} left out: neither bridge nor router")
                    continue
                near, other = (f"port:{node.partition(':')[2]}.{port}", f"port:{switch}.{far}")
                leaf = naming.entity("leaf", switch)
                add_link(found, file, place, Link(near, other), {near: node, other: leaf})
                found.add(file, place, leaf, ())
    return found


def _neighbors(lldp: Any) -> Iterator[tuple[str, str, str, bool]]:
    """(interface, neighbor, its port, whether it is no switch); the shapes of lldpcli's json and json0 (lldpctl(8))."""
    for part in _several(lldp):
        for entry in _several(_inside(part, "interface")):
            if not isinstance(entry, dict):
                continue
            named = [(_word(entry.get("name")), entry)] if "chassis" in entry else list(entry.items())
            for name, facts in named:
                for one in _several(facts):
                    chassis, far = _inside(one, "chassis"), _port_of(_inside(one, "port"))
                    if name and far and (switch := _switch_of(chassis)):
                        yield name, switch, far, _is_host(chassis)


def _switch_of(chassis: Any) -> str:
    first = next(iter(_several(chassis)), None)
    if not isinstance(first, dict):
        return ""
    return _word(first.get("name")) if "id" in first else clean_text(str(next(iter(first), ""))).strip()


def _is_host(chassis: Any) -> bool:
    """Whether a neighbor states capabilities and none is a switch's. Those that are enabled count, else all: without
    any, as of a switch with an old or terse agent, it is taken for a switch."""
    facts = next(iter(_several(chassis)), None)
    if isinstance(facts, dict) and "id" not in facts:  # by name
        facts = next(iter(_several(next(iter(facts.values()), None))), None)
    stated = [one for one in _several(_inside(facts, "capability")) if isinstance(one, dict)]
    kinds = {_word(one.get("type")) for one in stated if one.get("enabled") is True}
    kinds = kinds or {_word(one.get("type")) for one in stated}
    return bool(kinds) and not kinds & _OF_SWITCHES


def _port_of(port: Any) -> str:
    first = next(iter(_several(port)), None)
    identity, described = _inside(first, "id"), _word(_inside(first, "descr"))
    kind = _inside(next(iter(_several(identity)), None), "type")
    return described if kind == "mac" and described else _word(identity) or described


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _inside(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _word(value: Any) -> str:
    one = next(iter(_several(value)), None)
    text = one.get("value") if isinstance(one, dict) else one
    return clean_text(str(text)).strip() if isinstance(text, (str, int)) else ""
