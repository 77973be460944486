"""Workers in real processes: one that hangs is abandoned and restarted, and delays no other."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.collector import Collector
from agents.collectors.host.host import Host
from agents.collectors.host.versions import Versions
from agents.collectors.nic.network import Network
from agents.node.workers import worker as limits
from agents.node.workers.pool import ReadResult, Worker, WorkerPool
from agents.node.workers.processes import RUNNING, WorkerProcesses
from agents.node.workers.worker import ReadClient
from pipeline.model.records import SECOND

ROOT = Path(__file__).parents[2]
START = 1_767_225_600 * SECOND
Tick = Callable[..., dict[str, ReadResult]]


class Ticking:
    """Reads with a clock moved by hand; real time passes only while a tick waits."""

    def __init__(self, *collectors: Collector) -> None:
        self.seconds = 0.0
        self.pool = WorkerPool(collectors, "n1", 1.0, lambda: self.seconds)
        self.workers = {w.collector.name: w for w in self.pool.workers}

    def tick(self, timeout: float = 30.0, step: float = 1.0) -> dict[str, ReadResult]:
        self.seconds += step
        found = self.pool.tick(START + round(self.seconds * SECOND), timeout)
        return {worker.collector.name: delivery for worker, delivery in found.items()}


@pytest.fixture
def ticking() -> Iterator[Callable[..., Ticking]]:
    made: list[Ticking] = []

    def make(*collectors: Collector) -> Ticking:
        made.append(Ticking(*collectors))
        return made[-1]

    yield make
    for one in made:
        one.pool.close(5.0)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A network interface whose `speed` can be made to block."""
    port = tmp_path / "net" / "eth0"
    (port / "device").mkdir(parents=True)
    (port / "statistics").mkdir()
    (port / "operstate").write_text("up\n")
    (port / "speed").write_text("1000\n")
    return tmp_path / "net"


def block(sysfs: Path) -> Path:
    """Opening this file for reading waits in the kernel, like a file of a hanging driver."""
    speed = sysfs / "eth0" / "speed"
    speed.unlink()
    os.mkfifo(speed)
    return speed


