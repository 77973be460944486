"""Parses an exporter's text into series, and translates series into rows of our signals and custom signals.

An invalid line costs only itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.collector import Device
from pipeline.foreign.mapping import MappedMetric, MetricMapping, fill_template
from pipeline.model.signals import CATALOGUE


@dataclass(frozen=True, slots=True)
class ExporterSeries:
    """One sample: name (a counter's always with `_total`), labels, value (may be NaN), and the family's type."""

    name: str
    labels: Mapping[str, str]
    value: float
    kind: str


@dataclass(frozen=True, slots=True)
class ParsedPage:
    """One answer of an exporter. bad: invalid lines; help: text by name of the family."""

    series: tuple[ExporterSeries, ...]
    bad: int = 0
    help: Mapping[str, str] = field(default_factory=dict)


def parse_page(text: str) -> ParsedPage:
    """Parses the Prometheus text format 0.0.4 or OpenMetrics 1.0.

    Exemplars and timestamps are ignored: the time of a scrape is the agent's.
    """
    try:
        return _parse_whole(text)
    except (ValueError, KeyError, IndexError, TypeError):  # raised by the library on invalid lines
        return _parse_lines(text)


def _parse_whole(text: str) -> ParsedPage:
    families = list(_parse_families(text))
    return ParsedPage(
        tuple(_iterate_series(families)), 0, {f.name: f.documentation for f in families if f.documentation}
    )


def _parse_families(text: str) -> Iterator[Any]:
    from prometheus_client.openmetrics import parser as openmetrics
    from prometheus_client.parser import text_string_to_metric_families as plain

    read = openmetrics.text_string_to_metric_families if text.rstrip().endswith("# EOF") else plain
    yield from read(text)


def _iterate_series(families: list[Any]) -> Iterator[ExporterSeries]:
    for family in families:
        for sample in family.samples:
            yield ExporterSeries(sample.name, sample.labels, float(sample.value), family.type)


def _parse_lines(text: str) -> ParsedPage:
    """Parses a text with invalid lines; each sample gets the TYPE of its family from the lines before it."""
    from prometheus_client.parser import text_string_to_metric_families as plain

    found: list[ExporterSeries] = []
    kinds: dict[str, str] = {}
    bad = 0
    for line in text.splitlines():
        words = line.split(None, 3)
        if line.startswith("#"):
            if len(words) == 4 and words[1] == "TYPE":
                kinds[words[2]] = words[3].strip()
            continue
        if not words:
            continue
        try:
            samples = list(_iterate_series(list(plain(line.partition(" # ")[0] + "\n"))))
        except (ValueError, KeyError, IndexError, TypeError):
            bad += 1
            continue
        found += [ExporterSeries(s.name, s.labels, s.value, _family_type(s.name, kinds)) for s in samples]
    return ParsedPage(tuple(found), bad)


def _family_type(name: str, kinds: Mapping[str, str]) -> str:
    """Returns the type of a sample's family: its name, or the name without an OpenMetrics suffix."""
    stems = (name, *(name.removesuffix(end) for end in ("_total", "_sum", "_count", "_bucket", "_info", "_created")))
    return next((kinds[stem] for stem in stems if stem in kinds), "unknown")


MAX_CUSTOM_CHARS = 400
"""Most characters of a custom signal's name with its labels. Chosen."""


@dataclass(slots=True)
class Translation:
    """The result of one scrape. rows: class -> entity -> signal -> value; dropped: unmapped series beyond the limit."""

    rows: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    mapped: int = 0
    unmapped: int = 0
    dropped: int = 0


def translate_page(page: ParsedPage, names: MetricMapping, given: Mapping[str, str], most: int) -> Translation:
    """Translates a page. given: `target` and `node` of the endpoint; most: custom signals to keep."""
    found = Translation()
    gathered: dict[tuple[str, int], tuple[MappedMetric, list[float]]] = {}
    known = _build_lookups(page.series, names)
    unknown = []
    for series in page.series:
        if not math.isfinite(series.value) or series.value >= names.blank:
            continue  # exporters write it for "not supported now"
        labels = {**series.labels, **given, **_apply_lookups(series, names, known)}
        mine = [m for m in names.find_metrics(series.name) if m.matches(series.labels)]
        placed = [(m, e) for m in mine if (e := fill_template(names.entity_template(m), labels)) is not None]
        for metric, entity in placed:
            gathered.setdefault((entity, id(metric)), (metric, []))[1].append(series.value)
            _add_device(found, names, metric, entity, labels)
        found.mapped += bool(placed)
        if not placed:
            unknown.append(series)
    for (entity, _), (metric, values) in gathered.items():
        row = found.rows.setdefault(CATALOGUE[metric.signal].device_class, {}).setdefault(entity, {})
        row[metric.signal] = metric.convert(merge_values(metric, values))
    _add_custom_signals(found, unknown, page, given, most)
    return found


def merge_values(metric: MappedMetric, values: list[float]) -> float:
    """Returns one value for several series of one entity. Without `merge`, different values give NaN."""
    if metric.merge == "count":
        return float(len(values))
    if len(values) == 1:
        return values[0]
    if not metric.merge:
        return values[0] if len(set(values)) == 1 else math.nan
    if metric.merge in ("sum", "mean"):
        return math.fsum(values) / (len(values) if metric.merge == "mean" else 1)
    return min(values) if metric.merge == "min" else max(values)


def _build_lookups(series: Iterable[ExporterSeries], names: MetricMapping) -> Mapping[str, Mapping[str, str]]:
    """Returns lookup -> key -> label value."""
    found: dict[str, dict[str, str]] = {name: {} for name in names.lookups}
    metrics = {lookup.metric for lookup in names.lookups.values()}
    for one in (s for s in series if s.name in metrics):
        for name, lookup in names.lookups.items():
            value = one.labels.get(lookup.label or name)
            if one.name == lookup.metric and value and lookup.key in one.labels:
                found[name][one.labels[lookup.key]] = value
    return found


def _apply_lookups(
    series: ExporterSeries, names: MetricMapping, known: Mapping[str, Mapping[str, str]]
) -> Mapping[str, str]:
    """Returns the looked-up labels of a series; the key itself if the lookup has no entry."""
    keys = {name: series.labels.get(lookup.key) for name, lookup in names.lookups.items()}
    return {name: known[name].get(key, key) for name, key in keys.items() if key}


def _add_device(
    found: Translation, names: MetricMapping, metric: MappedMetric, entity: str, labels: Mapping[str, str]
) -> None:
    device_class = CATALOGUE[metric.signal].device_class
    before = found.devices.get(entity)
    wanted = names.attributes.get(device_class, {})
    facts = {name: labels[label] for name, label in wanted.items() if labels.get(label)}
    if before is None:
        above = (fill_template(template, labels) for template in names.parents.get(device_class, ()))
        found.devices[entity] = Device(tuple(parent for parent in above if parent and parent != entity), facts)
    elif not facts.keys() <= before.attributes.keys():
        found.devices[entity] = Device(before.parents, {**facts, **before.attributes})


def _add_custom_signals(
    found: Translation, unknown: list[ExporterSeries], page: ParsedPage, given: Mapping[str, str], most: int
) -> None:
    """Adds unmapped series as custom signals, up to a limit; histograms keep their sums but not their buckets."""
    parents = (f"node:{given['node']}",) if given.get("node") else ()
    rows: dict[str, dict[str, float]] = {}
    for series in unknown:
        found.unmapped += 1
        name = custom_name(series, given["target"])
        if (
            len(rows) >= most
            or len(name) > MAX_CUSTOM_CHARS
            or not name.isprintable()
            or series.name.endswith("_bucket")
        ):
            found.dropped += 1
            continue
        rows[name] = {"custom.value": series.value}
        facts = {"metric": series.name, "labels": dict(series.labels), "type": series.kind, "target": given["target"]}
        found.devices[name] = Device(parents, facts)
    if rows:
        found.rows["custom"] = rows


def custom_name(series: ExporterSeries, target: str) -> str:
    """Returns `custom:TARGET.METRIC{label=value,...}` with sorted labels, so that a series always has the same name."""
    inside = ",".join(f"{label}={value}" for label, value in sorted(series.labels.items()))
    return f"custom:{target}.{series.name}" + (f"{{{inside}}}" if inside else "")
