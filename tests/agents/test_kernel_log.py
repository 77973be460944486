"""The collector of the kernel's log, over a file or FIFO of the same format: which event each line becomes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.collector import NoData
from agents.collectors.gpu.slots import boot_id
from agents.collectors.host import kernel_events, kernel_log
from agents.collectors.host.kernel_log import KernelLog, RepeatLimiter
from agents.collectors.host.kmsg import KmsgPosition, KmsgReader
from pipeline.model.event_kinds import EVENT_KINDS
from pipeline.model.records import SECOND, Event

NOW = 1_800_000_000 * SECOND
UPTIME = 5_000 * SECOND
GPUS = ("0000:1d:00.0", "0000:2c:00.0", "0001:04:00.0")


class Clock:
    """Wall clock and time since boot, which advance together."""

    def __init__(self) -> None:
        self.passed = 0

    def now(self) -> int:
        return NOW + self.passed

    def since_boot(self) -> int:
        return UPTIME + self.passed


Make = Callable[..., KernelLog]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Make]:
    """An open collector over tmp_path/kmsg, on a node with three GPUs, a NIC and a driver of branch 575."""
    for minor, address in enumerate(reversed(GPUS)):
        information = tmp_path / "nvidia" / "gpus" / address / "information"
        information.parent.mkdir(parents=True, exist_ok=True)
        excluded = "Yes" if address == GPUS[1] else "No"
        information.write_text(f"GPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\nGPU Excluded:\t {excluded}\n")
    (tmp_path / "nvidia" / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08\n")
    (tmp_path / "sys/bus/pci/devices/0000:3b:00.0/infiniband/mlx5_4").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_4/ports/1").mkdir(parents=True)
    (tmp_path / "kmsg").touch()
    opened: list[KernelLog] = []

    def build(**settings: Any) -> KernelLog:
        roots = {"path": tmp_path / "kmsg", "driver": tmp_path / "nvidia", "sys": tmp_path / "sys"}
        found = KernelLog(**{**roots, "state": tmp_path / "state", **settings})
        found._now, found._since_boot = clock.now, clock.since_boot
        found.open("n1")
        opened.append(found)
        return found

    yield build
    for collector in opened:
        collector.close()


def write(tmp_path: Path, *lines: str, begin: int = 1, at: int = UPTIME, level: int = 4) -> None:
    with (tmp_path / "kmsg").open("a") as log:
        log.writelines(f"{level},{number},{at},-;{line}\n" for number, line in enumerate(lines, begin))


def read_once(collector: KernelLog) -> list[Event]:
    (reading,) = collector.read()
    for event in reading.events:
        json.dumps(dict(event.data), allow_nan=False)
        assert set(event.data) <= set(EVENT_KINDS[event.kind].data), event.kind
    return list(reading.events)


@pytest.mark.parametrize("slots_file", [False, True])
def test_a_gpu_keeps_its_index_after_another_was_lost_and_the_driver_reloaded(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots_file: bool
) -> None:
    """The file has one more GPU before both, which was lost before the agent started."""
    monkeypatch.setattr(kernel_events, "REREAD_S", -1.0)
    gpus = {"0000:1b:00.0": {"index": 0}, GPUS[0]: {"index": 1}, GPUS[2]: {"index": 2}}
    if slots_file:
        (tmp_path / "gpus.json").write_text(json.dumps({"boot": boot_id(), "gpus": gpus}))
    collector = make(gpus=tmp_path / "gpus.json" if slots_file else None)
    shutil.rmtree(tmp_path / "nvidia" / "gpus" / GPUS[0])
    (tmp_path / "nvidia" / "gpus" / "0002:05:00.0").mkdir()
    write(tmp_path, *(f"NVRM: Xid (PCI:{pci}): 79, pid=1, GPU lost" for pci in ("0002:05:00", "0001:04:00")))
    wanted = ["gpu:n1.3", "gpu:n1.2"] if slots_file else ["gpu:n1.2", "gpu:n1.1"]
    assert [event.entity for event in read_once(collector)] == wanted


def test_a_position_that_cannot_be_saved_costs_no_event_and_is_saved_later(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    collector = make()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        for number in range(1, 5):
            write(tmp_path, "NVRM: Xid (PCI:0001:04:00): 13, pid=7, name=train, Graphics Exception", begin=number)
            assert len(read_once(collector)) == 1
    assert capsys.readouterr().err == (
        f"collector kernel_log: {tmp_path / 'state'}: cannot be written: No space left on device; "
        "a restart may repeat records\n"
    )
    read_once(collector)
    assert capsys.readouterr().err == "collector kernel_log: position: resolved\n"
    assert (tmp_path / "state").read_text().endswith(" 5\n")
    write(tmp_path, "NVRM: Xid (PCI:0001:04:00): 13, pid=7, name=train, Graphics Exception", begin=5)
    read_once(collector)
    monkeypatch.setattr(os, "pwrite", refuse)
    collector.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_indexes_that_the_nvml_collector_gives_later_count(make: Make, tmp_path: Path) -> None:
    collector = make(gpus=tmp_path / "gpus.json")
    write(tmp_path, "NVRM: Xid (PCI:0001:04:00): 13, pid=7, name=train, Graphics Exception")
    assert [event.entity for event in read_once(collector)] == ["gpu:n1.1"]
    gpus = {"0000:1b:00.0": {"index": 0}, GPUS[0]: {"index": 1}, GPUS[2]: {"index": 2}}
    (tmp_path / "gpus.json").write_text(json.dumps({"boot": boot_id(), "gpus": gpus}))
    write(tmp_path, "NVRM: Xid (PCI:0001:04:00): 31, pid=7, name=train, MMU Fault", begin=2)
    assert [event.entity for event in read_once(collector)] == ["gpu:n1.2"]


def test_an_xid_becomes_an_event_of_its_gpu_with_meaning_and_details(make: Make, tmp_path: Path) -> None:
    write(
        tmp_path,
        "NVRM: Xid (PCI:0001:04:00): 13, pid=7, name=train, Graphics SM Warp Exception on (GPC 1, TPC 2, SM 0): a",
    )
    (event,) = read_once(make())
    assert (event.time, event.entity, event.kind) == (NOW, "gpu:n1.1", "xid")  # 2c is excluded and has no index
    assert event.data == {
        "xid": 13,
        "name": "graphics engine exception",
        "class": "application",
        "severity": "info",
        "action": "restart app",
        "then": "if the same GPC and TPC repeat: extended diagnostics, then field diagnostics",
        "source": "kernel",
        "pci": "0001:04:00",
        "pid": 7,
        "process": "train",
        "text": "Graphics SM Warp Exception on (GPC 1, TPC 2, SM 0): a",
        "detail": {"gpc": 1, "tpc": 2, "sm": 0, "error": "a"},
        "seq": 1,
        "count": 1,
    }


def test_an_unlisted_gpu_is_reported_for_the_node_with_its_address(make: Make, tmp_path: Path) -> None:
    write(tmp_path, "NVRM: Xid (PCI:0000:99:00): 79, gone")
    (event,) = read_once(make())
    assert (event.entity, event.data["pci"]) == ("node:n1", "0000:99:00")


def test_the_uuid_form_is_resolved_by_the_driver_and_by_the_line_before_it(make: Make, tmp_path: Path) -> None:
    uuid = "GPU-0a1b2c3d-1111-2222-3333-444455556666"
    write(tmp_path, f"NVRM: GPU at PCI:0000:1d:00: {uuid}", f"NVRM: Xid ({uuid}): 79, gone")
    (event,) = read_once(make())
    assert (event.entity, event.data["pci"], event.data["uuid"]) == ("gpu:n1.0", "0000:1d:00", uuid)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", ("critical", "reboot node")),
        ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", ("info", "none")),
        ("144, SAW_MVB Fatal XC0 i0 Link 00 (0x1 0x2)", ("critical", "reset GPU")),
        ("144, SAW_MVB Nonfatal XC0 i0 Link 00 (0x1 0x4)", ("warning", "none")),
        ("145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x4 0x1)", ("warning", "as XID 154 says")),
        ("74, NVLink: fatal error detected on link 1(0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", ("info", "none")),
        (
            "74, NVLink: fatal error detected on link 1(0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
            ("critical", "contact support"),
        ),
        ("94, Contained: SM (0x1). RST: Yes, D-RST: No", ("warning", "reset GPU")),
        ("95, Uncontained: SM (0x1). RST: Yes, D-RST: Yes", ("critical", "drain and reset GPU")),
        ("999, what", ("warning", "contact support: this code is not in the table")),
    ],
)
def test_the_line_overrides_the_table(make: Make, tmp_path: Path, line: str, wanted: tuple[str, str]) -> None:
    write(tmp_path, f"NVRM: Xid (PCI:0000:1d:00): {line}")
    (event,) = read_once(make())
    assert (event.data["severity"], event.data["action"]) == wanted


def test_a_switch_error_and_its_second_line(make: Make, tmp_path: Path) -> None:
    head = "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): "
    write(
        tmp_path,
        f"{head}20034, Fatal, Link 48 LTSSM Fault Up",
        f"{head}20034, Severity 1 Engine instance 48 Sub-engine instance 00",
    )
    first, second = read_once(make())
    assert (first.entity, first.kind, first.data["sxid"], first.data["fatal"]) == ("node:n1", "sxid", 20034, True)
    assert (first.data["severity"], first.data["reach"], first.data["detail"]) == ("critical", "link", {"link": 48})
    assert (second.data["severity"], second.data["detail"]["engine"]) == ("info", 48)


@pytest.mark.parametrize(
    ("line", "entity", "device"),
    [
        ("mlx5_core 0000:3b:00.0: Port module event: module 0, Cable unplugged", "port:n1.mlx5_4", "0000:3b:00.0"),
        ("mlx5_core 0000:3c:00.0: Port module event: module 0, Cable unplugged", "node:n1", "0000:3c:00.0"),
        ("nvme nvme3: Abort status: 0x371", "disk:n1.nvme3", "nvme3"),
        ("NVRM: GPU 0000:1d:00.0: GPU has fallen off the bus.", "gpu:n1.0", "0000:1d:00.0"),
        ("INFO: task python3:71 blocked for more than 120 seconds.", "node:n1", "python3"),
    ],
)
def test_a_line_belongs_to_the_device_in_it(make: Make, tmp_path: Path, line: str, entity: str, device: str) -> None:
    write(tmp_path, line)
    (event,) = read_once(make())
    assert (event.entity, event.kind, event.data["device"], event.data["text"]) == (entity, "kernel", device, line)


def test_lines_written_by_processes_are_marked(make: Make, tmp_path: Path) -> None:
    write(tmp_path, "Kernel panic - not syncing: not at all", level=12)
    (event,) = read_once(make())
    assert event.data["facility"] == 1


def test_repeats_beyond_the_burst_are_counted_in_a_later_event(make: Make, tmp_path: Path, clock: Clock) -> None:
    collector = make(burst=3, window=60.0)
    line = "NVRM: Xid (PCI:0000:1d:00): 31, Ch 1"
    write(tmp_path, *[line] * 10, "NVRM: Xid (PCI:0001:04:00): 31, Ch 1")
    first = read_once(collector)
    assert [(e.entity, e.data["count"]) for e in first] == [("gpu:n1.0", 1)] * 3 + [("gpu:n1.1", 1)]
    clock.passed = 59 * SECOND
    assert read_once(collector) == []
    clock.passed = 60 * SECOND
    (held,) = read_once(collector)
    assert (held.data["count"], held.data["since"], held.data["seq"]) == (7, NOW, 10)
    clock.passed = 200 * SECOND
    assert read_once(collector) == []


def test_no_count_is_lost_when_keys_are_evicted() -> None:
    repeats = RepeatLimiter(burst=1, window=60 * SECOND, max_keys=4)
    reported = [e for n in range(400) for e in repeats.filter(n * 7 % 11, Event(n, "node:n1", "kernel"))]
    reported += repeats.flush()
    assert sum(event.data["count"] for event in reported) == 400
    assert len(repeats._windows) <= 4


def test_a_clock_set_back_suppresses_nothing_and_loses_no_count() -> None:
    repeats, begin = RepeatLimiter(burst=5, window=60 * SECOND), NOW - 3600 * SECOND
    for _ in range(7):
        repeats.filter("it", Event(NOW, "node:n1", "kernel"))
    (held,) = repeats.end_windows(begin)
    assert held.data["count"] == 2
    reported = [e for n in range(7) for e in repeats.filter("it", Event(begin + n * SECOND, "node:n1", "kernel"))]
    assert [event.data["count"] for event in reported] == [1] * 5
    for _ in range(7):
        repeats.filter("other", Event(NOW, "node:n1", "kernel"))
    reported = repeats.filter("other", Event(begin, "node:n1", "kernel"))
    assert [event.data["count"] for event in reported] == [2, 1]


def test_a_new_record_is_never_older_than_the_last_read(make: Make, tmp_path: Path, clock: Clock) -> None:
    """The log's own clock may have drifted by minutes from the one that the agent reads."""
    collector = make()
    read_once(collector)
    clock.passed = 10 * SECOND
    write(tmp_path, "Kernel panic - not syncing: a", begin=1, at=UPTIME - 200 * SECOND)
    write(tmp_path, "Kernel panic - not syncing: b", begin=2, at=UPTIME + 200 * SECOND)
    write(tmp_path, "Kernel panic - not syncing: c", begin=3, at=UPTIME + 4 * SECOND)
    assert [event.time - NOW for event in read_once(collector)] == [0, 4 * SECOND, 10 * SECOND]


