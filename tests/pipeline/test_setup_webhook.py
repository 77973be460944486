"""`fleetpulse setup`: the webhook of a receiver inside the site, with questions in place of flags."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.arguments import build_parser
from pipeline.commands.setup import run_setup
from pipeline.config.sections import load_config
from pipeline.model.errors import UsageError

WORDS = ("--role", "one-host", "--site", "a", "--kafka", "", "--gpus", "0")


def set_up(path: Path, *answers: str, words: tuple[str, ...] = ()) -> list[str]:
    """Returns the questions that were asked."""
    asked: list[str] = []
    left = iter(answers)

    def ask(question: str) -> str:
        asked.append(question)
        return next(left)

    run_setup(build_parser().parse_args(["setup", "--config", str(path), *WORDS, *words]), ask, False, path.parent)
    assert list(left) == []
    return asked


def test_a_receiver_inside_the_site_is_taken_after_two_questions(tmp_path: Path) -> None:
    """The question was asked again and again, and named flags that nobody can give to a question."""
    path = tmp_path / "f.toml"
    asked = set_up(path, "http://10.1.2.3:9093/hook\n", "yes\n", "y\n")
    (receiver,) = load_config(path, {}).notify.webhooks
    assert (receiver.allow_http, receiver.allow_private) == (True, ("10.1.2.3/32",))
    assert asked[1].startswith("10.1.2.3 is called by http")
    assert asked[2] == "10.1.2.3 has the private address 10.1.2.3. Allow it? yes or no [no]: "


def test_a_name_inside_the_site_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken, and each delivery was refused."""

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, 0)) for address in ("fd00::5", "10.1.2.3", "10.1.2.3")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    path = tmp_path / "f.toml"
    set_up(path, "https://alerts.site.example/hook\n", "yes\n", "yes\n")
    (receiver,) = load_config(path, {}).notify.webhooks
    assert (receiver.allow_http, receiver.allow_private) == (False, ("fd00::5/128", "10.1.2.3/32"))


def test_who_does_not_agree_is_asked_for_another_address(tmp_path: Path) -> None:
    asked = set_up(tmp_path / "f.toml", "https://10.1.2.3/hook\n", "\n", "\n")
    assert "is private; expected a public address" in asked[2]
    assert load_config(tmp_path / "f.toml", {}).notify.webhooks == ()


def test_what_flags_allow_is_not_asked(tmp_path: Path) -> None:
    words = ("--allow-http", "--allow-private", "10.0.0.0/8")
    assert len(set_up(tmp_path / "f.toml", "http://10.1.2.3/hook\n", words=words)) == 1
    with pytest.raises(UsageError, match="--allow-http: there is no webhook"):
        set_up(tmp_path / "g.toml", "\n", words=words)
    assert not (tmp_path / "g.toml").exists()
