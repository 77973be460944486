"""The vendors' real Python bindings, over stand-ins of their C libraries: their answers are what we expect."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.collector import NoData
from agents.collectors.accelerators.amd import Amd
from agents.collectors.accelerators.gaudi import Gaudi
from tests.agents import nvml_stub
from tests.agents.bindings import pci
from tests.parts import do_without

NOT_SUPPORTED = 2
"""AMDSMI_STATUS_NOT_SUPPORTED."""


def real(name: str, patch: pytest.MonkeyPatch) -> Path:
    """Returns the path of the installed real binding, which is then imported again."""
    for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
        patch.delitem(sys.modules, loaded)
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        do_without("bindings", f"the package {name} is not installed: it is in the group dev of pyproject.toml")
    return Path(spec.origin).parent


def compiled(source: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    if nvml_stub.compiler() is None:
        pytest.skip("no C compiler: install gcc to test against a driver library")
    command = [nvml_stub.compiler() or "cc", "-shared", "-fPIC", "-w", "-x", "c", "-o", str(library), "-"]
    subprocess.run(command, input=source, text=True, check=True)


# --- pyhlml ----------------------------------------------------------------------------------------------------------


def test_gaudi_is_read_through_the_real_pyhlml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real("pyhlml", monkeypatch)
    compiled(Path(__file__).with_name("hlml_stub.c").read_text(), tmp_path / "libhlml.so")
    from pyhlml.hlml_lib import LibHLML  # type: ignore[import-not-found,import-untyped,unused-ignore]

    monkeypatch.setattr(LibHLML.__init__, "__defaults__", (str(tmp_path / "libhlml.so"),))
    collector = Gaudi(pci=pci(tmp_path, ("0x1da3", "0x120000", "0x1060")))
    collector.open("n1")
    (reading,) = collector.read()
    columns = reading.columns
    assert columns["gpu.power"].tolist() == [501, 500]  # each device has its own values
    assert (columns["gpu.temperature"][0], columns["gpu.board_temperature"][0]) == (50, 60)
    assert (columns["gpu.ecc_uncorrected"][0], columns["gpu.ecc_uncorrected_total"][0]) == (10, 11)
    assert (columns["gpu.dram_corrected"][0], columns["gpu.sram_uncorrected"][0]) == (1, 100)
    assert (columns["gpu.rows_corrected"][0], columns["gpu.rows_uncorrected"][0]) == (3, 4)
    assert (columns["gpu.links"][0], columns["gpu.links_up"][0]) == (4, 3)
    assert columns["gpu.memory_total"][0] == 128 * 2**30
    assert columns["gpu.energy"][0] == 2**53
    assert columns["gpu.throttle_reasons"][0] == 0x20
    assert np.isnan(columns["gpu.pcie_width"]).all()  # refused
    assert np.isnan(columns["gpu.sm_clock_max"]).all()  # a function that this library does not have
    assert collector.inventory()["gpu:n1.0"].attributes == {
        "vendor": "Intel",
        "sku": "HL-325L",
        "serial": "AN71",
        "uuid": "01P4",
        "pci": "0000:19:00.0",
        "driver": "1.21.0-abcdef",
    }
    collector.close()
    collector.close()


# --- amdsmi ----------------------------------------------------------------------------------------------------------


def filling(**values: Any) -> Callable[..., int]:
    """Returns a C function that fills the structure of its last argument; `a__b` is a.b."""

    def function(*arguments: Any) -> int:
        for path, value in values.items():
            place: Any = arguments[-1]._obj
            *parts, last = path.split("__")
            for part in parts:
                place = getattr(place, part)
            if isinstance(value, list):
                getattr(place, last)[: len(value)] = value
            else:
                setattr(place, last, value)
        return 0

    return function


def pointing(count: Any, places: Any, address: int, kind: Any, many: int) -> int:
    """Returns a two-step listing: the count, then the entries."""
    count._obj.value = many
    if isinstance(places, ctypes.Array):
        for i in range(many):
            places[i] = ctypes.cast(address + i, kind)
    return 0


@pytest.fixture
def amdsmi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the real binding's wrapper over a library that refuses everything; tests add answers."""
    folder = real("amdsmi", monkeypatch)
    names = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", (folder / "amdsmi_wrapper.py").read_text()))
    compiled(
        "".join(f"int {name}(void) {{ return {NOT_SUPPORTED}; }}\n" for name in names), tmp_path / "lib/libamd_smi.so"
    )
    monkeypatch.setenv("ROCM_HOME", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    wrapper = importlib.import_module("amdsmi.amdsmi_wrapper")
    wrapper.amdsmi_init = lambda flags: 0
    wrapper.amdsmi_get_socket_handles = lambda count, places: pointing(
        count, places, 0x100, wrapper.amdsmi_socket_handle, 2
    )

    def processors(socket: Any, count: Any, places: Any) -> int:
        address = (ctypes.cast(socket, ctypes.c_void_p).value or 0) + 0x100
        return pointing(count, places, address, wrapper.amdsmi_processor_handle, 1)

    wrapper.amdsmi_get_processor_handles = processors
    return wrapper


def read_bus(tmp_path: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    (tmp_path / "kfd").touch()
    collector = Amd(driver=tmp_path / "kfd", pci=pci(tmp_path))
    collector.open("n1")
    (reading,) = collector.read()
    attributes = dict(collector.inventory()["gpu:n1.0"].attributes)
    assert reading.entities == ("gpu:n1.0", "gpu:n1.1")
    collector.close()
    return {name: values.tolist() for name, values in reading.columns.items()}, attributes


def test_amd_is_read_through_the_real_amdsmi(tmp_path: Path, amdsmi: Any) -> None:
    none, none64 = 0xFFFF, 2**64 - 1
    amdsmi.amdsmi_get_gpu_activity = filling(gfx_activity=88, umc_activity=12, mm_activity=none)
    amdsmi.amdsmi_get_power_info = filling(current_socket_power=651, average_socket_power=none)
    amdsmi.amdsmi_get_power_cap_info = filling(power_cap=750_000_000, default_power_cap=750_000_000)
    amdsmi.amdsmi_get_clock_info = filling(clk=2100, max_clk=2105)
    amdsmi.amdsmi_get_gpu_vram_usage = filling(vram_total=196_592, vram_used=283)
    amdsmi.amdsmi_get_gpu_total_ecc_count = filling(correctable_count=5, deferred_count=1)
    amdsmi.amdsmi_get_gpu_ecc_count = filling(correctable_count=3, uncorrectable_count=1)
    amdsmi.amdsmi_get_pcie_info = filling(pcie_metric__pcie_width=16, pcie_metric__pcie_speed=32_000)
    amdsmi.amdsmi_get_gpu_metrics_info = filling(
        temperature_vrsoc=60,
        accumulation_counter=1000,
        ppt_residency_acc=10,
        indep_throttle_status=1 << 36,
        xgmi_read_data_acc=[10] * 7 + [none64],
        xgmi_link_status=[1] * 6 + [0, none],
    )
    amdsmi.amdsmi_get_gpu_asic_info = filling(market_name=b"AMD Instinct MI300X", asic_serial=b"0x1234ABCD")
    amdsmi.amdsmi_get_gpu_driver_info = filling(driver_version=b"6.12.12")
    columns, attributes = read_bus(tmp_path)
    assert (columns["gpu.utilization"], columns["gpu.memory_utilization"]) == ([0.88] * 2, [0.12] * 2)
    assert (columns["gpu.power"], columns["gpu.power_limit"]) == ([651] * 2, [750] * 2)
    assert (columns["gpu.sm_clock"], columns["gpu.memory_clock_max"]) == ([2100] * 2, [2105] * 2)
    assert columns["gpu.memory_used"] == [283 * 2**20] * 2
    assert (columns["gpu.ecc_corrected"], columns["gpu.ecc_deferred"]) == ([5] * 2, [1] * 2)
    assert (columns["gpu.dram_corrected"], columns["gpu.xgmi_uncorrected"]) == ([3] * 2, [1] * 2)
    assert (columns["gpu.pcie_generation"], columns["gpu.pcie_width"]) == ([5] * 2, [16] * 2)
    assert (columns["gpu.limiter_power"], columns["gpu.limiter_ticks"]) == ([10] * 2, [1000] * 2)
    assert columns["gpu.throttled"] == [1, 1]  # this version of the binding reports no more
    assert columns["gpu.xgmi_rx_bytes"] == [70 * 1024] * 2
    assert (columns["gpu.links"], columns["gpu.links_up"]) == ([7] * 2, [6] * 2)
    assert columns["gpu.present"] == [1, 1]
    assert np.isnan(columns["gpu.temperature"]).all()  # refused
    assert (attributes["sku"], attributes["serial"]) == ("AMD Instinct MI300X", "0x000000001234ABCD")


def test_a_library_that_refuses_everything_gives_no_values(tmp_path: Path, amdsmi: Any) -> None:
    columns, attributes = read_bus(tmp_path)
    assert columns.pop("gpu.present") == [0, 0]
    missing = (2**64 - 1, pytest.approx(float("nan"), nan_ok=True))
    assert all(value in missing for values in columns.values() for value in values)
    assert attributes == {"vendor": "AMD"}


def test_a_binding_without_its_library_is_no_data_and_writes_nothing_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real("amdsmi", monkeypatch)
    real("pyhlml", monkeypatch)
    monkeypatch.setenv("ROCM_HOME", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    (tmp_path / "kfd").touch()
    for collector in (Amd(driver=tmp_path / "kfd"), Gaudi(pci=pci(tmp_path, ("0x1da3", "0x120000", "0x1060")))):
        with pytest.raises(NoData):
            collector.open("n1")
    assert capsys.readouterr().out == ""
