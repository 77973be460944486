"""Compiling before the first input: a stop does not wait for it, and nothing reports a stall during it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.commands import first_compile
from pipeline.commands.first_compile import compile_first
from pipeline.runtime.heartbeat import EvaluationProgress

ROOT = Path(__file__).parents[2]
STOPPED_S = 5.0  # the product stops within seconds, whatever it does (docs/architecture.md)
PROGRAM = """
import sys, time
from detectors.runner import Runner
from pipeline.commands import run_pipeline
from pipeline.config.sections import load_config

def compile_long():
    print("compiling", flush=True)
    for _ in range(600):
        time.sleep(0.1)

code = run_pipeline.run(load_config(sys.argv[1]), Runner([]), compile_long)
print("code", code, flush=True)
"""
COMMAND = [str(ROOT / "fleetpulse.py"), "pipeline", "--config", "fleetpulse.toml"]
CONFIG = '[api]\nport = 0\n[store]\npath = "{0}/s.duckdb"\nfree_bytes = 0\n[spool]\ndirectory = "{0}/spool"\n'


def start(words: list[str], folder: Path, **more: str) -> subprocess.Popen[str]:
    (folder / "fleetpulse.toml").write_text(CONFIG.format(folder))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(folder / "compiled"), **more}
    return subprocess.Popen(words, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder)


def test_a_stop_during_the_compile_ends_the_pipeline_at_once(tmp_path: Path) -> None:
    with start([sys.executable, "-c", PROGRAM, str(tmp_path / "fleetpulse.toml")], tmp_path) as process:
        assert process.stdout is not None
        while "compiling" not in (line := process.stdout.readline()):
            assert line, "ended before it compiled"
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[0]
        assert time.monotonic() - begun < STOPPED_S
    assert (process.returncode, "code 0" in said) == (0, True), said


@pytest.mark.extended
def test_a_stop_during_the_first_start_does_not_wait_for_numba(tmp_path: Path) -> None:
    """The real command, with nothing compiled yet: about 40 s of CPU."""
    with start(
        [sys.executable, str(ROOT / "fleetpulse.py"), "pipeline", "--config", "fleetpulse.toml"], tmp_path
    ) as run:
        assert run.stdout is not None
        assert "API http://" in run.stdout.readline()
        time.sleep(3)  # well within it: the least that was measured is 30 s
        begun = time.monotonic()
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=180)[0]
        assert time.monotonic() - begun < STOPPED_S, said
    assert run.returncode == 0, said


def test_while_it_compiles_the_evaluation_is_not_reported_as_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_compile, "BEAT_S", 0.001)
    clock = [0.0]
    progress, done, troubles = EvaluationProgress(10, 5, lambda: clock[0]), threading.Event(), []

    def beat(doing: str) -> None:
        progress.heartbeat.beat(doing)
        clock[0] += 20
        troubles.append(progress.describe_trouble())
        if len(troubles) == 5:
            done.set()

    compile_first([done.wait], threading.Event(), beat)
    assert troubles[:5] == [None] * 5
    assert progress.heartbeat.doing == "compiling the detectors"


def test_compiling_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_compile, "BEAT_S", 0.001)
    monkeypatch.setattr(first_compile, "LIMIT_S", 0.0)
    beats: list[str] = []
    compile_first([lambda: time.sleep(0.05)], threading.Event(), beats.append)
    assert beats == []


def test_an_error_of_the_compiler_is_raised_where_the_loop_would_begin() -> None:
    def fail() -> None:
        raise RuntimeError("no memory for code")

    with pytest.raises(RuntimeError, match="no memory for code"):
        compile_first([fail], threading.Event(), lambda doing: None)


def test_a_long_compile_is_explained_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_compile, "BEAT_S", 0.001)
    monkeypatch.setattr(first_compile, "QUICK_S", 0.0)
    compile_first([lambda: time.sleep(0.05)], threading.Event(), lambda doing: None)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "compiling the detectors",
        "detectors compiled in 0 s",
    ]
