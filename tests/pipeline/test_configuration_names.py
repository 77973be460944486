"""Which files count, by their names and links, and by which name a node has its groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import files
from pipeline.config.sections import load_config
from pipeline.model.errors import ConfigError

GROUPED = '[[groups]]\nnodes = ["h200-*"]\n[groups.api]\nport = 7\n'


@pytest.mark.parametrize("name", ["h200-1", "'h200-1'", '"h200-1"', '"h200-\\u0031"'])
def test_a_node_in_quotes_has_its_groups(name: str, tmp_path: Path) -> None:
    (tmp_path / "fleetpulse.toml").write_text(GROUPED)
    config = load_config(tmp_path / "fleetpulse.toml", {files.NODE_VARIABLE: name})
    assert (config.agent.node, config.api.port) == ("h200-1", 7)


def test_drop_ins_of_editors_whose_names_begin_with_a_dot_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "fleetpulse.toml").touch()
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "10.toml").write_text("[api]\nport = 7\n")
    (tmp_path / "conf.d" / ".#10.toml").symlink_to("root@host.4711:1764331200")
    (tmp_path / "conf.d" / ".20.toml").write_text("[api]\nport = 8\n")
    assert load_config(tmp_path / "fleetpulse.toml", {}).api.port == 7


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.toml", "cannot be read: No such file"),
        ("fleetpulse.toml", "lead back to themselves; expected a TOML file"),
    ],
)
def test_a_link_of_the_usual_name_that_leads_nowhere_is_an_error(
    target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ignored: the command ran with defaults."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "HOST", tmp_path / "host.toml")
    Path("fleetpulse.toml").symlink_to(target)
    with pytest.raises(ConfigError, match=f"^fleetpulse.toml: .*{said}"):
        load_config(None, {})


def test_without_any_file_all_keys_have_their_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "HOST", tmp_path / "file" / "host.toml")
    (tmp_path / "file").touch()
    assert load_config(None, {}).source == "defaults"


def test_drop_ins_whose_links_lead_back_to_themselves_say_how_to_find_the_wrong_one(tmp_path: Path) -> None:
    (tmp_path / "fleetpulse.toml").touch()
    (tmp_path / "conf.d").symlink_to("conf.d")
    with pytest.raises(ConfigError, match=r"expected a folder of TOML files, or a link to one; .* namei .*/conf.d$"):
        load_config(tmp_path / "fleetpulse.toml", {})
