"""docs/xids.md shows the tables that are shipped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agents.collectors.gpu import xid_table
from agents.collectors.host import kernel_patterns

PAGE = Path(__file__).parents[2] / "docs" / "xids.md"


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def codes(found: Iterable[int | str]) -> str:
    return ", ".join(map(str, sorted(found, key=lambda code: (isinstance(code, str), code))))


def xid_rows() -> str:
    known = sorted(xid_table.load_xid_table().xids.values(), key=lambda x: x.code)
    rows = ((x.code, x.name, x.group, x.severity, x.action, x.next_action, codes(x.follows), codes(x.peers), ", ".join(x.products)) for x in known)  # fmt: skip # noqa: E501
    return table(("XID", "name", "class", "severity", "action", "then", "follows", "peers", "products"), rows)


def sxid_rows() -> str:
    known = sorted(xid_table.load_xid_table().sxids.values(), key=lambda x: x.code)
    rows = ((x.code, x.name, x.severity, x.reach, x.action, x.next_action) for x in known)
    return table(("SXid", "name", "severity", "reach", "action", "then"), rows)


def pattern_rows() -> str:
    rows = ((p.name, p.group, p.severity) for p in kernel_patterns.load_patterns().patterns)
    return table(("pattern", "class", "severity"), rows)


def test_the_page_shows_every_code_and_pattern_as_it_is_shipped() -> None:
    page = PAGE.read_text()
    for rows in (xid_rows(), sxid_rows(), pattern_rows()):
        assert rows in page, f"docs/xids.md is out of step; wanted in it:\n{rows}"
