"""Rolls a site out with Ansible (docs/install.md): a server and three nodes, bare Debian machines with systemd.

    make dist && python -m benchmarks.rollout

Ansible reaches each machine by ssh, as on a site. Installed, run again (nothing may change), changed in batches; a node
that fails its gate ends the roll-out before the next; the uninstallation leaves nothing. Needs root, mmdebstrap, ssh,
Java and ansible-core (`make parts`); everything runs in a network of its own. Prints a row for each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bare_machine import BARE, BareMachine, debian, missing
from tests.kafka_broker import Broker

ROOT = Path(__file__).parents[1]
PACKAGES = (*BARE, "openssh-server", "python3", "python3-apt")
"""What Ansible asks of a host."""
NODES = ("gpu001", "gpu002", "gpu003")
ALONE = "FLEETPULSE_ROLLOUT_ALONE"
"""Set in the process that has a network of its own."""
FIRST_PORT = 2201


def find_program() -> str:
    """Returns the path of ansible-playbook. Raises SystemExit without one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse" / "ansible"
    found = shutil.which("ansible-playbook") or next(map(str, cache.glob("*/bin/ansible-playbook")), None)
    if found is None:
        raise SystemExit("no ansible-playbook here: run 'make parts'")
    return found


def main() -> None:
    """Runs all steps. Raises SystemExit at the first that is not as it must be."""
    if lacking := missing():
        raise SystemExit(lacking)
    if os.environ.get(ALONE) is None:
        debian(PACKAGES)  # made before the network is left
        inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, "-m"]
        done = subprocess.run([*inside, "benchmarks.rollout"], cwd=ROOT, env={**os.environ, ALONE: "1"})
        raise SystemExit(done.returncode)
    with tempfile.TemporaryDirectory(prefix="fleetpulse-rollout-") as folder:
        place = Path(folder)
        with Broker(place / "kafka") as broker:
            machines = [BareMachine(place, name, PACKAGES) for name in ("server", *NODES)]
            try:
                Site(place, machines, broker.bootstrap).roll_out()
            finally:
                for machine in machines:
                    machine.__exit__()


class Site:
    """The machines, started and reachable by ssh, and an inventory of them in `place`."""

    def __init__(self, place: Path, machines: list[BareMachine], kafka: str) -> None:
        self.place, self.machines, key = place, machines, place / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        self.hosts: dict[str, dict[str, Any]] = {}
        for port, machine in enumerate(machines, FIRST_PORT):
            home = machine.root / "root/.ssh"
            home.mkdir(mode=0o700, exist_ok=True)
            (home / "authorized_keys").write_text(key.with_suffix(".pub").read_text())
            (machine.root / "etc/ssh/sshd_config.d/port.conf").write_text(f"Port {port}\nListenAddress 127.0.0.1\n")
            machine.__enter__()
            self.hosts[machine.name] = {"ansible_host": "127.0.0.1", "ansible_port": port}
        self.variables = {
            "fleetpulse_site": "east",
            "fleetpulse_kafka": kafka,
            "fleetpulse_packages": str(ROOT / "dist"),
            "fleetpulse_gate": "600s",
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(key),
            "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
        }

    def roll_out(self) -> None:
        """Runs all steps."""
        names = [machine.name for machine in self.machines]
        self.expect("install", self.play("site.yml"), dict.fromkeys(names, "changed"))
        self.expect("run again", self.play("site.yml"), dict.fromkeys(names, "same"))
        self.variables |= {"fleetpulse_slurm_hooks": True, "fleetpulse_config": "[agent]\ninterval = 2\n"}
        self.expect("change, with Slurm's hooks", self.play("site.yml"), dict.fromkeys(names, "changed"))
        self.machines[1].run("test -x /etc/slurm/fleetpulse/prolog.sh && fleetpulse check")
        self.variables |= {"fleetpulse_config": "[agent]\ninterval = 5\n", "fleetpulse_gate": "20s"}
        self.hosts["gpu002"]["fleetpulse_kafka"] = "127.0.0.1:9"
        wanted = {"server": "changed", "gpu001": "changed", "gpu002": "failed", "gpu003": "untouched"}
        self.expect("a node that fails its gate", self.play("site.yml"), wanted)
        if "interval = 2" not in self.machines[3].run("cat /etc/fleetpulse/conf.d/50-site.toml").stdout:
            raise SystemExit("gpu003 was changed after gpu002 failed")
        self.variables |= {"fleetpulse_remove_store": True}
        self.expect("uninstall", self.play("uninstall.yml"), dict.fromkeys(names, "changed"))
        for machine in self.machines:
            self.expect_nothing_left(machine)

    def play(self, playbook: str) -> dict[str, str]:
        """Runs a playbook; returns host -> changed, same, failed or untouched."""
        children = {
            "fleetpulse_server": {"hosts": {"server": self.hosts["server"]}},
            "fleetpulse_nodes": {"hosts": {name: self.hosts[name] for name in NODES}},
        }
        inventory = self.place / "inventory.json"
        inventory.write_text(json.dumps({"all": {"vars": self.variables, "children": children}}))
        environ = {**os.environ, "ANSIBLE_HOME": str(self.place / "ansible"), "ANSIBLE_NOCOLOR": "1"}
        words = [find_program(), "-i", inventory, ROOT / "deploy/ansible" / playbook]
        began = time.monotonic()
        done = subprocess.run(words, env=environ, capture_output=True, text=True)
        print(f"  {playbook}: {time.monotonic() - began:.0f} s, exit code {done.returncode}", flush=True)
        recap = done.stdout.partition("PLAY RECAP")[2]
        found = dict.fromkeys(self.hosts, "untouched")
        for host, changed, lost, failed in re.findall(
            r"^(\S+)\s+: ok=\d+\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", recap, re.MULTILINE
        ):
            found[host] = "failed" if int(lost) + int(failed) else "changed" if int(changed) else "same"
        self.said = done.stdout + done.stderr
        return found

    def expect(self, what: str, found: dict[str, str], wanted: dict[str, str]) -> None:
        """Prints a row. Raises SystemExit with what Ansible said if a host is not as wanted."""
        if found != wanted:
            raise SystemExit(f"{what}: {found}, expected {wanted}\n{self.said[-6000:]}")
        print(f"| {what} | {', '.join(f'{host}: {state}' for host, state in found.items())} |", flush=True)

    @staticmethod
    def expect_nothing_left(machine: BareMachine) -> None:
        """Raises SystemExit if a file, user or unit of ours is there."""
        left = machine.run("find / -xdev -name '*fleetpulse*' -not -path '/proc/*'; grep fleetpulse /etc/passwd", False)
        units = machine.run("systemctl list-units --all --no-legend 'fleetpulse*'", False).stdout
        if left.stdout or units:
            raise SystemExit(f"{machine.name}: left after the uninstallation:\n{left.stdout}{units}")
        print(f"| left on {machine.name} | nothing |", flush=True)


if __name__ == "__main__":
    main()
