"""The drill of an upgrade with packages, on the machines of benchmarks/installation.py: both orders, and back.

A real agent sends once per second over a real Kafka, and an incident is open. At the end every sample that the agent
measured must be stored once, and the incident must be the same one, open since the same moment, without a new alert:
its detector kept what it had seen. The commands are those of docs/upgrade.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bare_machine import BareMachine, MachineError

STEPS = (
    ("server first: new server", "server", "new"),
    ("server first: new agent", "node", "new"),
    ("back: old agent", "node", "old"),
    ("back: old server", "server", "old"),
    ("agent first: new agent", "node", "new"),
    ("agent first: new server", "server", "new"),
)
SETTLE_S = 600.0
"""Longest wait for the pipeline after a step (s). Chosen: it compiles its detectors again after a change of version."""
STORE = "/var/lib/fleetpulse-server/store.duckdb"
CONFIG = "FLEETPULSE_CONFIG=/etc/fleetpulse/fleetpulse.toml"
"""The first versions did not look there."""
SCENARIO = """
version = 1
duration = 86400
interval = 5
[fleet]
nodes = 2
gpus_per_node = 8
[jobs]
mean_hours = 0
[[fault]]
kind = "gpu_off_bus"
entity = "gpu:sim-n001.1"
onset = 300
"""
"""A second agent of the old version sends all the time; its lost GPU opens the incident."""
SAMPLES = """
    SELECT count(*) AS rows, count(DISTINCT time) AS times, count(*) FILTER (step > 1.5) AS pauses,
        coalesce(sum(step - 1) FILTER (step > 1.5), 0) AS missing_s
    FROM (SELECT time, epoch_us(time - lag(time) OVER (ORDER BY time)) / 1e6 AS step FROM node
        WHERE entity = 'node:gpu001' AND time >= TIMESTAMPTZ '{since}')"""
LOST = "SELECT (SELECT count(*) FROM gaps) AS gaps, (SELECT count(*) FROM dead_letter) AS letters"
INCIDENTS = "SELECT id, state, opened FROM incidents WHERE state != 'resolved' ORDER BY id"


@dataclass(frozen=True)
class Moment:
    """What is compared before and after a step."""

    incidents: tuple[tuple[str, str], ...]
    ever: int


def install_old(server: BareMachine, node: BareMachine, old: Path, kafka: str) -> None:
    """Installs an earlier version, which may know neither `setup` nor drop-ins: its files are written by hand."""
    text = '[site]\nname = "east"\n[pipeline]\ntransport = "kafka"\n'
    text += f'[kafka]\nbootstrap_servers = "{kafka}"\n'
    secured = "".join(f'[{part}]\ntoken_file = "/etc/fleetpulse/tokens"\n' for part in ("api", "dashboard"))
    secured += f'[store]\npath = "{STORE}"\n'
    for machine, kind, more in ((server, "server", secured), (node, "agent", "")):
        (deb,) = old.glob(f"fleetpulse-{kind}_*.deb")
        machine.run(f"dpkg -i /root/{deb.name}")
        (machine.root / "etc/fleetpulse/fleetpulse.toml").write_text(text + more)
    (server.root / "etc/fleetpulse/tokens").write_text("operator:0123456789abcdef0123\n")
    server.run("chmod 600 /etc/fleetpulse/tokens")
    server.run(
        "fleetpulse init --config /etc/fleetpulse/fleetpulse.toml; chown -R fleetpulse: /var/lib/fleetpulse-server"
    )
    # a dynamic user has no home on a machine without libnss-systemd, which that version cannot do without
    node.run("mkdir -p /etc/systemd/system/fleetpulse-agent.service.d")
    home = node.root / "etc/systemd/system/fleetpulse-agent.service.d/home.conf"
    home.write_text("[Service]\nEnvironment=HOME=/\n")
    server.run("systemctl enable --now fleetpulse-pipeline fleetpulse-dashboard")
    node.run("systemctl enable --now fleetpulse-agent")
    (server.root / "root/scenario.toml").write_text(SCENARIO)
    server.run("cp -al /opt/fleetpulse /opt/simulator")  # an upgrade does not change it
    started = f"systemd-run --unit=simulator --setenv={CONFIG} --setenv=FLEETPULSE__SPOOL__DIRECTORY=/var/tmp/spool"
    server.run(
        f"{started} /opt/simulator/bin/fleetpulse simulate --scenario /root/scenario.toml --to kafka --backfill 600"
    )


def drill(server: BareMachine, node: BareMachine, old: dict[str, Path]) -> None:
    """Runs all steps and prints a row for each. old: machine name -> folder below which debs of both versions are."""
    since = wait_for("an incident", lambda: _sql(server, INCIDENTS) and _sql(server, "SELECT max(time) AS t FROM node"))
    begun, before = since[0]["t"], _moment(server)
    print("| step | version | rows stored, twice, gaps and dead letters | pauses of the agent | incidents |")
    for what, where, version in STEPS:
        machine = server if where == "server" else node
        (deb,) = (old[machine.name] / ("new" if version == "new" else ".")).glob("*.deb")
        install = f"dpkg -i {'/' + str(deb.relative_to(machine.root))}"
        is_back = where == "server" and version == "old"
        machine.run(f"{go_back(machine)}{install} && systemctl start fleetpulse-pipeline" if is_back else install)
        wait_for("rows measured after the step", lambda: _has_new_rows(server))
        print(f"| {what} | {_version(machine)} | {_describe(server, begun, before)} |", flush=True)


def go_back(server: BareMachine) -> str:
    """Returns the commands before an older server is installed: its store is that of the upgrade (docs/backup.md)."""
    kept = server.run(f"ls -d {STORE}.schema-* 2>/dev/null || true").stdout.strip()
    restore = f"fleetpulse restore --replace {kept} && " if kept else ""
    return f"systemctl stop fleetpulse-pipeline && {restore}"


def _describe(server: BareMachine, begun: str, before: Moment) -> str:
    rows, lost, after = _sql(server, SAMPLES.format(since=begun))[0], _sql(server, LOST)[0], _moment(server)
    kept = "the same" if after == before else f"CHANGED: {before} -> {after}"
    twice = rows["rows"] - rows["times"]
    return (
        f"{rows['rows']}, {twice}, {lost['gaps']} and {lost['letters']} | "
        f"{rows['pauses']}, {float(rows['missing_s']):.0f} s | {kept}"
    )


def _version(machine: BareMachine) -> str:
    """The commit of what is installed; versions before packages know only their number."""
    return machine.run("fleetpulse --version").stdout.partition("(")[2].strip(" )\n") or "before packages"


def _moment(server: BareMachine) -> Moment:
    found = tuple((str(row["id"]), str(row["opened"])) for row in _sql(server, INCIDENTS))
    return Moment(found, int(_sql(server, "SELECT count(*) AS n FROM incidents")[0]["n"]))


def _has_new_rows(server: BareMachine) -> bool:
    """Whether a row is stored that was measured after now, by the clock that both machines share.

    Or refused: an old pipeline keeps what a newer agent sends as dead letters.
    """
    now = _sql(server, "SELECT now() AS t")[0]["t"]
    query = f"SELECT count(*) AS n FROM node WHERE entity = 'node:gpu001' AND time > TIMESTAMPTZ '{now}'"
    letters = f"SELECT count(*) AS n FROM dead_letter WHERE time > TIMESTAMPTZ '{now}'"
    return any(int(_sql(server, one)[0]["n"]) > 3 for _ in _tries(30) for one in (query, letters))


def _tries(number: int) -> Iterator[int]:
    for one in range(number):
        time.sleep(1)  # polls a real pipeline
        yield one


def _sql(server: BareMachine, query: str) -> list[dict[str, Any]]:
    """Returns the rows of a query. Raises MachineError while no pipeline answers."""
    one_line = " ".join(query.split()).replace('"', '\\"')
    found: list[dict[str, Any]] = json.loads(server.run(f'{CONFIG} fleetpulse sql "{one_line}" --output json').stdout)
    return found


def wait_for(what: str, look: Callable[[], Any]) -> Any:
    """Returns what `look` finds, once that is something. Raises SystemExit after SETTLE_S."""
    end, why = time.monotonic() + SETTLE_S, ""
    while time.monotonic() < end:
        try:
            if found := look():
                return found
        except MachineError as error:
            why = str(error)
        time.sleep(1)  # polls a real pipeline
    raise SystemExit(f"not within {SETTLE_S:.0f} s: {what}\n{why}")
