"""NVMe health: the log's layout, its command, and disks that refuse or do not answer."""

from __future__ import annotations

import ctypes
import errno
import math
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData, Reading
from agents.collectors.host import storage
from agents.collectors.host.storage import Nvme
from agents.node.batches import encode_column
from pipeline.model.signals import CATALOGUE

MISSING = 2**64 - 1
LOGS = st.one_of(st.binary(max_size=600), st.binary(min_size=512, max_size=512))


def log(**reported: int) -> bytes:
    """A health log in the layout of the specification; values that are not given are 0."""
    data = bytearray(512)
    struct.pack_into(
        "<BHBBB", data, 0, *(reported.get(n, 0) for n in ("warning", "kelvin", "spare", "threshold", "used"))
    )
    wide = {32: "read", 48: "written", 128: "hours", 144: "unsafe", 160: "media", 176: "entries"}
    for at, name in wide.items():
        data[at : at + 16] = reported.get(name, 0).to_bytes(16, "little")
    struct.pack_into("<I", data, 192, reported.get("hot", 0))
    struct.pack_into("<II", data, 224, reported.get("light", 0), reported.get("heavy", 0))
    return bytes(data)


WORN = log(
    warning=4,
    kelvin=318,
    spare=93,
    threshold=10,
    used=101,
    read=7,
    written=9,
    hours=26280,
    unsafe=3,
    media=2,
    entries=11,
    hot=5,
    light=60,
    heavy=2,
)


def add_disk(root: Path, name: str, **reported: str) -> None:
    known = {"model": "SAMSUNG MZQL27T6 ", "serial": f"S{name}", "firmware_rev": "GDC5", "transport": "pcie"}
    for file, text in {**known, "state": "live", **reported}.items():
        path = root / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def opened(root: Path, read_log: Callable[[Path], bytes], **settings: float) -> Nvme:
    nvme = Nvme(root=root, devices=Path("/dev"), **settings)
    nvme._read_log = read_log
    nvme.open("n1")
    return nvme


def read_once(nvme: Nvme) -> Reading:
    (reading,) = nvme.read()
    return reading


def test_a_log_is_read_in_the_units_of_the_catalogue(tmp_path: Path) -> None:
    add_disk(tmp_path, "nvme0")
    asked: list[Path] = []
    reading = read_once(opened(tmp_path, lambda path: asked.append(path) or WORN))
    assert asked == [Path("/dev/nvme0")]
    assert reading.entities == ("disk:n1.nvme0",)
    assert {name: values[0] for name, values in reading.columns.items()} == {
        "disk.state": 1,
        "disk.temperature": 45,
        "disk.critical_warning": 4,
        "disk.spare": 0.93,
        "disk.spare_threshold": 0.1,
        "disk.endurance_used": 1.01,
        "disk.lifetime_read": 7,
        "disk.lifetime_written": 9,
        "disk.power_on_time": 26280,
        "disk.unsafe_shutdowns": 3,
        "disk.media_errors": 2,
        "disk.error_log_entries": 11,
        "disk.hot_time": 5,
        "disk.throttled_time": 62,
    }


def test_the_log_is_read_every_ten_minutes_and_the_state_at_each_read(tmp_path: Path) -> None:
    add_disk(tmp_path, "nvme0")
    nvme = opened(tmp_path, lambda _: WORN)
    read_once(nvme)
    add_disk(tmp_path, "nvme0", state="dead")
    assert {name: v.tolist() for name, v in read_once(nvme).columns.items()} == {"disk.state": [5]}
    add_disk(tmp_path, "nvme0", state="deleting (no IO)")
    assert read_once(nvme).columns["disk.state"].tolist() == [4]
    add_disk(tmp_path, "nvme0", state="dreaming")
    assert read_once(nvme).columns["disk.state"].tolist() == [6]


