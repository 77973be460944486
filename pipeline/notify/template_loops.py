"""Loops of templates of receivers: they end soon, since each runs over the alerts once, or over their labels.

A template runs in the thread that sends the pages of its receiver: one that does not end would end the pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jinja2 import nodes

MOST_NESTED = 3
"""Loops in each other: groups of alerts, alerts, labels. Chosen."""
MOST_LISTED = 20
"""Items of a list that is written in a template and that a loop runs over. Chosen."""
ALERTS = "alerts"
_TABLES = frozenset({"commonLabels", "commonAnnotations", "groupLabels"})
_PARTS = frozenset({"labels", "annotations"})
_ORDERING = frozenset(
    {"selectattr", "rejectattr", "select", "reject", "sort", "unique", "list", "groupby", "map", "items"}
)
"""Filters that return at most as many items as they get."""
_COUNTING = frozenset({"length", "count"})


def find_endless(template: nodes.Template) -> str | None:
    """Returns the fault of the loops of a template, with its line; None if they end soon."""
    stored = Counter(node.name for node in template.find_all(nodes.Name) if node.ctx in ("store", "param"))
    for name in sorted({ALERTS, *_TABLES} & set(stored)):
        return f"sets {name}; expected another name"
    members = Counter(found for loop in template.find_all(nodes.For) if (found := _name_members(loop)))
    groups = {found for found, number in members.items() if stored[found] == number}
    return next(_check(template, (), groups), None)


def _check(node: nodes.Node, outer: tuple[nodes.For, ...], groups: set[str]) -> Iterator[str]:
    """Yields the faults below a node. outer: the loops around it.  groups: names of alerts of a group."""
    if outer and _is_long(node):
        yield f"line {node.lineno}: all alerts or members in a loop; expected them outside of loops, or |length"
    if not isinstance(node, nodes.For):
        skipped = isinstance(node, nodes.Filter) and node.name in _COUNTING and _is_long(node.node)
        for child in () if skipped else node.iter_child_nodes():
            yield from _check(child, outer, groups)
        return
    if not _ends(node.iter, groups):
        yield (
            f"line {node.lineno}: a loop over a text or another value; "
            "expected one over alerts, labels, annotations or change.incident.members"
        )
    if len(outer) >= MOST_NESTED:
        yield f"line {node.lineno}: {len(outer) + 1} loops in each other; expected at most {MOST_NESTED}"
    yield from _check(node.iter, outer, groups)
    for child in node.iter_child_nodes(exclude=("iter",)):
        yield from _check(child, (*outer, node), groups)


def _is_long(node: nodes.Node | None) -> bool:
    """Returns whether an expression is one of the lists that may have thousands of items."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "members" and isinstance(node.node, nodes.Getattr) and node.node.attr == "incident"
    return isinstance(node, nodes.Name) and node.name == ALERTS


def _name_members(loop: nodes.For) -> str | None:
    """Returns the name of the alerts of a group in `for value, NAME in alerts|groupby(...)`."""
    is_grouped = isinstance(loop.iter, nodes.Filter) and loop.iter.name == "groupby"
    if not is_grouped or not isinstance(loop.target, nodes.Tuple) or len(loop.target.items) != 2:
        return None
    name = loop.target.items[1]
    return name.name if isinstance(name, nodes.Name) else None


def _ends(node: nodes.Node | None, groups: set[str]) -> bool:
    """Returns whether what a loop runs over has few items: never the characters of a text."""
    if isinstance(node, nodes.Filter):
        return node.name in _ORDERING and _ends(node.node, groups)
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return len(node.items) <= MOST_LISTED
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _ends(node.node, groups)
        return isinstance(node.arg, nodes.Const) and node.arg.value in _PARTS
    if isinstance(node, nodes.Getattr):
        return node.attr in _PARTS or (node.attr == "list" and isinstance(node.node, nodes.Name)) or _is_long(node)
    return _is_long(node) or (isinstance(node, nodes.Name) and node.name in (*_TABLES, *groups))
