"""Series of an exporter -> rows of our own signals, and custom signals for what no mapping knows.

The text of an exporter -> its series. One bad line costs only itself.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.collector import Device
from agents.collectors.exporters.mapping import Metric, Names
from pipeline.model.signals import CATALOGUE


@dataclass(frozen=True, slots=True)
class Series:
    """One sample: name (a counter's always with `_total`), labels, value (may be NaN), and the family's type."""

    name: str
    labels: Mapping[str, str]
    value: float
    kind: str


@dataclass(frozen=True, slots=True)
class Page:
    """One answer of an exporter. bad: lines that are no samples. help: text by name of the family."""

    series: tuple[Series, ...]
    bad: int = 0
    help: Mapping[str, str] = field(default_factory=dict)


def page(text: str) -> Page:
    """What stands in `text`, in the Prometheus text format 0.0.4 or in OpenMetrics 1.0.

    OpenMetrics' exemplars and timestamps are left aside: the time of a scrape is the agent's.
    """
    try:
        return _whole(text)
    except (ValueError, KeyError, IndexError, TypeError):  # what the library raises on lines that it cannot read
        return _line_by_line(text)


def _whole(text: str) -> Page:
    families = list(_families(text))
    return Page(tuple(_series(families)), 0, {f.name: f.documentation for f in families if f.documentation})


def _families(text: str) -> Iterator[Any]:
    from prometheus_client.openmetrics import parser as openmetrics
    from prometheus_client.parser import text_string_to_metric_families as plain

    read = openmetrics.text_string_to_metric_families if text.rstrip().endswith("# EOF") else plain
    yield from read(text)


def _series(families: list[Any]) -> Iterator[Series]:
    for family in families:
        for sample in family.samples:
            yield Series(sample.name, sample.labels, float(sample.value), family.type)


def _line_by_line(text: str) -> Page:
    """The same for a text with bad lines in it; each sample is read with the TYPE line of its family before it."""
    from prometheus_client.parser import text_string_to_metric_families as plain

    found: list[Series] = []
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
            samples = list(_series(list(plain(line.partition(" # ")[0] + "\n"))))
        except (ValueError, KeyError, IndexError, TypeError):
            bad += 1
            continue
        found += [Series(s.name, s.labels, s.value, _kind(s.name, kinds)) for s in samples]
    return Page(tuple(found), bad)


def _kind(name: str, kinds: Mapping[str, str]) -> str:
    """The type of a sample's family: its own name, or that without the suffix that OpenMetrics puts to it."""
    stems = (name, *(name.removesuffix(end) for end in ("_total", "_sum", "_count", "_bucket", "_info", "_created")))
    return next((kinds[stem] for stem in stems if stem in kinds), "unknown")


NAME = 200
"""Most characters of an entity that labels make; chosen: longer ones are no names of devices."""
CUSTOM_NAME = 400
"""Most characters of the name of a custom signal, its labels included; chosen."""
_FIELDS = string.Formatter()


@dataclass(slots=True)
class Translated:
    """One scrape. rows: class -> entity -> signal -> value; dropped: unmapped series beyond the bound."""

    rows: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    mapped: int = 0
    unmapped: int = 0
    dropped: int = 0


def translate(page: Page, names: Names, given: Mapping[str, str], most: int) -> Translated:
    """What a page says in our words. given: `target` and `node` of the endpoint; most: custom signals that are kept."""
    found = Translated()
    gathered: dict[tuple[str, int], tuple[Metric, list[float]]] = {}
    known = _lookups(page.series, names)
    unknown = []
    for series in page.series:
        if not math.isfinite(series.value) or series.value >= names.blank:
            continue  # "not supported now", as exporters say it
        labels = {**series.labels, **given, **_looked_up(series, names, known)}
        mine = [m for m in names.of(series.name) if m.takes(series.labels)]
        placed = [(m, e) for m in mine if (e := filled(names.entity(m), labels)) is not None]
        for metric, entity in placed:
            gathered.setdefault((entity, id(metric)), (metric, []))[1].append(series.value)
            _describe(found, names, metric, entity, labels)
        found.mapped += bool(placed)
        if not placed:
            unknown.append(series)
    for (entity, _), (metric, values) in gathered.items():
        row = found.rows.setdefault(CATALOGUE[metric.signal].device_class, {}).setdefault(entity, {})
        row[metric.signal] = metric.value(merged(metric, values))
    _keep(found, unknown, page, given, most)
    return found


def merged(metric: Metric, values: list[float]) -> float:
    """One value of several series of one entity; without `merge` two different ones contradict each other: NaN."""
    if metric.merge == "count":
        return float(len(values))
    if len(values) == 1:
        return values[0]
    if not metric.merge:
        return values[0] if len(set(values)) == 1 else math.nan
    if metric.merge in ("sum", "mean"):
        return math.fsum(values) / (len(values) if metric.merge == "mean" else 1)
    return min(values) if metric.merge == "min" else max(values)


def filled(template: str, labels: Mapping[str, str]) -> str | None:
    """The template with labels in its braces; None where one is missing, empty or no name of a device."""
    wanted = [name for _, name, _, _ in _FIELDS.parse(template) if name]
    if not all(labels.get(name) for name in wanted):
        return None
    text = template.format_map(labels) if wanted else template
    return text if len(text) <= NAME and text.isprintable() else None


def _lookups(series: Iterable[Series], names: Names) -> Mapping[str, Mapping[str, str]]:
    """Lookup -> key -> what it stands for."""
    found: dict[str, dict[str, str]] = {name: {} for name in names.lookups}
    metrics = {lookup.metric for lookup in names.lookups.values()}
    for one in (s for s in series if s.name in metrics):
        for name, lookup in names.lookups.items():
            value = one.labels.get(lookup.label or name)
            if one.name == lookup.metric and value and lookup.key in one.labels:
                found[name][one.labels[lookup.key]] = value
    return found


def _looked_up(series: Series, names: Names, known: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """What the lookups say of a series; the key itself where nothing is known of it."""
    keys = {name: series.labels.get(lookup.key) for name, lookup in names.lookups.items()}
    return {name: known[name].get(key, key) for name, key in keys.items() if key}


def _describe(found: Translated, names: Names, metric: Metric, entity: str, labels: Mapping[str, str]) -> None:
    device_class = CATALOGUE[metric.signal].device_class
    before = found.devices.get(entity)
    wanted = names.attributes.get(device_class, {})
    facts = {name: labels[label] for name, label in wanted.items() if labels.get(label)}
    if before is None:
        above = (filled(template, labels) for template in names.parents.get(device_class, ()))
        found.devices[entity] = Device(tuple(parent for parent in above if parent and parent != entity), facts)
    elif not facts.keys() <= before.attributes.keys():
        found.devices[entity] = Device(before.parents, {**facts, **before.attributes})


def _keep(found: Translated, unknown: list[Series], page: Page, given: Mapping[str, str], most: int) -> None:
    """Unmapped series as custom signals, at most so many; buckets of histograms are left out for their sums."""
    parents = (f"node:{given['node']}",) if given.get("node") else ()
    rows: dict[str, dict[str, float]] = {}
    for series in unknown:
        found.unmapped += 1
        name = custom_name(series, given["target"])
        if len(rows) >= most or len(name) > CUSTOM_NAME or not name.isprintable() or series.name.endswith("_bucket"):
            found.dropped += 1
            continue
        rows[name] = {"custom.value": series.value}
        facts = {"metric": series.name, "labels": dict(series.labels), "type": series.kind, "target": given["target"]}
        found.devices[name] = Device(parents, facts)
    if rows:
        found.rows["custom"] = rows


def custom_name(series: Series, target: str) -> str:
    """`custom:TARGET.METRIC{label=value,...}`, labels in order, so that one series always has one name."""
    inside = ",".join(f"{label}={value}" for label, value in sorted(series.labels.items()))
    return f"custom:{target}.{series.name}" + (f"{{{inside}}}" if inside else "")
