"""A cable between two network namespaces with a real lldpd at each end, for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.parts import do_without

SEEN_S = 10.0
"""How long two lldpd have to see each other (s): they send every second."""
TRIES = 4


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)


def await_answer(ask: Callable[[], None]) -> None:
    """Repeats the query until the daemon answers; its socket exists before it listens."""
    until = time.monotonic() + 10
    while True:
        try:
            return ask()
        except subprocess.CalledProcessError as error:
            if time.monotonic() > until:
                raise TimeoutError(f"lldpd did not answer within 10 s: {error.stderr!r}") from error
            time.sleep(0.1)


def start(names: Sequence[str], sockets: Sequence[str], daemons: list[subprocess.Popen[bytes]]) -> None:
    """Starts an lldpd in each namespace."""
    for name, socket in zip(names, sockets, strict=True):
        command = ["nsenter", f"--net=/run/netns/{name}", "/usr/sbin/lldpd", "-d", "-u", socket]
        daemons.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


def stop(daemons: list[subprocess.Popen[bytes]]) -> None:
    while daemons:
        daemon = daemons.pop()
        daemon.terminate()
        daemon.wait(10)


def is_seen(socket: str, neighbor: str) -> bool:
    """Returns whether an lldpd sees a neighbor in time: one that starts while its link comes up may never send."""
    end = time.monotonic() + SEEN_S
    while time.monotonic() < end:
        command = ["/usr/sbin/lldpcli", "-u", socket, "-f", "json", "show", "neighbors"]
        if neighbor in subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout:
            return True
        time.sleep(0.1)
    return False


@contextmanager
def cable() -> Iterator[tuple[str, str, Callable[..., None]]]:
    """Two network namespaces with a cable between `host0` and `swp3`, an lldpd in each; their sockets."""
    if not shutil.which("lldpd", path="/usr/sbin:/usr/bin"):
        do_without("lldp", "no lldpd: run 'make parts'")
    if os.geteuid() != 0:
        do_without("lldp", "network namespaces need root")
    names = [f"fp{os.getpid()}{side}" for side in "ab"]
    folder = Path(tempfile.mkdtemp(prefix="fleetpulse-lldp-"))
    folder.chmod(0o755)  # lldpcli is another user's where it is set-user-id, as Debian has it
    sockets = [str(folder / f"{side}.sock") for side in "ab"]
    daemons: list[subprocess.Popen[bytes]] = []

    def configure(side: int, *what: str) -> None:
        sh("/usr/sbin/lldpcli", "-u", sockets[side], "configure", *what)

    try:
        for name in names:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", "host0", "netns", names[0], "type", "veth", "peer", "name", "swp3", "netns", names[1])
        for name, interface in zip(names, ("host0", "swp3"), strict=True):
            sh("ip", "-n", name, "link", "set", interface, "up")
        for _ in range(TRIES):
            start(names, sockets, daemons)
            for side in (0, 1):
                await_answer(lambda side=side: configure(side, "lldp", "tx-interval", "1"))
            configure(1, "system", "hostname", "leaf-real")
            if is_seen(sockets[0], "leaf-real"):
                break
            stop(daemons)
        yield sockets[0], sockets[1], configure
    finally:
        stop(daemons)
        for name in names:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)
        shutil.rmtree(folder)
