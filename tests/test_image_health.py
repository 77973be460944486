"""HEALTHCHECK of the image of the server: the part that runs in a container is asked where it listens."""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

IMAGES = Path(__file__).parents[1] / "deploy" / "images"
spec = importlib.util.spec_from_file_location("image_health", IMAGES / "health.py")
assert spec is not None
assert spec.loader is not None
health = importlib.util.module_from_spec(spec)
spec.loader.exec_module(health)
PROGRAM = ["/opt/fleetpulse/bin/python", "/opt/fleetpulse/bin/fleetpulse"]


def test_the_image_of_the_agent_needs_each_stage_above_it() -> None:
    """A build without BuildKit builds all of them; that of the server has the detectors, dashboard and store."""
    stages = re.findall(
        r"^FROM (\S+) AS (\S+)\n((?:(?!FROM ).*\n)*)", (IMAGES / "Dockerfile").read_text(), re.MULTILINE
    )
    bases = {name: {base, *re.findall(r"--from=(\S+)", text)} for base, name, text in stages}
    names, needed = list(bases), {"agent"}
    for name in reversed(names):
        needed |= bases[name] if name in needed else set()
    assert set(names[: names.index("agent")]) <= needed


class Answer(BaseHTTPRequestHandler):
    """Answers 200 on the path of the pipeline alone."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Answer) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("words", "text", "address"),
    [
        (["pipeline"], "", "http://127.0.0.1:8600/healthz"),
        (["pipeline"], '[api]\nhost = "::"\nport = 9\n', "http://[::1]:9/healthz"),
        (["dashboard"], '[dashboard]\nhost = "0.0.0.0"\n', "http://127.0.0.1:8501/_stcore/health"),
        (["executor"], "", None),
        (["--help"], "", None),
    ],
)
def test_a_part_is_asked_where_its_configuration_says(
    words: list[str], text: str, address: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "fleetpulse.toml"
    file.write_text(text)
    assert health.find_address([*PROGRAM, *words, "--config", str(file), ""]) == address
    assert health.find_address(["/sbin/docker-init", "--", *PROGRAM, *words, f"--config={file}", ""]) == address


def test_a_part_that_answers_is_alive_and_one_that_does_not_is_not(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("FLEETPULSE__API__PORT", str(server.server_port))
    monkeypatch.setenv("FLEETPULSE__DASHBOARD__PORT", str(server.server_port))
    health.ask(["fleetpulse", "pipeline"])
    with pytest.raises(OSError, match="503"):
        health.ask(["fleetpulse", "dashboard"])
    monkeypatch.setenv("FLEETPULSE__API__PORT", "9")
    with pytest.raises(OSError, match="refused"):
        health.ask(["fleetpulse", "pipeline"])


def test_every_image_has_a_health_check_and_gets_its_file() -> None:
    text = (IMAGES / "Dockerfile").read_text()
    for stage in ("agent", "server"):
        assert "HEALTHCHECK" in text.partition(f"AS {stage}\n")[2].partition("\nFROM ")[0]
    assert "!deploy/images/health.py\n" in (IMAGES.parents[1] / ".dockerignore").read_text()
