"""A real Slurm on this machine, without systemd: munge, one slurmctld, and nodes in separate PID namespaces.

Each node's slurmd runs in a PID namespace with its own /proc, so that a node sees only its processes, as on a
separate machine. GPUs are dummy character devices (`mknod ... c 1 3`), which is all that Slurm's GRES requires.
The prolog and epilog are ours (deploy/slurm). Needs root and Debian's slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.daemons import DaemonCluster, Daemons, free_ports
from tests.until import until

HOOKS = Path(__file__).parents[1] / "deploy" / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "unshare")
GPUS = 4
READY_S, STOP_S = 30.0, 15.0
"""Chosen: three nodes are idle after 2 s; with a busy machine ten times as long."""
REGISTER_S = 90.0
"""How long nodes may take to register at a slurmctld that was started again (s). Chosen: they do at a third of
SlurmdTimeout, and a busy machine takes four times as long."""
CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge.socket
CredType=cred/munge
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_min_interval=100000
SlurmdTimeout=60
MessageTimeout=10
KillWait=1
UnkillableStepTimeout=25
PrologFlags=Alloc
RebootProgram=/bin/true
Prolog={at}/prolog
Epilog={at}/epilog
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class SlurmError(Exception):
    """Slurm is not available, or did not start; the text gives the reason."""


def missing() -> str:
    """Returns the missing part without which no cluster can start; empty if nothing is missing."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)} here: run 'make parts'"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


GHOSTS = "ghost[003-008]"
"""Nodes that no slurmd serves, in a cluster with a topology."""


def save_state(run: Callable[..., str], node: str, state: Path) -> None:
    """Waits until slurmctld has written all changes so far to its folder `state`; a dying one loses the others.

    It writes nodes only when one has changed, so this changes one.
    """
    file = state / "node_state"
    before = file.stat().st_mtime_ns if file.exists() else 0
    run("scontrol", "update", f"NodeName={node}", f"Comment={time.monotonic_ns()}")
    until(lambda: file.exists() and file.stat().st_mtime_ns > before, REGISTER_S)


def read_slurmd_start(run: Callable[..., str], node: str) -> str:
    """Returns when the slurmd of a node started, as slurmctld knows since it registered."""
    return run("scontrol", "-o", "show", "node", node).partition("SlurmdStartTime=")[2].split()[0]


