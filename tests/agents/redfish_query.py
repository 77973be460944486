"""Redfish's query parameters: $expand, $select, $top, $skip and only (DSP0266, section 'Query parameters')."""

from __future__ import annotations

import re
from typing import Any

from tests.agents.redfish_tree import Document, Tree, normal

EXPAND = re.compile(r"(?P<what>[*.~])(\(\$levels=(?P<levels>\d+)\))?")
MOST_LEVELS = 3
KNOWN = ("$expand", "$select", "$top", "$skip", "only")


def answered_query(tree: Tree, document: Document, query: dict[str, str]) -> Document:
    """The document as requested. ValueError: invalid value; NotImplementedError: unsupported parameter."""
    for name in query:
        if name.startswith("$") and name not in KNOWN:
            raise NotImplementedError(name)
    if "only" in query:
        if query["only"] or "Members" not in document:
            raise ValueError("only")
        document = _only(tree, document)
    document = _page(document, query)
    if "$expand" in query:
        found = EXPAND.fullmatch(query["$expand"])
        if found is None or not 1 <= int(found["levels"] or 1) <= MOST_LEVELS:
            raise ValueError("$expand")
        document = expanded(tree, document, found["what"], int(found["levels"] or 1))
    if names := [name.strip() for name in query.get("$select", "").split(",") if name.strip()]:
        document = {key: value for key, value in document.items() if key.startswith("@odata") or key in names}
    return document


def _only(tree: Tree, document: Document) -> Document:
    """The only member of a collection; a collection of several is unchanged."""
    members = document["Members"]
    alone = tree.get(members[0]["@odata.id"]) if len(members) == 1 else None
    return alone or document


def _page(document: Document, query: dict[str, str]) -> Document:
    if "$top" not in query and "$skip" not in query:
        return document
    first, most = int(query.get("$skip", "0")), int(query.get("$top", "1000000"))
    if "Members" not in document or first < 0 or most < 0:
        raise ValueError("$top, $skip")
    return document | {"Members": document["Members"][first : first + most]}


def expanded(tree: Tree, document: Document, what: str, levels: int) -> Document:
    """Replaces references by their resources: `.` subordinate resources, `~` those in Links, `*` both."""

    def expand_value(value: Any, linked: bool) -> Any:
        if isinstance(value, list):
            return [expand_value(item, linked) for item in value]
        if not isinstance(value, dict):
            return value
        if list(value) == ["@odata.id"]:
            found = tree.get(normal(value["@odata.id"])) if linked == (what == "~") or what == "*" else None
            if found is None:
                return value
            return expanded(tree, found, what, levels - 1) if levels > 1 else found
        return {key: expand_value(inner, linked or key == "Links") for key, inner in value.items()}

    return {key: expand_value(value, key == "Links") for key, value in document.items()}
