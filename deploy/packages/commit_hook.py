"""Build hook of hatchling: adds the commit, for `fleetpulse --version`, and to wheels the units of systemd and guides.

Bundles, packages and images install the wheel, so that all have the guides, below share/doc/fleetpulse: each page where
its links find the others. Messages name their place on the host (pipeline/runtime/guides.py).
"""

import os
import re
import subprocess
from collections.abc import Iterator
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
        if self.target_name == "wheel":
            for page in list_guides(Path(self.root)):
                build_data["shared_data"][str(Path(self.root) / page)] = f"share/doc/fleetpulse/{page}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling after each build."""
        (Path(self.directory) / ".commit").unlink(missing_ok=True)


def list_guides(root: Path) -> Iterator[str]:
    """Yields the guides, and the pictures that they show. Raises FileNotFoundError without them: messages name them."""
    pages = sorted((root / "docs").glob("*.md"))
    pages = [root / "docs" / "index.md", *(page for page in pages if page.name != "index.md")]
    pages += [root / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")]
    shown = {name for page in pages for name in re.findall(r"\]\((?:docs/)?(images/[^)]+)\)", page.read_text())}
    yield from (str(page.relative_to(root)) for page in pages)
    yield from (f"docs/{name}" for name in sorted(shown))


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
