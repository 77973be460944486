"""The checks of `make compose-test`: runs docker-compose.yml on a Docker Engine and prints one line per check.

checks.py RESULTS    runs in the folder of docker-compose.yml; writes logs, screenshots and a table to RESULTS
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chart import check_chart
from outage import check_broker_outage
from restarts import check_restarts
from screenshot import take_screenshots
from stack import PROJECT, SERVICES, CheckError, Stack, run_command, wait_for
from tools import check_tools

UP_S, INCIDENT_S = 900, 600
"""Chosen: on two busy cores all services are up after 2 to 3 minutes, and the history is evaluated 1 min later."""


def main(results: Path) -> int:
    """Returns 0 if every check passed. Containers and volumes are always removed."""
    stack, report = Stack(), Report()
    try:
        run_checks(stack, report, results)
    except KeyboardInterrupt:
        report.failed += 1
        print("FAIL interrupted")
    finally:
        save_logs(stack, results / "end")
        report("nothing is left after `down --volumes`", lambda: take_down(stack))
    print(f"compose-test: {report.passed} passed, {report.failed} failed; logs and screenshots in {results}")
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


def run_checks(stack: Stack, report: Report, results: Path) -> None:
    """Runs all checks in order; skips those that depend on a failed one."""
    if not (
        report("docker-compose.yml is valid", lambda: stack.compose("config", "--quiet") or "docker compose config")
        and report("the image builds", lambda: build_image(stack))
        and report("`up --wait` starts all services", lambda: start_stack(stack))
    ):
        return
    report("the agent's image builds and reads its node", build_agent_image)
    report("ports are published on loopback only", lambda: check_published_ports(stack))
    for service in SERVICES:
        report(f"{service} has limits and no privileges", lambda service=service: check_confinement(stack, service))  # type: ignore[misc]
    report("the API requires a token", lambda: check_token(stack))
    report("doctor finds no problems", lambda: run_doctor(stack))
    report("the history is evaluated and an incident is open", lambda: wait_for_incident(stack))
    report("the dashboard shows the fleet", lambda: take_screenshots(stack, results))
    check_broker_outage(stack, report)
    save_logs(stack, results / "outage")  # before containers are recreated
    check_restarts(stack, report)
    check_tools(stack, report)
    check_chart(stack, report)


def build_image(stack: Stack) -> str:
    """Builds the image and returns its size."""
    stack.compose("build", "init")
    return describe_image("fleetpulse:local")


def build_agent_image() -> str:
    """Builds the agent's image, as docs/install.md has it, runs its checks once, and returns its size."""
    words = ["--file", "deploy/images/Dockerfile", "--target", "agent", "--tag", "fleetpulse-agent:local"]
    for name in ("PIP_NO_INDEX", "FLEETPULSE_COMMIT"):
        words += ["--build-arg", f"{name}={os.environ.get(name, '')}"]
    run_command("docker", "build", "--quiet", *words, ".")
    shown = run_command(
        "docker", "run", "--rm", "--network", "none", "fleetpulse-agent:local", "once", "--output", "jsonl"
    )
    if not shown.strip():
        raise CheckError("`once` in the image printed nothing")
    return describe_image("fleetpulse-agent:local")


def describe_image(name: str) -> str:
    """Returns size, user, ports and version of an image. Raises CheckError if it runs as root."""
    found = json.loads(run_command("docker", "image", "inspect", name))[0]
    user, ports = found["Config"]["User"], sorted(found["Config"].get("ExposedPorts") or {})
    if user.partition(":")[0] in ("", "0", "root"):
        raise CheckError(f"{name} runs as {user or 'root'}")
    parts = json.loads(
        run_command("docker", "run", "--rm", "--entrypoint", "cat", name, "/opt/fleetpulse/sbom.cdx.json")
    )
    version = run_command("docker", "run", "--rm", "--network", "none", name, "--version").strip()
    guides = run_command("docker", "run", "--rm", "--network", "none", name, "--help").rpartition("Guides: ")[2].strip()
    run_command("docker", "run", "--rm", "--entrypoint", "cat", name, guides)  # it says no path that is not there
    return (
        f"{found['Size'] / 1e6:.0f} MB, user {user}, ports {', '.join(ports) or 'none'}, "
        f"bill of materials of {len(parts['components'])} parts, {version}"
    )


def start_stack(stack: Stack) -> str:
    """Starts all services and returns their states."""
    stack.up(UP_S)
    return ", ".join(f"{s} {stack.state(s)}" for s in SERVICES)


