"""The IPMI collector on BMCs that respond, refuse, are slow, lose entries or are silent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agents.collector import NoData, Reading
from agents.collectors.bmc.ipmi import LOOK_BACK_S, MAX_ENTRIES, Ipmi
from agents.node.batches import check_reading, encode_column
from pipeline.model.event_kinds import EVENT_KINDS
from pipeline.model.records import Event
from pipeline.model.signals import CATALOGUE
from tests.agents.bmc import Board, DirectBmc, event, full, server

NOW = 1_800_000_000_000_000  # us
PS2_INPUT_LOST = (0x08, 0x41, 0x6F, b"\x03")


class Bench:
    """A collector over a board, with a clock that only a test advances."""

    def __init__(self, board: Board, answer_s: float = 0.0, **settings: float) -> None:
        self.board, self.seconds, self.answer_s = board, 0.0, answer_s
        self.ipmi = Ipmi(**settings)  # type: ignore[arg-type]
        self.ipmi._connect = lambda path, timeout: self
        self.ipmi._now = lambda: NOW + int(self.seconds * 1e6)
        self.ipmi._monotonic = lambda: self.seconds
        self._bmc = DirectBmc(board)

    def request(self, netfn: int, command: int, data: bytes = b"", lun: int = 0) -> bytes:
        self.seconds += self.answer_s
        return self._bmc.request(netfn, command, data, lun)

    def close(self) -> None:
        self._bmc.close()

    def read_once(self) -> tuple[Reading, ...]:
        """Reads once, an interval after the last read."""
        self.seconds += self.ipmi.interval
        found = self.ipmi.read()
        for reading in found:
            check_reading(reading, self.ipmi.inventory())
            assert set(reading.columns) <= set(self.ipmi.signals)
            for name, values in reading.columns.items():
                encode_column(CATALOGUE[name], values)
        reported = [event for reading in found for event in reading.events]
        assert all(set(event.data) <= set(EVENT_KINDS[event.kind].data) for event in reported)
        assert {e for r in found for e in r.entities} == self.ipmi.inventory().keys()
        return found

    def opened(self) -> Bench:
        self.ipmi.open("n1")
        return self


def row(readings: tuple[Reading, ...], name: str) -> dict[str, float]:
    """The values of one sensor."""
    entity = f"sensor:n1.ipmi.{name}"
    (sensors,) = (r for r in readings if entity in r.entities)
    place = sensors.entities.index(entity)
    wired = {signal: encode_column(CATALOGUE[signal], values)[place] for signal, values in sensors.columns.items()}
    missing = {"sensor.status": 0xFFFF, "sensor.alarm": 0xFF}
    return {s: round(float(v), 6) for s, v in wired.items() if v == v and v != missing.get(s)}


def sensors_of(readings: tuple[Reading, ...]) -> list[str]:
    sensors = (r for r in readings if r.device_class == "sensor")
    return [entity.removeprefix("sensor:n1.ipmi.") for reading in sensors for entity in reading.entities]


def events(bench: Bench) -> list[Event]:
    return [e for reading in bench.read_once() for e in reading.events]


def test_every_sensor_is_read_in_the_units_of_the_catalogue() -> None:
    found = Bench(server()).opened().read_once()
    node = found[0]
    assert (node.entities, node.columns["node.power"][0]) == (("node:n1",), 640)
    assert row(found, "CPU1-Temp") == {"sensor.temperature": 90, "sensor.alarm": 1}
    assert row(found, "Inlet-Temp") == {"sensor.temperature": -16, "sensor.alarm": 2}
    assert row(found, "P12V") == {"sensor.voltage": pytest.approx(12.096), "sensor.alarm": 0}
    assert row(found, "Fan-1") == {"sensor.fan_speed": 8400, "sensor.alarm": 0}
    assert row(found, "Fan-1-Duty") == {"sensor.ratio": pytest.approx(0.35), "sensor.alarm": 0}
    assert row(found, "PS1-Input") == {"sensor.power": 850, "sensor.alarm": 0}
    assert row(found, "PS1-Curve") == {"sensor.current": 21, "sensor.alarm": 0}  # 2 x 7 + 7, by its factors of now
    assert row(found, "PS-Status-1") == {"sensor.status": 0x1}
    assert row(found, "PS-Status-2") == {"sensor.status": 0x1 | 0x2 | 0x8}  # present, failed, input lost
    assert len(sensors_of(found)) == 9  # without the satellite's, records that are not sensors, and unwanted types


@pytest.mark.parametrize(
    ("chassis", "mask"),
    [(b"\x21\0\0", 0), (b"\x09\x01\x00", 0x4), (b"\x01\0\x0d", 0x70), (b"\x1f\0\0", 0xF), (b"\x1f", 0xFFFF)],
)
def test_faults_of_the_chassis_are_a_mask(chassis: bytes, mask: int) -> None:
    board = server()
    board.chassis = chassis
    assert Bench(board).opened().read_once()[0].columns["node.chassis_faults"][0] == mask


def test_a_bmc_that_is_busy_for_a_while_is_retried_at_the_next_read() -> None:
    board = server()
    bench = Bench(board).opened()
    bench.read_once()
    board.refuse = {(0x04, 0x2D): 0xC0, (0x2C, 0x02): 0xC3, (0x0A, 0x40): 0xD2}
    found = bench.read_once()
    assert row(found, "Fan-1") == {}
    assert np.isnan(found[0].columns["node.power"][0])
    board.refuse.clear()
    board.write(event(board.clock, *PS2_INPUT_LOST))
    found = bench.read_once()
    assert row(found, "Fan-1")["sensor.fan_speed"] == 8400
    assert found[0].columns["node.power"][0] == 640
    assert len(found[0].events) == 1


def test_the_inventory_has_labels_limits_and_the_bmcs_firmware() -> None:
    bench = Bench(server()).opened()
    bench.read_once()
    found = bench.ipmi.inventory()
    assert found["node:n1"].attributes == {
        "bmc_firmware": "3.42",
        "bmc_ipmi": "2.0",
        "bmc_manufacturer": str(0x2A2),
        "bmc_product": str(0x1234),
    }
    assert found["sensor:n1.ipmi.CPU1-Temp"].parents == ("node:n1",)
    attributes = found["sensor:n1.ipmi.CPU1-Temp"].attributes
    assert attributes == {"label": "CPU1 Temp", "type": "temperature", "max": 85.0, "crit": 95.0}
    limits = dict(found["sensor:n1.ipmi.Inlet-Temp"].attributes)
    assert (limits["min"], limits["lcrit"]) == (-5, -10)
    assert found["sensor:n1.ipmi.PS-Status-2"].attributes["type"] == "power_supply"


@pytest.mark.parametrize("reading", [b"\x5a\x20", b"\x5a\xe0\xc0", b"\x5a\x80\xc0", b"", b"\x5a"])
def test_a_sensor_that_is_not_available_or_not_scanned_is_missing(reading: bytes) -> None:
    board = server()
    board.readings[0x01] = reading
    found = Bench(board).opened().read_once()
    assert row(found, "CPU1-Temp") == {}
    assert row(found, "Fan-1")["sensor.fan_speed"] == 8400


def test_refused_requests_are_not_repeated_for_an_hour() -> None:
    board = server()
    del board.readings[0x10]
    board.watts = None
    bench = Bench(board).opened()
    bench.read_once()
    board.asked.clear()
    for _ in range(3):
        found = bench.read_once()
    assert row(found, "P12V") == {}
    assert np.isnan(found[0].columns["node.power"][0])
    assert not [a for a in board.asked if a[1] == 0x02 or a[2] == b"\x10"]
    board.readings[0x10], board.watts, bench.seconds = bytes((192, 0xC0, 0xC0)), 700, bench.seconds + 3600
    assert row(bench.read_once(), "P12V")["sensor.voltage"] == pytest.approx(12.096)
    assert bench.read_once()[0].columns["node.power"][0] == 700


def test_the_repository_is_read_once() -> None:
    bench = Bench(server()).opened()
    bench.read_once()
    bench.board.asked.clear()
    bench.read_once()
    assert not [a for a in bench.board.asked if a[:2] == (0x0A, 0x23)]


@pytest.mark.parametrize("largest", [0x22, 16])
def test_a_bmc_without_whole_records_is_read_in_pieces(largest: int) -> None:
    board = server()
    board.largest = largest
    bench = Bench(board).opened()
    assert row(bench.read_once(), "PS-Status-2")["sensor.status"] == 0xB
    assert len(bench.ipmi.inventory()) == 10


def test_a_busy_bmc_is_retried_at_the_next_read() -> None:
    board = server()
    board.busy = 1
    bench = Bench(board).opened()
    assert sensors_of(bench.read_once()) == []
    assert len(sensors_of(bench.read_once())) == 9


def test_a_repository_with_a_loop_or_an_error_ends() -> None:
    board = server()
    board.refuse[0x0A, 0x23] = 0xCB
    assert sensors_of(Bench(board).opened().read_once()) == []


def test_a_slow_bmc_is_read_over_several_reads() -> None:
    """Half a second per response and four seconds per read: each sensor is read in turn, and no read takes longer."""
    bench = Bench(server(), answer_s=0.5, budget=4.0).opened()
    seen: set[str] = set()
    for _ in range(12):
        begun = bench.seconds + bench.ipmi.interval
        found = bench.read_once()
        assert bench.seconds - begun <= 4.5
        seen |= {name for name in sensors_of(found) if row(found, name)}
    assert len(seen) == 9


def test_a_silent_sensor_does_not_block_the_others() -> None:
    board = server()
    bench = Bench(board).opened()
    bench.read_once()
    board.silent.add((0x04, 0x23))  # no response for the factors of PS1 Curve
    for _ in range(2):
        found = bench.read_once()
        assert row(found, "PS1-Curve") == {}
        assert row(found, "PS-Status-2") == {"sensor.status": 0xB}
        assert row(found, "CPU1-Temp")["sensor.temperature"] == 90


def test_a_power_request_without_response_hides_nothing_else() -> None:
    board = server()
    board.silent.add((0x2C, 0x02))
    found = Bench(board).opened().read_once()
    assert np.isnan(found[0].columns["node.power"][0])
    assert row(found, "CPU1-Temp")["sensor.temperature"] == 90


def test_a_silent_bmc_is_no_data_with_a_reason() -> None:
    board = server()
    bench = Bench(board).opened()
    bench.read_once()
    board.silent |= {(n, c) for n in (0x00, 0x04, 0x0A, 0x2C) for c in range(256)}
    with pytest.raises(NoData, match=r"/dev/ipmi0: BMC gave no answer to command"):
        bench.read_once()
    board.silent.add((0x06, 0x01))
    with pytest.raises(NoData, match="no answer"):
        bench.opened()


def test_without_a_device_the_message_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NoData, match=r"no .*ipmi7: no BMC, or ipmi_devintf and ipmi_si are not loaded"):
        Ipmi(device=tmp_path / "ipmi7").open("n1")


def test_a_device_without_permission_names_the_privilege() -> None:
    def closed(path: Path, timeout: float) -> DirectBmc:
        raise PermissionError(13, "Permission denied", str(path))

    ipmi = Ipmi()
    ipmi._connect = closed
    with pytest.raises(NoData, match="/dev/ipmi0: no permission: add CAP_DAC_OVERRIDE"):
        ipmi.open("n1")


def test_sensors_with_the_same_name_are_distinguished() -> None:
    board = server()
    board.records = [full(n, "Temp", 1) for n in (1, 2)]
    assert sensors_of(Bench(board).opened().read_once()) == ["Temp", "Temp-02"]


# --- the event log ---------------------------------------------------------------------------------------------------


def test_new_entries_become_events_with_the_bmcs_time() -> None:
    board = server()
    bench = Bench(board).opened()
    assert events(bench) == []
    board.write(event(board.clock - 20, *PS2_INPUT_LOST))
    (found,) = events(bench)
    assert (found.entity, found.kind) == ("node:n1", "sel")
    assert found.time == NOW + int(bench.seconds * 1e6) - 20_000_000
    data = dict(found.data)
    assert data.pop("raw").startswith("010002")
    assert data == {
        "record": 1,
        "timestamp": board.clock - 20,
        "sensor": "sensor:n1.ipmi.PS-Status-2",
        "type": "power_supply",
        "event": "input lost",
        "asserted": True,
    }
    assert events(bench) == []


def test_a_threshold_event_has_reading_and_threshold_in_the_sensors_unit() -> None:
    board = server()
    bench = Bench(board).opened()
    bench.read_once()
    board.write(event(board.clock, 0x01, 0x01, 0x01, b"\x59\x60\x5f"))
    data = dict(events(bench)[0].data)
    assert (data["event"], data["reading"], data["threshold"]) == ("above upper critical", 96, 95)


def test_deassertions_are_marked_and_bios_entries_have_no_sensor() -> None:
    board = server()
    bench = Bench(board).opened()
    bench.read_once()
    board.write(event(0, 0x08, 0x41, 0x6F | 0x80, b"\x03"), event(board.clock, 0x0C, 0x41, 0x6F, b"\x01", 0x01))
    gone, memory = events(bench)
    assert (gone.data["asserted"], gone.time) == (False, NOW + int(bench.seconds * 1e6))  # its clock was not set
    assert (memory.data["type"], memory.data["event"]) == ("memory", "uncorrectable error")
    assert "sensor" not in memory.data


def test_the_first_read_reports_only_the_last_hour() -> None:
    board = server()
    for age in (LOOK_BACK_S * 3, LOOK_BACK_S + 1, LOOK_BACK_S - 1, 5):
        board.write(event(board.clock - age, *PS2_INPUT_LOST))
    assert [e.data["record"] for e in events(Bench(board).opened())] == [3, 4]


def test_a_burst_is_reported_in_order_over_several_reads() -> None:
    board = server()
    bench = Bench(board).opened()
    bench.read_once()
    board.write(*(event(board.clock, *PS2_INPUT_LOST) for _ in range(MAX_ENTRIES * 2 + 3)))
    reported = [[e.data["record"] for e in events(bench)] for _ in range(4)]
    assert [len(read_once) for read_once in reported] == [MAX_ENTRIES, MAX_ENTRIES, 3, 0]
    assert [record for read_once in reported for record in read_once] == list(range(1, MAX_ENTRIES * 2 + 4))


def test_a_log_that_is_cleared_is_read_from_its_start() -> None:
    board = server()
    board.write(*(event(board.clock - 9, *PS2_INPUT_LOST) for _ in range(3)))
    bench = Bench(board).opened()
    bench.read_once()
    board.clear()
    board.write(event(board.clock, 0x10, 0x99, 0x6F, b"\x02"))
    assert [e.data["event"] for e in events(bench)] == ["log cleared"]
    board.write(event(board.clock, *PS2_INPUT_LOST))
    assert [e.data["record"] for e in events(bench)] == [2]


def test_an_entry_without_response_is_reported_by_the_next_read() -> None:
    board = server()
    bench = Bench(board).opened()
    bench.read_once()
    board.write(event(board.clock, *PS2_INPUT_LOST))
    board.silent.add((0x0A, 0x43))
    assert events(bench) == []
    board.silent.clear()
    assert [e.data["record"] for e in events(bench)] == [1]


def test_entries_read_before_a_timeout_are_reported_once() -> None:
    board = server()
    bench = Bench(board).opened()
    bench.read_once()
    board.write(*(event(board.clock, *PS2_INPUT_LOST) for _ in range(4)))
    answer, asked = board.answer, list[int]()

    def falls_silent(netfn: int, command: int, data: bytes, lun: int = 0) -> bytes | None:
        asked.append(command)
        return (
            None if (netfn, command) == (0x0A, 0x43) and asked.count(0x43) == 3 else answer(netfn, command, data, lun)
        )

    board.answer = falls_silent  # type: ignore[method-assign]
    reported = [[e.data["record"] for e in events(bench)] for _ in range(3)]
    assert reported == [[1, 2], [3, 4], []]


def test_a_busy_log_is_not_reported_twice() -> None:
    board = server()
    board.write(event(board.clock, *PS2_INPUT_LOST))
    bench = Bench(board).opened()
    assert len(events(bench)) == 1
    board.refuse[0x0A, 0x43] = 0xC0
    board.write(event(board.clock, *PS2_INPUT_LOST))
    assert events(bench) == []
    board.refuse.clear()
    assert [e.data["record"] for e in events(bench)] == [2]


def test_without_a_bmc_clock_entries_have_our_time() -> None:
    board = server()
    bench = Bench(board).opened()
    bench.read_once()
    board.refuse[0x0A, 0x48] = 0xC1
    board.write(event(board.clock, *PS2_INPUT_LOST))
    (found,) = events(bench)
    assert found.time == NOW + int(bench.seconds * 1e6)


def test_a_missing_log_affects_nothing_else() -> None:
    board = server()
    board.refuse[0x0A, 0x40] = 0xC1
    assert row(Bench(board).opened().read_once(), "Fan-1")["sensor.fan_speed"] == 8400
