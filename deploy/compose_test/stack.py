"""One project of Docker Compose and its API, as an operator sees them: commands, published ports, token from a file."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
PROJECT = "fleetpulse-compose-test"
"""Not the name in docker-compose.yml, so that a stack of that name on the same engine is not touched."""
SERVICES = ("kafka", "init", "simulator", "pipeline", "dashboard", "agent")
PERIOD_S = 0.5
"""How often a condition is looked at. Chosen."""


class CheckError(Exception):
    """A check failed; the text names the result found and the expected one."""


class Stack:
    """The services of docker-compose.yml in the current folder."""

    def __init__(self) -> None:
        self._token = ""

    def compose(self, *words: str, input: str | None = None) -> str:
        """What `docker compose` prints. Raises CheckError with the end of what it said."""
        return command("docker", "compose", "--project-name", PROJECT, *words, input=input)

    def container(self, service: str) -> str:
        """The id of its container, also of one that has ended."""
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str) -> Any:
        return json.loads(command("docker", "inspect", self.container(service)))[0]

    def state(self, service: str) -> str:
        """healthy, running, or how it ended."""
        found = self.inspect(service)["State"]
        if found["Status"] == "exited":
            return f"ended with {found['ExitCode']}"
        return str(found.get("Health", found)["Status"])

    def up(self, seconds: float) -> None:
        """As docs/compose.md says; every service is healthy or running then, init has ended."""
        self.compose("up", "--detach", "--wait", "--wait-timeout", f"{seconds:.0f}")

    def address(self, service: str, port: int) -> str:
        """Where this machine reaches a published port."""
        return "http://" + self.compose("port", service, str(port)).strip()

    def token(self) -> str:
        """The operator's, as docs/compose.md says to read it."""
        if not self._token:
            lines = self.compose("exec", "-T", "pipeline", "cat", "/run/fleetpulse/tokens").splitlines()
            self._token = dict(line.split(":") for line in lines)["operator"]
        return self._token

    def ask(self, path: str, body: Any = None, token: bool = True) -> tuple[int, Any]:
        """(status, answer) of the API; (0, why) where none came."""
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
        """The rows that the API gives for a SELECT."""
        status, answer = self.ask("/api/v1/sql", {"query": query})
        if status != 200:
            raise CheckError(f"POST /api/v1/sql: {status} {answer}")
        rows: list[list[Any]] = answer["rows"]
        return rows


def command(*words: str, input: str | None = None) -> str:
    """What a command prints. Raises CheckError with the end of what it said."""
    ran = subprocess.run(words, capture_output=True, text=True, input=input)
    if ran.returncode:
        raise CheckError(f"{' '.join(words)}: exit {ran.returncode}: {(ran.stdout + ran.stderr)[-2000:].strip()}")
    return ran.stdout


def wait(seconds: float, what: str, look: Callable[[], T | None]) -> tuple[T, float]:
    """(What `look` gave first that is not None, how long that took). Raises CheckError after `seconds`."""
    began = time.monotonic()
    while (found := look()) is None:
        if time.monotonic() - began > seconds:
            raise CheckError(f"{what}: not within {seconds:.0f} s")
        time.sleep(PERIOD_S)
    return found, time.monotonic() - began
