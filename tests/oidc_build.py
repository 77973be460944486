"""Packages of npm that tests use: a certified OpenID Connect provider, and axe-core, which checks accessibility.

Run as a program, as `make parts` does, it installs them; it needs only the standard library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGES = ("oidc-provider@9.13.3", "axe-core@4.14.1")


def folder() -> Path:
    """Returns where they are installed; one folder for each choice of versions."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fleetpulse" / "npm" / "_".join(PACKAGES)


def install() -> None:
    """Installs them from npm, unless they are there."""
    at = folder()
    if not all((at / "node_modules" / name.partition("@")[0]).is_dir() for name in PACKAGES):
        at.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", str(at), *PACKAGES], check=True)


if __name__ == "__main__":
    install()
    sys.stdout.write(f"{folder()}\n")
