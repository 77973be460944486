"""From an artifact to the first telemetry, as docs/install.md has it: bare Debian machines with systemd as process 1.

    make dist && python -m benchmarks.installation [site] [one-host] [wheel] [rpm] [--upgrade FOLDER]

site: server and node as debs, with a real Kafka.   one-host: the server's deb, without a broker.   wheel: a node with
Debian's Python and a folder of wheels.   rpm: the server's rpm by Debian's rpm, whose database has a stand-in of glibc.
--upgrade: the drill from an older version, whose debs are in FOLDER (benchmarks/old_packages.py), in place of `site`'s
commands: server first and node first, and back; nothing may be lost. Needs root, mmdebstrap and, for `site`, Java.
Everything runs in a network of its own without a way out. Prints commands, their seconds and what was found.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from websockets.exceptions import WebSocketException

from benchmarks.page_viewer import Viewer
from benchmarks.upgrade_drill import drill, install_old, wait_for
from tests.bare_machine import BARE, WITH_PYTHON, BareMachine, MachineError, debian, missing
from tests.kafka_broker import Broker

ROOT = Path(__file__).parents[1]
ALONE = "FLEETPULSE_INSTALLATION_ALONE"
"""Set in the process that has a network of its own."""
TELEMETRY_S = 900.0
"""Longest wait for the first telemetry (s). Chosen: detectors compile for 40 s of CPU, minutes on a busy machine."""
WITH_RPM = (*BARE, "rpm")
GATE = "fleetpulse doctor --wait 600s"
RELOADED = ("dashboard", "agent", "pipeline")
STOP_S = 65.0
"""More than TimeoutStopSec of the pipeline's unit."""
UNITS = ("pipeline", "dashboard", "executor", "agent")


@dataclass
class Way:
    """Commands that an administrator types, on which machine, and the seconds that each took."""

    name: str
    steps: list[tuple[str, str, float]] = field(default_factory=list)

    def run(self, machine: BareMachine, command: str) -> str:
        """Runs one command as root, counts it, and returns what it printed. Raises MachineError if it fails."""
        began = time.monotonic()
        said = machine.run(command).stdout
        self.steps.append((machine.name, command, time.monotonic() - began))
        print(f"  {machine.name}# {command}   ({self.steps[-1][2]:.0f} s)", flush=True)
        return said

    def report(self, seen: str) -> None:
        """Prints the row of the table."""
        machines = dict.fromkeys(step[0] for step in self.steps)
        for machine in machines:
            mine = [step for step in self.steps if step[0] == machine]
            print(f"| {self.name} | {machine} | {len(mine)} | {sum(s for _, _, s in mine) / 60:.1f} min | {seen} |")


