"""Answers as JSON or Arrow. In JSON: times as 27 characters, missing values and NaN as null, bytes as base64."""

from __future__ import annotations

import base64
import datetime
import decimal
import io
import json
import math
import uuid
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.model.errors import InvalidQuery

ARROW = "application/vnd.apache.arrow.stream"
TRUNCATED_HEADER = "X-Truncated"


def write_json(batches: pa.RecordBatchReader, rows: int, size: int) -> tuple[list[bytes], bool]:
    """Returns `{"columns", "rows", "truncated"}` in parts, and whether it was cut after `rows` rows or `size` bytes."""
    parts, count, length, truncated = [b'{"columns":%b,"rows":[' % encode_json(batches.schema.names)], 0, 0, False
    for batch in filter(len, batches):
        columns = [_values(column) for column in pa.Table.from_batches([batch]).slice(0, rows - count).columns]
        text = encode_json(list(zip(*columns, strict=True)))[1:-1]
        truncated = count + len(batch) > rows or length + len(text) > size
        if text and length + len(text) <= size:
            parts += [b"," if count else b"", text]
        count, length = count + len(batch), length + len(text)
        if truncated:
            break
    return [*parts, b'],"truncated":%b}' % encode_json(truncated)], truncated


def encode_json(body: Any) -> bytes:
    """Returns compact JSON. Raises ValueError on NaN, which JSON does not have."""
    return json.dumps(body, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode()


def write_arrow(batches: pa.RecordBatchReader, rows: int, size: int) -> tuple[list[bytes], bool]:
    """Returns an Arrow IPC stream in parts, and whether it was cut after `rows` rows or `size` bytes."""
    sink, count, truncated = io.BytesIO(), 0, False
    with pa.ipc.new_stream(sink, batches.schema) as writer:
        for batch in filter(len, batches):
            truncated = count + len(batch) > rows or sink.tell() + batch.nbytes > size
            if sink.tell() + batch.nbytes <= size:
                writer.write_batch(batch.slice(0, rows - count))
            count += len(batch)
            if truncated:
                break
    return [sink.getvalue()], truncated


def table_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Returns the rows as JSON objects."""
    names, columns = table.column_names, [_values(column) for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Returns one column as JSON values; numbers and times by a fast path."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return _times(column)
    try:
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string(kind):
            return column.to_pylist()  # type: ignore[no-any-return]
        return [_plain(value) for value in column.cast(_zoneless(kind)).to_pylist()]
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise InvalidQuery(f"a value of type {kind} has no JSON form ({error}); ask for {ARROW}") from error


def _times(column: pa.ChunkedArray) -> list[str | None]:
    """Formats times as `YYYY-MM-DDTHH:MM:SS.ffffffZ`. A time without a zone is UTC."""
    micros = column.cast(pa.timestamp("us"), safe=False).combine_chunks()
    values = micros.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False).view("datetime64[us]")
    texts = np.char.add(np.datetime_as_string(values, unit="us"), "Z").tolist()
    return [text if valid else None for text, valid in zip(texts, micros.is_valid().to_pylist(), strict=True)]


def _zoneless(kind: pa.DataType) -> pa.DataType:
    """Returns the type with all times inside it in microseconds without zone: no zone database is needed."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us")
    if pa.types.is_map(kind):
        return pa.map_(_zoneless(kind.key_type), _zoneless(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _zoneless(f.type)) for f in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_zoneless(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_zoneless(kind.value_type))
    return kind


def _plain(value: Any) -> Any:
    """Returns one value of any other type as JSON."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, decimal.Decimal):
        # DuckDB's sum() of whole numbers is a HUGEINT; Arrow has it as a decimal without fraction
        return int(value) if value == value.to_integral_value() and value.as_tuple().exponent == 0 else float(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(timespec="microseconds") + "Z"
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (datetime.date, datetime.time, uuid.UUID)):
        return str(value)
    raise InvalidQuery(f"a {type(value).__name__} has no JSON form; ask for {ARROW}")
