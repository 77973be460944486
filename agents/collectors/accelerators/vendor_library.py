"""A maker's Python binding: loaded only where its hardware is, asked call by call; a refusal is a missing value."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from agents.collector import NoData


def load(name: str, hardware: str) -> Any:
    """The module `name`; NoData where it is not installed or does not find its own library."""
    try:
        with quiet():
            return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a binding loads a C library at import, and each fails in its own way
        text = f"{type(error).__name__}: {error}"
        raise NoData(
            f"{hardware}, but its Python binding {name} cannot be used ({text}): install it for the agent"
        ) from None


def quiet() -> contextlib.AbstractContextManager[object]:
    """Bindings print to stdout what they do not find; ours is for data."""
    return contextlib.redirect_stdout(sys.stderr)


class Library:
    """Calls functions of a binding and counts those that were answered."""

    def __init__(self, module: Any, refusal: type[Exception]) -> None:
        self.module, self._refusal = module, refusal
        self.answered = 0

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer, or None: a function may be missing in an older binding, a value not supported by the device."""
        function = getattr(self.module, name, None)
        if function is None:
            return None
        try:
            found = function(*arguments)
        except (self._refusal, ValueError, KeyError):  # ValueError: bytes that are no text, numbers that are no enum
            return None
        self.answered += 1
        return found

    def table(self, name: str, *arguments: Any) -> dict[str, Any] | None:
        """An answer that must be a dict."""
        found = self.ask(name, *arguments)
        return found if isinstance(found, dict) else None
