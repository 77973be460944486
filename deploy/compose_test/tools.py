"""The profile `observability`: an alert of ours is in Alertmanager, and Prometheus scrapes both jobs.

An image that neither the engine nor a registry has is replaced by a stand-in: the same program, built from its Go
module by `make parts`. Grafana has no Go module: without a registry it is left out, and that is printed.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import stat
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stack import CheckError, Stack, run_command, wait_for

UP_S, ALERT_S, SCRAPE_S = 300, 180, 120
"""Limits (s). Chosen: alerts that fire are pushed again each minute, and the slower job scrapes every 30 s."""
PROGRAMS = {"alertmanager": "alertmanager/*/alertmanager", "prometheus": "senders/*/prometheus"}
"""Service -> its program in the cache folder of `make parts`."""
DATA = {"alertmanager": "/alertmanager", "prometheus": "/prometheus"}
WGET = """#!/usr/local/bin/python
import sys, urllib.request
urllib.request.urlopen(sys.argv[-1], timeout=4)
"""
STAND_IN = """FROM python:3.11-slim
COPY {name} /bin/{name}
COPY wget /usr/local/bin/wget
RUN install -d -o 65534 -g 65534 {data}
USER 65534:65534
ENTRYPOINT ["/bin/{name}"]
"""


def check_tools(stack: Stack, report: Callable[[str, Callable[[], str]], bool]) -> None:
    """Runs the checks of the profile in order."""
    os.environ["COMPOSE_PROFILES"] = "observability"
    for variable in ("ALERTMANAGER", "PROMETHEUS", "GRAFANA"):
        os.environ.setdefault(f"FLEETPULSE_{variable}_PORT", "0")
    services: list[str] = []
    report("images of the profile observability", lambda: find_images(stack, services))
    if report("`up --wait` with the profile", lambda: start(stack, services)):
        report("Alertmanager has our alerts", lambda: check_alertmanager(stack))
        report("Prometheus scrapes both jobs", lambda: check_prometheus(stack))
        if "grafana" in services:
            report("Grafana has our dashboards", lambda: check_grafana(stack))
    del os.environ["COMPOSE_PROFILES"]


def find_images(stack: Stack, services: list[str]) -> str:
    """Fills `services` with those whose image is there; builds stand-ins. Returns what was found."""
    images = dict(re.findall(r"image: ((?:prom|grafana)/(\w+):\S+)", Path("docker-compose.yml").read_text()))
    said = []
    for image, name in images.items():
        if is_at_hand(image):
            said.append(image)
        elif program := find_program(name):
            build_stand_in(image, name, program)
            said.append(f"{image} is a stand-in")
        else:
            said.append(f"no {image}: left out")
            continue
        services.append(name)
    return ", ".join(said)


def is_at_hand(image: str) -> bool:
    """Returns whether the engine has an image or can pull it."""
    for words in (("image", "inspect"), ("pull", "--quiet")):
        try:
            run_command("docker", *words, image)
            return True
        except CheckError:
            continue
    return False


def find_program(name: str) -> Path | None:
    """Returns the program of a service that `make parts` built; None without it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse"
    return next(iter(sorted(cache.glob(PROGRAMS[name]))), None) if name in PROGRAMS else None


def build_stand_in(image: str, name: str, program: Path) -> None:
    """Builds an image with a program, and a `wget` for the health check. Raises CheckError."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(program, Path(folder, name))
        Path(folder, "wget").write_text(WGET)
        for file in Path(folder).iterdir():
            file.chmod(file.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH | stat.S_IROTH)
        Path(folder, "Dockerfile").write_text(STAND_IN.format(name=name, data=DATA[name]))
        run_command("docker", "build", "--quiet", "--tag", image, folder)


def start(stack: Stack, services: list[str]) -> str:
    """Starts the tools; the pipeline is made again with the file of the profile."""
    words = ["up", "--detach", "--wait", "--wait-timeout", str(UP_S), "pipeline", "dashboard", *services]
    stack.compose(*words)
    return ", ".join(f"{service} {stack.state(service)}" for service in services)


def check_alertmanager(stack: Stack) -> str:
    """Waits until every unresolved incident that pages or is a ticket is an alert there."""

    def read() -> list[Any] | None:
        alerts = get(stack, "alertmanager", 9093, "/api/v2/alerts")
        return [a for a in alerts if a["labels"].get("alertname") != "Watchdog"] or None

    alerts, took = wait_for(ALERT_S, "an alert in Alertmanager", read)
    return f"{len(alerts)} alerts after {took:.0f} s, such as {alerts[0]['labels']['alertname']}"


def check_prometheus(stack: Stack) -> str:
    """Waits until both jobs are up and a dashboard's query has values."""

    def read() -> dict[str, int] | None:
        up = get(stack, "prometheus", 9090, "/api/v1/query?query=up")["data"]["result"]
        found = get(stack, "prometheus", 9090, "/api/v1/query?query=count(fleetpulse_gpu_temperature)")["data"][
            "result"
        ]
        jobs = {one["metric"]["job"] for one in up if one["value"][1] == "1"}
        return {"jobs": len(jobs), "gpus": int(found[0]["value"][1])} if len(jobs) == 2 and found else None

    seen, took = wait_for(SCRAPE_S, "both jobs up, with GPUs", read)
    return f"{seen['jobs']} jobs, temperatures of {seen['gpus']} GPUs after {took:.0f} s"


def check_grafana(stack: Stack) -> str:
    """Returns the titles of our dashboards. Raises CheckError without three."""
    found = get(stack, "grafana", 3000, "/api/search?type=dash-db", "admin:admin")
    if len(found) != 3:
        raise CheckError(f"{[one['title'] for one in found]}; expected three dashboards")
    return ", ".join(one["title"] for one in found)


def get(stack: Stack, service: str, port: int, path: str, login: str = "") -> Any:
    """Returns the JSON that a published port answers. Raises CheckError."""
    address = stack.address(service, port)
    request = urllib.request.Request(address + path)
    if login:
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())
    except OSError as error:
        raise CheckError(f"{address}{path}: {error}") from error
