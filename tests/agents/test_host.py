"""The host collector on a machine of known files, and its parsers against any text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData, Reading
from agents.collectors.columns import count_column, value_column
from agents.collectors.host import host as kernel_text
from agents.collectors.host.host import Host
from agents.collectors.kernel_files import MAX_FULL_READ, ProcFile
from agents.node.batches import encode_column
from pipeline.model.signals import CATALOGUE

SERVER = {
    "proc/loadavg": "3.50 2.25 1.00 4/1200 4711\n",
    "proc/stat": "cpu  100 20 30 400 50 6 7 8 9 0\ncpu0 50 10 15 200 25 3 3 4 0 0\ncpu1 50 10 15 200 25 3 4 4 9 0\n"
    "intr 12345 0 0\nctxt 99\nbtime 7\n",
    "proc/meminfo": "MemTotal:       2000 kB\nMemFree:   10 kB\nMemAvailable:   1500 kB\nBuffers: 5 kB\nCached: 7 kB\n"
    "SwapTotal: 300 kB\nSwapFree: 100 kB\nDirty: 2 kB\nWriteback: 1 kB\nSUnreclaim: 40 kB\nHardwareCorrupted: 4 kB\n"
    "HugePages_Total: 6\nHugePages_Free: 2\nHugepagesize: 2048 kB\n",
    "proc/vmstat": "nr_free_pages 5\nnuma_miss 17\noom_kill 3\n",
    "proc/uptime": "98765.43 1000.00\n",
    "proc/diskstats": " 259 0 nvme0n1 10 0 2000 5 20 0 4000 7 1 9 8\n 259 1 nvme0n1p1 9 0 1999 5 20 0 3999 7 0 0 0\n"
    " 259 2 nvme0n2 1 0 100 1 2 0 200 1 0 3 4\n"
    " 8 0 sda 1 0 8 5 2 0 16 7 0 0 0\n 253 0 dm-0 10 0 2000 5 20 0 4000 7 0 0 0\n 7 0 loop0 1 0 2 0 0 0 0 0 0 0 0\n",
    "proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=111\nfull avg10=0.00 avg60=0.00 total=5\n",
    "proc/pressure/memory": "some avg10=0.00 avg60=0.00 total=222\nfull avg10=0.00 avg60=0.00 total=22\n",
    "proc/pressure/io": "some avg10=0.00 avg60=0.00 avg300=0.00 total=333\nfull avg10=0.00 avg60=0.00 total=33\n",
    "proc/sys/kernel/osrelease": "6.8.0-test\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 1000 kB\nNode 0 MemFree: 9 kB\n",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 1000 kB\nNode 1 MemFree: 1 kB\n",
    **{f"sys/block/{disk}/size": "1\n" for disk in ("nvme0n1", "nvme0n2", "sda", "dm-0", "loop0")},
}
Tree = Callable[[dict[str, str]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes files below a folder, with both namespaces under the controller nvme0."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "sys/class/nvme/nvme0").mkdir(parents=True)
        for disk in ("nvme0n1", "nvme0n2"):
            (tmp_path / "sys/block" / disk / "device").symlink_to(tmp_path / "sys/class/nvme/nvme0")
        return tmp_path

    return write


def looks_of(root: Path, count: int = 1) -> list[tuple[Reading, ...]]:
    host = Host(proc=root / "proc", sys=root / "sys")
    host.open("n1")
    found = [host.read() for _ in range(count)]
    assert host.inventory().keys() == {entity for reading in found[0] for entity in reading.entities}
    host.close()
    return found


def node_of(root: Path) -> dict[str, float]:
    return {name: values[0] for name, values in looks_of(root)[0][0].columns.items()}


def test_the_host_is_read_in_the_units_of_the_catalogue(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    assert node_of(tree(SERVER)) == {
        "node.load1": 3.5,
        "node.load5": 2.25,
        "node.cpu_count": 2,
        "node.cpu_busy_time": 1710,  # user, nice, system, irq, softirq and stolen: 171 ticks of 10 ms
        "node.cpu_idle_time": 4500,
        "node.cpu_user_time": 1200,
        "node.cpu_system_time": 300,
        "node.cpu_iowait_time": 500,
        "node.cpu_irq_time": 130,
        "node.cpu_steal_time": 80,
        "node.context_switches": 99,
        "node.memory_total": 2000 * 1024,
        "node.memory_available": 1500 * 1024,
        "node.memory_cached": 12 * 1024,
        "node.memory_dirty": 3 * 1024,
        "node.memory_kernel": 40 * 1024,
        "node.memory_poisoned": 4 * 1024,
        "node.hugepages_total": 6 << 21,
        "node.hugepages_free": 2 << 21,
        "node.swap_used": 200 * 1024,
        "node.numa_free_min": 1024,
        "node.numa_misses": 17,
        "node.oom_kills": 3,
        "node.uptime": 98765.43,
        "node.disk_read": (2000 + 100 + 8) * 512,  # no partition, no layer, no loop device
        "node.disk_written": (4000 + 200 + 16) * 512,
        "node.cpu_pressure": 111,
        "node.memory_pressure": 222,
        "node.memory_pressure_full": 22,
        "node.io_pressure": 333,
        "node.io_pressure_full": 33,
    }


def test_a_small_decrease_of_the_wait_for_io_is_no_reset(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    root = tree(SERVER)
    host = Host(proc=root / "proc", sys=root / "sys")
    host.open("n1")
    found = []
    # the kernel moves waiting time of an idle processor to idle; the last line is of a reset
    for idle, iowait in ((40_000, 50_000), (40_005, 49_990), (40_005, 50_020), (30, 40)):
        (root / "proc/stat").write_text(f"cpu 100 20 30 {idle} {iowait} 6 7 8 20 0\ncpu0 1\nintr 1\nctxt 99\n")
        columns = host.read()[0].columns
        found.append((int(columns["node.cpu_idle_time"][0]), int(columns["node.cpu_iowait_time"][0])))
    host.close()
    assert found == [(900_000, 500_000), (900_000, 500_000), (900_250, 500_200), (700, 400)]


def test_disks_are_reported_separately_and_the_namespaces_of_a_controller_are_one(tree: Tree) -> None:
    disks = looks_of(tree(SERVER))[0][1]
    assert disks.entities == ("disk:n1.nvme0", "disk:n1.sda")
    assert {name: values.tolist() for name, values in disks.columns.items()} == {
        "disk.reads": [11, 1],
        "disk.read": [2100 * 512, 8 * 512],
        "disk.read_time": [6, 5],
        "disk.writes": [22, 2],
        "disk.written": [4200 * 512, 16 * 512],
        "disk.write_time": [8, 7],
        "disk.in_flight": [1, 0],
        "disk.io_time": [12, 0],
    }


def test_memory_and_disks_are_read_less_often_than_load(tree: Tree) -> None:
    first, second = looks_of(tree(SERVER), 2)
    assert {r.device_class for r in first} == {"node", "disk"}
    assert [r.device_class for r in second] == ["node"]
    assert "node.load1" in second[0].columns
    assert "node.memory_total" not in second[0].columns


@pytest.mark.parametrize("absent", sorted(name for name in SERVER if "proc/" in name and "sys/" not in name))
def test_a_file_that_the_kernel_lacks_costs_only_its_own_signals(tree: Tree, absent: str) -> None:
    root = tree({name: text for name, text in SERVER.items() if name != absent})
    assert len(node_of(root)) >= 20


@pytest.mark.parametrize("broken", sorted(name for name in SERVER if "proc/" in name and "osrelease" not in name))
def test_a_file_in_another_format_costs_only_its_own_signals(tree: Tree, broken: str) -> None:
    assert len(node_of(tree({**SERVER, broken: "what: is this\n\ncpu x\nsome total=?\noom_kill\n"}))) >= 20


def test_a_host_without_any_kernel_statistics_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no Linux kernel statistics"):
        Host(proc=tmp_path / "absent").open("n1")


def test_a_list_longer_than_a_page_is_read_to_its_end() -> None:
    """This kernel's own list of symbols, which is many pages long everywhere."""
    symbols = ProcFile(Path("/proc/kallsyms"))
    if not symbols.present:
        pytest.skip("a kernel without /proc/kallsyms")
    first, whole = symbols.text(), symbols.full_text()
    symbols.close()
    assert first is not None
    assert whole is not None
    assert whole.startswith(first)
    assert len(whole) >= min(MAX_FULL_READ, 10 * len(first))


