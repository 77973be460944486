"""A Docker Compose project and its API, used like an operator does: commands, published ports, token from a file."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection
from typing import Any, TypeVar

T = TypeVar("T")
PROJECT = "fleetpulse-compose-test"
"""Differs from the name in docker-compose.yml, so that a running stack on the same engine is not affected."""
SERVICES = ("kafka", "init", "simulator", "pipeline", "dashboard", "agent")
PERIOD_S = 0.5
"""Polling interval of conditions. Chosen."""


class CheckError(Exception):
    """A check failed; the text names the result found and the expected one."""


class Stack:
    """The services of docker-compose.yml in the current folder."""

    def __init__(self) -> None:
        self._token = ""

    def compose(self, *words: str, input: str | None = None, accepted: Collection[int] = (0,)) -> str:
        """Returns the output of `docker compose`. Raises CheckError with the end of the output."""
        return run_command("docker", "compose", "--project-name", PROJECT, *words, input=input, accepted=accepted)

    def container_id(self, service: str) -> str:
        """Returns the id of the container of a service, also of an exited one."""
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str) -> Any:
        """Returns the output of `docker inspect` for a service."""
        return json.loads(run_command("docker", "inspect", self.container_id(service)))[0]

    def state(self, service: str) -> str:
        """Returns healthy, running, or the exit code."""
        found = self.inspect(service)["State"]
        if found["Status"] == "exited":
            return f"ended with {found['ExitCode']}"
        return str(found.get("Health", found)["Status"])

    def up(self, seconds: float) -> None:
        """Runs `up` as in docs/compose.md; then every service is healthy or running, and init has ended."""
        self.compose("up", "--detach", "--wait", "--wait-timeout", f"{seconds:.0f}")

    def address(self, service: str, port: int) -> str:
        """Returns the URL of a published port on this machine."""
        return "http://" + self.compose("port", service, str(port)).strip()

    def token(self) -> str:
        """Returns the operator's token, read as in docs/compose.md."""
        if not self._token:
            lines = self.compose("exec", "-T", "pipeline", "cat", "/run/fleetpulse/tokens").splitlines()
            self._token = dict(line.split(":") for line in lines)["operator"]
        return self._token

    def request(self, path: str, body: Any = None, token: bool = True) -> tuple[int, Any]:
        """Returns (status, answer) of the API; (0, reason) if there is no answer."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.token()}"} if token else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address("pipeline", 8600) + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=15) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError as error:
            return 0, str(error)

    def sql(self, query: str) -> list[list[Any]]:
        """Returns the rows of a SELECT through the API."""
        status, answer = self.request("/api/v1/sql", {"query": query})
        if status != 200:
            raise CheckError(f"POST /api/v1/sql: {status} {answer}")
        rows: list[list[Any]] = answer["rows"]
        return rows


def run_command(*words: str, input: str | None = None, accepted: Collection[int] = (0,)) -> str:
    """Returns the output of a command. Raises CheckError with its end, unless the exit code is one of `accepted`."""
    ran = subprocess.run(words, capture_output=True, text=True, input=input)
    if ran.returncode not in accepted:
        raise CheckError(f"{' '.join(words)}: exit {ran.returncode}: {(ran.stdout + ran.stderr)[-2000:].strip()}")
    return ran.stdout


def wait_for(seconds: float, what: str, read: Callable[[], T | None]) -> tuple[T, float]:
    """Returns (first result of `read` that is not None, seconds waited). Raises CheckError after `seconds`."""
    began = time.monotonic()
    while (found := read()) is None:
        if time.monotonic() - began > seconds:
            raise CheckError(f"{what}: not within {seconds:.0f} s")
        time.sleep(PERIOD_S)
    return found, time.monotonic() - began
