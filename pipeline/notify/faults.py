"""Faults of the notifier's own steps: what is wrong now, and the log, which names each distinct fault once."""

from __future__ import annotations

import logging

log = logging.getLogger("fleetpulse.notify")
MAX_LOGGED = 100
"""Distinct faults of which the logging is remembered. Chosen."""


class Faults:
    """The faults of steps that did not work since. Thread-safe."""

    def __init__(self) -> None:
        self._current: dict[str, str] = {}
        self._logged: set[str] = set()

    def list_texts(self) -> list[str]:
        """Returns the faults of now, in the order of their steps."""
        return [text for _, text in sorted(dict(self._current).items())]

    def record(self, what: str, error: Exception) -> None:
        """Keeps and logs the fault of a step that is tried until it works."""
        self._current[what] = self.log(what, error)

    def log(self, what: str, error: Exception) -> str:
        """Returns the text of a fault, and logs it once."""
        text = f"{what}: {type(error).__name__}: {error}"
        if text not in self._logged:
            if len(self._logged) >= MAX_LOGGED:
                self._logged.clear()
            self._logged.add(text)
            log.error("%s; retried until it works, logged once", text, exc_info=error)
        return text

    def clear(self, what: str) -> None:
        """Forgets the fault of a step that worked."""
        self._current.pop(what, None)
