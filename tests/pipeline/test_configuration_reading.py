"""What a file of the configuration may be, and the words for what it may not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fleetpulse
from pipeline.commands.options import parse_seconds
from pipeline.config import files
from pipeline.config.sections import load_config
from pipeline.model.errors import ConfigError


@pytest.fixture
def main(tmp_path: Path) -> Path:
    (tmp_path / "conf.d").mkdir()
    path = tmp_path / "fleetpulse.toml"
    path.write_text('[site]\nname = "east"\n')
    return path


@pytest.mark.parametrize("name", ["fleetpulse.toml", "conf.d/50.toml"])
def test_what_is_no_regular_file_is_refused_before_it_is_read(main: Path, name: str) -> None:
    """A FIFO was waited for without an end, and /dev/zero was read until the memory was full."""
    path = main.parent / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is no regular file, and reading it may never end; expected a TOML file"):
        load_config(main, {})
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="is no regular file"):
        load_config(main, {})
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(main, {})


def test_an_empty_configuration_may_be_the_null_device() -> None:
    assert load_config("/dev/null", {}).site.name == "local"


def test_a_file_that_is_too_large_is_refused(main: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_CHARACTERS", 1000)
    main.write_text("#" * 1000)
    load_config(main, {})
    main.write_text("#" * 1001)
    with pytest.raises(ConfigError, match="has more than 1,000 characters; expected"):
        load_config(main, {})


def test_a_mark_of_the_byte_order_is_no_part_of_the_text(main: Path) -> None:
    main.write_bytes(b'\xef\xbb\xbf[site]\r\nname = "west"\r\n')
    assert load_config(main, {}).site.name == "west"


@pytest.mark.parametrize("character", ["\n", "\t", "\x1b", "\x7f", "\x9b"])
def test_a_name_with_a_control_character_is_refused(main: Path, character: str) -> None:
    main.write_text(f'[site]\nname = "ea\\u{ord(character):04x}st"\n')
    with pytest.raises(ConfigError, match="no control character"):
        load_config(main, {})


def test_show_names_the_option_that_chose_the_node(
    main: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(files.NODE_VARIABLE, "n1")
    words = ["config", "show", "--changed", "--output", "csv", "--config", str(main)]
    for more, shown in (["--node", "n2"], "agent.node,n2,--node"), ([], f"agent.node,n1,{files.NODE_VARIABLE}"):
        assert fleetpulse.main([*words, *more]) == 0
        assert shown in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("text", ["3x", "", "0", "601", "nan", "-1s"])
def test_a_time_that_is_none_says_what_was_expected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It said "invalid parse_seconds value"."""
    with pytest.raises(SystemExit):
        fleetpulse.main(["doctor", f"--wait={text}"])
    assert f"{text!r}; expected a time above 0 and at most 600s, such as 120s or 500ms" in capsys.readouterr().err
    assert (parse_seconds("5s"), parse_seconds("500ms"), parse_seconds("5")) == (5.0, 0.5, 5.0)
