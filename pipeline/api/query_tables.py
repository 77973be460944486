"""The store's tables as a query process sees them: each scan asks the pipeline for its columns and rows as Arrow."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset

from pipeline.api.query_channel import Channel

Term = tuple[str, str, str, str]
"""Column, comparison, kind of the value (time, text or number) and the value as text. Numbers are whole: others may be
printed rounded."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()]| and |[^"() ]+| ', re.DOTALL)
_COMPARISON = re.compile(
    r'\((?P<column>\w+) (?P<operator>==|>=|<=|>|<) (?:"(?P<text>[^"\\]*)"'
    r"|(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?Z)|(?P<number>-?\d{1,30}))\)"
)


class StoreTable(pyarrow.dataset.Dataset):  # type: ignore[misc]
    """One table. DuckDB takes it for an Arrow dataset, so it passes the columns and the filter that a scan needs."""

    def __init__(self, name: str, schema: pa.Schema, channel: Channel) -> None:
        self._name, self._own_schema, self._channel = name, schema, channel

    @property
    def schema(self) -> pa.Schema:
        return self._own_schema

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> Scan:
        """A scan of these columns whose rows all pass the filter; DuckDB does not apply it again."""
        names = self._own_schema.names if columns is None else list(columns)
        text = "" if filter is None else str(filter)
        needed = {*names, *words(text)}
        ours, theirs = socket.socketpair()
        with theirs:
            wanted = [name for name in self._own_schema.names if name in needed]
            self._channel.send({"scan": self._name, "columns": wanted, "where": terms(text)}, theirs.fileno())
        return Scan(ours, pa.schema([self._own_schema.field(name) for name in names]), filter)


class Scan:
    """The rows of one scan, as they arrive."""

    def __init__(self, source: socket.socket, schema: pa.Schema, condition: Any) -> None:
        self._source, self._schema, self._condition = source, schema, condition

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with self._source, self._source.makefile("rb") as file:
            for batch in pa.ipc.open_stream(file):
                passed = batch if self._condition is None else batch.filter(self._condition)
                yield passed.select(self._schema.names)


def words(text: str) -> set[str]:
    """The words of a filter outside its quoted values: its columns, and more that are none."""
    return {word for token in _TOKEN.findall(text) if token[0] != '"' for word in re.findall(r"\w+", token)}


def terms(text: str) -> list[Term]:
    """The comparisons that every row of a filter's result passes, which the store may apply before it sends rows.

    text: a pyarrow expression as `str` writes it, `((time >= 2026-01-31 08:00:00Z) and (entity == "gpu:n1.0"))`;
    pyarrow offers no other way to look into one. What is not understood is left out: the scan applies the whole filter.
    """
    found: list[Term] = []
    for part in _conjunction(text):
        if (match := _COMPARISON.fullmatch(part)) is not None:
            kind = next(kind for kind in ("text", "time", "number") if match[kind] is not None)
            found.append((match["column"], match["operator"].replace("==", "="), kind, match[kind]))
    return found


def _conjunction(text: str) -> Iterator[str]:
    """The parts that are joined by `and`, in any depth of parentheses."""
    waiting = [text]
    while waiting:
        part = waiting.pop()
        halves = _halves(part)
        if halves is None:
            yield part
        else:
            waiting.extend(halves)


def _halves(text: str) -> tuple[str, str] | None:
    """Left and right of `(left and right)`."""
    depth = place = 0
    for token in _TOKEN.findall(text):
        if token == " and " and depth == 1:
            return text[1:place], text[place + len(token) : -1]
        depth += {"(": 1, ")": -1}.get(token, 0)
        place += len(token)
    return None
