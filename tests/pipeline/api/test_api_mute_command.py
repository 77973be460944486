"""`fleetpulse mutes` against a real API: data on stdout, messages on stderr, and exit codes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fleetpulse
from pipeline.api.server import create_app, start_server
from pipeline.config.sections import Api, Config

Call = Callable[..., tuple[int, str, str]]
ADD = ("add", "straggler", "rack:r1", "--hours", "8", "--reason", "new paste")


@pytest.fixture
def mutes(
    backend: Any, now: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Call]:
    """mutes(*words): (exit code, stdout, stderr) of the command against a running API."""
    monkeypatch.setattr("pipeline.commands.mutes.time.time_ns", lambda: now * 1000)
    stop, config = threading.Event(), Config(api=Api(port=0))
    serving = start_server(create_app(backend, config, lambda: now), config, stop)
    file = tmp_path / "site.toml"
    file.write_text(f"[api]\nport = {serving.port}\n")

    def call(*words: str) -> tuple[int, str, str]:
        code = fleetpulse.main(["mutes", *words, "--config", str(file)])
        said = capsys.readouterr()
        return code, said.out, said.err

    yield call
    stop.set()
    serving.join(10)


@pytest.mark.slow
def test_a_mute_is_created_listed_and_ended(mutes: Call) -> None:
    code, out, err = mutes(*ADD, "--output", "json")
    (made,) = json.loads(out)
    assert (code, err) == (0, "")
    assert (made["detector"], made["scope"], made["reason"], made["user"]) == (
        *("straggler", "rack:r1", "new paste"),
        "local",
    )
    code, out, err = mutes()
    assert (code, err) == (0, "")
    head = ["id", "detector", "scope", "since", "until", "ended", "ended_by", "user", "reason"]
    assert out.splitlines()[0].split() == head
    assert "rack:r1" in out
    assert mutes("list") == (0, out, "")
    assert mutes("end", made["id"])[0] == 0
    assert "rack:r1" not in mutes("list")[1]
    assert "rack:r1" in mutes("list", "--all")[1]
    assert "rack:r1" in mutes("--all")[1]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "stragler", *ADD[2:]), "no such detector"),
        ((*ADD[:2], "rack", *ADD[3:]), "expected an entity"),
        ((*ADD[:6], ""), "reason: is empty"),
        ((*ADD[:4], "1000", *ADD[5:]), "at most 30 days"),
        (("end", "nothing"), "is not known or has ended"),
    ],
)
def test_an_invalid_mute_is_a_usage_error(mutes: Call, words: tuple[str, ...], said: str) -> None:
    code, out, err = mutes(*words)
    assert (code, out) == (2, "")
    assert said in err


def test_a_mute_for_an_unknown_entity_is_created_with_a_warning(mutes: Call) -> None:
    code, out, err = mutes("add", "straggler", "node:typo", *ADD[3:])
    assert (code, "node:typo" in out) == (0, True)
    assert "unknown entity; no effect until it appears" in err
    assert err.count("\n") == 1


def test_a_pipeline_that_does_not_run_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("[api]\nport = 9\n")
    assert fleetpulse.main(["mutes", "--config", str(tmp_path / "site.toml")]) == 3
    assert "start the pipeline" in capsys.readouterr().err


def test_a_token_without_permission_is_refused(with_tokens: Any, backend: Any, tmp_path: Path) -> None:
    tokens, stop = tmp_path / "tokens", threading.Event()
    config = Config(api=Api(port=0, token_file=tokens))
    serving = start_server(create_app(backend, config), config, stop)
    try:
        (tmp_path / "other").write_text("eve:eve-has-a-long-wrong-token\n")
        (tmp_path / "site.toml").write_text(f"[api]\nport = {serving.port}\ntoken_file = '{tmp_path}/other'\n")
        assert fleetpulse.main(["mutes", "--config", str(tmp_path / "site.toml")]) == 4
    finally:
        stop.set()
        serving.join(10)
