"""Processes in state D: from known files, and a real one of this machine's kernel."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData, Reading
from agents.collectors.host import host
from agents.collectors.host.host import Tasks, parse_task_stat
from pipeline.model.records import SECOND

SLEEPER = """
#include <unistd.h>
int main(void) { if (vfork() == 0) { pause(); _exit(0); } return 0; }
"""


class Processes:
    """Processes in a folder, their collector and a manual clock."""

    def __init__(self, root: Path) -> None:
        self.root, self.time = root, 1_000 * SECOND
        self.put(1, "systemd", "S")
        (root / "self").symlink_to(root / "1")
        self.tasks = Tasks(proc=root)
        self.tasks._now = lambda: self.time
        self.tasks.open("n1")

    def put(self, pid: int, comm: str, state: str, start: int = 100, used: int = 7, wchan: str = "") -> None:
        below = self.root / str(pid)
        below.mkdir(exist_ok=True)
        rest = f"1 {pid} {pid} 0 -1 4194560 12 0 0 0 {used} 2 0 0 20 0 1 0 {start} 1000 200 18446744073709551615"
        (below / "stat").write_text(f"{pid} ({comm}) {state} {rest}{' 0' * 28}\n")
        (below / "wchan").write_text(wchan)

    def read_once(self, after: float = 0.0) -> Reading:
        self.time += round(after * SECOND)
        (reading,) = self.tasks.read()
        return reading

    def values(self, after: float = 0.0) -> list[float]:
        return [values[0] for values in self.read_once(after).columns.values()]


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


def test_blocked_processes_are_counted_those_of_driver_and_training_too(processes: Processes) -> None:
    processes.put(20, "nvidia-smi", "D")
    processes.put(21, "python3.11", "D")
    processes.put(22, "rsync", "D")
    processes.put(23, "python3", "R")
    assert processes.values() == [3, 2, 0]


def test_a_name_with_parentheses_and_blanks_is_not_a_state(processes: Processes) -> None:
    processes.put(20, "a) D (b", "S")
    processes.put(21, "(sd-pam) D", "D")
    assert processes.values() == [1, 0, 0]


def test_the_longest_wait_is_of_one_process_without_progress(processes: Processes) -> None:
    processes.put(20, "python3", "D")
    processes.put(21, "rsync", "D")
    processes.read_once()
    assert processes.values(30)[2] == 30
    processes.put(20, "python3", "D", used=8)  # it ran in between
    processes.put(22, "late", "D")
    assert processes.values(30)[2] == 60  # rsync
    processes.put(21, "rsync", "S")
    assert processes.values(30) == [2, 1, 30]
    processes.put(20, "python3", "D", used=8, start=999)  # another process with the same number
    processes.put(22, "late", "S")
    assert processes.values(30) == [1, 1, 0]


def test_a_wait_of_two_minutes_is_reported_once_with_its_wchan(processes: Processes) -> None:
    processes.put(20, "python3", "D", wchan="rpc_wait_bit_killable")
    processes.put(21, "rsync", "D", wchan="0")
    assert processes.read_once().events == ()
    assert processes.read_once(119).events == ()
    events = processes.read_once(1).events
    assert [(e.kind, e.entity, e.time) for e in events] == [("task_blocked", "node:n1", processes.time)] * 2
    assert [dict(e.data) for e in events] == [
        {"pid": 20, "comm": "python3", "seconds": 120.0, "wchan": "rpc_wait_bit_killable"},
        {"pid": 21, "comm": "rsync", "seconds": 120.0, "wchan": None},
    ]
    assert processes.read_once(30).events == ()
    processes.put(20, "python3", "D", used=9)
    processes.read_once(30)
    assert [e.data["seconds"] for e in processes.read_once(150).events] == [150.0]


def test_a_storm_of_waits_is_bounded(processes: Processes) -> None:
    for pid in range(20, 20 + host.MAX_EVENTS + 3):
        processes.put(pid, "python3", "D")
    processes.read_once()
    assert len(processes.read_once(120).events) == host.MAX_EVENTS
    assert len(processes.read_once(30).events) == 3


def test_processes_that_end_during_the_read_are_skipped(processes: Processes) -> None:
    (processes.root / "30").mkdir()
    processes.put(31, "python3", "D")
    (processes.root / "31" / "stat").write_bytes(b"31 (python3) D 1 2")
    assert processes.values() == [0, 0, 0]


def test_without_processes_there_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="expected /proc mounted"):
        Tasks(proc=tmp_path / "absent").open("n1")


def test_a_real_process_that_sleeps_uninterruptibly_is_found(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a process that sleeps in vfork")
    (tmp_path / "sleeper.c").write_text(SLEEPER)
    program = tmp_path / "python-sleeper"
    subprocess.run([compiler, "-w", "-o", program, tmp_path / "sleeper.c"], check=True)
    process = subprocess.Popen([program])
    try:
        until = time.monotonic() + 10
        while process.pid not in dict(host.blocked_processes(Path("/proc"))):
            assert time.monotonic() < until, "the sleeper never came to state D"
            time.sleep(0.01)
        collector = Tasks(told_after=0.0)
        collector.open("n1")
        (reading,) = collector.read()
        assert reading.columns["node.tasks_blocked_gpu"][0] >= 1
        assert process.pid in {event.data["pid"] for event in reading.events}
    finally:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for child in children.read_text().split() if children.exists() else []:
            subprocess.run(["kill", "-9", child], check=True)
        process.kill()
        process.wait()


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(text: bytes) -> None:
    found = parse_task_stat(text)
    assert found is None or found.start == int(text.rpartition(b")")[2].split()[19])
