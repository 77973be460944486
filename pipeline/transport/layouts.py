"""Layouts: the text in a telemetry message that names its classes, entities and signals, parsed once and cached.

Version 1 is JSON with site, node and per block [class, entities, [[signal, type], ...]]. Version 2 has each list of
entities once, in `entities`, and per block [class, number of its list, [[signal, type], ...]]. In its lists
["gpu:n1.0", 8] are the entities gpu:n1.0 to gpu:n1.7. In its signals the class is left out (".power" of class gpu), and
"=" precedes a name that begins with "." or "=".
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pipeline.model.errors import WireError
from pipeline.model.names import MAX_NAME
from pipeline.model.signals import TYPES

MAX_LAYOUT = 256 << 10
"""Maximum layout: 256 KiB is 100 times that of a node with 16 GPUs and 16 ports."""
MAX_NAMES = 1 << 20
"""Maximum characters of all entities of a layout; chosen: four times those of the largest layout of version 1."""
MAX_ENTITIES = 1 << 15
"""Maximum entities of a layout; chosen: those of the largest layout of version 1 with names of five characters."""
LAYOUTS_BYTES = 512 << 20
"""Maximum total text of cached layouts, which take about as much when parsed. A node of 8 GPUs has 28 kB of layouts
that come each minute (the intervals that a message joins have their own layout), 12,500 such nodes 350 MB. Without the
cache each message is parsed again: 1 ms instead of 0.02 ms for a layout of 10 kB."""
_TOO_MANY = f"layout has more than {MAX_ENTITIES} entities or {MAX_NAMES} characters of names"
_SHAPES = 4096  # cached; nodes with equal hardware and the same agent share a shape
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})", re.DOTALL)

_SIGNALS, _SIGNALS_BYTES = 512, 64 << 10  # parsed signals kept, and their longest text: at most 32 MiB of text
_BLOCKS = b',"blocks":'

Signals = tuple[tuple[str, str], ...]
Numbered = tuple[tuple[str, int, Signals], ...]
Lists = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Names and types of one block."""

    device_class: str
    entities: tuple[str, ...]
    signals: Signals


class Shape:
    """Everything about the values of a layout except names of site, node and entities. Interned: compared by identity.

    blocks: per block its class, number of devices, and (signal, type) pairs.
    lists:  per block the number of its list of entities; blocks with the same number have the same entities.
    plans:  how the values lie in a body, by number of ticks (wire.py).
    """

    def __init__(self, blocks: tuple[tuple[str, int, Signals], ...], lists: tuple[int, ...]) -> None:
        self.blocks, self.lists = blocks, lists
        self.plans: dict[object, Any] = {}


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Layout:
    """Everything about a telemetry body except its values. Parsed once, so compared by identity."""

    site: str
    node: str
    blocks: tuple[BlockLayout, ...]
    shape: Shape


