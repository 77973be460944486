"""Packages of an earlier version, to upgrade from them, are built with today's build hook."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.old_packages import add_packaging
from tests.old_versions import WIRE_1, check_out


def test_todays_hook_builds_the_wheel_of_a_version_without_an_index_of_guides(tmp_path: Path) -> None:
    tree = check_out(WIRE_1, tmp_path / "tree")
    assert not (tree / "docs" / "index.md").exists()
    add_packaging(tree)
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(words, cwd=tree, env={**os.environ, "FLEETPULSE_COMMIT": WIRE_1}, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("pipeline/commit").decode() == f"{WIRE_1}\n"
        assert "pipeline/units/fleetpulse-agent.service" in archive.namelist()
        assert [name for name in archive.namelist() if name.endswith("share/doc/fleetpulse/docs/index.md")]
