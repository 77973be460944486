"""Slurm's host lists: `n[001-003,7],rack[0-1]node[0-3]` as names, in order, bounded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

MAX_HOSTS = 200_000
"""Most names of one list. Chosen: Slurm's own limit is 65,533 nodes (MAX_SLURM_NODES)."""
MAX_RANGES = 8
"""Most brackets in a name. Chosen: Slurm allows as many dimensions as a torus has, at most 5."""
_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def expand_hosts(text: str) -> list[str]:
    """The names of a host list. Raises ValueError with the problem."""
    found: list[str] = []
    for item in _split(text):
        pieces = _PART.split(item)
        if any(c in piece for piece in pieces[::2] for c in "[]") or len(pieces) > 2 * MAX_RANGES:
            raise ValueError(f"{item[:60]!r}: brackets that do not match")
        # one more than the most, so that a short text does not become millions of names before they are counted
        choices = [list(itertools.islice(_numbers(p), MAX_HOSTS + 1)) if i % 2 else [p] for i, p in enumerate(pieces)]
        size = 1
        for choice in choices:
            size *= len(choice)
        if len(found) + size > MAX_HOSTS:
            raise ValueError(f"over {MAX_HOSTS:,} names")
        found += map("".join, itertools.product(*choices))
    return found


def _split(text: str) -> Iterator[str]:
    """The items between commas outside of brackets."""
    depth, start = 0, 0
    for i, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if c == "," and depth == 0:
            if item := text[start:i].strip():
                yield item
            start = i + 1
    if item := text[start:].strip():
        yield item


def _numbers(text: str) -> Iterator[str]:
    """The numbers of `001-003,7`, as wide as they are written."""
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"range {part[:40]!r}")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MAX_HOSTS:
            raise ValueError(f"range {part[:40]!r}")
        yield from (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
