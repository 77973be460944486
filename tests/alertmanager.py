"""Starts a real Alertmanager: the distribution's, or the one that `make parts` builds from its Go module."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

VERSION = "0.34.2"
"""Release of github.com/prometheus/alertmanager that `make parts` builds."""


def built() -> Path:
    """Returns the path of the Alertmanager that `make parts` builds."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fleetpulse" / "alertmanager" / VERSION / "alertmanager"


def find_programs() -> dict[str, str]:
    """Returns name -> program of the Alertmanagers of this machine."""
    found = {"distribution": shutil.which("prometheus-alertmanager") or "", "built": str(built())}
    return {name: path for name, path in found.items() if path and Path(path).exists()}


class Alertmanager:
    """One running Alertmanager; `config` is its alertmanager.yml. It keeps its address over a restart."""

    def __init__(self, program: str, folder: Path, config: str) -> None:
        self._program, self._folder = program, folder
        (folder / "alertmanager.yml").write_text(config)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        words = [f"--config.file={self._folder}/alertmanager.yml", f"--storage.path={self._folder}/data"]
        words += [f"--web.listen-address={self.url.removeprefix('http://')}", "--cluster.listen-address="]
        log = open(self._folder / "alertmanager.log", "ab")  # noqa: SIM115 - the process has it
        self._process = subprocess.Popen([self._program, *words], stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError((self._folder / "alertmanager.log").read_text()[-2000:])

    def kill(self) -> None:
        """Kills it, so that it forgets its alerts."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def get(self, path: str) -> Any:
        """Returns the JSON of a GET below /api/v2."""
        with urllib.request.urlopen(f"{self.url}/api/v2{path}", timeout=10) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Returns (status, JSON) of a POST below /api/v2."""
        request = urllib.request.Request(
            f"{self.url}/api/v2{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, None


def build() -> Path:
    """Builds VERSION from its Go module, once, and returns the program. The web UI is not in the module."""
    out = built()
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    words = ["go", "mod", "download", "-json", f"github.com/prometheus/alertmanager@v{VERSION}"]
    done = subprocess.run(words, capture_output=True, check=True, cwd=out.parent)
    with tempfile.TemporaryDirectory(prefix="fleetpulse-alertmanager-") as work:
        source = Path(work) / "source"
        shutil.copytree(json.loads(done.stdout)["Dir"], source)
        for path in (source, *source.rglob("*")):
            path.chmod(0o755)
        page = source / "ui" / "app" / "dist"
        page.mkdir(parents=True, exist_ok=True)
        (page / "index.html").write_text("")
        part = out.with_suffix(".part")
        facts = f"-X github.com/prometheus/common/version.Version={VERSION}"
        words = ["go", "build", "-trimpath", "-ldflags", f"-s -w {facts}", "-o", str(part), "./cmd/alertmanager"]
        subprocess.run(words, cwd=source, check=True)
        part.replace(out)
    return out


if __name__ == "__main__":
    print(build())  # noqa: T201 - the folder, for make parts