def is_alive(pid: int) -> bool:
    """Whether any thread of a process still runs; the first may end before the others."""
    try:
        states = [task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False
    return any(state != "Z" for state in states)


def until(condition: Callable[[], bool]) -> None:
    """Waits for another process, at most 30 s."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)  # lets another process run; not a measurement


def test_an_isolated_collector_runs_in_another_process_with_the_same_result(
    ticking: Callable[..., Ticking], sysfs: Path
) -> None:
    one = ticking(Network(root=sysfs))
    found = one.tick()["network"]
    assert found.state == "ok"
    assert found.readings[0].entities == ("port:n1.eth0",)
    assert found.inventory is not None
    place = one.workers["network"].client
    assert place is not None
    assert place.pid not in (0, os.getpid())
    assert is_alive(place.pid)


@pytest.mark.slow
def test_a_hanging_collector_delays_no_other_and_is_abandoned_at_its_deadline(
    ticking: Callable[..., Ticking], sysfs: Path
) -> None:
    block(sysfs)
    one = ticking(Host(), Network(root=sysfs, deadline=3.0))
    before = time.monotonic()
    states = [one.tick(timeout=0.2) for _ in range(5)]
    assert time.monotonic() - before < 5
    assert all(found["host"].state == "ok" for found in states)
    reported = [found["network"] for found in states if "network" in found]
    assert [(d.state, d.reason) for d in reported] == [
        ("hung", "no answer within 3 s; abandoned, restart in 5 s"),
    ]


@pytest.mark.slow
def test_a_hung_collector_is_restarted_alone_with_backoff_and_killed_if_it_hangs_again(
    ticking: Callable[..., Ticking], sysfs: Path
) -> None:
    block(sysfs)
    one = ticking(Network(root=sysfs, deadline=1.0))
    worker = one.workers["network"]
    waits, pids = [], []
    for _ in range(60):
        found = one.tick(timeout=0.02)
        if worker.client is not None and worker.client.alone and worker.client.pid not in pids:
            pids.append(worker.client.pid)
        waits += [d.reason.rpartition(" in ")[2] for d in found.values()]
    assert waits[:3] == ["5 s", "10 s", "20 s"]
    assert worker.restarts == len(waits)
    until(lambda: not any(map(is_alive, pids[:-1])))


@pytest.mark.slow
def test_a_collector_has_readings_again_once_its_source_responds(ticking: Callable[..., Ticking], sysfs: Path) -> None:
    speed = block(sysfs)
    one = ticking(Network(root=sysfs, deadline=1.0))
    for _ in range(4):
        one.tick(timeout=0.02)
    assert one.workers["network"].state == "hung"
    speed.unlink()
    speed.write_text("400\n")
    for _ in range(6):
        one.tick(step=2.0)
    assert one.workers["network"].state == "ok"


@pytest.mark.slow
def test_a_killed_worker_is_reported_and_restarted(ticking: Callable[..., Ticking], sysfs: Path) -> None:
    one = ticking(Network(root=sysfs))
    one.tick()
    worker = one.workers["network"]
    assert worker.client is not None
    os.kill(worker.client.pid, signal.SIGKILL)
    found = one.tick()["network"]
    assert found.state == "fault"
    assert found.reason.startswith("its process was killed by SIGKILL")
    assert one.tick(step=6.0)["network"].state == "ok"


@pytest.mark.slow
def test_collectors_of_one_lane_share_a_process_until_one_hangs(ticking: Callable[..., Ticking], sysfs: Path) -> None:
    block(sysfs)
    one = ticking(Network(root=sysfs, deadline=2.0), Versions())
    first, second = one.workers["network"], one.workers["versions"]
    assert first.client is not None
    assert second.client is not None
    shared = first.client.pid
    assert second.client.pid == shared
    states = [one.tick(timeout=0.5) for _ in range(4)]
    assert states[0]["versions"].state == "ok"
    assert all(found.get("versions", states[0]["versions"]).state == "ok" for found in states)
    assert first.state == "hung"
    until(lambda: not is_alive(shared))  # a hanging call may spin: the other collector moves, the process is killed
    one.tick(step=60.0)
    assert second.client is not None
    assert second.client.pid not in (0, shared)
    assert second.state == "ok"


@pytest.mark.slow
def test_a_collector_that_hung_continues_in_its_own_process(ticking: Callable[..., Ticking], sysfs: Path) -> None:
    speed = block(sysfs)
    one = ticking(Network(root=sysfs, deadline=1.0), Versions())
    for _ in range(3):
        one.tick(timeout=0.02)
    speed.unlink()
    speed.write_text("400\n")
    one.tick(step=60.0)
    clients = {name: worker.client for name, worker in one.workers.items()}
    assert clients["network"] is not None
    assert clients["network"].alone
    assert clients["versions"] is None or clients["versions"].pid != clients["network"].pid


def test_a_lane_with_nothing_to_measure_ends(ticking: Callable[..., Ticking], tmp_path: Path) -> None:
    one = ticking(Network(root=tmp_path / "absent"))
    place = one.workers["network"].client
    assert place is not None
    assert one.tick()["network"].state == "no data"
    assert one.workers["network"].client is None
    until(lambda: not is_alive(place.pid))


def test_a_read_longer_than_the_timeout_of_a_tick_keeps_its_rate(ticking: Callable[..., Ticking], sysfs: Path) -> None:
    one = ticking(Network(root=sysfs))
    one.tick()
    worker = one.workers["network"]
    reported = 0
    for _ in range(4):
        found = one.tick(timeout=0.0)  # it is read, and its result comes now or with the next tick
        reported += sum(len(delivery.readings) for delivery in found.values())
        until(lambda: not worker.busy or bool(select.select([worker.client], [], [], 0)[0]))
    assert reported >= 3


def test_at_most_three_calls_of_a_thread_hang_at_the_same_time() -> None:
    release = threading.Event()

    class Hanging(Host):
        isolated = False

        def read(self) -> tuple[()]:
            release.wait(60)
            return ()

    one = Ticking(Hanging(deadline=1.0))
    before = threading.active_count()
    try:
        for _ in range(400):
            one.tick(timeout=0.001)
        worker = one.workers["host"]
        assert worker.reason == "3 calls hang in the kernel; it restarts when one of them returns"
        assert threading.active_count() - before <= limits.MAX_STUCK
    finally:
        release.set()
        one.pool.close(5.0)


def test_a_late_tick_times_out_no_worker(ticking: Callable[..., Ticking], sysfs: Path) -> None:
    """The machine was suspended: a read in progress had not had those seconds to finish."""
    block(sysfs)
    one = ticking(Network(root=sysfs, deadline=5.0))
    one.tick(timeout=0.01)
    assert one.tick(timeout=0.01, step=3600.0) == {}
    assert one.workers["network"].state == "starting"


def test_the_backoff_is_reset_after_ten_minutes_without_loss(ticking: Callable[..., Ticking], sysfs: Path) -> None:
    one = ticking(Network(root=sysfs))
    worker: Worker = one.workers["network"]

    def waits_after_a_kill() -> str:
        assert worker.client is not None
        pid = worker.client.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_alive(pid))
        return one.tick()["network"].reason.rpartition(" in ")[2]

    one.tick()
    waits = [waits_after_a_kill()]
    one.tick(step=30.0)
    waits.append(waits_after_a_kill())
    one.tick(step=30.0)
    one.tick(step=601.0)
    waits.append(waits_after_a_kill())
    assert waits == ["5 s", "10 s", "5 s"]


# --- the fork server -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_fork_server_is_restarted(ticking: Callable[..., Ticking], sysfs: Path) -> None:
    one = ticking(Network(root=sysfs))
    one.tick()
    os.kill(one.pool.pids[0], signal.SIGKILL)  # it was started before its workers
    until(lambda: one.tick(step=6.0).get("network", ReadResult("hung")).state == "fault")
    until(lambda: one.tick(step=6.0).get("network", ReadResult("hung")).state == "ok")


@pytest.mark.slow
def test_nothing_remains_after_close(sysfs: Path) -> None:
    block(sysfs)
    one = Ticking(Network(root=sysfs), Host())
    one.tick(timeout=0.01)
    place = one.workers["network"].client
    assert place is not None
    pids = one.pool.pids
    assert place.pid in pids
    one.pool.close(0.5)
    until(lambda: not any(map(is_alive, pids)))


ORPHAN = """import os, socket, sys, time
from agents.collectors.host.host import Host
from agents.node.workers import processes
parent, set_signal = os.getpid(), processes.set_parent_death_signal
def set_signal_late(number):
    while os.getppid() == parent:
        time.sleep(0.001)
    set_signal(number)
processes.set_parent_death_signal = set_signal_late
processes.ForkedWorkers().spawn([Host()], "n1", [socket.socket(fileno=int(sys.argv[1]))])
os._exit(0)"""


def test_a_worker_whose_parent_was_killed_during_its_start_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            subprocess.run([sys.executable, "-c", ORPHAN, str(theirs.fileno())], pass_fds=[theirs.fileno()], check=True)
        ours.settimeout(30.0)
        assert ours.recv(1) == b""  # the last process that had the other end is gone


def test_workers_keep_no_file_of_the_agent_open(tmp_path: Path, sysfs: Path) -> None:
    """A spool's lock held open by a hanging worker would block the next agent."""
    with (tmp_path / "lock").open("w") as lock:
        one = Ticking(Network(root=sysfs))
        try:
            one.tick()
            place = one.workers["network"].client
            assert place is not None
            held = [os.readlink(link) for link in Path(f"/proc/{place.pid}/fd").iterdir()]
        finally:
            one.pool.close(1.0)
        assert lock.name not in held


def test_the_status_of_a_running_process_is_running() -> None:
    processes = WorkerProcesses()
    try:
        assert processes.wait_status(os.getpid()) == RUNNING
    finally:
        processes.close()


def test_the_collectors_of_a_killed_lane_restart_together(ticking: Callable[..., Ticking], sysfs: Path) -> None:
    one = ticking(Network(root=sysfs), Versions())
    one.tick()
    clients = [worker.client for worker in one.pool.workers]
    assert clients[0] is not None
    killed = clients[0].pid
    os.kill(killed, signal.SIGKILL)
    until(lambda: not is_alive(killed))
    assert {d.state for d in one.tick(step=60.0).values()} == {"fault"}
    assert one.tick(step=60.0)["network"].state == "ok"
    pids = {worker.client.pid for worker in one.pool.workers if worker.client is not None}
    assert len(pids) == 1
    assert killed not in pids


@pytest.mark.slow
def test_an_unreadable_result_ends_the_worker_and_not_the_agent(ticking: Callable[..., Ticking], sysfs: Path) -> None:
    for rubbish in (b"\x04\x00\x00\x00abcd", b"\xff\xff\xff\xff"):
        one = ticking(Network(root=sysfs))
        worker = one.workers["network"]
        assert worker.is_due(START, False)
        worker.release()
        ours, theirs = socket.socketpair()
        worker.client = ReadClient(ours, worker._processes)
        assert worker.start_read(False)
        theirs.sendall(rubbish)
        found = worker.collect_result()
        theirs.close()
        assert found is not None
        assert found.state == "fault"


@pytest.mark.slow
def test_if_no_process_can_be_started_the_reason_is_reported_and_it_is_retried(sysfs: Path) -> None:
    """Simulates the limit of processes: no error may reach the agent's loop."""

    class Refusing(WorkerProcesses):
        def spawn(self, *_: object) -> int:
            raise OSError("Resource temporarily unavailable")

    one = Ticking(Network(root=sysfs))
    worker = one.workers["network"]
    worker.release()
    one.pool._processes.close()
    one.pool._processes = worker._processes = Refusing()
    assert one.tick() == {}
    assert worker.reason == "no process for it: Resource temporarily unavailable"
    one.pool.close(1.0)


ALONE = """
import fcntl, os, signal, sys, threading
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some supervisors leave it to their children
lock = open(sys.argv[1] + "/lock", "w")
from pathlib import Path
from agents.collectors.nic.network import Network
from agents.collectors.host.versions import Versions
from agents.node.workers.pool import WorkerPool
pool = WorkerPool([Network(root=Path(sys.argv[1])), Versions()], "n1")
found = pool.tick(1_767_225_600_000_000, 10.0)
parents = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pool.pids]
assert {*parents} == {os.getpid()}, parents
assert [delivery.state for delivery in found.values()] == ["ok", "ok"], found
(worker,) = {*pool.pids} - {pool.fork_server_pid}
held = [os.readlink(link) for link in Path(f"/proc/{worker}/fd").iterdir()]
assert lock.name not in held, held
os.kill(worker, signal.SIGKILL)
while Path(f"/proc/{worker}").exists():
    pass
found = pool.tick(1_767_225_601_000_000, 10.0)
assert {delivery.state for delivery in found.values()} == {"fault"}, found
pool.close(5.0)
assert threading.active_count() == 1
"""


def test_a_process_without_threads_forks_its_workers_itself(sysfs: Path) -> None:
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", ALONE, str(sysfs)], env=environ, check=True, timeout=60)


LATER = """
import os, signal, sys, threading
from pathlib import Path
from agents.collectors.host.versions import Versions
from agents.collectors.nic.network import Network
from agents.node.workers.pool import WorkerPool
seconds = 0.0
pool = WorkerPool([Network(root=Path(sys.argv[1]))], "n1", 1.0, lambda: seconds)
threading.Thread(target=threading.Event().wait, daemon=True).start()  # as those of spools and uplink

def read():
    return [found.state for found in pool.tick(1_767_225_600_000_000 + round(seconds * 1e6), 10.0).values()]

def list_programs():
    return {Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pool.pids}

assert read() == ["no data"]
first = pool.fork_server_pid
seconds = 61.0
found = read()
assert found == ["no data"], found
own = Path("/proc/self/cmdline").read_bytes()
assert list_programs() == {own}, list_programs()
assert pool.fork_server_pid == first
os.rename(sys.argv[2], sys.argv[1])
seconds = 200.0
found = read()
assert found == ["ok"], found
assert list_programs() == {own}, list_programs()
held = [os.readlink(link) for link in Path(f"/proc/{first}/fd").iterdir()]
assert sum(name.startswith("socket:") for name in held) == 1, held
(worker,) = {*pool.pids} - {first}
os.kill(first, signal.SIGKILL)  # and with it the worker that it forked
while Path(f"/proc/{worker}").exists():
    pass
seconds = 201.0
assert read() == ["fault"]
seconds = 300.0
found = read()
assert found == ["ok"], found
assert b"serve_forks" in Path(f"/proc/{pool.fork_server_pid}/cmdline").read_bytes()
pids = pool.pids
pool.close(5.0)
assert not Path(f"/proc/{pids[0]}").exists()
"""


def test_a_source_that_was_absent_is_read_again_without_a_new_interpreter(sysfs: Path) -> None:
    """A minute after each start one was started, whose imports delayed the ticks of a node without GPUs for seconds."""
    there = sysfs.rename(sysfs.with_name("there"))
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", LATER, str(sysfs), str(there)]
    subprocess.run(words, env=environ, check=True, timeout=60)
