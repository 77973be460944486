"""A source without response is reported within 30 s, in every collector."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agents.collector import HANG_S, Collector, Reading
from agents.collectors.bmc.redfish import Redfish
from agents.collectors.bmc.redfish_settings import BmcSettings
from agents.collectors.registry import COLLECTORS, MAX_DEADLINE_S
from agents.node.agent import CHECK_S, COLLECT_SHARE, Agent
from pipeline.config.sections import Agent as AgentSection
from pipeline.config.sections import Config
from pipeline.config.sections import Spool as SpoolSection
from pipeline.model.records import SECOND, Event

START = 1_800_000_000 * SECOND
PROMISED_S = 30.0


@dataclass
class Clock:
    """Time that passes by waiting; `stop` is set once `until` seconds have passed, or when `done` returns true."""

    until: float
    done: Callable[[], bool] = lambda: False
    seconds: float = 0.0

    def now(self) -> int:
        return START + round(self.seconds * SECOND)

    def monotonic(self) -> float:
        return self.seconds

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        if self.seconds >= self.until or self.done():
            stop.set()
            return True
        self.seconds += seconds
        return False


def hanging(kind: type[Collector], release: threading.Event) -> Collector:
    """That collector with its own interval and deadline, over a source that does not answer before `release`."""

    def read(self: Collector) -> tuple[Reading, ...]:
        release.wait()
        return ()

    made = {
        "isolated": False,
        "open": lambda self, node: None,
        "read": read,
        "close": lambda self: None,
        "wanted": lambda self: True,
    }
    return type(kind.__name__, (kind,), made)()


@pytest.mark.parametrize("interval", [1.0, 600.0])
@pytest.mark.parametrize("kind", COLLECTORS, ids=lambda kind: kind.name)
def test_every_collector_with_a_hung_source_is_reported_within_30_s_of_its_read(
    tmp_path: Path, kind: type[Collector], interval: float
) -> None:
    release = threading.Event()
    log, one = io.StringIO(), hanging(kind, release)
    config = Config(agent=AgentSection("n1", interval), spool=SpoolSection(tmp_path))
    asked: list[float] = []
    clock = Clock(interval + one.interval * 2 + 100, lambda: "hung" in log.getvalue())
    agent = Agent(config, [one], clock, log, collect_share=0.0)
    (worker,) = agent.pool.workers
    real = worker.start_read
    worker.start_read = lambda tell: asked.append(clock.seconds) or real(tell)  # type: ignore[method-assign,func-returns-value]
    agent.run(threading.Event())
    release.set()
    (line,) = [line for line in log.getvalue().splitlines() if "hung" in line]
    assert f"collector {kind.name}: hung: no answer within {one.deadline:g} s" in line
    assert clock.seconds - asked[0] <= PROMISED_S


def test_no_configurable_deadline_breaks_the_30_s_limit() -> None:
    assert MAX_DEADLINE_S + CHECK_S + COLLECT_SHARE < PROMISED_S
    assert HANG_S + 1.0 + COLLECT_SHARE < PROMISED_S


# --- sources that a thread of the collector waits for: the collector itself answers all the time ---------------------


def mute(connection: socket.socket, end: threading.Event) -> None:
    end.wait()


def dripping(connection: socket.socket, end: threading.Event) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b" " * 100_000:
        connection.sendall(bytes([byte]))
        if end.wait(0.05):
            return


@contextmanager
def server(behave: Callable[[socket.socket, threading.Event], None]) -> Iterator[tuple[int, threading.Event]]:
    """A loopback port, and whether a client has connected; `behave` handles each connection."""
    end, came, threads = threading.Event(), threading.Event(), []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            behave(connection, end)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                threads[-1].start()
                came.set()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    try:
        yield listener.getsockname()[1], came
    finally:
        end.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in threads:
            thread.join()


def events_of(collector: Collector) -> list[Event]:
    return [event for reading in collector.read() for event in reading.events]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("scheme", "behave"), [("http", mute), ("http", dripping), ("https", mute)])
def test_a_bmc_that_accepts_without_response_is_lost_after_20_s(
    scheme: str, behave: Callable[[socket.socket, threading.Event], None]
) -> None:
    """Before, it was reported after its time-out of 200 s."""
    with server(behave) as (port, came):
        one = Redfish(bmcs=(BmcSettings("b1", f"{scheme}://127.0.0.1:{port}", allow_http=True, verify=False),))
        now = [1000.0]
        one._monotonic = lambda: now[0]
        one.open("n1")
        try:
            assert came.wait(30)
            wait_until(lambda: one._pollers[0]._current_request)
            now[0] += HANG_S - 1
            assert events_of(one) == []
            now[0] += 1
            (lost,) = events_of(one)
            now[0] += 60
            assert (events_of(one), one._pollers[0].reachable) == ([], False)
        finally:
            one.close()
    assert (lost.kind, lost.entity) == ("bmc_lost", "bmc:b1")
    assert lost.data["reason"] == "/redfish/v1: no response for 20 s; waiting up to 200 s"


def wait_until(found: Callable[[], Any], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until
        time.sleep(0.01)