def main(arguments: Sequence[str]) -> None:
    """Runs the chosen ways."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="*", metavar="site | one-host | wheel | rpm")
    parser.add_argument("--upgrade", type=Path)
    given = parser.parse_args(arguments)
    if lacking := missing():
        raise SystemExit(lacking)
    ways = given.ways or ["site", "one-host", "wheel", "rpm"]
    with tempfile.TemporaryDirectory(prefix="fleetpulse-installation-") as folder:
        if os.environ.get(ALONE) is None:
            debian()  # made before the network is left
            if "wheel" in ways:
                debian(WITH_PYTHON)
            if "rpm" in ways:
                debian(WITH_RPM)
            wheels = collect_wheels() if "wheel" in ways else Path()
            words = [sys.executable, "-m", "benchmarks.installation", *arguments]
            inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *words]
            raise SystemExit(subprocess.run(inside, cwd=ROOT, env={**os.environ, ALONE: str(wheels)}).returncode)
        for way in ways:
            place = Path(folder) / way
            if way == "site":
                install_site(place, given)
            elif way == "one-host":
                install_one_host(place)
            elif way == "rpm":
                install_rpm(place)
            else:
                install_wheel(place, Path(os.environ[ALONE]))


def find_deb(kind: str, folder: Path = ROOT / "dist") -> Path:
    """Returns the newest deb of a kind. Raises SystemExit without one."""
    found = sorted(folder.glob(f"fleetpulse-{kind}_*.deb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"{folder}: no deb of {kind}; make dist")
    return found[-1]


def install_site(place: Path, given: argparse.Namespace) -> None:
    """A server and a node by their debs, over a real Kafka; or, if asked, an older version and the drill."""
    with (
        Broker(place / "kafka") as broker,
        BareMachine(place, "server") as server,
        BareMachine(place, "gpu001") as node,
    ):
        for machine, kind in ((server, "server"), (node, "agent")):
            machine.put(find_deb(kind, given.upgrade) if given.upgrade else find_deb(kind))
            machine.put(find_deb(kind), "/root/new")
        if given.upgrade:
            install_old(server, node, given.upgrade, broker.bootstrap)
            drill(server, node, {machine.name: machine.root / "root" for machine in (server, node)})
        else:
            install_new(server, node, broker.bootstrap)
        print_exposure(server, UNITS)
        uninstall(node, "agent")
        uninstall(server, "server")


def install_new(server: BareMachine, node: BareMachine, kafka: str) -> None:
    """The commands of docs/install.md, counted."""
    way = Way("deb, with Kafka")
    way.run(server, f"dpkg -i /root/{find_deb('server').name}")
    way.run(server, f"fleetpulse setup --role server --site east --kafka {kafka} --gpus 0 --webhook ''")
    way.run(server, "fleetpulse init")
    way.run(server, "systemctl enable --now fleetpulse-pipeline fleetpulse-dashboard")
    way.run(node, f"dpkg -i /root/{find_deb('agent').name}")
    way.run(node, f"fleetpulse setup --role node --site east --kafka {kafka} --gpus 0")
    way.run(node, "systemctl enable --now fleetpulse-agent")
    way.run(server, GATE)
    way.run(node, GATE)
    way.report(wait_for_telemetry(server, "gpu001"))


def install_one_host(place: Path) -> None:
    """Agent, pipeline, dashboard and executor by the server's deb, without a broker."""
    way = Way("deb, one host")
    with BareMachine(place, "one-host") as machine:
        machine.put(find_deb("server"))
        way.run(machine, f"dpkg -i /root/{find_deb('server').name}")
        set_up_one_host(machine, way)
        print(reload_all(machine))
        print(back_up_and_restore(machine))
        print(start_executor(machine))
        print_exposure(machine, UNITS)
        uninstall(machine, "server")


def set_up_one_host(machine: BareMachine, way: Way) -> None:
    """Runs `setup` and the commands that it prints, until the dashboard shows telemetry."""
    said = way.run(machine, "fleetpulse setup --role one-host --site east --kafka '' --gpus 0 --webhook ''")
    for command in said.partition("Next:\n")[2].splitlines():
        way.run(machine, command.strip().replace("--wait 120s", "--wait 600s"))
    way.report(wait_for_telemetry(machine, machine.name))


def install_rpm(place: Path) -> None:
    """The server's rpm, with the rpm of Debian: dependencies, scripts, verification, upgrade and removal are real."""
    way, rpm = Way("rpm, one host"), "rpm --force-debian"
    found = sorted((ROOT / "dist").glob("fleetpulse-server-*.rpm"))
    if not found:
        raise SystemExit("dist: no rpm of server; make dist")
    with BareMachine(place, "rpm-host", WITH_RPM) as machine:
        machine.put(found[-1])
        machine.put(make_glibc(place))
        machine.run(f"{rpm} -i /root/glibc-*.rpm")
        way.run(machine, f"{rpm} -i /root/{found[-1].name}")
        machine.run("rpm -V fleetpulse-server")
        set_up_one_host(machine, way)
        pids = "for u in pipeline dashboard agent; do systemctl show -p MainPID --value fleetpulse-$u; done"
        before = machine.run(pids).stdout.split()
        machine.run(f"{rpm} -U --replacepkgs /root/{found[-1].name}")
        machine.run(GATE)
        after = machine.run(pids).stdout.split()
        changed = sum(map(str.__ne__, before, after))
        print(f"| rpm -U | {changed} of {len(after)} running units were restarted | the gate passes |")
        machine.run("rpm -e fleetpulse-server; rm -r /var/lib/fleetpulse-server")
        (removal,) = re.findall(r"After `rpm -e`: `([^`]*)`", (ROOT / "docs/install.md").read_text())
        machine.run(" ".join(removal.split()))
        print_left(machine)


def make_glibc(place: Path) -> Path:
    """Returns an empty rpm that says what Debian's files are to a package: glibc, and a shell."""
    version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    settings = ["name: glibc", f"version: {version.split()[-1]}", "arch: amd64", "provides: [/bin/sh]"]
    config = place / "glibc.yaml"
    config.write_text("\n".join([*settings, "platform: linux", "maintainer: nobody <nobody@localhost>", ""]))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse" / "nfpm"
    program = shutil.which("nfpm") or next(map(str, cache.glob("*/nfpm")))
    words = [program, "package", "--config", config, "--packager", "rpm", "--target", place]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    (made,) = place.glob("glibc-*.rpm")
    return made


