"""Our names and OpenTelemetry's: every convention equals the package, every signal has a metric name."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from types import ModuleType

import pytest
from opentelemetry.semconv._incubating.attributes import hw_attributes
from opentelemetry.semconv._incubating.metrics import hw_metrics, system_metrics
from opentelemetry.semconv.schemas import Schemas

from pipeline.model.signals import CATALOGUE, otel


def published(module: ModuleType) -> dict[str, tuple[str, str]]:
    """Returns metric -> (instrument, unit), as the generated module documents them."""
    text = inspect.getsource(module)
    found = re.findall(r'^[A-Z_]+: Final = "([a-z_.]+)"\n"""(.*?)"""', text, re.M | re.S)
    documented = {
        name: [re.search(rf"^{key}: (.+)$", words, re.M) for key in ("Instrument", "Unit")] for name, words in found
    }
    return {
        name: (kind[1], unit[1]) for name, (kind, unit) in documented.items() if kind and unit
    }  # deprecated ones document less


PUBLISHED = {**published(hw_metrics), **published(system_metrics)}


@pytest.mark.parametrize("name", otel.CONVENTIONS)
def test_a_convention_equals_the_one_in_the_package(name: str) -> None:
    assert (otel.CONVENTIONS[name].instrument, otel.CONVENTIONS[name].unit) == PUBLISHED[name]


def test_the_schema_is_known_to_the_package() -> None:
    assert otel.SCHEMA in {schema.value for schema in Schemas}


def test_no_name_below_hw_or_system_is_ours() -> None:
    for signal in CATALOGUE.values():
        for metric in otel.metrics_of_signal(signal):
            assert metric.name in PUBLISHED or metric.name == f"fleetpulse.{signal.name}"


def test_types_states_and_keys_are_those_of_the_package() -> None:
    types = {one.value for one in hw_attributes.HwTypeValues}
    states = {one.value for one in hw_attributes.HwStateValues}
    keys = {value for name, value in vars(hw_attributes).items() if name.isupper()}
    for signal in CATALOGUE.values():
        for metric in otel.metrics_of_signal(signal):
            facts = dict(metric.attributes)
            assert facts.get("hw.type", "gpu") in types
            assert facts.get("hw.state", "ok") in states
            assert {key for key in facts if key.startswith("hw.")} <= keys


REQUIRED = {
    "hw.errors": {"hw.type", "error.type"},
    "hw.status": {"hw.type", "hw.state"},
    "hw.power": {"hw.type"},
    "hw.energy": {"hw.type"},
    "hw.gpu.io": {"network.io.direction"},
    "hw.network.io": {"network.io.direction"},
    "hw.network.packets": {"network.io.direction"},
    "hw.physical_disk.endurance_utilization": {"hw.physical_disk.state"},
}


def test_required_attributes_are_present() -> None:
    for signal in CATALOGUE.values():
        for metric in otel.metrics_of_signal(signal):
            assert REQUIRED.get(metric.name, set()) <= dict(metric.attributes).keys()


def test_no_two_signals_of_a_class_are_one_metric() -> None:
    places = [(s.device_class, m.name, m.attributes) for s in CATALOGUE.values() for m in otel.metrics_of_signal(s)]
    assert [place for place, count in Counter(places).items() if count > 1] == []


def test_one_name_has_one_unit_and_instrument() -> None:
    metrics = {(m.name, m.unit, m.instrument) for s in CATALOGUE.values() for m in otel.metrics_of_signal(s)}
    assert len(metrics) == len({name for name, _, _ in metrics})


@pytest.mark.parametrize(
    ("signal", "name", "factor", "attributes"),
    [
        ("gpu.energy", "hw.energy", 1e-3, {"hw.type": "gpu"}),
        ("gpu.power", "hw.power", 1, {"hw.type": "gpu"}),
        ("gpu.ecc_uncorrected", "hw.errors", 1, {"hw.type": "gpu", "error.type": "uncorrected"}),
        ("nic.rx_bytes", "hw.network.io", 1, {"network.io.direction": "receive"}),
        ("nic.speed", "hw.network.bandwidth.limit", 125_000, {}),
        ("disk.endurance_used", "hw.physical_disk.endurance_utilization", -1, {"hw.physical_disk.state": "remaining"}),
        ("node.cpu_user_time", "system.cpu.time", 1e-3, {"cpu.mode": "user"}),
        ("node.cpu_busy_time", "fleetpulse.node.cpu_busy_time", 1, {}),
        ("coolant.flow", "fleetpulse.coolant.flow", 1, {}),
        ("service.state", "fleetpulse.service.state", 1, {}),
    ],
)
def test_a_signal_has_the_name_unit_and_attributes_of_its_convention(
    signal: str, name: str, factor: float, attributes: dict[str, str]
) -> None:
    (metric,) = otel.metrics_of_signal(CATALOGUE[signal])
    assert (metric.name, metric.factor, dict(metric.attributes)) == (name, factor, attributes)


def test_a_state_is_exported_per_state_of_the_convention_and_as_its_number() -> None:
    up, own = otel.metrics_of_signal(CATALOGUE["nic.state"])
    assert (up.name, up.states) == ("hw.network.up", (1,))
    assert own.name == "fleetpulse.nic.state"
    *states, own = otel.metrics_of_signal(CATALOGUE["disk.state"])
    shown = {
        dict(m.attributes)["hw.state"]: {CATALOGUE["disk.state"].states[i] for i in m.states or ()} for m in states
    }
    assert shown["ok"] == {"live"}
    assert "dead" in shown["failed"]
    assert "resetting" in shown["degraded"]
