"""Driver statistics by ioctl: decoded replies, a test driver below the real calls, and this kernel."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData
from agents.collectors.nic.ethtool import PAUSE_S, STATISTICS, EthtoolStatistics, _Interface
from agents.collectors.nic.ethtool_requests import (
    EthtoolIoctl,
    decode_driver_info,
    decode_names,
    decode_statistics_count,
    fec_mode_of_bits,
    positions_of,
)
from pipeline.model.signals import CATALOGUE
from tests.agents.rdma_node import RdmaNode, h100
from tests.agents.test_nic_modules import NAMES, qsfp

ROOT = Path(__file__).parents[2]

# --- answers ---------------------------------------------------------------------------------------------------------


def test_every_statistic_has_the_interval_of_the_catalogue() -> None:
    for statistic in STATISTICS:
        assert CATALOGUE[statistic.signal].interval == statistic.interval, statistic.signal
        assert (CATALOGUE[statistic.signal].kind == "gauge") == statistic.gauge, statistic.signal


def test_names_and_count_are_decoded_from_kernel_structs() -> None:
    names = [b"rx_packets", b"rx_bits_phy", b"x" * 32]
    answer = struct.pack("=III", 0x1B, 1, 3) + b"".join(n.ljust(32, b"\0") for n in names)
    assert decode_names(answer + bytes(64), 3) == ["rx_packets", "rx_bits_phy", "x" * 32]
    assert positions_of(decode_names(answer, 3), ["rx_bits_phy", "absent"]).tolist() == [1]
    assert decode_statistics_count(struct.pack("=IIQI", 0x37, 0, 2, 512)) == 512
    assert decode_statistics_count(struct.pack("=IIQI", 0x37, 0, 0, 512)) == 0  # the driver has no statistics


@pytest.mark.parametrize(("bits", "state"), [(1 << 3, "rs"), (1 << 2, "off"), (1 << 4, "baser"), (1 << 5, "llrs")])
def test_error_correction_is_the_state_of_its_bit(bits: int, state: str) -> None:
    assert CATALOGUE["nic.fec_mode"].states[int(fec_mode_of_bits(bits))] == state
    assert np.isnan(fec_mode_of_bits(0))


@given(st.binary(max_size=300), st.integers(0, 1 << 20))
def test_no_response_breaks_a_parser(answer: bytes, count: int) -> None:
    assert len(decode_names(answer, count)) <= 10
    assert 0 <= decode_statistics_count(answer) < 1 << 32
    assert len(decode_driver_info(answer).firmware) <= 32


class NamesFailOnce:
    """A driver that refuses its first answer of names."""

    def __init__(self) -> None:
        self.names_asked = 0

    def statistics_names(self, name: str, count: int) -> list[str]:
        self.names_asked += 1
        if self.names_asked == 1:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return [STATISTICS[0].names[0]]

    def read_statistics(self, name: str, count: int) -> np.ndarray:
        return np.array([7], np.uint64)


def test_names_that_were_refused_once_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EthtoolIoctl, "statistics_count", lambda calls, name: 1)
    collector, clock = EthtoolStatistics(), [0.0]
    collector._ethtool, collector._monotonic = NamesFailOnce(), lambda: clock[0]
    port = _Interface("eno1")
    assert collector._read_values(port) is None
    clock[0] += PAUSE_S
    assert collector._read_values(port).tolist() == [7]
    assert STATISTICS[0].signal in port.positions


# --- a driver below the real calls -----------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from pathlib import Path
from agents.collectors.nic.ethtool import EthtoolStatistics
c = EthtoolStatistics(root=Path(sys.argv[1]))
c.open("n1")
looks = []
for grown in (False, False, True):
    if grown: Path(sys.argv[2]).touch()
    looks += [{"entities": r.entities, "columns": {k: v.tolist() for k, v in r.columns.items()}} for r in c.read()]
print(json.dumps({"looks": looks, "facts": {e: dict(d.attributes) for e, d in c.inventory().items()}}))
c.close()
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("ethtool") / "ethtool_stub.so"
    source = Path(__file__).with_name("ethtool_stub.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made


def driven(stub: Path, net: Path, folder: Path, module: bytes | None = None) -> tuple[dict[str, Any], list[str]]:
    """Three reads of the collector over the stub driver, and the driver's requests."""
    log = folder / "asked"
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LD_PRELOAD": str(stub),
        "ETHTOOL_STUB_LOG": str(log),
        "ETHTOOL_STUB_EXTRA": "5000",
        "ETHTOOL_STUB_GROWN": str(folder / "grown"),
    }
    if module is not None:
        (folder / "module").write_bytes(module)
        environ["ETHTOOL_STUB_MODULE"] = str(folder / "module")
    words = [sys.executable, "-c", PROGRAM, str(net), str(folder / "grown")]
    ran = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), log.read_text().splitlines()


@pytest.fixture
def node(tmp_path: Path) -> RdmaNode:
    node = RdmaNode(tmp_path / "node")
    place = node.pci("pci0000:0a/0000:0a:01.0/0000:0b:00.0", kind="0x020000")
    node.device("mlx5_8", place, ethernet=True)
    node.interface("mlxens8", place)
    return node


