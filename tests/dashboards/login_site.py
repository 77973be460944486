"""A dashboard with a login at a real provider, in front of the double of the API; and people without a browser."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from joserfc import jwt
from joserfc.jwk import OctKey

from benchmarks.page_viewer import Run, Viewer
from tests.dashboards.conftest import Api, running_api
from tests.dashboards.test_dashboard_serve import free_port
from tests.oidc_provider import ROLES, SECRET, Provider, log_in, running_provider

ROOT = Path(__file__).parents[2]
COOKIE_SECRET = "a-secret-for-cookies-of-32-bytes"


@dataclass
class Site:
    """A running dashboard: its address in browsers, the API double, the provider, and its process."""

    url: str
    api: Api
    provider: Provider
    files: Path
    port: int
    browsers: list[httpx.Client] = field(default_factory=list)

    def new_browser(self, cookies: dict[str, str] | None = None) -> httpx.Client:
        """A browser with these cookies, closed with the site."""
        self.browsers.append(httpx.Client(trust_env=False, cookies=cookies))
        return self.browsers[-1]

    def begin_login(self, page: str = "/", browser: httpx.Client | None = None) -> tuple[httpx.Client, httpx.Response]:
        """Presses the button Log in on a page; returns the browser and the redirect to the provider."""
        browser = browser or self.new_browser()
        claims = {"provider": "default", "exp": int(time.time()) + 60}
        token = jwt.encode({"alg": "HS256"}, claims, OctKey.import_key(COOKIE_SECRET))
        address = f"{self.url}/auth/login?provider={token}"
        return browser, browser.get(address, headers={"Referer": f"{self.url}{page}"})

    def log_in(self, name: str, page: str = "/") -> tuple[httpx.Client, httpx.Response]:
        """Logs in from a page; returns the browser and the dashboard's last redirect."""
        browser, answer = self.begin_login(page)
        answer = log_in(browser, answer, name, f"{self.url}/oauth2callback")
        return browser, browser.get(answer.headers["location"])

    def see(self, browser: httpx.Client | None, page: str = "", query: str = "", click: str = "") -> Run:
        """Opens a page over a WebSocket and returns what it shows; with `click`, after that button."""
        return asyncio.run(_see(self.url, cookies_of(browser) if browser else {}, page, query, click))


def cookies_of(browser: httpx.Client) -> dict[str, str]:
    """Returns the cookies of Streamlit's login."""
    kept = ("_streamlit", "fleetpulse_login")
    return {c.name: c.value or "" for c in browser.cookies.jar if c.name.startswith(kept)}


async def _see(url: str, cookies: dict[str, str], page: str, query: str, click: str) -> Run:
    viewer = Viewer(url, cookies)
    try:
        run = await viewer.open(page, query)
        return await viewer.run(page, query, clicked=run.buttons[click]) if click else run
    finally:
        await viewer.close()


@contextmanager
def running_site(
    at: Path, ttl: dict[str, int] | None = None, board: str = "", oidc: str = "", external_url: str = ""
) -> Iterator[Site]:
    """Runs provider, API double and dashboard until the block ends.

    ttl: of the provider's tokens (s). board, oidc: more lines of [dashboard] and [dashboard.oidc]. external_url: where
    browsers see it, if that is not its own port.
    """
    port, provider_port = free_port(), free_port()
    at.mkdir(parents=True, exist_ok=True)
    for name, text in {"secret": SECRET, "cookie": COOKIE_SECRET, "token": "dashboard:fp_token-of-dashboard"}.items():
        (at / name).write_text(text)
    url = external_url or f"http://127.0.0.1:{port}"
    with (
        running_provider(at, provider_port, [f"{url}/oauth2callback"], **(ttl or {})) as provider,
        running_api() as api,
    ):
        roles = ", ".join(f'"{group}" = "{role}"' for group, role in ROLES.items())
        (at / "fleetpulse.toml").write_text(
            f'[notify]\nexternal_url = "{external_url}"\n'
            f'[dashboard]\nport = {port}\napi_url = "{api.url}"\ntoken_file = "{at}/token"\nroles = {{ {roles} }}\n'
            f'{board}\n[dashboard.oidc]\nissuer = "{provider.url}"\nclient_id = "fleetpulse"\n'
            f'client_secret_file = "{at}/secret"\ncookie_secret_file = "{at}/cookie"\n{oidc}\n'
        )
        with running_dashboard(at / "fleetpulse.toml", port):
            site = Site(url, api, provider, at, port)
            try:
                yield site
            finally:
                for browser in site.browsers:
                    browser.close()


@contextmanager
def running_dashboard(config: Path, port: int) -> Iterator[None]:
    """Runs `fleetpulse dashboard` until the block ends."""
    command = [sys.executable, str(ROOT / "fleetpulse.py"), "dashboard", "--config", str(config)]
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not is_listening(port):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)  # polls a real process; it has no event for this
        try:
            yield
        finally:
            process.terminate()
            process.wait(10)


def is_listening(port: int) -> bool:
    """Returns whether something answers on a port, whatever it says."""
    try:
        httpx.get(f"http://127.0.0.1:{port}/", trust_env=False, timeout=1.0)
    except httpx.TransportError:
        return False
    return True
