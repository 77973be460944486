"""SIGHUP: whatever a check of the new configuration raises, the service goes on, and the record says why."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError
from pipeline.runtime.reload import Reload

Records = list[tuple[str, str]]
NOT_RELOADED = "configuration not reloaded, nothing changed: "


@pytest.fixture(autouse=True)
def _keep_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def reload_once(load: Callable[[], Config]) -> tuple[Records, list[str]]:
    """Returns the records and the lines of the log of one SIGHUP, which must not end the service."""
    records: Records = []
    lines: list[str] = []
    hangup = Reload("pipeline", Config(), load, (), lambda *record: records.append(record), lines.append)
    signal.raise_signal(signal.SIGHUP)
    assert not hangup.poll()
    assert not hangup.accepted
    return records, lines


def test_an_error_that_no_check_declares_is_a_refusal_with_its_type_and_a_traceback() -> None:
    def load() -> Config:
        raise UnicodeError("label empty, of https://usr:SECRET@h.example/path")

    records, lines = reload_once(load)
    why = "UnicodeError: label empty, of https://h.example/(hidden)"
    assert records == [("refused", why)]
    assert lines[:2] == [NOT_RELOADED + why, "Traceback (most recent call last):"]
    assert "in load" in "".join(lines)
    assert "SECRET" not in "".join(lines)


def test_a_declared_error_is_one_line() -> None:
    def load() -> Config:
        raise ConfigError("[api] port = 1: taken")

    assert reload_once(load) == ([("refused", "[api] port = 1: taken")], [f"{NOT_RELOADED}[api] port = 1: taken"])
