"""The board's sensors from the kernel's files: every kind in its unit, and files that fail one by one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.collector import NoData
from agents.collectors.host.hwmon import MAX_FLAGS, MAX_SENSORS, RESCAN_S, Hwmon
from agents.node.batches import check_reading, encode_column
from pipeline.model.signals import CATALOGUE
from tests.examples import examples
from tests.open_files import list_open

SECOND = 1_000_000


class Board:
    """A tree like /sys/class/hwmon, and the folders of the devices."""

    def __init__(self, root: Path) -> None:
        self.root, self.devices = root / "class", root / "devices"
        self.root.mkdir()

    def plug(self, number: int, name: str, place: str | None, files: Mapping[str, object]) -> Path:
        """A chip: hwmonN with its files; `place` is its device on the bus."""
        folder = self.root / f"hwmon{number}"
        folder.mkdir()
        if place is not None:
            (self.devices / place).mkdir(parents=True, exist_ok=True)
            (folder / "device").symlink_to(self.devices / place)
        for file, text in {"name": name, **files}.items():
            (folder / file).write_text(f"{text}\n")
        return folder

    def pull(self, number: int) -> None:
        shutil.rmtree(self.root / f"hwmon{number}")


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


class Clock:
    """Wall time that only a test advances."""

    def __init__(self) -> None:
        self.now = 1_800_000_000 * SECOND

    def __call__(self) -> int:
        return self.now


def opened(board: Board, clock: Clock | None = None, **how: object) -> Hwmon:
    hwmon = Hwmon(root=board.root, **how)  # type: ignore[arg-type]
    hwmon.open("n1")
    if clock is not None:
        hwmon._schedule._now = clock
        hwmon._schedule.due(RESCAN_S)
    return hwmon


def values(hwmon: Hwmon) -> dict[str, dict[str, float]]:
    """sensor -> signal -> value as on the wire; missing values are left out."""
    readings, inventory = hwmon.read(), hwmon.inventory()
    assert sorted(inventory) == sorted(entity for reading in readings for entity in reading.entities)
    found: dict[str, dict[str, float]] = {}
    for reading in readings:
        check_reading(reading, inventory)
        assert set(reading.columns) <= set(hwmon.signals)
        names = [entity.removeprefix("sensor:n1.") for entity in reading.entities]
        found |= {name: {} for name in names}
        for signal, column in reading.columns.items():
            wired = encode_column(CATALOGUE[signal], column)
            missing = np.isnan(wired) if wired.dtype.kind == "f" else wired == np.iinfo(wired.dtype).max
            for name, value, gone in zip(names, wired, missing, strict=True):
                if not gone:
                    found[name][signal] = round(float(value), 4)
    return found


def test_every_kind_is_read_in_the_units_of_the_catalogue(board: Board) -> None:
    board.plug(
        0,
        "board",
        "i2c-0",
        {
            "temp1_input": -5500,
            "in0_input": 12096,
            "curr1_input": 1500,
            "power1_input": 350_000_000,
            "fan1_input": 8400,
            "humidity1_input": 41_500,
            "energy1_input": 2**40,
        },
    )
    assert values(opened(board)) == {
        "board-i2c-0.curr1": {"sensor.current": 1.5},
        "board-i2c-0.energy1": {"sensor.energy": 2**40},
        "board-i2c-0.fan1": {"sensor.fan_speed": 8400},
        "board-i2c-0.humidity1": {"sensor.ratio": 0.415},
        "board-i2c-0.in0": {"sensor.voltage": 12.096},
        "board-i2c-0.power1": {"sensor.power": 350},
        "board-i2c-0.temp1": {"sensor.temperature": -5.5},
    }


def test_a_power_meter_with_only_an_average_is_read(board: Board) -> None:
    board.plug(0, "power_meter", None, {"power1_average": 612_000_000, "power1_average_interval": 1000})
    assert values(opened(board)) == {"power_meter.power1": {"sensor.power": 612}}


def test_the_files_of_an_old_style_driver_are_in_the_device_folder(board: Board) -> None:
    folder = board.plug(0, "x", "ACPI000D-00", {})
    (folder / "name").unlink()
    (board.devices / "ACPI000D-00" / "name").write_text("power_meter\n")
    (board.devices / "ACPI000D-00" / "power1_average").write_text("250000000\n")
    assert values(opened(board)) == {"power_meter-ACPI000D-00.power1": {"sensor.power": 250}}


def test_label_chip_and_limits_are_attributes_in_the_unit_of_the_signal(board: Board) -> None:
    board.plug(0, "coretemp", "coretemp.0", {"temp1_input": 45000, "temp1_label": "Package id 0", "temp1_crit": 100000})
    board.plug(1, "pmbus", "0-0058", {"in1_input": 12000, "in1_min": 11400, "in1_max": "nonsense", "in1_label": ""})
    found = opened(board).inventory()
    assert found["sensor:n1.coretemp-0.temp1"].parents == ("node:n1",)
    attributes = found["sensor:n1.coretemp-0.temp1"].attributes
    assert attributes == {"chip": "coretemp", "label": "Package id 0", "crit": 100.0}
    assert found["sensor:n1.pmbus-0-0058.in1"].attributes == {"chip": "pmbus", "min": 11.4}


@pytest.mark.parametrize(
    ("flags", "alarm"),
    [
        ({"temp1_alarm": 0, "temp1_crit_alarm": 0}, 0),
        ({"temp1_max_alarm": 1, "temp1_crit_alarm": 0}, 1),
        ({"temp1_max_alarm": 1, "temp1_crit_alarm": 1}, 2),
        ({"temp1_crit_alarm": "", "temp1_alarm": 1}, 1),
    ],
)
def test_the_worst_flag_of_the_chip_is_the_alarm(board: Board, flags: dict[str, object], alarm: int) -> None:
    board.plug(0, "jc42", "0-0018", {"temp1_input": 50000, **flags})
    assert values(opened(board)) == {"jc42-0-0018.temp1": {"sensor.temperature": 50, "sensor.alarm": alarm}}


def test_a_faulty_sensor_has_no_value(board: Board) -> None:
    board.plug(0, "jc42", "0-0018", {"temp1_input": -128000, "temp1_fault": 1, "temp2_input": 50000, "temp2_fault": 0})
    found = values(opened(board))
    assert found["jc42-0-0018.temp1"] == {"sensor.alarm": 3}
    assert found["jc42-0-0018.temp2"] == {"sensor.temperature": 50, "sensor.alarm": 0}


def test_a_sensor_without_response_affects_no_other(board: Board) -> None:
    """Reading a folder fails with EISDIR as a chip does with EIO, ENODATA or EAGAIN."""
    folder = board.plug(0, "nct6798", "nct6775.656", {"temp1_input": 41000, "temp3_input": "", "fan1_input": 900})
    (folder / "temp2_input").mkdir()
    found = values(opened(board))
    assert found == {
        "nct6798-nct6775-656.temp1": {"sensor.temperature": 41},
        "nct6798-nct6775-656.temp2": {},
        "nct6798-nct6775-656.temp3": {},
        "nct6798-nct6775-656.fan1": {"sensor.fan_speed": 900},
    }


def test_a_chips_name_does_not_depend_on_other_devices(board: Board) -> None:
    for number, place in ((0, "nvme0"), (1, "nvme1")):
        board.plug(number, "nvme", place, {"temp1_input": 40000})
    board.plug(2, "k10temp", "0000:00:18.3", {"temp1_input": 60000})
    board.plug(3, "acpitz", None, {"temp1_input": 30000})
    names = set(values(opened(board)))
    assert names == {"nvme0.temp1", "nvme1.temp1", "k10temp-0000-00-18-3.temp1", "acpitz.temp1"}
    board.pull(0)
    assert names - set(values(opened(board))) == {"nvme0.temp1"}


def test_two_chips_with_the_same_name_and_no_location_are_distinguished(board: Board) -> None:
    for number in (3, 12):
        board.plug(number, "acpitz", None, {"temp1_input": number * 1000})
    found = values(opened(board))
    assert {name: sensor["sensor.temperature"] for name, sensor in found.items()} == {
        "acpitz.temp1": 3,
        "acpitz-hwmon12.temp1": 12,
    }


def test_new_and_removed_chips_are_noticed_at_a_slow_interval(board: Board) -> None:
    clock = Clock()
    board.plug(0, "nvme", "nvme0", {"temp1_input": 40000})
    hwmon = opened(board, clock)
    board.plug(1, "nvme", "nvme1", {"temp1_input": 41000})
    assert set(values(hwmon)) == {"nvme0.temp1"}
    clock.now += int(RESCAN_S) * SECOND
    assert set(values(hwmon)) == {"nvme0.temp1", "nvme1.temp1"}
    board.pull(0)
    clock.now += int(RESCAN_S) * SECOND
    assert set(values(hwmon)) == {"nvme1.temp1"}
    board.pull(1)
    board.plug(1, "jc42", "0-0018", {"temp1_input": 39000})  # the kernel gives the number to another chip
    clock.now += int(RESCAN_S) * SECOND
    assert values(hwmon) == {"jc42-0-0018.temp1": {"sensor.temperature": 39}}
    hwmon.close()


def test_between_scans_no_folder_is_listed(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.plug(0, "nvme", "nvme0", {"temp1_input": 40000})
    hwmon = opened(board, Clock())
    listed: list[object] = []
    monkeypatch.setattr(os, "listdir", listed.append)
    monkeypatch.setattr(os, "open", listed.append)
    hwmon.read()
    assert listed == []


def test_a_slow_chip_is_skipped_until_the_next_scan(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds, asked = Clock(), [0.0], list[str]()
    board.plug(0, "slow", "0-0058", {f"temp{n}_input": 40000 for n in range(1, 6)})
    board.plug(1, "nvme", "nvme0", {"temp1_input": 41000})
    hwmon = opened(board, clock)
    hwmon._monotonic = lambda: seconds[0]
    pread = os.pread

    def slowly(handle: int, size: int, offset: int) -> bytes:
        path = os.readlink(f"/proc/self/fd/{handle}")
        asked.append(path)
        seconds[0] += 1.0 if "hwmon0" in path else 0.001
        return pread(handle, size, offset)

    monkeypatch.setattr(os, "pread", slowly)
    for _ in range(3):
        found = values(hwmon)
    assert found["nvme0.temp1"] == {"sensor.temperature": 41}
    assert found["slow-0-0058.temp1"] == {}
    assert len([path for path in asked if "hwmon0" in path]) == 1
    clock.now += int(RESCAN_S) * SECOND
    assert values(hwmon)["slow-0-0058.temp1"] == {"sensor.temperature": 40}


def test_open_files_are_bounded_alarms_first(board: Board) -> None:
    chips = 4
    for chip in range(chips):
        files = {f"temp{n}_{end}": 1 for n in range(1, 101) for end in ("input", "alarm", "crit_alarm", "max_alarm")}
        board.plug(chip, "many", f"chip{chip}", files)
    hwmon = opened(board)
    assert 0 < len(list_open(board.root)) <= MAX_FLAGS + chips * 100
    found = values(hwmon)
    assert len(found) == chips * 100
    assert all("sensor.temperature" in sensor for sensor in found.values())
    assert 100 <= len([sensor for sensor in found.values() if "sensor.alarm" in sensor]) < chips * 100
    hwmon.close()
    assert list_open(board.root) == []


def test_excluded_chips_are_not_opened(board: Board) -> None:
    board.plug(0, "drivetemp", "0:0:0:0", {"temp1_input": 30000})
    board.plug(1, "nvme", "nvme0", {"temp1_input": 40000})
    assert set(values(opened(board, exclude=("drivetemp*",)))) == {"nvme0.temp1"}


def test_missing_sensors_are_no_data_with_a_reason(board: Board, tmp_path: Path) -> None:
    for root in (board.root, tmp_path / "gone"):
        with pytest.raises(NoData, match=r"no sensor below .*: no driver for the board's chips is loaded"):
            Hwmon(root=root).open("n1")


def test_the_number_of_sensors_is_bounded(board: Board) -> None:
    for chip in range(3):
        board.plug(chip, "many", f"chip{chip}", {f"temp{n}_input": n for n in range(1, MAX_SENSORS // 2 + 1)})
    assert len(values(opened(board))) == MAX_SENSORS


@given(
    st.dictionaries(
        st.sampled_from(["temp1_input", "temp1_crit", "temp1_fault", "power1_average", "energy1_input", "name"]),
        st.one_of(st.binary(max_size=400), st.integers().map(lambda n: str(n).encode())),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60), deadline=None)
def test_no_bytes_in_its_files_make_the_collector_fail(tmp_path: Path, files: dict[str, bytes]) -> None:
    folder = tmp_path / "class" / "hwmon0"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in {"name": b"chip", "in0_input": b"1", **files}.items():
        (folder / name).write_bytes(data)
    hwmon = Hwmon(root=folder.parent)
    try:
        hwmon.open("n1")
    except NoData:  # a chip without a name
        return
    assert "chip.in0" in values(hwmon) or "name" in files
    hwmon.close()