def test_disks_are_distinguished_and_network_disks_are_excluded(tmp_path: Path) -> None:
    for name in ("nvme10", "nvme2"):
        add_disk(tmp_path, name)
    add_disk(tmp_path, "nvme3", transport="tcp")
    (tmp_path / "nvme-subsys0").mkdir()
    nvme = opened(tmp_path, lambda path: log(kelvin=300 + int(path.name[4:])))
    reading = read_once(nvme)
    assert reading.entities == ("disk:n1.nvme2", "disk:n1.nvme10")
    assert reading.columns["disk.temperature"].tolist() == [29, 37]
    facts = nvme.inventory()["disk:n1.nvme10"]
    assert facts.parents == ("node:n1",)
    assert facts.attributes == {"model": "SAMSUNG MZQL27T6", "serial": "Snvme10", "firmware": "GDC5"}


def test_without_privilege_the_temperature_comes_from_the_driver_and_the_fix_is_reported(tmp_path: Path) -> None:
    add_disk(tmp_path, "nvme0")
    (tmp_path / "nvme0" / "hwmon4").mkdir()
    (tmp_path / "nvme0" / "hwmon4" / "temp1_input").write_text("41850\n")

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    nvme = opened(tmp_path, refuse)
    columns = read_once(nvme).columns
    assert columns["disk.temperature"].tolist() == [41.85]
    assert np.isnan(columns["disk.spare"][0])
    assert columns["disk.media_errors"].tolist() == [MISSING]
    reported = nvme.inventory()["disk:n1.nvme0"].attributes["health_log"]
    assert reported == "/dev/nvme0: not permitted: add CAP_SYS_ADMIN"


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hanging disk waits for; opened at the end of the test."""
    made = threading.Event()
    yield made
    made.set()


def test_a_hung_disk_costs_only_its_own_values(tmp_path: Path, gate: threading.Event) -> None:
    for name in ("nvme0", "nvme1", "nvme2"):
        add_disk(tmp_path, name)

    def read_log(path: Path) -> bytes:
        if path.name == "nvme0":
            gate.wait()
        if path.name == "nvme2":
            raise OSError(errno.EIO, "refused with NVMe status 0x2", str(path))
        return WORN

    columns = read_once(opened(tmp_path, read_log, patience=0.2)).columns
    assert columns["disk.temperature"][1] == 45
    assert np.isnan(columns["disk.temperature"][[0, 2]]).all()
    assert columns["disk.media_errors"].tolist() == [MISSING, 2, MISSING]
    assert columns["disk.state"].tolist() == [1, 1, 1]


def test_a_server_without_such_disks_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no NVMe disk"):
        Nvme(root=tmp_path / "absent").open("n1")


def test_the_command_has_the_kernels_layout() -> None:
    """_IOWR('N', 0x41, 72 bytes) carries the size of the struct; so would a wrong layout show."""
    assert ctypes.sizeof(storage._Command) == 72
    assert (3 << 30 | 72 << 16 | ord("N") << 8 | 0x41) == storage._ADMIN_COMMAND
    assert (storage._Command.addr.offset, storage._Command.cdw10.offset) == (24, 40)


def test_a_device_that_is_not_a_disk_refuses_the_command() -> None:
    with pytest.raises(OSError, match="ioctl") as refused:
        storage.read_health_log(Path("/dev/null"))
    assert refused.value.errno == errno.ENOTTY


def test_a_disk_without_temperature_is_not_at_minus_273_degrees() -> None:
    assert math.isnan(storage.decode_health_log(log())["disk.temperature"])


@given(LOGS)
def test_any_bytes_are_decoded_or_too_short(data: bytes) -> None:
    try:
        found = storage.decode_health_log(data)
    except ValueError:
        assert len(data) < 512
        return
    for name in storage.GAUGES:
        encode_column(CATALOGUE[name], np.array([found[name]]))
    assert all(isinstance(found[name], int) for name in storage.COUNTERS)
