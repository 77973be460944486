"""Answers on the listening socket of the API while the pipeline starts again.

A separate program, without imports that take time: `python -I -S stand_in.py`, with the socket as descriptor
LISTENER. It ends when stdin does: when the pipeline has started, or has died.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import sys
import threading
import time

LISTENER = 3
RETRY_AFTER_S = 2
"""When a caller should ask again (s). Chosen: a start takes two to ten times that."""
DETAIL = "the pipeline starts again with a changed configuration; try again"
MOST = 32
"""Connections at a time. Chosen: a dashboard and its people, for some seconds."""
_WITHIN_S = 1.0  # longest life of a connection (s), which the start of the pipeline may wait for; chosen
_MAX_BYTES = 64 * 1024


def make_answer(request: bytes) -> bytes:
    """Returns the answer to a request: 200 on /healthz, where a manager would else kill the process, 503 on others."""
    method, path, *_ = [*request.split(b"\r\n", 1)[0].split(b" "), b"", b""]
    kind, status = "application/json", "503 Service Unavailable"
    route = path.partition(b"?")[0]
    if route == b"/healthz":
        status, body = "200 OK", json.dumps({"status": "ok"})
    elif route == b"/readyz":
        body = json.dumps({"ready": False, "reasons": [DETAIL]})
    else:
        kind = "application/problem+json"
        body = json.dumps({"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": DETAIL})
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    head += "" if status.startswith("200") else f"retry-after: {RETRY_AFTER_S}\r\n"
    return (head + "\r\n" + ("" if method == b"HEAD" else body)).encode()


def answer(connection: socket.socket, free: threading.Semaphore) -> None:
    """Answers one request and closes the connection, after the caller: else it might lose the answer."""
    end = time.monotonic() + _WITHIN_S
    with contextlib.suppress(OSError), connection:
        connection.settimeout(_WITHIN_S)
        connection.sendall(make_answer(connection.recv(_MAX_BYTES)))
        connection.shutdown(socket.SHUT_WR)
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(_MAX_BYTES):  # the rest of the request
                break
    free.release()


def serve(listener: socket.socket, until: int) -> None:
    """Answers until the descriptor `until` is at its end, and at most two seconds longer."""
    free = threading.Semaphore(MOST)
    while until not in select.select([listener.fileno(), until], [], [])[0]:
        if not free.acquire(timeout=_WITHIN_S):
            continue
        try:
            connection = listener.accept()[0]
        except OSError:  # the pipeline was first, or the caller has gone
            free.release()
        else:
            threading.Thread(target=answer, args=(connection, free)).start()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for the pipeline, which ends this
    serve(socket.socket(fileno=LISTENER), sys.stdin.fileno())