def test_only_our_statistics_of_thousands_are_reported(stub: Path, node: RdmaNode, tmp_path: Path) -> None:
    found, asked = driven(stub, node.net, tmp_path, qsfp())
    assert [look["entities"] for look in found["looks"]] == [["port:n1.mlx5_8"]] * 3
    wanted = {
        "phy_symbol_errors": 1,
        "phy_corrected_bits": 2,
        "phy_bits": 3,
        "lane0_errors": 4,
        "lane3_errors": 5,
        "rx_pause": 6 + 7,
        "rx_pause_duration": 8,
        "tx_pause": 9,
        "pause_storm_errors": 10,
        "pcie_stalled_writes": 11,
        "pcie_stall_write_events": 12,
        "pcie_rx_integrity": 13,
        "phy_link_downs": 14,
    }
    first, _, grown = (look["columns"] for look in found["looks"])
    taken = {name: first.pop(f"nic.{name}")[0] for name in wanted}
    assert taken == wanted
    assert first.pop("nic.fec_mode") == [3]
    assert first.keys() == {f"nic.{n}" for n in ("module_temperature", "module_voltage", "rx_power_min")} | {
        "nic.tx_power_min",
        "nic.bias_max",
    }
    assert first["nic.rx_power_min"] == pytest.approx([0.012])
    assert grown["nic.phy_link_downs"] == [14]  # channels were added: the names were read again
    assert asked.count("mlxens8 0x1b") == 2
    assert found["facts"]["port:n1.mlx5_8"] == {
        "interface": "mlxens8",
        "driver": "mlx5_core",
        "driver_version": "24.10",
        **NAMES,
        "firmware": "28.41.1000 (MT_0000000838)",
    }


def test_an_empty_module_cage_is_read_once(stub: Path, node: RdmaNode, tmp_path: Path) -> None:
    found, asked = driven(stub, node.net, tmp_path)
    assert asked.count("mlxens8 0x42") == 1
    assert all("nic.module_temperature" not in look["columns"] for look in found["looks"])


@pytest.mark.parametrize(
    ("code", "rest"),
    [
        *((code, 3600) for code in (errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL, errno.E2BIG)),
        *((code, 60) for code in (errno.EIO, errno.EBUSY, errno.ENODEV, errno.ETIMEDOUT)),
    ],
)
def test_a_refused_request_is_repeated_after_a_minute_or_an_hour(tmp_path: Path, code: int, rest: int) -> None:
    collector, now, asked = EthtoolStatistics(root=h100(tmp_path, ports=1).net), 1, []
    collector.open("n1")
    collector._monotonic = lambda: now
    port = next(iter(collector._ports.values()))

    def refuse(*_: object) -> None:
        asked.append(now)
        raise OSError(code, os.strerror(code))

    for now in range(1, 1 + 2 * rest, 5):  # noqa: B007, the clock reads it
        collector._query(port, "it", refuse)
    assert asked == [1, 1 + rest]
    now = 1 + 2 * rest
    assert collector._query(port, "it", lambda *_: 7) == 7
    assert "it" not in port.paused_until  # a port that responds again is reported again
    collector.close()


# --- this kernel -----------------------------------------------------------------------------------------------------


def test_interfaces_without_these_statistics_are_missing_and_no_fault(tmp_path: Path) -> None:
    node = h100(tmp_path, ports=1)
    collector = EthtoolStatistics(root=node.net)
    collector.open("n1")
    (reading,) = collector.read()
    assert reading.entities == ("port:n1.eno1", "port:n1.mlx5_8", "port:n1.mlx5_0")
    assert dict(reading.columns) == {}
    assert collector.inventory().keys() == set(reading.entities)
    collector.close()
    with pytest.raises(NoData, match="is hardware"):
        EthtoolStatistics(root=tmp_path / "absent").read()


def test_the_loopback_of_this_machine_can_be_queried() -> None:
    calls = EthtoolIoctl()
    for question in (calls.driver_info, calls.active_fec, calls.read_module):
        with pytest.raises(OSError, match=r"not supported|not permitted|Invalid argument"):
            question("lo")
    assert calls.statistics_count("lo") == 0
    calls.close()


VETH = """
mount -t sysfs sysfs /sys && ip link add fp0 type veth peer name fp1 && ip link set fp0 up && ip link set fp1 up
exec "$0" -c '
from agents.collectors.nic.ethtool import EthtoolStatistics
from agents.collectors.nic.ethtool_requests import EthtoolIoctl
calls = EthtoolIoctl()
count = calls.statistics_count("fp0")
names, values = calls.statistics_names("fp0", count), calls.read_statistics("fp0", count)
print(calls.driver_info("fp0").driver, count == len(names) == len(values) > 0)
c = EthtoolStatistics(include=("fp*",), exclude=("*",))
c.open("n1")
print([r.entities for r in c.read()], dict(c.inventory()["port:n1.fp0"].attributes)["driver"])
'
"""


def test_a_real_driver_is_read_through_the_real_kernel() -> None:
    words = ["unshare", "--net", "--mount", "--map-root-user", "sh", "-c", VETH, sys.executable]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("no unshare or ip here")
    ran = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    if ran.returncode != 0 and "Traceback" not in ran.stderr:
        pytest.skip(f"no network namespace of our own here: {ran.stderr.strip()}")
    assert ran.stdout.splitlines() == ["veth True", "[('port:n1.fp0', 'port:n1.fp1')] veth"], ran.stderr
