"""HTML fragments with links: entities in a row, tables, figures. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from dashboards import links
from dashboards.words import amount

_NUMBER = ' class="fp-num"'
_EMPTY = " data-empty"


def link(text: str, address: str, title: str = "") -> str:
    """Returns a link within the dashboard as markup."""
    return links.as_markup(links.Link(text, address, title))


def entity_link(entity: str, short: bool = False) -> str:
    """Returns the link to the page about an entity. short: its own name without the kind."""
    return links.as_markup(links.entity_link(entity, entity.partition(":")[2] if short else ""))


def entity_links(entities: Sequence[str], total: int | None = None, short: bool = False) -> str:
    """Returns links in a row; with a larger total, how many are left out."""
    more = (total or len(entities)) - len(entities)
    shown = ", ".join(entity_link(entity, short) for entity in entities)
    return f"{shown} and {more:,} more" if more > 0 else shown


def table(head: Sequence[str], rows: Iterable[Sequence[str]], empty: str, caption: str = "", numbers: int = 0) -> str:
    """Returns a table whose cells are markup, or `empty` without rows.

    caption: read aloud.  numbers: how many of the last columns are right-aligned.
    """
    found = list(rows)
    if not found:
        return f'<p class="fp-empty">{escape(empty)}</p>'
    first = len(head) - numbers
    heads = "".join(
        f'<th scope="col"{_NUMBER if i >= first else ""}>{escape(text)}</th>' for i, text in enumerate(head)
    )
    body = "".join(f"<tr>{_cells(row, head, first)}</tr>" for row in found)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="fp-scroll" tabindex="0" role="region" aria-label="{escape(caption or head[0])}">'
        f'<table class="fp-table fp-linked">{title}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cells(row: Sequence[str], head: Sequence[str], first: int) -> str:
    """Returns the cells of a row. On a phone each is a line with the name of its column, without the empty ones."""
    return "".join(_cell(cell, head[i], i >= first) for i, cell in enumerate(row))


def _cell(cell: str, name: str, is_number: bool) -> str:
    kind = f"{_NUMBER if is_number else ''}{'' if cell else _EMPTY}"
    return f'<td data-head="{escape(name)}"{kind}><span>{cell}</span></td>'


def tile(number: str, word: str, below: str, tone: str, address: str = "") -> str:
    """Returns a figure with its word. tone: a colour name of the palette, or `none`. address: where it leads."""
    inside = (
        f'<b>{escape(number)}</b><span class="fp-word">{escape(word)}</span>'
        f'<span class="fp-sub">{escape(below) or "&nbsp;"}</span>'
    )
    if not address:
        return f'<div class="fp-tile fp-tile-{escape(tone)}" role="listitem">{inside}</div>'
    return (
        f'<div role="listitem" class="fp-tile-box"><a class="fp-tile fp-tile-{escape(tone)}" '
        f'href="{escape(address)}">{inside}</a></div>'
    )


def tiles(fragments: Iterable[str]) -> str:
    """Returns figures in a row."""
    return f'<div class="fp-tiles fp-tiles-fit" role="list">{"".join(fragments)}</div>'


def anchor(name: str) -> str:
    """Returns a place on the page that `#name` leads to."""
    return f'<span id="{escape(name)}" class="fp-anchor"></span>'


def kinds(counts: Mapping[str, int], words: Mapping[str, tuple[str, str]]) -> str:
    """Returns numbers by kind: `8 GPUs, 4 ports`. words: kind -> (one, many)."""
    return ", ".join(amount(number, *words.get(kind, (kind, kind))) for kind, number in counts.items())
