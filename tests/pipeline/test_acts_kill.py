"""The executor as a separate process at a real Slurm, killed with signal 9 after each step it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import slurm_cluster
from tests.parts import do_without
from tests.pipeline.api.test_api_acts import Served

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
STEPS = ("awaiting_approval", "executing", "executed", "verifying", "verified")
CONFIG = """\
[api]
port = {port}
[acts]
hold = "on"
release = "on"
adapter = "slurm"
[acts.limits]
fleet_share = 0.5
ceiling_share = 0.75
[executor]
token_file = "{folder}/executor.token"
poll_seconds = 1
"""
LIMIT_S = 120.0
"""Longest wait for a state (s). Chosen: ten starts of the process on a busy machine."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    if reason := slurm_cluster.missing():
        do_without("slurm", reason)
    with slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm"), 4) as made:
        yield made


class Killed:
    """An executor process that is killed as soon as an act has a state, and started again."""

    def __init__(self, served: Any, cluster: slurm_cluster.Cluster, folder: Path) -> None:
        self.served, self.folder, self.kills = served, folder, 0
        file = folder / "executor.toml"
        file.write_text(CONFIG.format(port=served.server.port, folder=folder))
        self.environment = {**os.environ, "SLURM_CONF": f"{cluster.folder}/slurm.conf"}
        self.words = [sys.executable, "-c", "import sys, fleetpulse; sys.exit(fleetpulse.main())", "executor"]
        self.words += ["--config", str(file)]

    def reach(self, act: str, state: str) -> None:
        """Runs the executor until the act has a state or a later one, and kills it at that moment."""
        with open(self.folder / "executor.log", "ab") as log:
            process = subprocess.Popen(self.words, env=self.environment, stdout=log, stderr=log)
        try:
            end = time.monotonic() + LIMIT_S
            later = STEPS[STEPS.index(state) :]
            while (now := self.served.board.find(act).state) not in later:
                assert time.monotonic() < end, f"{act} is {now}, not {state}"
                assert process.poll() is None, (self.folder / "executor.log").read_text()[-2000:]
                time.sleep(0.002)
            self.kills += 1
        finally:
            process.kill()  # signal 9
            process.wait()


def test_an_executor_killed_after_each_step_does_each_thing_once(
    cluster: slurm_cluster.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tmp_path, monkeypatch)  # type: ignore[no-untyped-call]
    try:
        executor = Killed(served, cluster, tmp_path)
        for node in cluster.nodes[:2]:  # two of four are all that the limits allow
            body = {"verb": "hold", "targets": [f"node:{node}"], "reason": "fault"}
            act = served.call("POST", "/acts", body, token="dashboard", person="alice")[1]["id"]  # type: ignore[no-untyped-call]
            for step in STEPS:
                served.site.now += 31_000_000  # the dead executor's lease is over
                executor.reach(act, step)
                if step == "awaiting_approval":
                    plan = served.board.find(act).plan.hash(served.board.find(act))
                    answer = {"plan": plan, "comment": "yes"}
                    said = served.call("POST", f"/acts/{act}/approve", answer, token="dashboard", person="bob")  # type: ignore[no-untyped-call]
                    assert said[0] == 200, said
            found = served.board.find(act)
            assert (found.state, found.held) == ("verified", (f"node:{node}",))
            shown = cluster.run("sinfo", "-h", "-N", "-n", node, "-o", "%T %E").strip()
            assert shown.startswith(f"drained fleetpulse:{act}"), shown
        assert executor.kills == 2 * len(STEPS)
        states = [h["state"] for h in served.board.describe(act)["history"]]
        assert [states.count(s) for s in ("executed", "verified", "failed", "rolled_back")] == [1, 1, 0, 0], states
    finally:
        served.close()  # type: ignore[no-untyped-call]
