"""Build hook of hatchling: adds the commit, for `fleetpulse --version`, and to wheels the units of systemd."""

import os
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Adds the files to wheel and sdist; an installation that points to a checkout has none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before each build."""
        if version == "editable":
            return
        commit = find_commit(Path(self.root))
        written = Path(self.directory) / ".commit"
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(f"{commit}\n")
        build_data["force_include"][str(written)] = "pipeline/commit"
        units = Path(self.root) / "deploy" / "systemd"  # for `fleetpulse setup --units`; a container's build has none
        if self.target_name == "wheel" and units.is_dir():
            build_data["force_include"][str(units)] = "pipeline/units"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling after each build."""
        (Path(self.directory) / ".commit").unlink(missing_ok=True)


def find_commit(root: Path) -> str:
    """FLEETPULSE_COMMIT, as in a container's build, else that of an sdist, else of the checkout, with + if changed."""
    if given := os.environ.get("FLEETPULSE_COMMIT"):
        return given
    recorded = root / "pipeline" / "commit"
    if recorded.exists():
        return recorded.read_text().strip()
    if not (root / ".git").exists():
        return "unknown commit"
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout.strip()