def test_the_first_start_reads_back_as_configured(make: Make, tmp_path: Path) -> None:
    for number, age in enumerate((700, 599, 1), 1):
        write(tmp_path, f"Kernel panic - not syncing: {age}", begin=number, at=UPTIME - age * SECOND)
    assert [(e.data["seq"], e.time - NOW) for e in read_once(make())] == [(2, -599 * SECOND), (3, -1 * SECOND)]


def test_a_restart_neither_loses_nor_repeats(make: Make, tmp_path: Path, clock: Clock) -> None:
    first = make()
    write(tmp_path, "Kernel panic - not syncing: a")
    assert [e.data["seq"] for e in read_once(first)] == [1]
    assert read_once(first) == []
    first.close()
    write(tmp_path, "Kernel panic - not syncing: b", begin=2, at=UPTIME + SECOND)
    clock.passed = 3600 * SECOND
    second = make()
    assert [(e.data["seq"], e.time) for e in read_once(second)] == [(2, NOW + SECOND)]


def test_a_single_read_consumes_nothing(make: Make, tmp_path: Path) -> None:
    write(tmp_path, "Kernel panic - not syncing: a")
    once = make()
    assert len(read_once(once)) == 1
    once.close()
    assert len(read_once(make())) == 1


def test_a_second_process_does_not_use_the_position_of_the_first(tmp_path: Path) -> None:
    first, second = KmsgPosition(tmp_path / "place"), KmsgPosition(tmp_path / "place")
    assert first.open() is None
    first.save(70)
    assert second.open() is None
    second.save(99)
    second.close()
    first.close()
    assert first.open() == 70
    first.save(5)
    first.close()
    assert second.open() == 5
    second.close()


