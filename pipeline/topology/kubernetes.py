"""Labels of Kubernetes nodes: the output of `kubectl get nodes -o json`, or of the API's /api/v1/nodes.

The labels of zones and regions are Kubernetes' own; `nvidia.com/gpu.clique` is set by NVIDIA's GPU feature discovery
(cluster UUID and clique: one NVLink domain), `network.topology.nvidia.com/...` by NVIDIA's topograph. A site adds its
own labels with `labels` of the source, which come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.topology.documents import get_text, list_rows, parse_json, require_text
from pipeline.topology.source import Naming, SourceFile, SourceTopology

LABELS: Mapping[str, str] = {
    "nvidia.com/gpu.clique": "clique",
    "network.topology.nvidia.com/accelerator": "accelerator",
    "network.topology.nvidia.com/leaf": "leaf",
    "network.topology.nvidia.com/block": "block",
    "network.topology.nvidia.com/spine": "spine",
    "network.topology.nvidia.com/core": "core",
    "network.topology.nvidia.com/datacenter": "datacenter",
    "topology.kubernetes.io/zone": "zone",
    "topology.kubernetes.io/region": "region",
}
"""Label -> kind, from near to far. topograph's `accelerator` is an NVLink domain, its `block` the switches that nodes
are cabled to (called `leaf` in later versions), its `datacenter` the top of the fabric (later `core`)."""
_EXPECTED = "the output of kubectl get nodes -o json"


def read_labels(files: Sequence[SourceFile], naming: Naming) -> SourceTopology:
    """Nodes below what their labels name; where all nodes of a group share the next one, the group is below it too."""
    found = SourceTopology()
    chains: dict[str, dict[str, str]] = {}  # group -> kind of a label -> the one group over it; "" for several
    for file in files:
        document = parse_json(file, _EXPECTED)
        items = _items(file, document)
        for place, row in list_rows(items, file, "items"):
            if row.get("kind", "Node") != "Node":
                raise file.fault(place, f"is a {str(row.get('kind'))[:40]}", _EXPECTED)
            name = require_text(row, file, place, "metadata", "name")
            groups = _groups(file, place, row, naming)
            found.define(file, place, naming.entity("node", name), groups.values())
            _note_chains(chains, list(groups.items()))
    for group, above in chains.items():
        over = next((entity for entity in above.values() if entity), "")
        found.add(files[0], f"group {group[:60]}", group, (over,) if over else ())
    return found


def _items(file: SourceFile, document: Any) -> Any:
    """The rows of a list, or one node. The items of the API's lists do not say what they are, their list does."""
    if not isinstance(document, dict):
        return document
    if "items" in document and (kind := document.get("kind", "List")) not in ("List", "NodeList"):
        raise file.fault("kind", f"{str(kind)[:40]!r}", f"List or NodeList: {_EXPECTED}")
    if "items" in document and get_text(document, "metadata", "continue"):
        left = get_text(document, "metadata", "remainingItemCount")
        found = f"is set, so that {left or 'some'} nodes are missing here"
        raise file.fault("metadata.continue", found, f"all nodes: {_EXPECTED}, or /api/v1/nodes without limit")
    return document.get("items", [document])


def _groups(file: SourceFile, place: str, row: Mapping[str, Any], naming: Naming) -> dict[str, str]:
    """Label -> the group that it names, from near to far."""
    labels = row["metadata"].get("labels") or {}
    if not isinstance(labels, dict):
        raise file.fault(f"{place}.metadata.labels", f"is {type(labels).__name__}", "an object")
    groups: dict[str, str] = {}
    for label, kind in {**naming.labels, **LABELS}.items():
        value = labels.get(label, "")
        if not isinstance(value, str):
            raise file.fault(f"{place}.metadata.labels[{label}]", f"is {type(value).__name__}", "a text")
        if value.strip():
            groups[label] = naming.entity(naming.labels.get(label, kind), value.strip())
    return groups


def _note_chains(chains: dict[str, dict[str, str]], groups: Sequence[tuple[str, str]]) -> None:
    """Notes which groups are over which; several over one group mean that it is not inside any of them."""
    for i, (_, group) in enumerate(groups):
        known = chains.setdefault(group, dict(groups[i + 1 :]))
        for label, entity in groups[i + 1 :]:
            if known.setdefault(label, entity) != entity:
                known[label] = ""
