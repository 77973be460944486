"""The dashboard under a path of a reverse proxy: login, links and pages there; whose X-Forwarded-For counts."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboards.login_site import Site, running_site
from tests.dashboards.test_dashboard_serve import free_port

pytestmark = pytest.mark.oidc
BROWSER = "203.0.113.9"


class Proxy:
    """Forwards connections to the dashboard, and adds X-Forwarded-For to the first request of each."""

    def __init__(self) -> None:
        self.target = 0
        self._listener = socket.create_server(("127.0.0.1", free_port()))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self.target))
                self._sockets += [caller, server]
                threading.Thread(target=self._copy, args=(caller, server, True), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, caller, False), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, first: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if first:
                    line, _, rest = data.partition(b"\r\n")
                    data = line + b"\r\nX-Forwarded-For: " + BROWSER.encode() + b"\r\n" + rest
                    first = False
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes all connections."""
        for one in (self._listener, *self._sockets):
            one.close()


@contextlib.contextmanager
def behind_proxy(at: Path, trusted: str) -> Iterator[Site]:
    """A dashboard with base_path = /fleet behind a proxy."""
    proxy = Proxy()
    board = f'base_path = "/fleet"\ntrusted_proxies = [{trusted}]'
    try:
        with running_site(at, board=board, external_url=f"http://127.0.0.1:{proxy.port}/fleet") as site:
            proxy.target = site.port
            yield site
    finally:
        proxy.close()


def test_a_link_survives_the_login_under_a_base_path_and_the_browsers_address_is_recorded(tmp_path: Path) -> None:
    with behind_proxy(tmp_path, '"127.0.0.1"') as site:
        browser, answer = site.begin_login("/incident?id=A1")
        assert answer.status_code == 302
        browser, answer = site.log_in("alice", "/incident?id=A1")
        assert answer.headers["location"] == "/fleet/incident?id=A1"
        kept = [c for c in answer.headers.get_list("set-cookie") if "Max-Age=43200" in c]
        assert kept
        assert all("Path=/fleet;" in cookie for cookie in kept)
        run = site.see(browser, "incident", "id=A1&live=0", click="Acknowledge")
        assert run.exceptions == []
        sent = site.api.posted_headers[-1]
        assert (sent["Fleetpulse-User"], sent["Fleetpulse-Client"]) == ("alice@example.org", BROWSER)


def test_a_forwarded_address_of_an_untrusted_proxy_does_not_count(tmp_path: Path) -> None:
    with behind_proxy(tmp_path, '"192.0.2.1"') as site:
        browser, _ = site.log_in("alice")
        site.see(browser, "incident", "id=A1&live=0", click="Acknowledge")
        assert "Fleetpulse-Client" not in site.api.posted_headers[-1]


def test_the_root_without_a_slash_stays_within_a_base_path_that_has_the_name_of_a_page(tmp_path: Path) -> None:
    with behind_proxy(tmp_path, '"127.0.0.1"') as site:
        browser = site.new_browser()
        assert browser.get(f"{site.url}?live=0", follow_redirects=True).status_code == 200
        answer = browser.get(f"{site.url}/fleet?live=0")
        assert (answer.status_code, answer.headers["location"]) == (302, "./?live=0")
