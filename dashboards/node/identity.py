"""What a node or device is: serial numbers, versions, where it is, what supplies it, which job runs on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from dashboards import links, markup
from dashboards.data_quality.answers import Version
from dashboards.devices.answers import EntityDetail
from dashboards.devices.html import entity_link
from dashboards.links import Text, entity_crumbs
from dashboards.words import amount, label
from pipeline.model.entity_names import KINDS, entity_name

HIDDEN = frozenset({"simulated", "peer", "every", "place"})
_NAMES = {
    "serial": "Serial number",
    "uuid": "UUID",
    "clock_keeper": "Time service",
    "pci": "PCI address",
    "bus_address": "Bus address",
    "sku": "Product",
    "vbios": "VBIOS",
    "fw_ver": "Firmware",
    "part_number": "Part number",
    "bios": "BIOS",
    "bmc": "BMC",
    "cuda": "CUDA",
    "port_guid": "Port GUID",
    "node_guid": "Node GUID",
    "peer_guid": "GUID of the far end",
}
ORDER = ("site", "row", "pod", "rack", "leaf", "rail", "cdu", "loop", "pdu", "shelf", "circuit")
"""Kinds above a node, from place to supply; others follow by name. Chosen."""


def usual_versions(found: Iterable[Version]) -> dict[str, str]:
    """Returns name -> version of most nodes. found: those of most nodes first, as the API gives them."""
    usual: dict[str, str] = {}
    for one in found:
        usual.setdefault(one.name, one.version)
    return usual


def attribute_rows(attributes: Mapping[str, Any], usual: Mapping[str, str] = {}) -> list[tuple[str, str]]:
    """Returns (label, markup) of an inventory's attributes; nested ones in one line each.

    usual: version of most nodes by attribute; another one is marked, with the usual one beside it.
    """
    rows = []
    for key, value in attributes.items():
        if key in HIDDEN or value in (None, "", [], {}):
            continue
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        shown = ", ".join(map(str, shown)) if isinstance(shown, list) else str(shown)
        text = escape(shown)
        if usual.get(key, shown) != shown:
            text += f" {markup.badge('DIFFERS', 'watch')} <small>most of the fleet: {escape(usual[key])}</small>"
        rows.append((_NAMES.get(key, label(key)), text))
    return rows


def place_rows(detail: EntityDetail) -> list[tuple[str, str]]:
    """Returns (label, links) of what the entity is part of or supplied by, grouped by kind."""
    by_kind: dict[str, list[str]] = {}
    for entity in detail.above:
        by_kind.setdefault(entity.partition(":")[0], []).append(entity)
    kinds = sorted(by_kind, key=lambda kind: (ORDER.index(kind) if kind in ORDER else len(ORDER), kind))
    rows = [(_kind_name(kind), ", ".join(map(_short_link, by_kind[kind]))) for kind in kinds if kind != "job"]
    if detail.site:
        rows.insert(0, ("Site", escape(detail.site)))
    return rows


def _short_link(entity: str) -> str:
    return entity_link(entity, entity.partition(":")[2])


def _kind_name(kind: str) -> str:
    name = KINDS.get(kind, (kind, kind))[0]
    return name[:1].upper() + name[1:]


def work_rows(detail: EntityDetail) -> list[tuple[str, str]]:
    """Returns (label, markup) of the jobs that run on the entity now, with their ranks."""
    rows = []
    for job, ranks in detail.work.items():
        numbers = [rank.rpartition(".")[2] for rank in ranks]
        first, last = entity_link(ranks[0], numbers[0]), entity_link(ranks[-1], numbers[-1])
        which = f"rank {first}" if len(ranks) == 1 else f"ranks {first} to {last}"
        rows.append(
            ("Job now", f"{entity_link(job, entity_name(job))}, {which} ({amount(len(ranks), 'rank', 'ranks')})")
        )
    return rows or [("Job now", "none known")]


def crumbs(detail: EntityDetail, focus: str = "") -> list[Text]:
    """Returns the steps from the fleet to this page."""
    steps = entity_crumbs(detail.above)
    if focus:
        return [*steps, links.entity_link(detail.entity), entity_name(focus)]
    return [*steps, entity_name(detail.entity)]
