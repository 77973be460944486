"""A driver that answers nonsense: no crash, no endless loop, nothing outside a signal's range on the wire."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agents.collectors.gpu.fields import decode_bit_error_rate, decode_fields, field_number
from agents.collectors.gpu.library import printable_text
from agents.collectors.gpu.refusals import RefusedCalls
from agents.collectors.gpu.sampler import METRICS, GpmSampler
from agents.collectors.gpu.slots import GpuSlot, kernel_pci_address
from agents.collectors.gpu.values import MISSING, GpuValues
from tests.agents.nvml_machine import Machine, Steps

MOST_TYPES = 7
WHOLE = 2**64 - 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_random_bytes_in_every_response_never_crash_the_collector(machine: Machine, seed: int) -> None:
    steps: Steps = [("open", "n1"), ("control", [f"garbage {seed}"]), *[("read", 5)] * 4, ("read", 60), ("read", 0)]
    found = machine.run([*steps, ("read", 3600), ("inventory", None), ("close", None)], "gpus 8", "arch all")
    results = [result for result in found[2:8] if "columns" in result]
    assert results
    assert all(len(result["entities"]["gpu"]) == 8 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_garbage_from_the_first_call_on_is_no_data_or_a_reading(machine: Machine, seed: int) -> None:
    found = machine.run([("control", [f"garbage {seed}"]), ("open", "n1"), ("close", None)], "gpus 2")
    assert found[1] is None or "no data" in found[1]
    odd = [
        f"garbage {seed} {name}" for name in ("nvmlDeviceGetPciInfo", "nvmlDeviceGetName", "nvmlDeviceGetFieldValues")
    ]
    found = machine.run([("control", odd), ("open", "n1"), ("read", 0), ("read", 60), ("read", 60)], "gpus 2")
    assert all(len(result["entities"]["gpu"]) == 2 for result in found[2:])


@given(st.lists(st.tuples(st.integers(0, WHOLE), st.integers(-3, 12)), max_size=40))
@example([(WHOLE - 1023, 2)])  # as a float it is 2**64 already
@example([(WHOLE, 2), (WHOLE, 3)])  # NVML_VALUE_NOT_AVAILABLE
def test_any_union_and_type_decodes_to_a_value_or_to_missing(entries: list[tuple[int, int]]) -> None:
    raw = np.array([value for value, _ in entries], np.uint64)
    types = np.array([kind for _, kind in entries], np.int32)
    floats, counters = decode_fields(raw, types)
    for value, whole, (bits, kind) in zip(floats.tolist(), counters.tolist(), entries, strict=True):
        assert not math.isinf(value)
        if not 0 <= kind < MOST_TYPES or (bits, kind) in ((WHOLE, 2), (WHOLE, 3)):
            assert (math.isnan(value), whole) == (True, MISSING)
        if kind in (2, 3) and bits != WHOLE:
            assert (value, whole) == (float(bits), bits)
        if kind == 1 and bits & 0xFFFFFFFF != 0xFFFFFFFF:
            assert (value, whole) == (bits & 0xFFFFFFFF, bits & 0xFFFFFFFF)
        if kind == 5:
            signed = (bits & 0xFFFFFFFF) - (1 << 32) * (bits >> 31 & 1)
            assert (value, whole) == (signed, signed if signed >= 0 else MISSING)
        if kind == 6 and bits & 0xFFFF != 0xFFFF:
            assert whole == bits & 0xFFFF


@given(st.floats())
def test_a_double_is_itself(value: float) -> None:
    floats, counters = decode_fields(np.array([value]).view(np.uint64), np.array([0], np.int32))
    assert floats[0] == value or (math.isnan(floats[0]) and not math.isfinite(value))
    if 0 <= value < 2**53:
        assert counters[0] == int(value)


@given(st.integers(0, 15), st.integers(0, 255))
def test_a_packed_rate_is_mantissa_times_a_negative_power_of_ten(mantissa: int, exponent: int) -> None:
    (rate,) = decode_bit_error_rate(np.array([float(mantissa << 8 | exponent)]))
    assert rate == pytest.approx(mantissa * 10.0**-exponent)


def test_a_packed_rate_with_unknown_bits_is_missing() -> None:
    assert np.isnan(decode_bit_error_rate(np.array([4096.0, -1.0, np.nan, 1e300]))).all()


@given(st.binary(max_size=64))
def test_any_bytes_make_a_text_that_can_be_sent(raw: bytes) -> None:
    printable_text(raw).encode("utf-8")
    assert printable_text(raw).isprintable()


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_none(text: str) -> None:
    found = kernel_pci_address(text)
    assert found is None or kernel_pci_address(found) == found


@given(st.text(max_size=20))
def test_any_driver_version_has_a_field_number_or_none(version: str) -> None:
    assert field_number("SMOOTHING_LIFE", object(), version) in (None, 258, 263)


def test_a_ratio_above_one_by_rounding_is_one_and_garbage_is_out_of_range() -> None:
    pynvml = pytest.importorskip("pynvml")
    reported = {"gpu.sm_active": 100.003, "gpu.tensor_active": 101.1, "gpu.dram_active": 99.9, "gpu.pcie_tx_rate": 1e-6}

    def support(_: object, found: Any) -> int:
        found._obj.isSupportedDevice = 1
        return 0

    def compare(_: object) -> int:
        gpm._view["code"], gpm._view["value"] = 0, [reported.get(signal, 0.0) for signal in METRICS]
        return 0

    known = {"nvmlGpmQueryDeviceSupport": support, "nvmlGpmMetricsGet": compare}
    gpm = GpmSampler(pynvml, lambda name: known.get(name, lambda *_: 0), RefusedCalls([GpuSlot(0)]))
    values = GpuValues([(tuple(METRICS), ("gpu:n1.0",))])
    assert [gpm.read(0, None, values) for _ in range(2)] == [0, 0]
    found = {name: float(column[0]) for name, column in values.columns(list(reported)).items()}
    assert found == pytest.approx(
        {"gpu.sm_active": 1, "gpu.tensor_active": 1.011, "gpu.dram_active": 0.999, "gpu.pcie_tx_rate": 2**20 * 1e-6}
    )
    assert found["gpu.sm_active"] <= 1 < found["gpu.tensor_active"]


@given(st.floats())
def test_a_value_that_a_counter_cannot_hold_is_missing(value: float) -> None:
    values = GpuValues([(("gpu.energy", "gpu.power"), ("gpu:n1.0",))])
    values.set_value(values.index_of("gpu.energy", 0), value)
    found = int(values.columns(["gpu.energy"])["gpu.energy"][0])
    assert found == (int(value) if 0 <= value < MISSING else MISSING)