def test_a_truncated_line_is_skipped() -> None:
    line = " 8 0 sda 1 0 8 5 2 0 16 7 0 1234 0\n"
    assert kernel_text.parse_diskstats(line)["sda"]["disk.io_time"] == 1234
    assert kernel_text.parse_diskstats(line[:-4]) == {}


KEYS = ("cpu", "cpu0", "\nintr", "\nctxt", "MemTotal:", "MemFree:", "Node", "kB", "some", "full", "total=", "oom_kill")
NUMBERS = ("0", "18446744073709551616", "-1", "9" * 400, "9" * 5000, "1e999", "nan", "\n", ":", "=", "\x00", "²", "sda")
WORDS = st.sampled_from([*KEYS, *NUMBERS])
TEXTS = st.one_of(st.text(max_size=200), st.lists(WORDS, max_size=60).map(" ".join))
PARSERS: tuple[Callable[[str], kernel_text.SignalValues], ...] = (
    kernel_text.parse_loadavg,
    lambda text: kernel_text.parse_stat(text, 10.0),
    kernel_text.parse_meminfo,
    lambda text: kernel_text.parse_numa_meminfo([text]),
    kernel_text.parse_vmstat,
    kernel_text.parse_uptime,
    lambda text: kernel_text.parse_pressure("io", text),
)


@given(TEXTS)
def test_any_text_is_parsed_or_raises_an_expected_error(text: str) -> None:
    for parse in PARSERS:
        try:
            values = parse(text)
        except kernel_text.PARSE_ERRORS:
            continue
        for name, value in values.items():
            column = encode_column(CATALOGUE[name], value_column(value))
            assert column.shape == (1,)


@given(TEXTS)
def test_no_text_of_diskstats_breaks_the_parser(text: str) -> None:
    for values in kernel_text.parse_diskstats(text).values():
        assert count_column(values.values()).dtype == np.uint64
