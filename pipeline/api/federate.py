"""`/federate`: the newest values of all devices as a Prometheus page, selected by `match[]` as in Prometheus itself.

A metric is `fleetpulse_` and the name of the signal with underscores for dots, a counter with `_total`. Labels are
`entity`, `node` (whose agent sends it), `site` and `simulated`. Each value has the time at which it was measured.

Selectors are `NAME{label="value", ...}` with `=`, `!=`, `=~` and `!~`. Expressions are RE2 (source: Prometheus,
querying basics) and run in Arrow's RE2, whose time is linear in the text: a hostile one cannot hang the pipeline.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from pipeline.model.errors import OverLimit, UsageError
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE, CLASSES, Signal, column_of
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues

MAX_SAMPLES = 250_000
"""Most samples on a page (chosen: 35 MB; two signals of 100,000 GPUs)."""
MAX_SELECTORS, MAX_MATCHERS, MAX_TEXT = 32, 16, 4096
"""Bounds on selectors of a request, matchers of a selector, and characters of a selector (chosen: far beyond use)."""
STALE = 300 * SECOND
"""Age from which a value is left out (us; source: Prometheus looks back 5 minutes)."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_LABELS = ("entity", "node", "site", "simulated")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_MATCHER = re.compile(
    r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*("(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`)\s*'
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
_HELP = str.maketrans({"\\": "\\\\", "\n": "\\n"})
_HELP_OPEN = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition of a selector. label: `__name__` for the name of the metric."""

    label: str
    operator: str
    value: str

    def select(self, texts: pa.Array) -> NDArray[np.bool_]:
        """Returns which of the texts match. Raises UsageError for an expression that RE2 does not accept."""
        if self.operator in ("=", "!="):
            found = pa.compute.equal(texts, self.value)
        else:
            try:
                pa.compute.match_substring_regex(pa.scalar(""), self.value)  # `a)|(?:b` is one only in parentheses
                found = pa.compute.match_substring_regex(texts, f"^(?s:{self.value})$")
            except pa.ArrowInvalid as error:
                raise UsageError(f"match[]: {self.value!r}: not an expression of RE2: {error}") from error
        return np.asarray(found) ^ self.operator.startswith("!")


def parse_selector(text: str) -> list[Matcher]:
    """Parses `NAME{label="value"}`. Raises UsageError, also for a selector that matches every series."""
    wrong = f'match[] = {text[:200]!r}: expected a selector such as fleetpulse_gpu_power{{node=~"n1.*"}}'
    if len(text) > MAX_TEXT:
        raise UsageError(f"match[]: {len(text)} characters; expected at most {MAX_TEXT}")
    rest, found = text.strip(), list[Matcher]()
    if (name := _NAME.match(rest)) is not None:
        found.append(Matcher("__name__", "=", name[0]))
        rest = rest[name.end() :].strip()
    if rest:
        if rest[0] != "{" or rest[-1] != "}":
            raise UsageError(wrong)
        rest = rest[1:-1].strip()
        while rest:
            if (part := _MATCHER.match(rest)) is None or len(found) >= MAX_MATCHERS:
                raise UsageError(wrong)
            found.append(Matcher(part[1], part[2], _unquote(part[3])))
            rest = rest[part.end() :]
            if rest and not rest.startswith(","):
                raise UsageError(wrong)
            rest = rest[1:].strip()
    if not any(bool(m.select(pa.array([""]))[0]) is False for m in found):
        raise UsageError(f"{wrong}; at least one condition must not match an empty text")
    return found


def _unquote(text: str) -> str:
    if text[0] == "`":
        return text[1:-1]
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], "\\" + m[1]), text[1:-1], flags=re.DOTALL)


def write_page(
    selectors: Sequence[str],
    devices: Devices,
    read: Callable[[str], CurrentValues],
    now: int,
    open_metrics: bool = False,
) -> bytes:
    """Returns the page. read: the newest values of a class. Raises UsageError, OverLimit for more than MAX_SAMPLES."""
    if not 0 < len(selectors) <= MAX_SELECTORS:
        raise UsageError(f"match[]: found {len(selectors)} selectors; expected 1 to {MAX_SELECTORS}")
    parsed = [parse_selector(text) for text in selectors]
    left, parts, taken = MAX_SAMPLES, list[bytes](), set[str]()
    for device_class in CLASSES:
        current = read(device_class)
        families = [f for f in _list_families(device_class, current.values) if f.name not in taken]
        taken |= {f.name for f in families}
        wanted = _match(parsed, families, devices, device_class) if families else {}
        for family in families:
            if family.name not in wanted:
                continue
            count, lines = family.write(current, devices, wanted[family.name], now, open_metrics)
            if (left := left - count) < 0:
                raise OverLimit(f"match[] selects more than {MAX_SAMPLES} values; select fewer, or scrape in parts")
            parts.append(lines)
    return b"".join([*parts, b"# EOF\n" if open_metrics else b""])


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric: the name in the text format, and its signal."""

    name: str
    column: str
    signal: Signal

    def write(
        self, current: CurrentValues, devices: Devices, wanted: NDArray[np.bool_], now: int, open_metrics: bool
    ) -> tuple[int, bytes]:
        """Returns the number of samples and their lines, in order of the devices. wanted: by slot."""
        values, times, slot = current.values[self.column], current.times[self.column], current.slot
        present = values != np.iinfo(values.dtype).max if values.dtype.kind == "u" else ~np.isnan(values)
        at = np.flatnonzero((slot >= 0) & (slot < len(wanted)) & present & (now - times < STALE))
        at = at[wanted[slot[at]]]
        if not len(at):
            return 0, b""
        labels = _write_labels(devices, self.signal.device_class, slot[at])
        moment = pa.array(times[at] // 1000)
        stamp = moment.cast(pa.string())
        if open_metrics:  # seconds with a fraction instead of milliseconds
            stamp = pa.compute.binary_join_element_wise(
                pa.compute.utf8_slice_codeunits(stamp, 0, -3), pa.compute.utf8_slice_codeunits(stamp, -3), "."
            )
        number = _write_numbers(values[at])
        name = pa.scalar(self.name)
        lines = pa.compute.binary_join_element_wise(name, labels, number, pa.scalar(" "), stamp, pa.scalar("\n"), "")
        body = pa.compute.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "")[0].as_buffer().to_pybytes()
        return len(at), self._head(open_metrics) + body

    def _head(self, open_metrics: bool) -> bytes:
        kind = "counter" if self.signal.kind == "counter" else "gauge"
        name = self.name.removesuffix("_total") if open_metrics else self.name
        text = f"{self.signal.help} ({self.signal.unit})".translate(_HELP_OPEN if open_metrics else _HELP)
        return f"# HELP {name} {text}\n# TYPE {name} {kind}\n".encode()


def _list_families(device_class: str, columns: Iterable[str]) -> Iterator[_Family]:
    """All metrics of a class: signals of the catalogue first, then others, whose names are made to fit."""
    known = {s.column: s for s in CATALOGUE.values() if s.device_class == device_class}
    taken = set[str]()
    for column in sorted(columns, key=lambda c: (c not in known, c)):
        signal = known.get(column) or Signal(
            f"{device_class}.{column}", "1", "gauge", device_class, "f8", "Custom signal"
        )
        name = metric_name(signal)
        if name not in taken:  # two custom names may differ in characters that a metric cannot have
            taken.add(name)
            yield _Family(name, column, signal)


def metric_name(signal: Signal) -> str:
    """Returns the name of a signal as a metric: gpu.energy -> fleetpulse_gpu_energy_total."""
    column = column_of(signal.name, signal.device_class)
    name = re.sub(r"[^a-zA-Z0-9_]", "_", f"fleetpulse_{signal.device_class}_{column}")
    return f"{name}_total" if signal.kind == "counter" else name


def _match(
    selectors: Sequence[Sequence[Matcher]], families: Sequence[_Family], devices: Devices, device_class: str
) -> dict[str, NDArray[np.bool_]]:
    """Returns the metrics that a selector names -> which devices it selects, by slot."""
    names = pa.array([family.name for family in families])
    number = len(devices.names(device_class))
    columns = _read_labels(devices, device_class, number)
    found: dict[str, NDArray[np.bool_]] = {}
    for matchers in selectors:
        chosen, kept = np.ones(len(families), bool), np.ones(number, bool)
        for matcher in matchers:
            if matcher.label == "__name__":
                chosen &= matcher.select(names)
            elif matcher.label in columns:
                kept &= matcher.select(columns[matcher.label])
            else:  # a label that no series has is empty
                kept &= matcher.select(pa.array([""]))[0]
        for i in np.flatnonzero(chosen).tolist():
            name = families[i].name
            found[name] = found[name] | kept if name in found else kept
    return found


def _read_labels(devices: Devices, device_class: str, number: int) -> Mapping[str, pa.Array]:
    origins = list(devices.origins(device_class)[:number])
    columns: list[Any] = [list(devices.names(device_class)[:number]), *([row[i] for row in origins] for i in range(2))]
    entity, site, node = columns
    simulated = ["true" if row[2] else "false" for row in origins]
    return {
        name: pa.array(values, pa.string())
        for name, values in zip(_LABELS, (entity, node, site, simulated), strict=True)
    }


def _write_labels(devices: Devices, device_class: str, slots: NDArray[np.int32]) -> pa.Array:
    """Returns `{entity="...",...} ` of devices."""
    number = int(slots.max()) + 1
    columns = _read_labels(devices, device_class, number)
    parts: list[Any] = []
    for i, name in enumerate(_LABELS):
        escaped = columns[name].take(pa.array(slots))
        for raw, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
            escaped = pa.compute.replace_substring(escaped, raw, written)
        parts += [pa.scalar(f'{"," if i else "{"}{name}="'), escaped, pa.scalar('"')]
    return pa.compute.binary_join_element_wise(*parts, pa.scalar("} "), "")


def _write_numbers(values: NDArray[Any]) -> pa.Array:
    texts = pa.array(values).cast(pa.string())
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        infinite = pa.array(np.where(values > 0, "+Inf", "-Inf"))
        texts = pa.compute.if_else(pa.array(np.isfinite(values)), texts, infinite)
    return texts


# --- the pipeline's own metrics ---------------------------------------------------------------------------------------


def render_metrics(counters: Mapping[str, float]) -> str:
    """One HELP and one TYPE line per family, then its samples. A family named `..._total` is a counter."""
    families: dict[str, list[tuple[str, float]]] = {}
    for name, value in counters.items():
        families.setdefault(name.partition("{")[0], []).append((name, value))
    lines: list[str] = []
    for family, samples in sorted(families.items()):
        kind = "counter" if family.endswith("_total") else "gauge"
        lines += [f"# HELP {family} {_help(family)}", f"# TYPE {family} {kind}"]
        lines += [f"{name} {_number(value)}" for name, value in samples]
    return "\n".join(lines) + "\n"


def _help(family: str) -> str:
    """Returns the family's name in words: fleetpulse_rows_total -> 'Rows, since the start.'"""
    words = family.removeprefix("fleetpulse_").removesuffix("_total").replace("_", " ")
    since = ", since the start." if family.endswith("_total") else ", now."
    return words[:1].upper() + words[1:] + since


def _number(value: float) -> str:
    """Formats a sample: whole numbers without a point, infinities in Prometheus syntax."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
