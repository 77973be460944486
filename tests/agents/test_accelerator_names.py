"""Names of accelerators of several vendors on one node."""

from __future__ import annotations

from pathlib import Path

from agents.collectors.accelerators.pci_devices import VENDORS, entity_prefix, list_devices
from tests.agents.bindings import pci

H100 = ("0x10de", "0x030200", "0x2330")
MI300X = ("0x1002", "0x120000", "0x74a1")
MI250X = ("0x1002", "0x038000", "0x7408")
RADEON = ("0x1002", "0x030000", "0x744c")
GAUDI = ("0x1da3", "0x120000", "0x1020")
TRAINIUM = ("0x1d0f", "0x088000", "0x7164")
AWS_DISK = ("0x1d0f", "0x010802", "0x8061")
TPU_V4 = ("0x1ae0", "0x120000", "0x005e")
GOOGLE_NIC = ("0x1ae0", "0x020000", "0x0042")


def test_a_nodes_only_vendor_has_plain_numbers(tmp_path: Path) -> None:
    for number, (maker, device) in enumerate(
        {"nvidia": H100, "amd": MI250X, "gaudi": GAUDI, "neuron": TRAINIUM, "tpu": TPU_V4}.items()
    ):
        bus = pci(tmp_path / str(number), device, device, AWS_DISK, GOOGLE_NIC, RADEON)
        assert entity_prefix(maker, bus) == ""
        assert [one.address for one in list_devices(maker, bus)] == ["0000:10:00.0", "0000:11:00.0"]


def test_no_two_vendors_of_a_node_share_names(tmp_path: Path) -> None:
    bus = pci(tmp_path, TPU_V4, TRAINIUM, GAUDI, MI300X, H100)
    assert [entity_prefix(maker, bus) for maker in VENDORS] == ["", "amd", "gaudi", "neuron", "tpu"]
    bus = pci(tmp_path / "without", GAUDI, MI300X)
    assert (entity_prefix("amd", bus), entity_prefix("gaudi", bus)) == ("", "gaudi")


def test_the_model_is_given_where_the_device_id_names_it(tmp_path: Path) -> None:
    bus = pci(tmp_path, TPU_V4, TRAINIUM)
    assert [one.model for maker in ("tpu", "neuron") for one in list_devices(maker, bus)] == ["TPU v4", "trainium"]


def test_no_bus_has_no_accelerators(tmp_path: Path) -> None:
    assert list_devices("amd", tmp_path / "none") == ()
    assert entity_prefix("amd", tmp_path / "none") == ""
    broken = pci(tmp_path, MI300X)
    (broken / "0000:10:00.0" / "vendor").unlink()
    assert list_devices("amd", broken) == ()
