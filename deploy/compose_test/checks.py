"""What `make compose-test` holds docker-compose.yml to, on a running Docker Engine: one line per check on stdout.

checks.py RESULTS    runs in the folder of docker-compose.yml; logs, pictures and table go to the folder RESULTS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outage import broker_outage
from screenshot import screenshot
from second_life import second_life
from stack import PROJECT, SERVICES, CheckError, Stack, command, wait

UP_S, INCIDENT_S = 900, 600
"""Chosen: on two busy cores everything is up after 2 to 3 minutes, and the history judged a minute later."""


def main(results: Path) -> int:
    """Returns 0 if every check held. Everything is taken down in any case."""
    stack, report = Stack(), Report()
    try:
        checks(stack, report, results)
    except KeyboardInterrupt:
        report.failed += 1
        print("FAIL interrupted")
    finally:
        record(stack, results / "end")
        report("nothing is left after `down --volumes`", lambda: take_down(stack))
    print(f"compose-test: {report.passed} passed, {report.failed} failed; logs and pictures in {results}")
    return 1 if report.failed else 0


class Report:
    """Runs checks, prints a line for each and counts them."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def __call__(self, what: str, check: Callable[[], str]) -> bool:
        """`check` returns a description, or raises CheckError."""
        began = time.monotonic()
        try:
            seen, verdict = check(), "ok  "
            self.passed += 1
        except CheckError as error:
            seen, verdict = str(error), "FAIL"
            self.failed += 1
        print(f"{verdict} {what} ({time.monotonic() - began:.1f} s): {seen}", flush=True)
        return verdict == "ok  "


def checks(stack: Stack, report: Report, results: Path) -> None:
    """All of them, in order; what cannot hold without an earlier one is left out after that one failed."""
    if not (
        report("docker-compose.yml is valid", lambda: stack.compose("config", "--quiet") or "docker compose config")
        and report("the image builds", lambda: build(stack))
        and report("`up --wait` brings everything up", lambda: up(stack))
    ):
        return
    report("ports are published on loopback only", lambda: published(stack))
    for service in SERVICES:
        report(f"{service} is confined", lambda service=service: confined(stack, service))  # type: ignore[misc]
    report("the API wants a token", lambda: token_wanted(stack))
    report("doctor finds nothing wrong", lambda: doctor(stack))
    report("the history is judged and an incident is open", lambda: incident(stack))
    report("the dashboard shows the fleet", lambda: screenshot(stack, results))
    broker_outage(stack, report)
    record(stack, results / "outage")  # before containers are recreated
    second_life(stack, report)


def build(stack: Stack) -> str:
    stack.compose("build", "init")
    size = int(command("docker", "image", "inspect", "fleetpulse:local", "--format", "{{.Size}}"))
    return f"{size / 1e6:.0f} MB"


def up(stack: Stack) -> str:
    stack.up(UP_S)
    return ", ".join(f"{s} {stack.state(s)}" for s in SERVICES)


def published(stack: Stack) -> str:
    ports = {
        (service, place["HostIp"], port)
        for service in SERVICES
        for port, places in (stack.inspect(service)["NetworkSettings"]["Ports"] or {}).items()
        for place in places or []
    }
    if {host for _, host, _ in ports} != {"127.0.0.1"} or {s for s, _, _ in ports} != {"pipeline", "dashboard"}:
        raise CheckError(f"{sorted(ports)}; wanted pipeline and dashboard on 127.0.0.1")
    return ", ".join(f"{service} {port}" for service, _, port in sorted(ports))


def confined(stack: Stack, service: str) -> str:
    """As docker-compose.yml says, and as the engine has it."""
    found = stack.inspect(service)
    host: Any = found["HostConfig"]
    faults = {
        "its root can be written": not host["ReadonlyRootfs"],
        "it keeps capabilities": host["CapDrop"] != ["ALL"] or bool(host["CapAdd"]),
        "it may gain privileges": not any(o.startswith("no-new-privileges") for o in host["SecurityOpt"] or []),
        "it is root": found["Config"]["User"].partition(":")[0] in ("", "0", "root"),
        "no limit of memory": host["Memory"] == 0,
        "no limit of processors": host["NanoCpus"] == 0,
        "no limit of processes": not host["PidsLimit"] or host["PidsLimit"] < 0,
        "no limit of its log": "max-size" not in host["LogConfig"]["Config"],
    }
    if any(faults.values()):
        raise CheckError(", ".join(fault for fault, there in faults.items() if there))
    user, memory, cpus = found["Config"]["User"], host["Memory"] >> 20, host["NanoCpus"] / 1e9
    return f"user {user}, {memory} MiB, {cpus:g} processors, {host['PidsLimit']} processes, read-only, no capability"


def token_wanted(stack: Stack) -> str:
    refused, allowed = stack.ask("/api/v1/fleet", token=False)[0], stack.ask("/api/v1/fleet")[0]
    if (refused, allowed) != (401, 200):
        raise CheckError(f"{refused} without and {allowed} with one; wanted 401 and 200")
    return "401 without, 200 with the operator's"


def doctor(stack: Stack) -> str:
    """In the pipeline's container: a container has no GPU, and the demo no receiver of alerts; these are warnings."""
    found = json.loads(stack.compose("exec", "-T", "pipeline", "fleetpulse", "doctor", "--output", "json"))
    if failed := [f"{line['check']}: {line['found']}" for line in found if line["state"] == "fail"]:
        raise CheckError("; ".join(failed))
    return ", ".join(f"{line['check']} {line['state']}" for line in found)


def incident(stack: Stack) -> str:
    def look() -> Any | None:
        _, fleet = stack.ask("/api/v1/fleet")
        status, answer = stack.ask("/api/v1/incidents")
        judged = status == 200 and not fleet["backlog"] and answer["incidents"]
        return answer["incidents"] if judged else None

    found, took = wait(INCIDENT_S, "an incident through the API", look)
    summaries = sorted({f"{i['severity']} {i['detector']} {i['entity']}" for i in found if i["state"] != "resolved"})
    rows = stack.sql("SELECT count(*) FROM gpu")[0][0]
    return f"after {took:.0f} s {len(found)} incidents, open: {', '.join(summaries)}; {rows} rows of GPUs stored"


def record(stack: Stack, folder: Path) -> None:
    """Saves logs and states of the containers, to explain a failure."""
    folder.mkdir(exist_ok=True)
    texts: dict[str, tuple[str, ...]] = {"ps.txt": ("ps", "--all")}
    texts |= {f"{s}.log": ("logs", "--no-log-prefix", "--timestamps", s) for s in SERVICES}
    for name, words in texts.items():
        try:
            text = stack.compose(*words)
        except CheckError as error:
            text = f"{error}\n"
        (folder / name).write_text(text.replace("\x1b[2K", ""))
    print((folder / "ps.txt").read_text(), end="")


def take_down(stack: Stack) -> str:
    stack.compose("down", "--volumes", "--timeout", "30")
    mine = ("--filter", f"label=com.docker.compose.project={PROJECT}")
    left = [
        kind for kind in ("container", "volume", "network") if command("docker", kind, "ls", "--quiet", *mine).strip()
    ]
    if left:
        raise CheckError(f"still there: {', '.join(left)}")
    return "containers, volumes and networks are gone"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
