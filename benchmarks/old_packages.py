"""Builds deb packages of an earlier commit with today's packaging, to upgrade from them (benchmarks/installation.py).

    python -m benchmarks.old_packages 409170b FOLDER

The program, its requirements and the agent's unit are of that commit; the units of the server are today's, as an
administrator of then would have written them: without what that version cannot do (readiness, watchdog, reload).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOOK = '\n[tool.hatch.build.hooks.custom]\npath = "deploy/packages/commit_hook.py"\n'
NOT_THEN = re.compile(r"^(WatchdogSec|NotifyAccess|ExecReload|TimeoutStartSec)=.*\n", re.MULTILINE)


def main(commit: str, target: str) -> None:
    """Builds the debs of agent and server into a folder. Raises SystemExit without that commit."""
    with tempfile.TemporaryDirectory(prefix="fleetpulse-old-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        packed = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True)
        if packed.returncode:
            raise SystemExit(f"{commit}: {packed.stderr.decode().strip()}; a clone with its history has it")
        subprocess.run(["tar", "-x", "-C", tree], input=packed.stdout, check=True)
        add_packaging(tree)
        environ = {**os.environ, "PYTHON": sys.executable, "FLEETPULSE_COMMIT": commit}
        subprocess.run([tree / "deploy/packages/make"], env=environ, check=True)
        Path(target).mkdir(parents=True, exist_ok=True)
        for deb in (tree / "dist").glob("*.deb"):
            shutil.copy(deb, target)


def add_packaging(tree: Path) -> None:
    """Puts today's packaging into a tree that had none; one that has its own stays as it is."""
    if (tree / "deploy" / "packages").is_dir():
        return
    for name in ("deploy/packages", "deploy/systemd"):
        shutil.copytree(ROOT / name, tree / name)
    for name in ("deploy/requirements.py", "constraints.txt"):
        shutil.copy(ROOT / name, tree / name)
    with (tree / "pyproject.toml").open("a") as project:
        project.write(HOOK)
    index = tree / "docs" / "index.md"  # today's packaging expects the guides with their first page
    if not index.exists():
        index.parent.mkdir(exist_ok=True)
        index.write_text("# Guides\n")
    shutil.copy(tree / "deploy" / "fleetpulse-agent.service", tree / "deploy" / "systemd")
    for unit in ("pipeline", "dashboard", "executor"):
        path = tree / "deploy" / "systemd" / f"fleetpulse-{unit}.service"
        path.write_text(NOT_THEN.sub("", path.read_text()).replace("Type=notify", "Type=exec"))


if __name__ == "__main__":
    main(*sys.argv[1:])
