"""The text of an exporter -> its series. One bad line costs only itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


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
