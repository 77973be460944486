"""A real Slurm 24.11 with slurmrestd, from Debian 13 in a separate folder (`make parts`), each daemon in a chroot.

Slurm of Debian 12 is 22.05, whose slurmrestd cannot change nodes. Each daemon has a separate mount namespace with
/proc and /dev, so that no mount outlives it. Needs root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.daemons import DaemonCluster, Daemons, free_ports
from tests.slurm_cluster import REGISTER_S, SlurmError, read_slurmd_start, save_state
from tests.until import until

ROOT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse" / "slurm" / "trixie"
GPUS = 4
READY_S, STOP_S = 60.0, 20.0
"""Chosen: two nodes are idle after 4 s; with a busy machine ten times as long."""
_ENTER = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$@"'
CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge.socket
CredType=cred/munge
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={at}/jwt.key
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=60
MessageTimeout=10
RebootProgram=/bin/true
GresTypes=gpu
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Returns the missing part without which it cannot start; empty if nothing is missing."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    return "" if (ROOT / "usr/sbin/slurmrestd").exists() else "no Slurm 24.11 here: run 'make parts'"


class RestCluster(DaemonCluster):
    """Nodes gpu001, gpu002, ... with GPUS GPUs each, and slurmrestd at `url`.

    topology: of topology.conf for topology/`plugin`.   commands: folder with Slurm's commands of this version.
    """

    def __init__(self, topology: str = "", plugin: str = "tree", nodes: int = 2) -> None:
        self._topology, self._plugin = topology, plugin
        self.nodes = tuple(f"gpu{number:03d}" for number in range(1, nodes + 1))
        self.folder = Path(tempfile.mkdtemp(prefix="fleetpulse-slurm-", dir=ROOT / "tmp"))
        self.folder.chmod(0o755)
        self.at = f"/{self.folder.relative_to(ROOT)}"
        self._daemons = Daemons(self.folder, SlurmError, READY_S, STOP_S)
        self._ports = free_ports(nodes + 2)
        self.url = f"http://127.0.0.1:{self._ports[1]}"
        self.commands = self.folder / "bin"

    def run(self, *words: str) -> str:
        """Returns the output of one of Slurm's commands. Raises SlurmError with its message."""
        done = subprocess.run(self._words(words), capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise SlurmError(f"{words[0]}: status {done.returncode}: {done.stderr[-2000:]}{self._daemons.tails()}")
        return done.stdout

    def kill_node(self, node: str) -> None:
        """Kills the slurmd of a node with signal 9."""
        self._daemons.kill(node)

    def start_node(self, node: str, *options: str) -> None:
        """Starts the slurmd of a node again, and waits until it registers. `-b`: it says that it has just booted."""
        before = read_slurmd_start(self.run, node)
        if node in self._daemons.running:
            self._daemons.kill(node)
        self._spawn(node, ("slurmd", "-D", *options, "-N", node))
        until(lambda: read_slurmd_start(self.run, node) not in (before, "None"), REGISTER_S)

    def kill_controller(self) -> None:
        """Kills slurmctld; slurmrestd stays."""
        self._daemons.kill("slurmctld")

    def save_state(self) -> None:
        """Waits until slurmctld has written all changes so far; it loses the others when it is killed."""
        save_state(self.run, self.nodes[0], self.folder / "state")

    def start_controller(self) -> None:
        """Starts slurmctld again with its state, and waits until all nodes that live have registered."""
        self._spawn("slurmctld", ("slurmctld", "-D"))
        self._daemons.wait("slurmctld", self._has_all_nodes, REGISTER_S)

    def _has_all_nodes(self) -> bool:
        done = subprocess.run(self._words(("sinfo", "-h", "-N", "-o", "%N %T")), capture_output=True, text=True)
        rows = [line.split() for line in done.stdout.splitlines()]
        alive = [state for node, state in rows if node in self._daemons.running]
        return len(rows) == len(self.nodes) and not any("unk" in state or "*" in state for state in alive)

    def token(self, seconds: int = 600) -> str:
        """Returns a line such as `scontrol token` prints."""
        return self.run("scontrol", "token", "username=root", f"lifespan={seconds}")

    def close(self) -> None:
        """Stops the daemons and removes what they wrote."""
        self._daemons.close(gently=set(self._daemons.running))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _words(self, words: tuple[str, ...], *options: str, **environment: str) -> list[str]:
        named = [f"{name}={value}" for name, value in ({"SLURM_CONF": f"{self.at}/slurm.conf"} | environment).items()]
        inside = [*options, str(ROOT), "env", *named, *words]
        return ["unshare", "--mount", "sh", "-c", _ENTER.replace('"$0/', f'"{ROOT}/'), "chroot", *inside]

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        hosts = ROOT / "etc/hosts"
        if host not in (hosts.read_text() if hosts.exists() else ""):
            with open(hosts, "a") as file:
                file.write(f"127.0.0.1 localhost {host}\n")
        for name in ("state", "bin", "dev", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        for number in range(GPUS):
            os.mknod(self.folder / "dev" / f"nvidia{number}", 0o666 | 0o020000, os.makedev(1, 3))
        for name in ("scontrol", "squeue", "sinfo", "scancel"):
            file = self.commands / name
            file.write_text(f'#!/bin/sh\nexec {shlex.join(self._words((name,)))} "$@"\n')
            file.chmod(0o755)
        for name, size in (("munge.key", 128), ("jwt.key", 32)):
            (self.folder / name).write_bytes(os.urandom(size))
            (self.folder / name).chmod(0o600)
        lines = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 CoresPerSocket=8 "
            f"RealMemory=500 Gres=gpu:h100:{GPUS}"
            for node, port in zip(self.nodes, self._ports[2:], strict=True)
        )
        conf = CONF.format(host=host, at=self.at, ports=self._ports, nodes=lines)
        if self._topology:
            (self.folder / "topology.conf").write_text(self._topology)
            conf += f"TopologyPlugin=topology/{self._plugin}\n"
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(f"Name=gpu Type=h100 File={self.at}/dev/nvidia[0-{GPUS - 1}]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")

    def _start(self) -> None:
        at = self.at
        files = [f"--{name}-file={at}/munged.{end}" for name, end in (("log", "log"), ("pid", "pid"), ("seed", "seed"))]
        munge = ("munged", "--foreground", "--force", f"--socket={at}/munge.socket", f"--key-file={at}/munge.key")
        self._spawn("munged", (*munge, *files))
        self._daemons.wait("munge", lambda: (self.folder / "munge.socket").exists())
        self._spawn("slurmctld", ("slurmctld", "-D", "-c"))
        for node in self.nodes:
            self._spawn(node, ("slurmd", "-D", "-N", node))
        rest = ("slurmrestd", "-a", "rest_auth/jwt", "-s", "slurmctld", self.url.removeprefix("http://"))
        self._spawn("slurmrestd", rest, "--userspec=65534:65534", SLURM_JWT="daemon")
        self._daemons.wait("nodes", self._is_ready)

    def _is_ready(self) -> bool:
        words = self._words(("sinfo", "-h", "-t", "idle", "-o", "%D"))
        done = subprocess.run(words, capture_output=True, text=True)
        with socket.socket() as probe:
            listens = probe.connect_ex(("127.0.0.1", self._ports[1])) == 0
        return done.returncode == 0 and done.stdout.strip() == str(len(self.nodes)) and listens

    def _spawn(self, name: str, words: tuple[str, ...], *options: str, **environment: str) -> None:
        self._daemons.spawn(name, self._words(words, *options, **environment), dict(os.environ), f"{name}.log")
