"""The mapping file: translates another exporter's metrics to our signals.

    version = 1
    source = "where the names come from"
    blank = 9.2e18                                # values from here on mean "not supported"

    [entities]                                    # device class -> entity; labels in braces
    gpu = "gpu:{Hostname}.{gpu}"
    [parents]
    gpu = ["node:{Hostname}"]
    [attributes.gpu]                              # attribute -> label that holds it
    sku = "modelName"
    [lookups.switch]                              # {switch} = label `switch` of `metric` with the same `key`
    metric = "infiniband_switch_info"
    key = "guid"

    [[metric]]
    name = "DCGM_FI_DEV_GPU_UTIL"                 # as in the text
    signal = "gpu.utilization"
    scale = 0.01                                  # value * scale has the catalogue's unit
    where = { mode = "user|nice" }                # labels that must match whole
    without = ["GPU_I_ID"]                        # labels that must be absent
    merge = "sum"                                 # several series of one entity: sum, mean, min, max, count
    states = { "1" = "ok", "3" = "critical" }     # value -> state of the catalogue
    entity = "port:{guid}.{port}"                 # if it differs from that of the class

`{target}` is the endpoint's name, `{node}` its node. A series that lacks a label of its entity stays unmapped.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pipeline.config.settings import build_section
from pipeline.model.errors import ConfigError
from pipeline.model.regular_files import read_regular_text
from pipeline.model.signals import CATALOGUE, CLASS_OF_KIND, CLASSES, Signal
from pipeline.model.toml_text import parse_toml

SHIPPED_FOLDER = Path(__file__).with_name("mappings")
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # Prometheus data model, label names
MergeRule = Literal["", "sum", "mean", "min", "max", "count"]
MAX_ENTITY_CHARS = 200
"""Most characters of an entity built from labels. Chosen: longer ones are not device names."""
_FORMATTER = string.Formatter()


@dataclass(frozen=True)
class MappedMetric:
    """One [[metric]] entry: series of this name, and the signal that they become."""

    name: str
    signal: str
    scale: float = 1.0
    offset: float = 0.0
    where: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    merge: MergeRule = ""
    states: Mapping[str, str] = field(default_factory=dict)
    entity: str = ""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a series with these labels matches."""
        return all(p.fullmatch(labels.get(label, "")) for label, p in self._where) and not any(
            label in labels for label in self.without
        )

    def convert(self, given: float) -> float:
        """Returns the signal's value; NaN for a state that the mapping does not name."""
        if self.states:
            state = self.states.get(f"{given:g}")
            return float(CATALOGUE[self.signal].states.index(state)) if state else float("nan")
        return given * self.scale + self.offset

    @cached_property
    def _where(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        return tuple((label, re.compile(pattern)) for label, pattern in self.where.items())


@dataclass(frozen=True)
class LabelLookup:
    """A label that only another metric has: found by a key that both have."""

    metric: str
    key: str
    label: str = ""


@dataclass(frozen=True)
class MetricMapping:
    """One mapping file. blank: values from here on are missing."""

    version: int
    source: str = ""
    blank: float = float("inf")
    entities: Mapping[str, str] = field(default_factory=dict)
    parents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    lookups: Mapping[str, LabelLookup] = field(default_factory=dict)
    metric: tuple[MappedMetric, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, tuple[MappedMetric, ...]]:
        """Metrics by name."""
        found: dict[str, tuple[MappedMetric, ...]] = {}
        for metric in self.metric:
            found[metric.name] = (*found.get(metric.name, ()), metric)
        return found

    def find_metrics(self, name: str) -> tuple[MappedMetric, ...]:
        """Returns the entries for series of this name; the suffix `_total`, which some exporters omit, is optional."""
        return self.by_name.get(name) or self.by_name.get(name.removesuffix("_total"), ())

    def entity_template(self, metric: MappedMetric) -> str:
        """Returns the template of the entity of a metric's signal."""
        return metric.entity or self.entities[CATALOGUE[metric.signal].device_class]


NO_MAPPING = MetricMapping(1, "none: every series is kept as a custom signal")


def list_shipped() -> tuple[str, ...]:
    """Returns the names of the mappings that come with the agent."""
    return tuple(sorted(path.stem for path in SHIPPED_FOLDER.glob("*.toml")))


def load_mapping(name: str) -> MetricMapping:
    """Returns a shipped mapping by name, or a user's by path; "" maps nothing. Raises ConfigError."""
    if not name:
        return NO_MAPPING
    path = SHIPPED_FOLDER / f"{name}.toml" if name in list_shipped() else Path(name).expanduser()
    try:
        table = parse_toml(read_regular_text(path))
    except OSError as error:
        known = ", ".join(list_shipped())
        raise ConfigError(f"mapping {name!r}: {error.strerror}; expected a file, or one of {known}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return check_mapping(build_section(MetricMapping, table, str(path)), str(path))


def check_mapping(mapping: MetricMapping, where: str) -> MetricMapping:
    """Raises ConfigError for signals, states and kinds that are not in the catalogue, and for invalid templates."""
    if mapping.version != 1:
        raise ConfigError(f"{where}: version = {mapping.version}; expected 1")
    for device_class in (*mapping.entities, *mapping.parents, *mapping.attributes):
        if device_class not in CLASSES:
            raise ConfigError(f"{where}: {device_class!r} is not a device class; expected one of {', '.join(CLASSES)}")
    for device_class, template in mapping.entities.items():
        _check_template(template, f"{where}: [entities] {device_class}")
    for device_class, templates in mapping.parents.items():
        for template in templates:
            _check_template(template, f"{where}: [parents] {device_class}")
    for metric in mapping.metric:
        _check_metric(mapping, metric, f"{where}: [[metric]] {metric.name}")
    return mapping


def _check_metric(mapping: MetricMapping, metric: MappedMetric, where: str) -> None:
    signal = CATALOGUE.get(metric.signal)
    if signal is None:
        raise ConfigError(
            f"{where}: signal = {metric.signal!r} is not in the catalogue; `fleetpulse signals` lists all"
        )
    _check_template(metric.entity, where)
    template = metric.entity or mapping.entities.get(signal.device_class, "")
    kind = template.partition(":")[0]
    if CLASS_OF_KIND.get(kind) != signal.device_class:
        raise ConfigError(f"{where}: entity {template!r}: expected one of the class {signal.device_class}")
    for value, state in metric.states.items():
        _check_state(signal, value, state, where)
    for label, pattern in metric.where.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{where}: where {label} = {pattern!r} is not a regular expression: {error}") from None


def _check_template(template: str, where: str) -> None:
    """Raises ConfigError unless braces hold the name of a label."""
    wanted = "expected names of labels in braces, as in gpu:{Hostname}.{gpu}"
    try:
        found = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"{where}: {template!r}: {error}; {wanted}") from None
    for _, label, form, conversion in found:
        if label is not None and (form or conversion or not _LABEL.fullmatch(label)):
            raise ConfigError(f"{where}: {template!r}: {label!r} is not a plain label; {wanted}")


def _check_state(signal: Signal, value: Any, state: str, where: str) -> None:
    if state not in signal.states:
        raise ConfigError(f"{where}: state {state!r}; {signal.name} has {', '.join(signal.states) or 'none'}")
    try:
        float(value)
    except ValueError:
        raise ConfigError(f"{where}: states {value!r}; expected the number that the exporter gives") from None


def fill_template(template: str, labels: Mapping[str, str]) -> str | None:
    """Returns the template with labels filled in; None if a label is missing, or the result is not a device name."""
    wanted = [name for _, name, _, _ in _FORMATTER.parse(template) if name]
    if not all(labels.get(name) for name in wanted):
        return None
    text = template.format_map(labels) if wanted else template
    return text if len(text) <= MAX_ENTITY_CHARS and text.isprintable() else None
