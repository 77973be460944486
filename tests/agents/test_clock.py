"""The clock: this machine's own kernel, a real chronyd where one is installed, and steps of a clock set by hand."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData
from agents.collectors.host import clock
from agents.collectors.host.clock import Clock, KernelClock
from pipeline.model.records import SECOND

CHRONYD = shutil.which("chronyd") or shutil.which("chronyd", path="/usr/sbin:/usr/local/sbin")


def read_once(collector: Clock) -> dict[str, float]:
    (reading,) = collector.read()
    return {name: values[0] for name, values in reading.columns.items()}


def test_this_kernel_reports_the_state_of_its_clock() -> None:
    collector = Clock(chrony_port=0)
    collector.open("n1")
    found = read_once(collector)
    assert found.keys() == set(collector.signals)
    assert found["node.clock_synchronized"] in (0, 1)
    assert found["node.clock_error_max"] >= 0
    assert np.isnan(found["node.clock_stratum"])


def test_kernel_numbers_are_converted_to_units() -> None:
    kept = KernelClock(state=0, offset=-1500, frequency=-(12 << 16), error_max=2_000_000, status=0x2001)
    found = clock.clock_values(kept, None)
    assert found["node.clock_offset"] == -1.5e-6  # STA_NANO
    assert clock.clock_values(KernelClock(0, -1500, 0, 0, 0x0001), None)["node.clock_offset"] == -1.5e-3
    assert found["node.clock_frequency"] == -12
    assert found["node.clock_error_max"] == 2
    assert found["node.clock_synchronized"] == 1


@pytest.mark.parametrize(("state", "status"), [(5, 0x0001), (0, 0x0040)])
def test_an_unsynchronized_clock_is_reported(state: int, status: int) -> None:
    assert clock.clock_values(KernelClock(state, 0, 0, 16_000_000, status), None)["node.clock_synchronized"] == 0


def test_a_kernel_that_refuses_is_no_data() -> None:
    def refuse() -> KernelClock:
        raise PermissionError(1, "adjtimex")

    collector = Clock()
    collector._adjtimex = refuse
    with pytest.raises(NoData, match="adjtimex: Operation not permitted"):
        collector.open("n1")


def test_only_a_step_of_the_wall_clock_is_a_jump() -> None:
    times = [(100.0, 10.0), (110.0, 20.0), (122.0, 30.0), (132.4, 40.0), (80.0, 50.0), (200.0, 170.0)]
    moments = iter([(round(wall * SECOND), round(boot * SECOND)) for wall, boot in times])
    collector = Clock(chrony_port=0)
    collector._clocks = lambda: next(moments)
    collector.open("n1")
    found = [collector.read()[0].events for _ in times]
    assert [[e.data["seconds"] for e in events] for events in found] == [[], [], [2.0], [], [-62.4], []]
    assert (found[2][0].kind, found[2][0].entity, found[2][0].time) == ("clock_jump", "node:n1", 122 * SECOND)


# --- chronyd ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def chronyd(tmp_path: Path) -> Iterator[int]:
    """Port of a real chronyd that keeps its own clock at stratum 7 and leaves that of this machine alone."""
    if CHRONYD is None:
        pytest.skip("no chronyd here: apt-get install chrony")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
    settings = ("port 0", f"cmdport {port}", "bindcmdaddress 127.0.0.1", "bindcmdaddress /", "local stratum 7")
    (tmp_path / "chrony.conf").write_text("\n".join((*settings, f"pidfile {tmp_path / 'pid'}")) + "\n")
    words = [CHRONYD, "-d", "-x", "-U", "-f", tmp_path / "chrony.conf"]
    user = ["-u", "root"] if os.getuid() == 0 else []
    process = subprocess.Popen([*words, *user], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 10
        while (found := clock.query_chronyd(port, 0.2)) is None or found.stratum == 0:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until, "chronyd does not answer"
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.communicate()


def test_a_real_chronyd_reports_its_stratum(chronyd: int) -> None:
    collector = Clock(chrony_port=chronyd)
    collector.open("n1")
    found = read_once(collector)
    assert found["node.clock_stratum"] == 7
    assert abs(found["node.clock_offset"]) < 1
    assert collector.inventory()["node:n1"].attributes == {"clock_keeper": "chronyd"}


def report(sequence: int, stratum: int = 2, offset: int = 0, reply: int = 5) -> bytes:
    head = struct.pack("!BBBBHHHHHHIII", 6, 2, 0, 0, 33, reply, 0, 0, 0, 0, sequence, 0, 0)
    return head + struct.pack("!I20sHHIII9I", 1, b"", stratum, 0, 0, 0, 0, offset, *[0] * 8)


def test_chronyds_offset_is_used_where_the_kernels_is_zero() -> None:
    half = 1 << 25 | 1 << 23  # exponent 1, coefficient 2^23: 2^23 * 2^(1 - 25)
    tracking = clock.decode_tracking(report(9, 3, half), 9)
    assert (tracking.stratum, tracking.offset) == (3, 0.5)
    assert clock.clock_values(KernelClock(0, 0, 0, 0, 0), tracking)["node.clock_offset"] == 0.5


@pytest.mark.parametrize(
    ("word", "number"),
    [(0, 0.0), (2 << 25 | 1 << 23, 1.0), (127 << 25 | (1 << 25) - (1 << 24), -0.25), (126 << 25 | 1 << 23, 0.0625)],
)
def test_chronyd_floats_are_decoded(word: int, number: float) -> None:
    assert clock.decode_float(word) == number


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"", "reply of 0 bytes"),
        (report(8), "reply to request 8; expected 9"),
        (report(9, reply=3), "reply 3"),
        (b"\x05" + report(9)[1:], "version 5"),
    ],
)
def test_a_wrong_reply_is_an_error_with_a_reason(reply: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        clock.decode_tracking(reply, 9)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_report_or_a_value_error(reply: bytes) -> None:
    try:
        clock.decode_tracking(reply, 1)
    except ValueError:
        return


@pytest.fixture
def server() -> Iterator[Callable[[bytes], int]]:
    """Starts a server that answers each datagram with the same bytes; returns its port."""
    links: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(link: socket.socket, answer: bytes) -> None:
        while True:
            _, caller = link.recvfrom(512)
            if caller == link.getsockname():
                return
            link.sendto(answer, caller)

    def start(answer: bytes) -> int:
        link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        link.bind(("127.0.0.1", 0))
        links.append(link)
        threads.append(threading.Thread(target=serve, args=(link, answer)))
        threads[-1].start()
        return int(link.getsockname()[1])

    yield start
    for link, thread in zip(links, threads, strict=True):
        link.sendto(b"", link.getsockname())
        thread.join()
        link.close()


def test_a_server_with_other_replies_is_not_chronyd(server: Callable[[bytes], int]) -> None:
    assert clock.query_chronyd(server(b"hello"), 1.0) is None


def test_a_closed_port_costs_no_time() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
    began = time.monotonic()
    assert clock.query_chronyd(port, 60.0) is None
    assert time.monotonic() - began < 5  # a waiting client would wait 60 s
