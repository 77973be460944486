"""SIGHUP: whatever a check of the new configuration raises, the service goes on, and the record says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.config import accepted
from pipeline.config.sections import Config, load_config
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


@pytest.mark.parametrize("later", [b"operator:another-token-of-it\n", None, b"\xff"])
def test_a_secret_file_with_a_new_content_is_a_change_and_recorded_without_what_it_contains(
    later: bytes | None, tmp_path: Path
) -> None:
    file, tokens = tmp_path / "fleetpulse.toml", tmp_path / "tokens"
    file.write_text(f"[api]\ntoken_file = '{tokens}'\n")
    tokens.write_bytes(b"operator:a-token-of-24-letters\n")
    records: Records = []
    load = lambda: load_config(file)  # noqa: E731 - as the services give it
    hangup = Reload("pipeline", load(), load, (), lambda *record: records.append(record), lambda _: None)
    signal.raise_signal(signal.SIGHUP)
    assert not hangup.poll()
    tokens.unlink() if later is None else tokens.write_bytes(later)
    signal.raise_signal(signal.SIGHUP)
    assert hangup.poll()
    accepted.take_texts(os.environ)
    assert records == [("done", f"api.token_file: {tokens} has a new content")]


def accept_reload(folder: Path, first: str, second: str) -> Path:
    """Returns the file of a configuration of which a reload from `first` to `second` was accepted."""
    file = folder / "fleetpulse.toml"
    file.write_text(first)
    hangup = Reload("pipeline", load_config(file), lambda: load_config(file), (), lambda *_: None, lambda _: None)
    file.write_text(second)
    signal.raise_signal(signal.SIGHUP)
    assert hangup.poll()
    return file


@pytest.mark.parametrize(
    ("later", "records"),
    [
        ("[budget]\nday = 4\n", "refused"),
        ("[budget]\ndays = 4\n", "done"),
        (None, "refused"),
        ("[budget]\ndays = 3\n", ""),
    ],
    ids=["wrong", "valid", "removed", "the same"],
)
def test_a_file_that_changes_before_the_new_start_is_another_reload(
    later: str | None, records: str, tmp_path: Path
) -> None:
    """The start has the checked configuration; another one is checked and recorded before it is in force."""
    file = accept_reload(tmp_path, "[budget]\ndays = 2\n", "[budget]\ndays = 3\n")
    file.unlink() if later is None else file.write_text(later)
    config = load_config(file)
    assert config.budget.days == 3
    found: Records = []
    hangup = Reload("pipeline", config, lambda: load_config(file), (), lambda *one: found.append(one), lambda _: None)
    assert hangup.poll() is (records == "done")
    assert [outcome for outcome, _ in found] == ([records] if records else [])
    accepted.take_texts(os.environ)


def test_a_drop_in_that_appears_before_the_new_start_is_another_reload(tmp_path: Path) -> None:
    file = accept_reload(tmp_path, "", "[budget]\ndays = 3\n")
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "10.toml").write_text("[budget]\npages = 1\n")
    found: Records = []
    config = load_config(file)
    hangup = Reload("pipeline", config, lambda: load_config(file), (), lambda *one: found.append(one), lambda _: None)
    assert not hangup.poll()
    assert "10.toml" in found[0][1]
    assert accepted.VARIABLE not in os.environ


def test_a_child_reads_the_files_themselves(tmp_path: Path) -> None:
    file = accept_reload(tmp_path, "", "[budget]\ndays = 3\n")
    file.write_text("[budget]\ndays = 4\n")
    program = f"from pipeline.config.sections import load_config; print(load_config({str(file)!r}).budget.days)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    accepted.take_texts(os.environ)
    assert done.stdout == "4.0\n"


STARTED = """
import signal, sys
from pathlib import Path
from pipeline.config.sections import load_config
from pipeline.runtime.reload import Reload, start_again
file = Path(sys.argv[1])
config = load_config(file)
print("starts with", config.budget.days)
load = lambda: load_config(file)
hangup = Reload("pipeline", config, load, (), lambda *record: print(*record), lambda line: None)
if config.budget.days == 28:
    file.write_text("[budget]\\ndays = 3\\n")
    signal.raise_signal(signal.SIGHUP)
if hangup.poll():
    file.write_text("[budget]\\nday = 5\\n")
    start_again()
"""


def test_the_new_start_in_the_same_process_has_the_text_that_was_checked(tmp_path: Path) -> None:
    file = tmp_path / "fleetpulse.toml"
    file.touch()
    done = subprocess.run([sys.executable, "-c", STARTED, str(file)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["starts with 28.0", "done budget.days: 28.0 -> 3.0", "starts with 3.0"], done.stderr
    assert lines[3].startswith("refused ")
    assert "did you mean 'days'?" in lines[3]
