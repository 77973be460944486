"""Invalid values become missing in every wire type, and counters keep every digit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.collector import Device, Reading
from agents.node.batches import build_batch, build_blocks, build_inventory_event, check_reading, encode_column
from pipeline.model.records import Origin
from pipeline.model.signals import CATALOGUE, Signal
from tests.examples import examples


def column(name: str, *values: float, dtype: Any = None) -> list[float]:
    found: list[float] = encode_column(CATALOGUE[name], np.array(values, dtype)).tolist()
    return found


def test_outside_the_valid_range_and_nan_are_missing() -> None:
    assert column("gpu.temperature", 40, -21, 151, 150)[0::3] == [40, 150]
    assert np.isnan(column("gpu.temperature", np.nan, -21, 151, np.inf)).all()
    assert column("gpu.sm_clock", 1980, 10_001, -1, np.nan) == [1980, 65535, 65535, 65535]
    assert column("gpu.pcie_generation", 5, 17, 255, 300) == [5, 255, 255, 255]


def test_counters_keep_every_digit_and_the_highest_value_means_missing() -> None:
    assert column("gpu.energy", 2**53 + 1, 2**64 - 2, 2**64 - 1, dtype=np.uint64) == [2**53 + 1, 2**64 - 2, 2**64 - 1]
    assert column("gpu.energy", 5.0, np.nan, -1.0, 1e30) == [5, 2**64 - 1, 2**64 - 1, 2**64 - 1]


KINDS = {(signal.type, signal.valid): signal for signal in CATALOGUE.values()}
"""One signal of each wire type and valid range: nothing else of a signal matters to its column."""


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("signal", KINDS.values(), ids=lambda s: f"{s.type} {s.valid[0]:g}..{s.valid[1]:g}")
@settings(max_examples=examples(25))
@given(values=st.lists(st.one_of(st.floats(), st.integers(-(2**60), 2**60).map(float)), min_size=1, max_size=5))
def test_every_measured_value_fits_the_wire_type_or_is_missing(signal: Signal, values: list[float]) -> None:
    found = encode_column(signal, np.array(values))
    assert found.dtype == np.dtype(signal.type)
    for value, sent in zip(values, found.tolist(), strict=True):
        missing = np.isnan(sent) if found.dtype.kind == "f" else sent == np.iinfo(found.dtype).max
        if not missing:
            assert signal.valid[0] <= value <= signal.valid[1]
            assert sent == pytest.approx(value, rel=1e-6, abs=1.0 if found.dtype.kind == "u" else 1e-30)


def test_readings_of_the_same_devices_share_one_block_and_unknown_signals_are_omitted() -> None:
    first = Reading("gpu", ("gpu:n1.0",), {"gpu.power": np.array([300.0]), "gpu.made_up": np.array([1.0])})
    second = Reading("gpu", ("gpu:n1.0",), {"gpu.temperature": np.array([50.0]), "node.load1": np.array([1.0])})
    (block,) = build_blocks([first, second])
    assert set(block.columns) == {"gpu.power", "gpu.temperature"}
    assert block.columns["gpu.power"].shape == (1, 1)


def test_two_collectors_of_one_device_share_its_row() -> None:
    """The store has one row per device and tick: a signal of one collector is missing for devices of the others."""
    ports, errors = ("port:n1.a", "port:n1.b"), ("port:n1.b", "port:n1.c")
    speed = Reading("nic", ports, {"nic.speed": np.array([100.0, 200.0])})
    crc = Reading("nic", errors, {"nic.crc_errors": np.array([7, 8], np.uint64)})
    (block,) = build_blocks([speed, crc])
    assert block.entities == ("port:n1.a", "port:n1.b", "port:n1.c")
    np.testing.assert_array_equal(block.columns["nic.speed"], [[100, 200, np.nan]])
    assert block.columns["nic.crc_errors"].tolist() == [[np.iinfo(np.uint64).max, 7, 8]]


def test_a_missing_value_replaces_no_value_of_another_reading() -> None:
    ports = ("port:n1.a", "port:n1.b")
    first = Reading("nic", ports, {"nic.speed": np.array([100.0, 200.0])})
    second = Reading("nic", ports, {"nic.speed": np.array([np.nan, 400.0])})
    (block,) = build_blocks([first, second])
    assert block.columns["nic.speed"].tolist() == [[100.0, 400.0]]


def test_a_name_that_is_not_text_is_a_fault_of_its_collector() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        check_reading(Reading("nic", ("port:n1.\udcf0",), {"nic.speed": np.ones(1)}), None)


def test_a_float_too_large_for_64_bits_is_missing() -> None:
    found = encode_column(CATALOGUE["nic.rx_bytes"], np.array([2.0**64, 5.0]))
    assert found.tolist() == [np.iinfo(np.uint64).max, 5]


def test_without_readings_there_is_no_batch() -> None:
    origin = Origin("local", "n1", bytes(16))
    assert build_batch(origin, 1, []) is None
    assert build_batch(origin, 1, [Reading("gpu", (), {"gpu.power": np.array([])})]) is None


def test_the_node_is_always_in_its_inventory() -> None:
    event = build_inventory_event(5, "n1", {"gpu:n1.0": Device(("node:n1",), {"sku": "H100"})})
    assert event.data["entities"] == {
        "node:n1": {"parents": [], "attributes": {}},
        "gpu:n1.0": {"parents": ["node:n1"], "attributes": {"sku": "H100"}},
    }
