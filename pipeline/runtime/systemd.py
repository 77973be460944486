"""Notifies the service manager that a service is ready, alive or stopping: the notification protocol of systemd.

One datagram per message to the socket that NOTIFY_SOCKET names (sd_notify(3)); without that variable nothing happens.
Watchdog messages depend on a service's own loop: if it is stuck, they stop, and systemd restarts the service.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

WATCHDOG_INTERVALS = 4
"""Intervals of the agent that the watchdog waits at least; chosen: a tick may be late twice and still be in time."""
WATCHES = 4
"""Looks at a loop's heartbeat within the watchdog's timeout. Chosen: three may be missed."""
UNIT_FOLDER = Path(sys.prefix).parent / "share" / "systemd"
"""The units of a package or bundle, which are beside its Python; absent in a checkout."""
HOST_UNITS = Path("/etc/systemd/system")
"""Where `fleetpulse setup --units` writes units for an installation by pip."""
CREDENTIALS = Path("/run/credentials")
"""Folder in which systemd gives each running unit copies of its secrets (LoadCredential= of systemd.exec(5))."""
_SECOND_US = 1_000_000
_PATIENCE_S = 5.0  # for systemctl and journalctl; chosen: they take some ms
_STEPS = {"203": "EXEC", "217": "USER", "226": "NAMESPACE", "243": "CREDENTIALS"}
"""Exit codes of systemd itself, of a program that it could not start (systemd.exec(5), "Process Exit Codes")."""
_LONGEST = 400
"""Longest line of a log in a message (characters). Chosen, as for the reason of a refused reload."""


class SystemdNotifier:
    """The manager's socket, if there is one. No call blocks or raises: a service without its manager continues.

    error: why the last message was not delivered; None if it was, or if there is no manager.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.error: str | None = None
        self._address = _parse_address(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog_us = _parse_watchdog(environment)
        self._status = self._configuration = self._told = ""
        self._socket = _open_socket() if self._address else None

    def notify_ready(self, interval: float = 0.0) -> None:
        """Reports that the loop runs every `interval` seconds (0: unknown). Too short a watchdog timeout is raised."""
        lines = ["READY=1"]
        wanted = round(WATCHDOG_INTERVALS * interval * _SECOND_US)
        if 0 < self._watchdog_us < wanted:
            lines.append(f"WATCHDOG_USEC={wanted}")
        self._send(*lines)

    def notify_alive(self, status: str = "") -> None:
        """Reports one iteration of the loop; `status` is shown by `systemctl status`, and sent when it changes."""
        lines = ["WATCHDOG=1"] if self._watchdog_us else []
        text = _join_lines(status, self._configuration)
        if text != self._told:
            lines.append(f"STATUS={text}")
        if lines and self._send(*lines):
            self._status, self._told = status, text

    def notify_configuration(self, text: str) -> None:
        """Reports with which configuration the service runs. It stands behind each status of `notify_alive`."""
        self._configuration = text
        told = _join_lines(self._status, text)
        if self._send(f"STATUS={told}"):
            self._told = told

    def watch(self, age_s: Callable[[], float], stop: threading.Event) -> None:
        """Reports a loop as alive from a thread, until `stop`, while its last heartbeat is `age_s` young enough (s).

        For loops of which one step may take minutes, such as a checkpoint of the store.
        """
        limit_s = self._watchdog_us / _SECOND_US / 2

        def look() -> None:
            while not stop.wait(limit_s * 2 / WATCHES):
                if age_s() < limit_s:
                    self.notify_alive()

        if limit_s:
            threading.Thread(target=look, name="watchdog", daemon=True).start()

    def extend(self, seconds: float, status: str) -> None:
        """Asks for more time to start or stop, from now on; `status` is shown by `systemctl status`."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * _SECOND_US)}", "STATUS=" + _join_lines(status))

    def notify_stopping(self) -> None:
        """Reports that the service is about to end: one that goes on is killed after the unit's TimeoutStopSec."""
        self._send("STOPPING=1")

    def notify_reloading(self) -> None:
        """Reports that the process starts again by itself; `notify_ready` ends that."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def close(self) -> None:
        """Closes the socket; may be called twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> bool:
        """Whether the manager received the message. If its queue is full, it is dropped; the next tick sends one."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, self._address)
        except OSError as error:
            self.error = f"NOTIFY_SOCKET: {error.strerror}"
            return False
        self.error = None
        return True


def has_unit(service: str) -> bool:
    """Returns whether systemd runs a service of this installation: of a package, a bundle, or after `setup --units`."""
    if UNIT_FOLDER.is_dir():
        return True
    try:
        return f"ExecStart={sys.prefix}/bin/fleetpulse " in (HOST_UNITS / f"fleetpulse-{service}.service").read_text()
    except OSError:
        return False


def is_expected(service: str) -> bool:
    """Returns whether a service should run here: its unit is enabled, or was started and runs or is started again; or a
    container was made for it, whose first process it is. A unit that is disabled and does not run is kept off, also one
    that is `failed`: `systemctl disable --now` does not end that state."""
    if is_container_of(service):
        return True
    unit = f"fleetpulse-{service}.service"
    if not has_unit(service) or os.path.realpath(HOST_UNITS / unit) == os.devnull:  # masked
        return False
    if any(os.path.lexists(folder / unit) for folder in HOST_UNITS.glob("*.wants")):
        return True
    return _ask_state(unit) in ("active", "activating", "deactivating", "reloading")


def is_container_of(service: str) -> bool:
    """Returns whether this is a container that was made for a service: its first process is that service."""
    words = _read_first_process()
    return any(os.path.basename(one) == "fleetpulse" and two == service for one, two in itertools.pairwise(words))


def is_first_process() -> bool:
    """Returns whether this process is the first of a container, as of `docker run IMAGE setup`."""
    return os.getpid() == 1


def _read_first_process(path: Path = Path("/proc/1/cmdline")) -> list[str]:
    try:
        return path.read_text(errors="replace").split("\0")
    except OSError:
        return []


def is_running(service: str) -> bool:
    """Returns whether the unit of a service of this installation runs now."""
    return has_unit(service) and _ask_state(f"fleetpulse-{service}.service") in ("active", "reloading")


def is_down(service: str) -> bool:
    """Returns whether the unit of a service should run and does not. False where no systemd answers: not known."""
    if not has_unit(service) or not is_expected(service):
        return False
    return _ask_state(f"fleetpulse-{service}.service") not in ("", "active", "reloading")


def explain_end(service: str) -> str:
    """Returns the state of a unit that does not run, how it ended, and the last line that it wrote into the log."""
    wanted = "ActiveState,SubState,Result,ExecMainStatus,StatusText,InvocationID"
    lines = _ask_manager("show", f"--property={wanted}", f"fleetpulse-{service}.service").splitlines()
    shown = dict(line.split("=", 1) for line in lines if "=" in line)
    parts = [f"its unit is {shown.get('ActiveState', '')} ({shown.get('SubState', '')})"]
    if (result := shown.get("Result", "")) not in ("", "success"):
        code = shown.get("ExecMainStatus", "")
        parts.append(f"it ended with {result} {code}{f' ({_STEPS[code]})' if code in _STEPS else ''}")
    if shown.get("StatusText"):
        parts.append(f"its status: {shown['StatusText']}")
    if shown.get("InvocationID"):
        of_it = f"_SYSTEMD_INVOCATION_ID={shown['InvocationID']}"
        if said := _ask("journalctl", "--quiet", "--no-pager", "--output=cat", "--lines=1", of_it):
            parts.append(f"its last line: {' '.join(said.split())[:_LONGEST]}")
    return "; ".join(parts)


def read_status(service: str) -> str:
    """Returns the line that a service showed last (`systemctl status`); empty where no systemd answers."""
    return _ask_manager("show", "--property=StatusText", "--value", f"fleetpulse-{service}.service")


def _ask_state(unit: str) -> str:
    """Returns the state of a unit; empty where no systemd answers."""
    return _ask_manager("is-active", unit)


def _ask_manager(*words: str) -> str:
    return _ask("systemctl", *words)


def _ask(*words: str) -> str:
    """Returns what a program of systemd prints; empty if there is none or it does not answer."""
    import subprocess  # the agent, which notifies systemd, needs none

    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _join_lines(*texts: str) -> str:
    """Returns texts as the one line that the protocol takes."""
    return "; ".join(" ".join(text.splitlines()) for text in texts if text)


def _parse_address(name: str) -> str:
    """The socket's address: a path, or a name in the kernel's abstract namespace, which is written with a leading @.

    Other families (vsock, of managers of virtual machines) do not occur on a service's own machine: unsupported.
    """
    if name.startswith("@"):
        return "\0" + name[1:]
    return name if name.startswith("/") else ""


def _parse_watchdog(environment: Mapping[str, str]) -> int:
    """Microseconds after which the manager kills a silent service; 0 if it does not, or for another process."""
    wanted, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not wanted.isdecimal() or (pid and pid != str(os.getpid())):
        return 0
    return int(wanted)


def _open_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
