"""TOML that people write: each reader names the file, whatever is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.collectors.gpu.xid_table import read_toml
from agents.sim import scenario_file
from pipeline.config.files import read_table
from pipeline.foreign.mapping import load_mapping
from pipeline.incidents.advice import AdviceBook, read_advice
from pipeline.model.errors import UsageError
from pipeline.model.toml_text import parse_toml
from pipeline.recording.text_files import read_signals, read_topology

ROOT = Path(__file__).parents[2]
WRONG = {
    "digits": (f"x = {'9' * 5000}", "too many digits"),
    "nested lists": (f"x = {'[' * 20_000}", "nested too deep"),
    "nested tables": ("x = " + "{x = " * 20_000, "nested too deep"),
    "a word": ("x", "Expected '='"),
}
READERS: list[Callable[[Path], Any]] = [
    *(read_advice, read_table, read_signals, read_topology, read_toml, scenario_file.load),
    lambda path: load_mapping(str(path)),
]


@pytest.mark.parametrize("what", WRONG)
def test_every_reader_refuses_what_is_no_toml_with_the_name_of_the_file(what: str, tmp_path: Path) -> None:
    """A number of 5,000 digits and tables in tables ended in a ValueError or RecursionError."""
    path = tmp_path / "own.toml"
    path.write_text(WRONG[what][0])
    for reader in READERS:
        with pytest.raises(UsageError) as caught:
            reader(path)
        assert str(path) in str(caught.value)
        assert WRONG[what][1] in str(caught.value)


@pytest.mark.parametrize("text", [WRONG["digits"][0], WRONG["nested lists"][0], f"[detector.xid.{'a.' * 3000}a]"])
def test_advice_that_becomes_wrong_leaves_that_of_before_in_force(text: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[detector.xid]\nadvice = "Call us."\n')
    book = AdviceBook(path)
    path.write_text(text)
    os.utime(path, ns=(1, 1))
    assert book.find("xid", "gpu:n1.0")["advice"] == "Call us."


def test_no_other_module_calls_tomllib() -> None:
    modules = [
        path for package in ("agents", "pipeline", "detectors", "dashboards") for path in (ROOT / package).rglob("*.py")
    ]
    calling = [path.relative_to(ROOT).as_posix() for path in modules if "tomllib." in path.read_text()]
    assert calling == ["pipeline/model/toml_text.py"]
    assert parse_toml("x = 1") == {"x": 1}
