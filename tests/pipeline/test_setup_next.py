"""What `fleetpulse setup` says to do next."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.commands import setup
from pipeline.commands.arguments import build_parser
from pipeline.commands.setup import next_commands, run_setup
from pipeline.commands.setup_answers import Answers


def test_a_container_of_setup_alone_names_no_command_that_the_host_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "is_first_process", lambda: True, raising=False)
    path = tmp_path / "fleetpulse.toml"
    words = ["--role", "node", "--site", "a", "--kafka", "k:9092", "--gpus", "0", "--webhook", ""]
    given = build_parser().parse_args(["setup", "--config", str(path), *words])
    said = run_setup(given, lambda _: pytest.fail("asked"), False, tmp_path, path)
    steps = said[said.index("Next:") + 1 :]
    assert "container of this image" in steps[0]
    assert steps[1].endswith(f": agent --config {path}")
    assert not [line for line in steps if line.strip().startswith("fleetpulse ")]


def test_a_node_with_a_package_is_waited_for_as_long_as_the_guide_says(tmp_path: Path) -> None:
    last = next_commands(Answers("node", "a", "k:9092", 0, None, packaged=True), tmp_path / "f.toml")[-1]
    assert last.endswith("doctor --wait 120s")
