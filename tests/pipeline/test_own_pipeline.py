"""Commands that must reach the pipeline of their configuration refuse another one that has its port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fleetpulse
from pipeline.api.server import create_app, start_server
from pipeline.commands.pipeline import PipelineBackend
from pipeline.config import sections
from tests.pipeline.test_silence import NODES, SilencePipeline

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def east(site: Any) -> Iterator[tuple[int, Path]]:
    """Port and store of a running pipeline of the site `east`."""
    made = SilencePipeline(site, site={"name": "east"})
    made.run(30, *NODES)
    config = replace(made.service.config, api=sections.Api(port=0))
    stop = threading.Event()
    api = start_server(create_app(PipelineBackend(made.service), config), config, stop)
    yield api.port, config.store.path
    stop.set()
    api.join()
    made.service.close()


@pytest.fixture
def run(east: tuple[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with the site's port and further sections as its configuration."""

    def run_command(more: str, *words: str) -> tuple[int, str]:
        file = tmp_path / "fleetpulse.toml"
        file.write_text(f"[api]\nport = {east[0]}\n{more}")
        code = fleetpulse.main([*words, "--config", str(file)])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run_command


def test_a_backup_of_another_installations_pipeline_is_refused_and_nothing_is_copied(
    run: Run, east: tuple[int, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other" / "store.duckdb"
    for exists in (False, True):
        if exists:
            other.parent.mkdir()
            other.touch()
        code, said = run(f'[store]\npath = "{other}"\n', "backup", str(tmp_path / "copy"))
        assert code == 4
        assert f"http://127.0.0.1:{east[0]}: the pipeline that answers (site east) has the store {east[1]}" in said
        assert f"expected {other}, [store] path of {tmp_path}/fleetpulse.toml; nothing was copied; use the" in said
        assert not list(tmp_path.glob("copy*"))


def test_a_backup_of_the_own_pipeline_is_made_also_by_another_name_of_its_store(
    run: Run, east: tuple[int, Path], tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(east[1].parent)
    for number, path in enumerate((east[1], tmp_path / "link" / east[1].name)):
        store = f'[store]\npath = "{path}"\nfree_bytes = 0\n'
        code, said = run(store, "backup", str(tmp_path / f"copy{number}"))
        assert code == 0, said
        assert (tmp_path / f"copy{number}" / "MANIFEST.json").exists()


@pytest.mark.parametrize("words", [("decommission", "n5", "--reason", "sold"), ("return", "n5"), ()])
def test_nodes_of_another_site_are_neither_changed_nor_listed(run: Run, words: tuple[str, ...], tmp_path: Path) -> None:
    code, said = run('[site]\nname = "west"\n', "node", *words)
    assert code == 4
    assert "the pipeline that answers is of site east; expected west, [site] name of" in said
    assert run('[site]\nname = "east"\n', "node", "--output", "jsonl") == (0, "")


def test_a_configuration_that_names_no_site_reaches_any_as_through_a_tunnel(run: Run) -> None:
    assert run("", "node", "decommission", "n5", "--reason", "sold")[0] == 0
    assert "n5" in run("", "node", "--output", "jsonl")[1]


def test_a_store_that_a_variable_sets_is_expected_by_the_name_of_the_variable(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETPULSE__STORE__PATH", "/nowhere/store.duckdb")
    said = run("", "backup", str(tmp_path / "copy"))[1]
    assert "expected /nowhere/store.duckdb, FLEETPULSE__STORE__PATH; nothing was copied" in said
