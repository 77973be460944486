"""`fleetpulse executor`: carries out approved acts with the credentials of the scheduler, in a separate process.

It holds no state: after a kill it asks the pipeline which acts began, and the scheduler which ended. While the pipeline
or the scheduler does not answer it waits; nothing is done that the pipeline has not recorded first.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from pipeline.acts.act import VERBS
from pipeline.acts.adapters import make_adapter
from pipeline.acts.adapters.adapter import Adapter
from pipeline.acts.executor import Executor
from pipeline.acts.remote import RemoteBoard
from pipeline.commands.known_nodes import find_scheduler
from pipeline.config.sections import Config
from pipeline.model.errors import FleetpulseError
from pipeline.runtime import logs
from pipeline.runtime.supervise import Stop
from pipeline.runtime.systemd import SystemdNotifier

log = logging.getLogger("fleetpulse.executor")
STOP_S = 240.0
"""How long a stop waits for programs that run (s). Chosen: less than TimeoutStopSec of the unit (300 s)."""
SCHEDULERS = ("kubernetes", "slurm", "slurmrestd", "noop")


def make_executor(config: Config) -> Executor:
    """Returns the executor. Raises ConfigError for an adapter that lacks its part of the configuration."""
    acts = config.acts

    @cache
    def find(name: str) -> Adapter:
        return make_adapter(name, acts)

    used = {acts.adapter_of(verb) for verb in VERBS if acts.mode_of(verb) != "off"}
    for name in used:
        find(name)
    scheduler = next(name for name in SCHEDULERS if name in used or name == "noop")
    clock = lambda: time.time_ns() // 1000  # noqa: E731
    token_file = config.executor.token_file or config.api.token_file
    nodes = find_scheduler(find(scheduler), replace(config, api=replace(config.api, token_file=token_file)))
    board = RemoteBoard(config)
    find_adapter = lambda verb: find(acts.adapter_of(verb))  # noqa: E731
    return Executor(board, acts, nodes, find_adapter, clock, config.executor.name, secrets.token_hex(4))


def run(config: Config) -> int:
    """Works until SIGTERM or SIGINT; acts under way are finished first, programs within STOP_S."""
    stop, said = Stop(), ""
    executor = make_executor(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logs.limit_all_loggers()
    modes = ", ".join(f"{verb} {config.acts.mode_of(verb)}" for verb in VERBS if config.acts.mode_of(verb) != "off")
    sys.stderr.write(f"fleetpulse executor {config.executor.name}: {modes or 'all verbs are off'}\n")
    manager = SystemdNotifier()
    manager.notify_ready(config.executor.poll_seconds)
    while not stop.is_set():
        try:
            executor.run_once()
            if said:
                log.info("works again")
            said = ""
        except FleetpulseError as error:
            if str(error) != said:
                log.warning("waits: %s", error)
            said = str(error)
        manager.notify_alive(f"waits: {said}" if said else "")
        stop.wait(config.executor.poll_seconds)
    manager.notify_stopping()
    finish(executor, STOP_S)
    return 0


def finish(executor: Executor, limit_s: float, pause: Callable[[float], None] = time.sleep) -> None:
    """Waits for programs that run, and reports their end; begins nothing."""
    end = time.monotonic() + limit_s
    while executor.waiting and time.monotonic() < end:
        pause(1.0)
        try:
            executor.run_once(only_waiting=True)
        except FleetpulseError as error:
            log.warning("at the stop: %s", error)
    if executor.waiting:
        log.warning("programs still run, and are counted as failed: %s", ", ".join(sorted(executor.waiting)))