def install_wheel(place: Path, wheels: Path) -> None:
    """A node with Debian's Python 3.11 and a folder of wheels, over a real Kafka that has the topics."""
    way = Way("wheel, from a folder")
    with Broker(place / "kafka") as broker, BareMachine(place, "gpu002", WITH_PYTHON) as machine:
        settings = {"PIPELINE__TRANSPORT": "kafka", "KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap}
        settings |= {"STORE__PATH": str(place / "store.duckdb"), "SPOOL__DIRECTORY": str(place / "spool")}
        environ = {**os.environ, **{f"FLEETPULSE__{key}": value for key, value in settings.items()}}
        environ["PYTHONPATH"] = str(ROOT)
        subprocess.run([sys.executable, ROOT / "fleetpulse.py", "init"], env=environ, cwd=place, check=True)
        machine.put(wheels)
        for command in read_commands("docs/install.md", "As root, on the node:"):
            fitting = command.replace("kafka-1:9092", broker.bootstrap).replace("--gpus 8", "--gpus 0")
            way.run(machine, f"cd /root; {fitting.replace('--wait 120s', '--wait 600s')}")
        way.report(machine.run("/opt/fleetpulse/bin/fleetpulse check").stdout.strip().splitlines()[-1])
        print_exposure(machine, UNITS[-1:])


def read_commands(page: str, after: str) -> list[str]:
    """Returns the commands of the indented block that follows a line of a page: what is documented is what runs."""
    text = (ROOT / page).read_text().partition(after)[2]
    block = re.search(r"\n\n((?:    .*\n)+)", text)
    assert block, (page, after)
    return [line.strip() for line in block[1].splitlines()]


def collect_wheels() -> Path:
    """Returns a folder of wheels of Debian's Python for a node, with ours; as docs/install.md makes it."""
    folder = ROOT / "dist" / "wheels"
    listed = subprocess.run(
        [sys.executable, "deploy/requirements.py", "agent"], cwd=ROOT, capture_output=True, text=True
    )
    wanted = folder.with_suffix(".txt")
    folder.mkdir(parents=True, exist_ok=True)
    wanted.write_text(listed.stdout)
    words = ["-m", "pip", "download", "--quiet", "--dest", folder, "--require-hashes", "--only-binary", ":all:"]
    words += ["--python-version", "3.11", "--constraint", "constraints.txt", "--requirement", wanted]
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True)
    for wheel in (ROOT / "dist").glob("*.whl"):
        (folder / wheel.name).write_bytes(wheel.read_bytes())
    return folder


def wait_for_telemetry(machine: BareMachine, node: str) -> str:
    """Waits until the page of the node, opened as a browser does, shows its telemetry. Raises SystemExit."""
    end, text = time.monotonic() + TELEMETRY_S, ""
    while time.monotonic() < end:
        with contextlib.suppress(OSError, WebSocketException):
            text = asyncio.run(read_page("node", f"entity=node:{node}"))
            if "Collector host" in text and node in text:
                return f"page of {node}: {len(text)} characters"
        time.sleep(1)  # polls real services
    raise SystemExit(
        f"{node}: no page within {TELEMETRY_S:.0f} s: {text[:500]}\n{machine.run('journalctl -n 40').stdout}"
    )


async def read_page(page: str, query: str) -> str:
    """Returns the text of a page of the dashboard."""
    viewer = Viewer("http://127.0.0.1:8501")
    try:
        return (await viewer.open(page, query)).text
    finally:
        await viewer.close()


def print_exposure(machine: BareMachine, units: Sequence[str]) -> None:
    """Prints what systemd says of each unit that is installed, and which ports are open."""
    for unit in units:
        said = machine.run(f"systemd-analyze security --no-pager fleetpulse-{unit} | tail -1").stdout
        print(f"| fleetpulse-{unit} | {said.split('exposure level for ')[1].split(': ')[1].split()[0]} |")
    print(machine.run("ss -ltnH").stdout)


