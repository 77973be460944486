"""Versions of software and firmware from a known tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.host.versions import Versions, parse_os_release

SERVER = {
    "proc/sys/kernel/osrelease": "6.8.0-test",
    "proc/sys/kernel/tainted": "4609",
    "sys/module/nvidia/version": "570.86.15",
    "sys/module/mlx5_core/initstate": "live",
    "sys/class/dmi/id/bios_version": "2.21.7",
    "sys/class/dmi/id/product_name": "XE9680",
    "sys/class/dmi/id/product_serial": "ABC123",
    "os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nBROKEN="\n# no line\n',
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in SERVER.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return tmp_path


def opened(root: Path) -> Versions:
    made = Versions(proc=root / "proc", sys=root / "sys", release=(root / "absent", root / "os-release"))
    made._now = lambda: 5
    made.open("n1")
    return made


def test_versions_are_attributes_of_the_node(root: Path) -> None:
    versions = opened(root)
    (reading,) = versions.read()
    assert reading.columns["node.kernel_tainted"].tolist() == [4609]
    assert reading.events == ()
    found = dict(versions.inventory()["node:n1"].attributes)
    found.pop("agent", None)  # there if we are installed
    assert found == {
        "kernel": "6.8.0-test",
        "operating_system": "Debian GNU/Linux 12 (bookworm)",
        "nvidia_driver": "570.86.15",
        "mlx5_core_driver": "loaded",
        "bios_version": "2.21.7",
        "product_name": "XE9680",
        "product_serial": "ABC123",
    }


def test_a_driver_that_is_replaced_at_run_time_is_an_event(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = opened(root)
    monkeypatch.setattr(versions._schedule, "due", lambda _: True)
    versions.read()
    assert versions.read()[0].events == ()
    (root / "sys/module/nvidia/version").write_text("575.51.02\n")
    (root / "sys/class/dmi/id/bios_version").unlink()
    (event,) = versions.read()[0].events
    assert (event.time, event.entity, event.kind) == (5, "node:n1", "version")
    assert event.data == {
        "versions": {"bios_version": None, "nvidia_driver": "575.51.02"},
        "before": {"bios_version": "2.21.7", "nvidia_driver": "570.86.15"},
    }


def test_the_files_of_a_root_disk_are_read_once(root: Path) -> None:
    versions = opened(root)
    (root / "os-release").unlink()
    versions.open("n1")
    versions.read()
    assert versions.inventory()["node:n1"].attributes["operating_system"] == "Debian GNU/Linux 12 (bookworm)"


def test_a_machine_without_versions_has_no_attributes(tmp_path: Path) -> None:
    versions = opened(tmp_path)
    (reading,) = versions.read()
    assert reading.columns["node.kernel_tainted"].tolist() == [2**64 - 1]
    assert versions.inventory()["node:n1"].attributes.keys() <= {"agent"}


@given(st.text(max_size=300))
def test_no_text_breaks_the_parser_of_os_release(text: str) -> None:
    assert all(len(value) <= 200 for value in parse_os_release(text).values())
