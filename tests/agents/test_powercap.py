"""Energy counters of processors and memory: raw, with their wrap value and the required privilege."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.collector import NoData
from agents.collectors.host.processors import Powercap
from agents.node.batches import check_reading
from tests.examples import examples

MISSING = np.iinfo(np.uint64).max
RANGE = 262_143_328_850


def zone(root: Path, number: str, name: str, energy: object) -> Path:
    folder = root / number
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two packages with their memory, and the platform."""
    (tmp_path / "intel-rapl").mkdir()  # the control type: no zone
    (tmp_path / "intel-rapl" / "enabled").write_text("1\n")
    zone(tmp_path, "intel-rapl:0", "package-0", 111)
    zone(tmp_path, "intel-rapl:0:0", "dram", 222)
    zone(tmp_path, "intel-rapl:1", "package-1", 333)
    zone(tmp_path, "intel-rapl:1:0", "dram", RANGE)
    zone(tmp_path, "intel-rapl:2", "psys", 2**63)
    return tmp_path


def energies(powercap: Powercap) -> dict[str, int]:
    (reading,) = powercap.read()
    check_reading(reading, powercap.inventory())
    assert powercap.inventory().keys() == set(reading.entities)
    assert reading.columns["sensor.energy"].dtype == np.uint64
    return dict(zip(reading.entities, map(int, reading.columns["sensor.energy"]), strict=True))


def opened(root: Path) -> Powercap:
    powercap = Powercap(root=root)
    powercap.open("n1")
    return powercap


def test_every_zone_is_read_raw_and_named_by_those_above_it(root: Path) -> None:
    assert energies(opened(root)) == {
        "sensor:n1.intel-rapl.package-0": 111,
        "sensor:n1.intel-rapl.package-0.dram": 222,
        "sensor:n1.intel-rapl.package-1": 333,
        "sensor:n1.intel-rapl.package-1.dram": RANGE,
        "sensor:n1.intel-rapl.psys": 2**63,
    }


def test_a_restarted_counter_is_reported_raw(root: Path) -> None:
    powercap = opened(root)
    powercap.read()
    (root / "intel-rapl:1:0" / "energy_uj").write_text("17\n")
    assert energies(powercap)["sensor:n1.intel-rapl.package-1.dram"] == 17


def test_wrap_value_and_current_caps_are_attributes(root: Path) -> None:
    powercap = opened(root)
    folder = root / "intel-rapl:0"
    (folder / "constraint_0_name").write_text("long_term\n")
    (folder / "constraint_0_power_limit_uw").write_text("350000000\n")
    device = powercap.inventory()["sensor:n1.intel-rapl.package-0"]
    assert device.parents == ("node:n1",)
    assert device.attributes == {"zone": "intel-rapl:0", "wraps_at": RANGE, "limit_long_term": 350.0}
    (folder / "constraint_0_power_limit_uw").write_text("200000000\n")
    assert powercap.inventory()["sensor:n1.intel-rapl.package-0"].attributes["limit_long_term"] == 200


def test_a_second_interface_to_the_same_package_is_another_sensor(root: Path) -> None:
    zone(root, "intel-rapl-mmio:0", "package-0", 112)
    zone(root, "intel-rapl:3", "package-0", 113)
    found = energies(opened(root))
    assert found["sensor:n1.intel-rapl-mmio.package-0"] == 112
    assert found["sensor:n1.intel-rapl.package-0.intel-rapl-3"] == 113


@pytest.mark.parametrize("text", ["", "nonsense", "-5", str(2**64)])
def test_an_unreadable_counter_affects_no_other(root: Path, text: str) -> None:
    (root / "intel-rapl:0" / "energy_uj").write_text(text)
    found = energies(opened(root))
    assert found["sensor:n1.intel-rapl.package-0"] == MISSING
    assert found["sensor:n1.intel-rapl.package-1"] == 333


def test_counters_only_for_root_name_the_privilege(root: Path) -> None:
    """Reads as an unprivileged user in a separate process, because root may read everything."""
    if os.geteuid() != 0:
        pytest.skip("only root can change its user")
    for folder in root.glob("intel-rapl:*"):
        (folder / "energy_uj").chmod(0o400)
    for folder in (root, *root.parents):
        if folder != Path("/") and folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(0o755)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:  # the child must never continue as a second pytest process
            os.setuid(65534)
            opened(root)
            os.write(writer, b"opened")
        except BaseException as absent:  # noqa: BLE001 - the parent reports it
            os.write(writer, str(absent).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as text:
        message = text.read()
    assert message.startswith(f"{root}/intel-rapl:0/energy_uj: not readable:")
    assert message.endswith("add CAP_DAC_READ_SEARCH")


def test_missing_counters_are_no_data_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(NoData, match=r"no energy counter below .*: no driver such as intel_rapl_msr is loaded"):
        Powercap(root=tmp_path / "powercap").open("n1")


def test_counters_that_all_disappeared_are_no_data(root: Path) -> None:
    powercap = opened(root)
    for folder in root.glob("intel-rapl:*"):
        (folder / "energy_uj").write_text("")
    with pytest.raises(NoData, match="none of 5 energy counters"):
        powercap.read()


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60), deadline=None)
def test_no_bytes_in_its_files_make_the_collector_fail(root: Path, energy: bytes, limit: bytes, name: bytes) -> None:
    folder = root / "intel-rapl:0"
    (folder / "energy_uj").write_bytes(energy)
    (folder / "name").write_bytes(name)
    for file in ("max_energy_range_uj", "constraint_0_power_limit_uw", "constraint_0_name"):
        (folder / file).write_bytes(limit)
    powercap = opened(root)
    assert len(energies(powercap)) == 5
    powercap.close()
