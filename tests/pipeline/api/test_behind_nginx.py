"""The reverse proxy of docs/security.md, with a real nginx: it passes the API on under the name of the site."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from pipeline.api.server import create_app
from pipeline.config.sections import Api, Config
from tests.parts import do_without
from tests.until import until

ROOT = Path(__file__).parents[3]
NAME = "fleetpulse.example"
TOKEN = {"Authorization": "Bearer ada-has-a-long-token"}


def read_recipe() -> str:
    (found,) = re.findall(r"```nginx\n(server .*?)```", (ROOT / "docs/security.md").read_text(), re.DOTALL)
    return str(found)


@contextlib.contextmanager
def run_api(backend: Any, tmp_path: Path) -> Iterator[int]:
    (tmp_path / "tokens").write_text("ada:ada-has-a-long-token\n")
    (tmp_path / "tokens").chmod(0o600)
    app = create_app(backend, Config(api=Api(token_file=tmp_path / "tokens")))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextlib.contextmanager
def run_nginx(folder: Path, api_port: int) -> Iterator[int]:
    nginx, openssl = shutil.which("nginx"), shutil.which("openssl")
    if nginx is None or openssl is None:
        do_without("nginx", "needs nginx and openssl (apt-get install nginx-light openssl)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        openssl,
        "req",
        "-x509",
        "-nodes",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-days",
        "2",
    ]
    words += ["-subj", f"/CN={NAME}", "-keyout", f"{folder}/key", "-out", f"{folder}/pem"]
    subprocess.run(words, check=True, capture_output=True)
    site = read_recipe().replace("listen 443", f"listen 127.0.0.1:{port}").replace("8600", str(api_port))
    site = site.replace("/etc/ssl/fleetpulse.pem", f"{folder}/pem")
    site = site.replace("/etc/ssl/private/fleetpulse.key", f"{folder}/key")
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = f"daemon off; pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {temporary} {site} }}"
    (folder / "nginx.conf").write_text(text)
    with subprocess.Popen([nginx, "-p", folder, "-c", folder / "nginx.conf"], stderr=subprocess.PIPE) as process:
        try:
            until(lambda: _listens(port))
            yield port
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_the_api_answers_behind_the_proxy_of_the_guide(backend: Any, tmp_path: Path) -> None:
    with run_api(backend, tmp_path) as api, run_nginx(tmp_path, api) as port:
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE  # the certificate is of this test
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust, headers={"Host": NAME}) as caller:
            assert caller.get("/api/v1/fleet").status_code == 401
            assert caller.get("/api/v1/fleet", headers=TOKEN).status_code == 200
            asked = caller.post("/api/v1/sql", headers=TOKEN, json={"query": "SELECT 1 AS a"})
            assert asked.json()["rows"] == [[1]]


def test_the_keys_that_belong_to_the_proxy_are_in_the_guide_with_their_place() -> None:
    text = (ROOT / "docs/security.md").read_text()
    place = text.index("/etc/fleetpulse/conf.d/50-site.toml")
    assert place < text.index("trusted_proxies = ") < text.index("systemctl reload fleetpulse-pipeline")


@pytest.mark.parametrize("name", ["pages", "api"])
def test_only_the_pages_get_the_name_of_the_site(name: str) -> None:
    part = read_recipe().partition("location /api/")[2 if name == "api" else 0]
    assert ("Host $http_host" in part) is (name == "pages")