@pytest.mark.parametrize("text", ["", "another-boot 17", "x" * 500, "\x00\xff", "17"])
def test_without_a_recent_position_the_configured_time_is_read_back(make: Make, tmp_path: Path, text: str) -> None:
    (tmp_path / "state").write_text(text)
    write(tmp_path, "Kernel panic - not syncing: a")
    assert len(read_once(make())) == 1


def test_overwritten_records_are_an_event_with_their_count(make: Make, tmp_path: Path) -> None:
    collector = make()
    write(tmp_path, "a", "b")
    assert read_once(collector) == []
    write(tmp_path, "c", begin=103)
    (event,) = read_once(collector)
    assert (event.entity, event.kind, event.data["missed"]) == ("node:n1", "kernel_log_overrun", 100)


def test_a_flood_is_read_in_bounded_reads(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "MAX_RECORDS", 100)
    collector = make(burst=10_000)
    path = tmp_path / "fifo"
    os.mkfifo(path)
    collector._log = KmsgReader(path)
    collector._log.open()
    writer = os.open(path, os.O_WRONLY)
    os.write(writer, b"".join(b"2,%d,1,-;Kernel panic - not syncing: a\n" % n for n in range(1000)))
    collector._first_record_time, reported = 0, 0
    reads = 0
    while reported < 1000 and reads < 20:
        reported, reads = reported + len(read_once(collector)), reads + 1
    assert reported == 1000
    os.close(writer)


