"""Stop: signal handlers may set it, however often and wherever they interrupt."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pipeline.runtime.supervise import Stop

NESTED_SIGNALS = """
import signal
from pipeline.runtime.supervise import Stop
stop, seen = Stop(), []
def handler(*_):
    for _ in range(100):
        stop.set()
    seen.append(1)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, handler)
print("ready", flush=True)
while len(seen) < 100:
    stop.wait(0.001)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print("end", flush=True)
"""


def test_waiting_ends_when_it_is_set_and_not_before():
    stop = Stop()
    assert not stop.wait(0.01)
    assert not stop.is_set()
    threading.Timer(0.05, stop.set).start()
    assert stop.wait(10)
    assert stop.is_set()
    assert stop.wait(0)


def test_every_waiting_thread_wakes():
    stop, woken = Stop(), []
    threads = [threading.Thread(target=lambda: woken.append(stop.wait(10))) for _ in range(5)]
    for thread in threads:
        thread.start()
    stop.set()
    for thread in threads:
        thread.join(5)
    assert woken == [True] * 5


def test_setting_it_very_often_never_blocks():
    stop = Stop()
    for _ in range(100_000):
        stop.set()
    assert stop.is_set()


def test_it_cannot_be_unset():
    with pytest.raises(TypeError):
        Stop().clear()


def test_nested_signals_never_deadlock_it():
    command = [sys.executable, "-c", NESTED_SIGNALS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()) as child:
        assert child.stdout.readline() == "ready\n"
        until = time.monotonic() + 30
        while child.poll() is None and time.monotonic() < until:
            child.send_signal(signal.SIGINT)
            child.send_signal(signal.SIGTERM)
            time.sleep(0.0005)  # more would only nest handlers until the interpreter's stack is full
        child.kill()
        assert child.stdout.read() == "end\n"
