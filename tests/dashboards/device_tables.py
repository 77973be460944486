"""Answers of the API about one node: `/entity`, `/values`, `/compare` and `/events`."""

from __future__ import annotations

from typing import Any

from dashboards import snapshot
from dashboards.devices import requests
from pipeline.model.records import SECOND, from_iso, iso
from pipeline.model.signals import CATALOGUE, CLASS_OF_KIND
from tests.dashboards.conftest import NOW, incident_table


def empty_caches() -> None:
    """Empties the caches of the process, so that pages ask again."""
    snapshot._fetch_cached.clear()
    requests._read_history.clear()
    requests._try_history.clear()


HOSTILE = "node:<b>n\N{SNOWMAN}</b>"


def serve_node(api: Any, node: str = "node:n003", gpus: int = 8) -> None:
    """Lets the API answer about a node with so many GPUs, and about its first port."""
    api.tables |= {
        "entity": lambda query: entity_table(query["entity"][0], node, gpus),
        "values": lambda query: values_table(query["entity"][0], query["signal"], node, gpus),
        "compare": lambda query: compare_table(query, node, gpus),
        "events": lambda query: events_table(node),
    }


def gpu_names(node: str, gpus: int) -> list[str]:
    """Returns the entities of a node's GPUs."""
    return [f"gpu:{node.partition(':')[2]}.{i}" for i in range(gpus)]


def port_name(node: str) -> str:
    """Returns the entity of the node's port."""
    return f"port:{node.partition(':')[2]}.mlx5_0"


def entity_table(entity: str, node: str, gpus: int) -> dict[str, Any] | None:
    """Returns the node, a GPU or the port; None for others."""
    parts = [
        {"entity": e, "parents": [node], "attributes": {"serial": f"SN{i}", "vbios": "96.00"}}
        for i, e in enumerate(gpu_names(node, gpus))
    ]
    port = {"entity": port_name(node), "parents": [node, "leaf:l1"], "attributes": {"serial": "MT1", "fw_ver": "28.4"}}
    known = {part["entity"]: part for part in [*parts, port]}
    if entity != node and entity not in known:
        return None
    above = ["rack:r1", "cdu:c1"] if entity == node else [node, "rack:r1", "cdu:c1"]
    if entity == port_name(node):
        above.insert(1, "leaf:l1")
    return {
        "entity": entity,
        "kind": entity.partition(":")[0],
        "simulated": True,
        "site": "test",
        "parents": above[:1],
        "above": above,
        "attributes": known[entity]["attributes"] if entity in known else {"serial": "BOARD-7", "kernel": "6.8"},
        "parts": [*parts, port] if entity == node else [],
        "left_out": 0,
        "work": [{"job": "job:81", "ranks": ["rank:81.0", "rank:81.1"]}],
        "incidents": [
            {**incident_table("A1"), "relation": "cause"},
            {
                **incident_table("C3", cause="cdu:c1", entity="cdu:c1", summary="CDU c1: flow low"),
                "relation": "affected",
            },
            {**incident_table("B2", state="resolved", resolved=iso(NOW)), "relation": "member"},
        ],
        "links": {},
    }


def values_table(entity: str, signals: list[str], node: str, gpus: int) -> dict[str, Any]:
    """Returns newest values: GPU 3 is hot, and its driver recommends a reset."""
    own = {"gpu": gpu_names(node, gpus), "nic": [port_name(node)], "node": [node]}
    classes = []
    for device_class, entities in own.items():
        names = [name for name in signals if CATALOGUE[name].device_class == device_class]
        classes.append(
            {
                "device_class": device_class,
                "entities": entities,
                "last_seen": [iso(NOW)] * len(entities),
                "left_out": 0,
                "signals": [_signal_values(name, entities) for name in names],
            }
        )
    return {"as_of": iso(NOW), "classes": classes}


def _signal_values(name: str, entities: list[str]) -> dict[str, Any]:
    signal = CATALOGUE[name]
    states = signal.kind == "state"
    values: list[float | None] = [1.0 if signal.normal == ("up",) else 0.0 if states else 60.0] * len(entities)
    if name in ("gpu.temperature", "gpu.recovery_action") and len(entities) > 3:
        values[3] = 92.0 if name == "gpu.temperature" else 1.0
    brief = {key: getattr(signal, key) for key in ("name", "unit", "help", "kind")}
    brief |= {"states": list(signal.states), "normal": list(signal.normal)}
    band = {"median": None, "low": None, "high": None} if states else {"median": 61.0, "low": 58.0, "high": 64.0}
    return {"signal": brief, "values": values, **band, "peers": 0 if states else 56, "peer_kind": "group"}


def compare_table(query: dict[str, list[str]], node: str, gpus: int) -> dict[str, Any]:
    """Returns 60 points of each device, with a gap in the middle."""
    start, end = from_iso(query["from"][0]), from_iso(query["to"][0])
    width = (end - start) / 60 / SECOND
    found = []
    for name in query["signal"]:
        signal = CATALOGUE[name]
        own = [e for e in query["entity"] if CLASS_OF_KIND.get(e.partition(":")[0]) == signal.device_class]
        entities = own or (gpu_names(node, gpus) if signal.device_class == "gpu" else [])
        lines = [
            {"entity": e, "values": [None if 20 < k < 28 else 60.0 + i for k in range(60)], "low": None, "high": None}
            for i, e in enumerate(entities)
        ]
        flat = [61.0] * 60
        found.append(
            {
                "signal": {key: getattr(signal, key) for key in ("name", "unit", "help", "kind")},
                "states": list(signal.states),
                "step": 60,
                "start": iso(start),
                "width": width,
                "peer_kind": "rack",
                "peers": 56 if lines else 0,
                "left_out": 0,
                "lines": lines,
                "band": {"median": flat, "low": [58.0] * 60, "high": [64.0] * 60} if lines else None,
            }
        )
    return {"from": iso(start), "to": iso(end), "simulated": True, "signals": found}


def events_table(node: str) -> dict[str, Any]:
    """Returns an XID, a data gap and a failed collector."""
    xid = {"xid": 79, "name": "GPU has fallen off the bus", "action": "reboot node", "then": "RMA", "severity": "fatal"}
    items = [
        (gpu_names(node, 1)[0], "event", "xid", xid),
        (node, "gap", "samples", {"messages": 12, "cause": "spool full"}),
        (node, "event", "collector", {"collector": "nvml", "state": "no data", "reason": "<i>no driver</i>"}),
    ]
    return {
        "items": [
            {"time": iso(NOW - i * SECOND), "type": kind, "entity": entity, "subject": subject, "data": data}
            for i, (entity, kind, subject, data) in enumerate(items)
        ],
        "truncated": False,
    }
