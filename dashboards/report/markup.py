"""The parts that all reports share: an HTML document without scripts or links to files, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path


def write_document(title: str, about: str, sections: Sequence[str]) -> str:
    """Returns one HTML document. sections: markup; title and about are escaped."""
    style = (Path(__file__).parent / "report.css").read_text()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p>{''.join(sections)}</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> str:
    """Returns a table, or the text `empty` without rows; all cells are escaped."""
    if not rows:
        return f"<p>{escape(empty)}</p>"
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="list"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
