"""Training scripts with PyTorch: digests equal NumPy's, and an optimizer step is a step."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from agents.collectors.training.training import Training

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("torch_program.py")
PATIENCE_S = 20.0

pytestmark = pytest.mark.torch


def run(python: str, *words: str) -> Any:
    """Returns the program's output in the Python that has PyTorch."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run([python, PROGRAM, *words], env=environ, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_tensors_have_the_same_digest_as_numpy_arrays(torch_python: str) -> None:
    found = run(torch_python, "digests")
    assert len(found["equal"]) == 3 * 5 * 4 + 2
    assert [name for name, digest, wanted in found["equal"] if digest != wanted] == []
    assert [name for name, digest, other in found["different"] if digest == other] == []


@pytest.mark.parametrize("optimizer", ["own", "hooks"])
def test_each_optimizer_step_is_reported_with_loss_norm_and_digests(
    optimizer: str, tmp_path: Path, torch_python: str
) -> None:
    """With this PyTorch's optimizer, and with one that has the hooks of PyTorch 2."""
    collector = Training(socket=str(tmp_path / "t.sock"))
    collector.open("n1")
    with contextlib.closing(collector):
        result = run(torch_python, "train", str(tmp_path / "t.sock"), optimizer)
        assert not result["trouble"]
        events, entities, end = [], (), time.monotonic() + PATIENCE_S
        while len(events) < 2 and time.monotonic() < end:
            (reading,) = collector.read()
            events += reading.events
            entities = reading.entities or entities
        columns = {name: values.tolist() for name, values in reading.columns.items()}
        assert entities == ("rank:j.0",)
        assert (columns["rank.step"], columns["rank.tokens"], columns["rank.refused"]) == ([4], [32], [0])
        assert columns["rank.loss"] == [pytest.approx(result["loss"])]
        assert columns["rank.step_time"][0] > columns["rank.compute_time"][0] > 0
        assert [(e.data["step"], e.data["bucket"]) for e in events] == [(2, "group0"), (4, "group0")]
        assert events[1].data["digest"] == result["digest"]
        assert result["steps"] == 4, "the step after close() is none of ours"
