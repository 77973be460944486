"""The commands `fleetpulse record`, and `agent` and `once` with a recording in place of this node."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time as clock_time
from pathlib import Path

from agents.collectors.registry import configured_collectors
from agents.node import agent
from agents.node.once import Output, print_once
from agents.node.workers.pool import WorkerPool
from agents.recording.files import NodeRecordingWriter
from agents.recording.playback import Tape, playback_collectors
from pipeline.config.sections import Config
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND
from pipeline.runtime.supervise import Stop

WAIT_SHARE = 0.5
"""Share of the interval for which a tick waits for its collectors: the agent's own, so that both get the same
readings."""
CLOSE_S = 1.0
"""Longest wait for the collectors to close, as in the agent."""
EXTRA_PLAY_S = 0.5
"""Seconds to play beyond the last tick and one more: the time that a slow collector's answer may take."""


def record(config: Config, directory: str | Path, seconds: float | None, stop: threading.Event) -> int:
    """Runs the collectors and writes their readings, for so many seconds or until `stop`. Raises UsageError."""
    if seconds is not None and not seconds > 0:
        raise UsageError(f"record: --seconds {seconds:g}; expected more than 0")
    node, interval = config.agent.node, config.agent.interval
    found = configured_collectors(config.collector, config.source, config.agent.collectors)
    writer = NodeRecordingWriter(directory, node, interval, found)
    looking = WorkerPool(found, node, interval)
    until = f"for {seconds:g} s" if seconds is not None else "until Ctrl-C"
    _log(f"record: {node} into {directory}, every {interval:g} s {until}")
    try:
        ticks = _run_ticks(looking, writer, interval, seconds, stop)
    finally:
        looking.close(CLOSE_S)
        writer.close()
    _log(f"record: {ticks} ticks in {directory}")
    return 0


def _run_ticks(
    looking: WorkerPool, writer: NodeRecordingWriter, interval: float, seconds: float | None, stop: threading.Event
) -> int:
    """Runs the loop; ticks are whole intervals after the first, even if the wall clock is changed."""
    first = round(clock_time.time() / interval) * round(interval * SECOND)
    began, ticks, place = clock_time.monotonic(), 0, 0
    while seconds is None or place * interval < seconds:
        tick = first + round(place * interval * SECOND)
        delivered = looking.tick(tick, WAIT_SHARE * interval, with_inventory=place == 0)
        writer.write_tick(tick, [(worker.collector, delivery) for worker, delivery in delivered.items()])
        ticks, passed = ticks + 1, clock_time.monotonic() - began
        place = int(passed / interval) + 1
        if stop.wait(began + place * interval - clock_time.monotonic()):
            break
    return ticks


def play(config: Config, directory: str | Path | None, speed: float | None) -> int:
    """Runs the agent over a recording; returns 0 at its end, or on a stop request."""
    if directory is None:
        raise UsageError("agent: --speed applies to a recording; add --replay-recording DIR")
    speed = 1.0 if speed is None else speed
    tape, stop = _open_tape(directory, speed), Stop()
    ending = threading.Timer(tape.seconds + tape.interval + EXTRA_PLAY_S, lambda: _end_playback(tape, stop))
    ending.daemon = True
    tape.on_start = ending.start
    config = dataclasses.replace(config, agent=dataclasses.replace(config.agent, interval=tape.interval))
    _log(f"recording: {directory} of {tape.info.node}, {tape.seconds:g} s at {speed:g} times its speed")
    try:
        return agent.run(config, stop, playback_collectors(tape), simulated=True)
    finally:
        ending.cancel()


def once(config: Config, directory: str | Path, output: Output) -> int:
    """Prints one reading of a recording: its first tick."""
    return print_once(config, output, playback_collectors(_open_tape(directory, 1.0)))


def _open_tape(directory: str | Path, speed: float) -> Tape:
    if not 0 < speed <= 1000:
        raise UsageError(f"--speed {speed:g}; expected more than 0 and at most 1000 times")
    return Tape(directory, speed)


def _end_playback(tape: Tape, stop: threading.Event) -> None:
    _log(f"recording: {tape.directory} has ended")
    stop.set()


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
