"""A bare Debian 12 with systemd as process 1, as a folder: what a package meets on a fresh machine.

Needs root and mmdebstrap; the packages of Debian are kept in the cache folder. The machine has its own processes,
cgroups and mounts; its network is that of this process, so that several machines and a broker reach each other.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

BOOT = Path(__file__).with_suffix(".sh")
BARE = ("systemd", "systemd-sysv", "dbus", "iproute2")
"""What every installed Debian has beyond `minbase`."""
WITH_PYTHON = (*BARE, "python3", "python3-venv")
BOOT_S, STOP_S = 60.0, 20.0
"""Chosen: systemd is up in 2 s on an idle machine."""
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


class MachineError(Exception):
    """The machine did not start, or a command on it failed."""


def missing() -> str:
    """Returns what this host lacks for a machine; empty if nothing."""
    if os.geteuid() != 0:
        return "a bare machine needs root"
    lacking = [name for name in ("mmdebstrap", "unshare", "nsenter", "pivot_root") if shutil.which(name) is None]
    return f"no {', '.join(lacking)} here: apt-get install mmdebstrap util-linux" if lacking else ""


def debian(packages: Iterable[str] = BARE) -> Path:
    """Returns the archive of a Debian 12 with these packages; makes it once (a minute). Raises MachineError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse" / "bare"
    archive = cache / f"bookworm-{'-'.join(sorted(packages))}.tar"
    if archive.exists():
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    draft = archive.with_suffix(f".{os.getpid()}.tar")
    words = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--dpkgopt=force-unsafe-io"]
    done = subprocess.run(
        [*words, f"--include={','.join(packages)}", "bookworm", draft], capture_output=True, text=True
    )
    if done.returncode:
        raise MachineError(f"mmdebstrap: {done.stderr[-500:]}")
    draft.replace(archive)
    return archive


class BareMachine:
    """One machine below `folder`, named `name`; `with` starts it, and ends it with everything that it runs."""

    def __init__(self, folder: Path, name: str, packages: Iterable[str] = BARE) -> None:
        self.name, self.root = name, folder / name
        self._cgroup = f"fleetpulse-{name}-{os.getpid()}"
        self.root.mkdir(parents=True)
        subprocess.run(["tar", "-xf", debian(packages), "-C", self.root], check=True)
        (self.root / "etc" / "hostname").write_text(f"{name}\n")
        self._outer: subprocess.Popen[bytes] | None = None
        self._first = 0

    def __enter__(self) -> Self:
        self._outer = subprocess.Popen([BOOT, self.root, self._cgroup], start_new_session=True)
        try:
            end = time.monotonic() + BOOT_S
            while not self._is_up():
                if self._outer.poll() is not None or time.monotonic() > end:
                    raise MachineError(f"{self.name}: systemd did not start within {BOOT_S:g} s")
                time.sleep(0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _is_up(self) -> bool:
        assert self._outer is not None
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        found = children.read_text().split() if children.exists() else []
        if not found:
            return False
        self._first = int(found[0])
        if Path(f"/proc/{self._first}/comm").read_text().strip() != "systemd":
            return False
        return self.run("systemctl is-system-running", check=False).stdout.strip() in ("running", "degraded")

    def run(self, command: str, check: bool = True, user: int | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a line of shell on the machine, as root or another user. Raises MachineError if it fails."""
        words = ["nsenter", "-t", str(self._first), "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--root", "--wd"]
        words += ["env", "-i", f"PATH={PATH}", "HOME=/root", "LANG=C.UTF-8"]
        words += [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        done = subprocess.run([*words, "sh", "-c", command], capture_output=True, text=True, errors="replace")
        if check and done.returncode:
            raise MachineError(f"{self.name}: {command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def put(self, file: Path, folder: str = "/root") -> None:
        """Copies a file or folder to the machine, below its root."""
        target = self.root / folder.lstrip("/") / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if file.is_dir() else shutil.copy)(file, target)

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            return
        if self._first:
            os.kill(self._first, signal.SIGRTMIN + 4)  # systemd's power off: services are stopped
        try:
            self._outer.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._outer.kill()
            self._outer.wait()
        self._outer = None
        for line in Path("/proc/mounts").read_text().splitlines():
            _, place, kind, *_ = line.split()
            if kind in ("cgroup", "cgroup2"):
                _remove_cgroup(Path(place) / self._cgroup)


def _remove_cgroup(folder: Path) -> None:
    """Removes a cgroup with those below it, which is what rmdir of its folders does."""
    if not folder.is_dir():
        return
    for below in list(folder.iterdir()):
        if below.is_dir():
            _remove_cgroup(below)
    end = time.monotonic() + STOP_S
    while True:
        try:
            folder.rmdir()
            return
        except OSError:  # its last process is still ending
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
