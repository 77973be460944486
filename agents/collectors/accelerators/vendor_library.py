"""A vendor's Python binding: imported only on nodes with its hardware; a refused call is a missing value."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from agents.collector import NoData


def import_binding(name: str, hardware: str) -> Any:
    """Imports the module `name`. Raises NoData if it is not installed, or does not find its own library."""
    try:
        with stdout_to_stderr():
            return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a binding loads a C library at import, which may raise anything
        text = f"{type(error).__name__}: {error}"
        raise NoData(
            f"{hardware}, but its Python binding {name} cannot be used ({text}): install it for the agent"
        ) from None


def stdout_to_stderr() -> contextlib.AbstractContextManager[object]:
    """Redirects stdout to stderr: bindings print warnings to stdout, which is for our data."""
    return contextlib.redirect_stdout(sys.stderr)


class VendorLibrary:
    """Calls functions of a binding and counts the answered calls."""

    def __init__(self, module: Any, refusal: type[Exception]) -> None:
        self.module, self._refusal = module, refusal
        self.answered_calls = 0

    def call(self, name: str, *arguments: Any) -> Any:
        """Returns the answer; None if the binding lacks the function or the device does not support it."""
        function = getattr(self.module, name, None)
        if function is None:
            return None
        try:
            found = function(*arguments)
        except (self._refusal, ValueError, KeyError):  # ValueError: invalid text, or an unknown member of an enum
            return None
        self.answered_calls += 1
        return found

    def call_for_dict(self, name: str, *arguments: Any) -> dict[str, Any] | None:
        """Returns an answer that must be a dict; else None."""
        found = self.call(name, *arguments)
        return found if isinstance(found, dict) else None
