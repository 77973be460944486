"""The commit of a checkout, for `fleetpulse --version` and `support`; an installed wheel has a file with it instead."""

from __future__ import annotations

import os
import subprocess

_PATIENCE_S = 2.0  # for git; chosen: it takes 10 ms, on a slow network disk the version is printed without the commit
_DESCRIBE = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY")
"""Variables that lead git to another repository than that of the folder, as in hooks (git(1))."""


def find_commit(root: str) -> str:
    """Returns the commit of a checkout, with `-dirty` if tracked files are changed; empty if git does not say."""
    if not os.path.lexists(os.path.join(root, ".git")):
        return ""
    environ = {name: text for name, text in os.environ.items() if name not in _ELSEWHERE}
    environ["GIT_OPTIONAL_LOCKS"] = "0"  # it only reads
    try:
        done = subprocess.run(
            ["git", "-C", root, *_DESCRIBE], env=environ, capture_output=True, text=True, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