def set_keys(machine: BareMachine, text: str, verb: str, *units: str) -> None:
    """Writes a drop-in of the configuration, then restarts or reloads units. Raises MachineError."""
    names = " ".join(f"fleetpulse-{unit}" for unit in units)
    machine.run(f"printf '{text}\\n' > /etc/fleetpulse/conf.d/10-changed.toml && systemctl {verb} {names}")


def reload_all(machine: BareMachine) -> str:
    """Reloads three units under systemd, then with a wrong file; returns what is recorded. Raises SystemExit."""
    show = "for u in pipeline agent dashboard; do systemctl show -p MainPID,NRestarts --value fleetpulse-$u; done"
    before = machine.run(show).stdout
    changed = "[budget]\\ndays = 5\\n[agent]\\ninterval = 2\\n[dashboard]\\nconnections = 90"
    set_keys(machine, changed, "reload", *RELOADED[:2])
    audit = "fleetpulse sql \"SELECT actor, reason FROM audit WHERE action = 'reload configuration'\" --output jsonl"
    event = "fleetpulse sql \"SELECT data FROM events WHERE kind = 'configuration'\" --output jsonl"
    wait_for("the dashboard's row of the audit", lambda: _lines(machine, audit, 1))
    events = wait_for("the agent's event", lambda: _lines(machine, event, 1))
    machine.run("systemctl reload fleetpulse-pipeline")
    rows = wait_for("the pipeline's row of the audit", lambda: _lines(machine, audit, 2))
    time.sleep(STOP_S)  # systemd would kill what reported STOPPING and went on
    if (after := machine.run(show).stdout) != before:
        raise SystemExit(f"processes before the reload {before.split()}, after it {after.split()}")
    try:
        set_keys(machine, "[budget]\\ndayz = 5", "reload", *RELOADED)
    except MachineError:
        machine.run("rm /etc/fleetpulse/conf.d/10-changed.toml")
        return f"| reload | the same processes | {'; '.join([*rows, *events])} | a wrong file: refused |"
    raise SystemExit("a wrong configuration was reloaded")


def back_up_and_restore(machine: BareMachine) -> str:
    """Follows docs/backup.md on a running server; returns what the restored store has. Raises MachineError."""
    way = Way("backup and restore")
    count = "fleetpulse sql 'SELECT count(*) AS n FROM audit' --output jsonl"
    way.run(machine, "fleetpulse backup /var/backups/fleetpulse-1")
    before = machine.run(count).stdout.strip()
    way.run(machine, "systemctl stop fleetpulse-pipeline")
    way.run(machine, "fleetpulse restore --replace /var/backups/fleetpulse-1")
    way.run(machine, "systemctl start fleetpulse-pipeline")
    way.run(machine, GATE)
    after = machine.run(count).stdout.strip()
    return f"| backup and restore | {len(way.steps)} commands | rows of the audit {before} before, {after} after |"


def _lines(machine: BareMachine, command: str, number: int) -> list[str]:
    said = machine.run(command).stdout.splitlines()
    return said if len(said) >= number else []


def start_executor(machine: BareMachine) -> str:
    """Follows docs/acts.md: the executor's unit makes a plan. Returns what was seen. Raises SystemExit."""
    way = Way("executor")
    said = way.run(machine, "fleetpulse token create executor --role operator --executor")
    token = said.strip().splitlines()[-1]
    file = "/etc/fleetpulse/executor.token"
    way.run(machine, f"(umask 077; echo executor:{token} > {file}); systemctl enable --now fleetpulse-executor")
    plan = f"fleetpulse act plan hold node:{machine.name} --reason test"
    planned = wait_for("a plan", lambda: machine.run(plan).stdout)
    state = machine.run("systemctl show -p ActiveState -p NRestarts --value fleetpulse-executor").stdout.split()
    return f"| executor | {len(way.steps)} commands | {planned.splitlines()[0]} | {', '.join(state)} restarts |"


def uninstall(machine: BareMachine, kind: str) -> None:
    """Removes the package as the guide says, and prints what is left of it."""
    machine.run(f"dpkg --purge fleetpulse-{kind}; rm -rf /var/lib/fleetpulse-server")
    print_left(machine)


def print_left(machine: BareMachine) -> None:
    """Prints the files that still name us."""
    words = "find / -xdev -name '*fleetpulse*' -not -path '/proc/*' -not -path '/root/*' -not -path '/var/backups/*'"
    left = machine.run(words, check=False).stdout
    print(f"| {machine.name} | left after the uninstallation | {' '.join(left.split()) or 'nothing'} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