def test_a_log_without_permission_names_the_privilege(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoData, match=r"kmsg: No such file.*expected the kernel log"):
        KernelLog(path=tmp_path / "kmsg").open("n1")

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NoData, match=r"/dev/kmsg: not readable: add CAP_SYSLOG"):
        KernelLog().open("n1")


@pytest.mark.slow
def test_a_hung_driver_does_not_block_the_log(make: Make, tmp_path: Path) -> None:
    """Reading the facts of a wedged GPU may never end; the names of the folders are enough for the index."""
    information = tmp_path / "nvidia" / "gpus" / GPUS[0] / "information"
    information.unlink()
    os.mkfifo(information)
    write(tmp_path, "NVRM: Xid (PCI:0001:04:00): 79, gone")
    (event,) = read_once(make())
    assert event.entity == "gpu:n1.2"  # that 2c is excluded could not be read
    os.close(os.open(information, os.O_WRONLY))


def test_this_machines_own_log_is_read(tmp_path: Path) -> None:
    collector = KernelLog(state=tmp_path / "state", look_back=1e9)
    try:
        collector.open("n1")
    except NoData as absent:
        pytest.skip(str(absent))
    events = read_once(collector)
    collector.close()
    assert all(event.entity.partition(":")[2].startswith("n1") for event in events)