class LayoutCache:
    """LRU cache of parsed layouts by digest of their texts, limited to `most` bytes of text."""

    def __init__(self, most: int) -> None:
        self._max_bytes, self._size = most, 0
        self._known: OrderedDict[bytes, tuple[Layout, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get_layout(self, text: bytes) -> Layout:
        """The parsed layout of a text of any version. Raises WireError."""
        from hashlib import sha256  # here: agents only encode, and save 3 MiB for OpenSSL

        key = sha256(text).digest()  # the text itself would take most of the memory
        with self._lock:
            if found := self._known.get(key):
                self._known.move_to_end(key)
                return found[0]
        layout, size = _parse_layout(text)
        with self._lock:
            if key not in self._known:
                self._known[key] = layout, size
                self._size += size
            while self._size > self._max_bytes:
                _, (_, size) = self._known.popitem(last=False)
                self._size -= size
        return layout

    def __len__(self) -> int:
        return len(self._known)


def format_json(value: object) -> bytes:
    """Compact JSON. Raises ValueError on numbers that JSON does not have."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def format_layout(site: str, node: str, blocks: Iterable[tuple[str, tuple[str, ...], Signals]]) -> bytes:
    """The text of a layout of version 2. Raises WireError if it is too long."""
    lists: dict[tuple[str, ...], int] = {}
    found = [
        [device_class, lists.setdefault(entities, len(lists)), [[_strip_class(n, device_class), t] for n, t in signals]]
        for device_class, entities, signals in blocks
    ]
    text = format_json({"site": site, "node": node, "entities": [_count_runs(e) for e in lists], "blocks": found})
    names = sum(len(name) for entities in lists for name in entities)
    if len(text) > MAX_LAYOUT or names > MAX_NAMES or sum(map(len, lists)) > MAX_ENTITIES:
        raise WireError(f"layout of {len(text)} bytes, expected at most {MAX_LAYOUT}: send fewer devices per batch")
    return text


def _strip_class(name: str, device_class: str) -> str:
    if name.startswith(f"{device_class}."):
        return name[len(device_class) :]
    return f"={name}" if name[:1] in (".", "=") else name


def _count_runs(entities: Sequence[str]) -> list[Any]:
    """The entities, those whose last number counts up as [first, how many]."""
    found: list[Any] = []
    stem, following = None, 0
    for entity in entities:
        numbered = _NUMBERED.fullmatch(entity)
        if numbered and found and stem == numbered[1] and following == int(numbered[2]):
            found[-1] = [found[-1], 2] if isinstance(found[-1], str) else [found[-1][0], found[-1][1] + 1]
        else:
            found.append(entity)
        stem, following = (numbered[1], int(numbered[2]) + 1) if numbered else (None, 0)
    return found


def _expand_runs(listed: Iterable[Any]) -> tuple[str, ...]:
    """The entities of a list. Raises WireError on too many, TypeError or ValueError on other content."""
    found: list[str] = []
    for item in listed:
        if isinstance(item, str):
            found.append(sys.intern(item))
            continue
        first, count = item
        numbered = _NUMBERED.fullmatch(first)
        if type(count) is not int or not 0 < count <= MAX_ENTITIES or numbered is None:
            raise WireError(f"layout has a run {item!r:.80} of entities, expected [name that ends in a number, count]")
        if len(found) + count > MAX_ENTITIES or len(first) * count > MAX_NAMES:  # before they are built
            raise WireError(_TOO_MANY)
        start = int(numbered[2])
        found += [sys.intern(f"{numbered[1]}{number}") for number in range(start, start + count)]
    return tuple(found)


def _parse_layout(text: bytes) -> tuple[Layout, int]:
    """The layout, and its size with all names. Entity names are interned, shapes cached: many layouts share them."""
    try:
        found, signals_of = _read_layout(text)
        site, node = found["site"], found["node"]
        if signals_of is not None:
            blocks, lists = _parse_numbered(found, signals_of)
        else:
            blocks = [
                (c, tuple(map(sys.intern, entities)), tuple((name, code) for name, code in signals))
                for c, entities, signals in found.get("blocks", ())
            ]
            lists = tuple(range(len(blocks)))
        shape = _intern_shape(tuple((c, len(entities), signals) for c, entities, signals in blocks), lists)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise WireError(f"layout is not a valid JSON object: {error}") from error
    distinct = dict(zip(lists, (entities for _, entities, _ in blocks), strict=True)).values()
    check_texts([site, node, *(entity for entities in distinct for entity in entities)])
    for entities in distinct:
        if len(set(entities)) != len(entities) or not all(":" in entity for entity in entities):
            raise WireError("layout names an entity twice in one block, or one that is not kind:name")
    named = zip(blocks, shape.blocks, strict=True)
    layout = Layout(site, node, tuple(BlockLayout(c, e, signals) for (_, e, _), (c, _, signals) in named), shape)
    return layout, max(len(text), sum(len(entity) for entities in distinct for entity in entities))


def _parse_numbered(found: Any, signals_of: Numbered) -> tuple[list[tuple[str, tuple[str, ...], Signals]], Lists]:
    """The blocks of version 2, and the number of each one's list. Raises WireError and what _parse_layout catches."""
    listed: list[tuple[str, ...]] = []
    names = total = 0
    for entities in found["entities"]:
        listed.append(_expand_runs(entities))
        names, total = names + sum(map(len, listed[-1])), total + len(listed[-1])
        if names > MAX_NAMES or total > MAX_ENTITIES:
            raise WireError(_TOO_MANY)
    lists = tuple(number for _, number, _ in signals_of)
    if any(number >= len(listed) for number in lists) or len(set(lists)) != len(listed):
        raise WireError(f"layout has {len(listed)} lists of entities, its blocks use {sorted(set(lists))!r:.80}")
    return [(device_class, listed[number], signals) for device_class, number, signals in signals_of], lists


def _parse_signals(listed: Iterable[Any]) -> Numbered:
    """Class, number of the list of entities, and signals of each block of version 2."""
    found = []
    for device_class, number, signals in listed:
        check_texts([device_class])
        if type(number) is not int or number < 0:
            raise WireError(f"layout has list of entities {number!r:.20}, expected a number from 0")
        if len(device_class) > MAX_NAME:  # it is repeated in each name
            raise WireError(f"layout has a class of {len(device_class)} characters, expected at most {MAX_NAME}")
        found.append((device_class, number, tuple((_add_class(name, device_class), code) for name, code in signals)))
    return tuple(found)


@lru_cache(_SIGNALS)
def _parse_signals_text(text: bytes) -> Numbered:
    return _parse_signals(json.loads(text))


def _read_layout(text: bytes) -> tuple[Any, Numbered | None]:
    """The object of a layout, and its blocks if they are of version 2; nodes of equal hardware share their text."""
    head, key, tail = text.rpartition(_BLOCKS)
    if key and b'"entities":' in head and len(tail) <= _SIGNALS_BYTES:
        with contextlib.suppress(ValueError):  # not as our writer writes it
            found = json.loads(head + b"}")
            return found, _parse_signals_text(tail[:-1])
    found = json.loads(text)
    return found, _parse_signals(found["blocks"]) if "entities" in found else None


def _add_class(name: str, device_class: str) -> str:
    if name.startswith("."):
        return device_class + name
    return name.removeprefix("=")


def check_texts(texts: list[str]) -> None:
    """Raises WireError on anything but text."""
    if not all(isinstance(text, str) for text in texts):
        raise WireError("layout has names or types that are not text")
    check_text("".join(texts))


def check_text(text: str) -> None:
    """Raises WireError on unpaired surrogates: valid in JSON, but they cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WireError(f"text is not valid Unicode: {error.reason} at position {error.start}") from error


@lru_cache(_SHAPES)
def _intern_shape(blocks: tuple[tuple[str, int, Signals], ...], lists: tuple[int, ...]) -> Shape:
    """The shape of blocks. Raises WireError on non-text, unknown types or a signal twice in one block."""
    check_texts([c for c, _, _ in blocks] + [text for _, _, signals in blocks for pair in signals for text in pair])
    for _, _, signals in blocks:
        if any(code not in TYPES for _, code in signals):
            raise WireError(f"layout has types other than {', '.join(TYPES)}")
        if len({name for name, _ in signals}) != len(signals):
            raise WireError("layout names a signal twice in one block")
    return Shape(blocks, lists)
