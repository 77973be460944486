"""A simulated /proc: processes with the files that the collector `jobs` reads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path


class ProcTree:
    """`start`, `exec` and `end` change a process as the kernel does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        (root / "stat").write_text("cpu 1 2 3\n")

    def start(
        self, pid: int, environment: Mapping[str, str] = {}, cgroup: str = "0::/user.slice", at: int = 100
    ) -> None:
        folder = self.root / str(pid)
        folder.mkdir()
        numbers = " ".join(["1"] * 17)
        (folder / "stat").write_text(f"{pid} (a) b (c)) S {numbers} 0 {at + pid} 4096 5 1\n")
        (folder / "cgroup").write_text(f"{cgroup}\n")
        self.exec(pid, environment)

    def exec(self, pid: int, environment: Mapping[str, str]) -> None:
        """Starts another program in the process."""
        text = "".join(
            f"{key}={value}\0" for key, value in {"PATH": "/bin", "SECRET": "hunter2", **environment}.items()
        )
        (self.root / str(pid) / "environ").write_bytes(text.encode())

    def end(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))
