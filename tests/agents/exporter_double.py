"""A server that sends given bytes to every connection."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agents.collector import Reading
from agents.collectors.exporters.prometheus import Prometheus

OK = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def peer(*parts: bytes, drip: bytes = b"", every: float = 0.02, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server that sends the same to every connection, then one byte again and again, or closes."""
    stop, threads = threading.Event(), []

    def serve(plain: socket.socket) -> None:
        try:
            with plain, tls.wrap_socket(plain, server_side=True) if tls else plain as sock:
                sock.recv(1 << 16)
                for part in parts:
                    sock.sendall(part)
                while drip and not stop.wait(every):
                    sock.sendall(drip)
        except OSError:  # the other end closed the connection
            return

    def accept() -> None:
        while not stop.is_set():
            try:
                found, _ = listener.accept()
            except TimeoutError:
                continue
            found.settimeout(5.0)
            threads.append(threading.Thread(target=serve, args=(found,)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        waits = threading.Thread(target=accept)
        waits.start()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}/metrics"
        finally:
            stop.set()
            for thread in (waits, *threads):
                thread.join()


def read_until_reported(collector: Prometheus, target: str, limit: float = 10.0) -> list[Reading]:
    """Reads until the endpoint's state is reported."""
    found: list[Reading] = []
    end = time.monotonic() + limit
    while not any(f"exporter:{target}" in r.entities for r in found):
        assert time.monotonic() < end, found
        found += collector.read()
        time.sleep(0.01)
    return found
