"""Compiling before input is read, in a thread: a stop does not wait for the compiler, which takes a minute at the first
start of a version, and the loop's heartbeat goes on, so that nothing reports a stall."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

log = logging.getLogger("fleetpulse.pipeline")

BEAT_S = 0.5
"""Time between two heartbeats (s); chosen, as the shortest limit is three frames of a second."""
LIMIT_S = 900.0
"""Time of compiling after which it counts as hung: no more heartbeats, so /readyz and the watchdog report it. Chosen:
four times the longest first start that was measured (docs/figures.md)."""
QUICK_S = 8.0
"""Time (s) after which a log line explains the wait. Chosen: reading what an earlier start compiled takes 2 to 4 s."""


def compile_first(steps: Iterable[Callable[[], object]], stop: threading.Event, beat: Callable[[str], None]) -> None:
    """Returns when all steps have returned, or soon after `stop`: then they go on until the process ends.

    beat: gets the heartbeats of the calling thread. Raises what a step raises.
    """
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            for step in steps:
                step()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)
        finally:
            done.set()

    begun, explained = time.monotonic(), False
    threading.Thread(target=run, name="compile", daemon=True).start()
    while not done.wait(BEAT_S) and not stop.is_set():
        passed = time.monotonic() - begun
        if passed < LIMIT_S:
            beat("compiling the detectors")
        if passed > QUICK_S and not explained:
            explained = True
            log.warning("compiling the detectors, once per version: about a minute; later starts read the result")
    if errors:
        raise errors[0]
    if explained and done.is_set():
        log.warning("detectors compiled in %.0f s", time.monotonic() - begun)