class Cluster(DaemonCluster):
    """`nodes` machines with GPUS GPUs each, named gpu001, gpu002, ... or as in `names`.

    topology: text of topology.conf, over them and GHOSTS.
    """

    def __init__(self, folder: Path, nodes: int = 2, topology: str = "", names: tuple[str, ...] = ()) -> None:
        self.folder, self._topology = folder.resolve(), topology
        self.nodes = names or tuple(f"gpu{number:03d}" for number in range(1, nodes + 1))
        self._daemons = Daemons(self.folder, SlurmError, READY_S, STOP_S)
        self._environment = {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf"}

    # --- commands ----------------------------------------------------------------------------------------------------

    def run(self, *words: str, timeout: float = 60.0) -> str:
        """Returns the output of one of Slurm's commands. Raises SlurmError with its message."""
        done = subprocess.run(
            words, env=self._environment, cwd=self.folder, capture_output=True, text=True, timeout=timeout
        )
        if done.returncode:
            raise SlurmError(f"{words[0]}: status {done.returncode}: {done.stderr[-2000:]}{self._daemons.tails()}")
        return done.stdout

    def batch(self, script: str, *options: str) -> str:
        """Submits a job and returns its id."""
        file = self.folder / f"batch-{time.monotonic_ns()}.sh"
        file.write_text(f"#!/bin/sh\n{script}\n")
        return self.run("sbatch", "--parsable", "--output=job-%j.log", *options, str(file)).strip()

    def proc(self, node: str) -> Path:
        """Returns /proc of the node."""
        parent = self._daemons.running[node].pid
        child = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0]
        return Path(f"/proc/{child}/root/proc")

    def facts(self, node: str) -> Path:
        """Returns the folder in which our prolog writes on that node."""
        return self.folder / f"facts-{node}"

    def kill_node(self, node: str) -> None:
        """Kills all of a node with signal 9: slurmd and what runs there."""
        self._daemons.kill(node)

    def start_node(self, node: str, *options: str) -> None:
        """Starts a node again, and waits until it registers. `-b`: its slurmd says that the machine has just booted."""
        before = read_slurmd_start(self.run, node)
        if node in self._daemons.running:
            self._daemons.kill(node)
        until(lambda: before == "None" or time.strftime("%Y-%m-%dT%H:%M:%S") > before)  # Slurm knows seconds
        self._start_slurmd(node, *options)
        until(lambda: read_slurmd_start(self.run, node) not in (before, "None"), REGISTER_S)

    def kill_controller(self) -> None:
        """Kills slurmctld."""
        self._daemons.kill("slurmctld")

    def save_state(self) -> None:
        """Waits until slurmctld has written all changes so far; it loses the others when it is killed."""
        save_state(self.run, self.nodes[0], self.folder / "state")

    def start_controller(self) -> None:
        """Starts slurmctld again with its state, and waits until it answers."""
        self._spawn("slurmctld", "slurmctld", "-D")
        self._daemons.wait("slurmctld", self._has_all_nodes, REGISTER_S)

    def _has_all_nodes(self) -> bool:
        """Whether slurmctld answers and every node has registered; a node that has not cannot be resumed."""
        words = ["sinfo", "-h", "-N", "-o", "%T"]
        states = subprocess.run(words, env=self._environment, capture_output=True, text=True).stdout.split()
        return len(states) == len(self.nodes) and not any("unk" in state or "*" in state for state in states)

    # --- start and stop ----------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("state", "dev", *(f"spool-{node}" for node in self.nodes), *(f"facts-{n}" for n in self.nodes)):
            (self.folder / name).mkdir()
        for number in range(GPUS):
            os.mknod(self.folder / "dev" / f"nvidia{number}", 0o666 | 0o020000, os.makedev(1, 3))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "hooks.conf").write_text("FLEETPULSE=/nonexistent\n")
        for hook in ("prolog", "epilog"):
            file, at = self.folder / hook, self.folder
            file.write_text(
                f"#!/bin/sh\nexport FLEETPULSE_JOBS_DIR={at}/facts-$SLURMD_NODENAME\n"
                f"export FLEETPULSE_HOOKS_CONF={at}/hooks.conf\nexec {HOOKS / hook}.sh\n"
            )
            file.chmod(0o755)
        ports = free_ports(len(self.nodes) + 1)
        host = socket.gethostname().partition(".")[0]
        lines = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 CoresPerSocket=8 "
            f"RealMemory=500 Gres=gpu:{GPUS}"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        )
        if self._topology:
            (self.folder / "topology.conf").write_text(self._topology)
            ghosts = f"NodeName={GHOSTS} NodeHostname={GHOSTS} NodeAddr=127.0.0.1 CPUs=8 RealMemory=500 State=DOWN"
            lines = f"TopologyPlugin=topology/tree\n{lines}\n{ghosts}"
        conf = CONF.format(host=host, port=ports[0], at=self.folder, nodes=lines)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/dev/nvidia[0-{GPUS - 1}]\n")

    def _start(self) -> None:
        at = self.folder
        self._spawn(
            "munged",
            *("munged", "--foreground", "--force", f"--socket={at}/munge.socket", f"--key-file={at}/munge.key"),
            *(f"--log-file={at}/munged.log", f"--pid-file={at}/munged.pid", f"--seed-file={at}/munged.seed"),
        )
        self._daemons.wait("munge", lambda: (at / "munge.socket").exists())
        self._spawn("slurmctld", "slurmctld", "-D", "-c")
        for node in self.nodes:
            self._start_slurmd(node)
        self._daemons.wait("nodes", lambda: self._idle() == len(self.nodes))

    def _start_slurmd(self, node: str, *options: str) -> None:
        apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
        # the first process of a node must reap orphans, or a step never ends; slurmd does not
        self._spawn(node, *apart, "bash", "-c", f"{' '.join(('slurmd', '-D', *options, '-N', node))} & wait")

    def _idle(self) -> int:
        done = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=self._environment, capture_output=True, text=True
        )
        return int(done.stdout.strip() or 0) if done.returncode == 0 else 0

    def _spawn(self, name: str, *words: str) -> None:
        self._daemons.spawn(name, words, self._environment, f"{name}.out")

    def close(self) -> None:
        """Stops the daemons; the end of a node's first process ends all of the node."""
        self._daemons.close(gently=self._daemons.running.keys() - set(self.nodes))
