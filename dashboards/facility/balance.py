"""HTML of how evenly power is drawn: over the phases and feeds of PDUs, and over the supplies of nodes."""

from __future__ import annotations

from dashboards import linked
from dashboards.facility.answers import Balance, Supplies, UnevenNode
from dashboards.markup import badge
from dashboards.words import amount, percent, quantity

UNBALANCE = 0.1
"""Unbalance of the phases from which a PDU is marked. Chosen: single-phase loads give a few percent; a lost phase far
more."""
FEED = 0.15
"""Difference to the even share of a feed from which it is marked. Chosen: supplies of nodes share within 10 %."""


def cell(balance: Balance | None) -> str:
    """Returns the balance of a PDU; empty if nothing is known."""
    texts = []
    if balance is not None and balance.phases is not None:
        word = f"phases {percent(balance.phases)} off"
        of = balance.circuit or ""
        where = f" ({linked.entity_link(of)})" if of.startswith("circuit:") else ""
        texts.append((badge(word.upper(), "degraded") if balance.phases > UNBALANCE else word) + where)
    if balance is not None and balance.share is not None:
        word = f"{percent(balance.share)} of {balance.feeds} feeds"
        uneven = abs(balance.share - 1 / balance.feeds) > FEED / balance.feeds
        texts.append(badge(word.upper(), "degraded") if uneven else word)
    return "; ".join(texts)


def supplies(found: Supplies | None) -> str:
    """Returns on how many nodes the power supplies share the load, and the nodes where they do not."""
    if found is None:
        return '<p class="fp-empty">This API does not compare the supplies of nodes.</p>'
    if not found.nodes:
        return '<p class="fp-empty">No node reports the load of two power supplies: no BMC of a node is read.</p>'
    even = f"{found.nodes - found.uneven:,} of {amount(found.nodes, 'node', 'nodes')} share the load evenly"
    text = f'<p class="fp-empty">{even}: no supply is more than {percent(found.limit)} above the mean of its node.</p>'
    if not found.uneven:
        return text
    more = found.uneven - len(found.worst)
    head = ("Node", "Highest supply", "Above the mean", "All supplies")
    table = linked.table(head, map(_row, found.worst), "", "Nodes with uneven power supplies")
    return text + table + (f'<p class="fp-empty">{more:,} more nodes are not listed.</p>' if more > 0 else "")


def _row(one: UnevenNode) -> tuple[str, ...]:
    loads = ", ".join(quantity(watts, "W") for _, watts in sorted(one.loads.items()))
    return linked.entity_link(one.node), linked.entity_link(one.supply), percent(one.excess), loads