def check_published_ports(stack: Stack) -> str:
    """Returns the published ports. Raises CheckError for one beyond loopback."""
    ports = {
        (service, place["HostIp"], port)
        for service in SERVICES
        for port, places in (stack.inspect(service)["NetworkSettings"]["Ports"] or {}).items()
        for place in places or []
    }
    if {host for _, host, _ in ports} != {"127.0.0.1"} or {s for s, _, _ in ports} != {"pipeline", "dashboard"}:
        raise CheckError(f"{sorted(ports)}; expected pipeline and dashboard on 127.0.0.1")
    return ", ".join(f"{service} {port}" for service, _, port in sorted(ports))


def check_confinement(stack: Stack, service: str) -> str:
    """Checks privileges and limits that the engine applied. Raises CheckError with those that are missing."""
    found = stack.inspect(service)
    host: Any = found["HostConfig"]
    faults = {
        "root file system is writable": not host["ReadonlyRootfs"],
        "has capabilities": host["CapDrop"] != ["ALL"] or bool(host["CapAdd"]),
        "can gain privileges": not any(o.startswith("no-new-privileges") for o in host["SecurityOpt"] or []),
        "runs as root": found["Config"]["User"].partition(":")[0] in ("", "0", "root"),
        "no memory limit": host["Memory"] == 0,
        "no CPU limit": host["NanoCpus"] == 0,
        "no process limit": not host["PidsLimit"] or host["PidsLimit"] < 0,
        "no log size limit": "max-size" not in host["LogConfig"]["Config"],
    }
    if any(faults.values()):
        raise CheckError(", ".join(fault for fault, there in faults.items() if there))
    user, memory, cpus = found["Config"]["User"], host["Memory"] >> 20, host["NanoCpus"] / 1e9
    return f"user {user}, {memory} MiB, {cpus:g} CPUs, {host['PidsLimit']} processes, read-only, no capabilities"


def check_token(stack: Stack) -> str:
    """Checks that the API answers 401 without a token."""
    refused, allowed = stack.request("/api/v1/fleet", token=False)[0], stack.request("/api/v1/fleet")[0]
    if (refused, allowed) != (401, 200):
        raise CheckError(f"status {refused} without and {allowed} with a token; expected 401 and 200")
    return "401 without, 200 with the operator's token"


def run_doctor(stack: Stack) -> str:
    """Runs doctor in the pipeline's container. No GPU and no alert receiver are warnings there."""
    words = ("exec", "-T", "pipeline", "fleetpulse", "doctor", "--wait", "600s", "--output", "json")
    shown = stack.compose(*words, accepted=(0, 1, 3))  # 1 and 3: a check fails; the rows say which
    try:
        found = json.loads(shown)
    except ValueError as error:
        raise CheckError(f"doctor printed {shown[-2000:].strip()!r}, expected its checks") from error
    if failed := [f"{line['check']}: {line['found']}" for line in found if line["state"] == "fail"]:
        raise CheckError("; ".join(failed))
    return ", ".join(f"{line['check']} {line['state']}" for line in found)


def wait_for_incident(stack: Stack) -> str:
    """Waits until the backlog is empty and there is an incident."""

    def read() -> Any | None:
        _, fleet = stack.request("/api/v1/fleet")
        status, answer = stack.request("/api/v1/incidents")
        evaluated = status == 200 and not fleet["backlog"] and answer["incidents"]
        return answer["incidents"] if evaluated else None

    found, took = wait_for(INCIDENT_S, "an incident through the API", read)
    summaries = sorted({f"{i['severity']} {i['detector']} {i['entity']}" for i in found if i["state"] != "resolved"})
    rows = stack.sql("SELECT count(*) FROM gpu")[0][0]
    return f"after {took:.0f} s {len(found)} incidents, open: {', '.join(summaries)}; {rows} rows of GPUs stored"


def save_logs(stack: Stack, folder: Path) -> None:
    """Saves logs and states of the containers."""
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
    """Removes all containers, volumes and networks. Raises CheckError if some are left."""
    stack.compose("down", "--volumes", "--timeout", "30")
    mine = ("--filter", f"label=com.docker.compose.project={PROJECT}")
    left = [
        kind
        for kind in ("container", "volume", "network")
        if run_command("docker", kind, "ls", "--quiet", *mine).strip()
    ]
    if left:
        raise CheckError(f"not removed: {', '.join(left)}")
    return "containers, volumes and networks are removed"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
