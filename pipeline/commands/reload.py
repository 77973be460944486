"""SIGHUP: the pipeline reads its configuration again, and if it is valid restarts in the same process.

Nothing is lost: it is the stop and start of `systemctl restart`, which keep the state of all detectors, without a new
process, and only after the configuration was found valid and the change is a row of the audit.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from pipeline.commands.configuration import list_changed_keys
from pipeline.config.sections import Config
from pipeline.engine.people import People
from pipeline.model.errors import FleetpulseError
from pipeline.model.records import Caller

log = logging.getLogger("fleetpulse.pipeline")
AGAIN = -1
"""Result of a pipeline that was asked to start again: no exit code of a process."""
ACTION = "reload configuration"
_SHOWN = 10  # keys that are named in the audit


class Reload:
    """Answers SIGHUP. `poll` is called by the loop, between two rounds; a wrong configuration changes nothing."""

    def __init__(
        self, config: Config, load: Callable[[], Config], people: Callable[[], People], stop: threading.Event
    ) -> None:
        self._config, self._load, self._people, self._stop = config, load, people, stop
        self._asked = False
        self.accepted = False
        signal.signal(signal.SIGHUP, self._ask)

    def _ask(self, *_: object) -> None:
        self._asked = True

    def poll(self) -> None:
        """Reads the configuration if that was asked for; stops the loop if it is valid and differs."""
        if not self._asked:
            return
        self._asked = False
        user = Caller("SIGHUP")
        try:
            changed = list_changed_keys(self._config, self._load())
        except FleetpulseError as error:
            log.error("configuration not reloaded, nothing changed: %s", error)
            self._people().record_audit(user, ACTION, self._config.source, str(error), "refused")
            return
        if not changed:
            log.warning("configuration reloaded: nothing changed")
            return
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        self._people().record_audit(user, ACTION, self._config.source, ", ".join(changed[:_SHOWN]) + more, "done")
        log.warning("configuration reloaded: %s; starting again", ", ".join(changed))
        self.accepted = True
        self._stop.set()


def start_again() -> NoReturn:
    """Replaces this process, which has closed everything, by a new start of the same command."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)
