"""The Slurm hooks with a real Slurm: they fail open; an unfit node is drained, and its job requeued."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agents.node.health.report import NodeHealth, open_health
from pipeline.config.sections import load_config
from pipeline.model.records import Event, Origin
from tests.parts import do_without
from tests.slurm_cluster import HOOKS, Cluster, SlurmError, missing

ROOT = Path(__file__).parents[1]
XID = {"xid": 79, "name": "GPU has fallen off the bus", "severity": "critical", "action": "reboot node"}
FIT, UNFIT, NO_COMMAND, FROZEN, CRASHES, SICK, LOUD, IDLE = (f"gpu{n:03d}" for n in range(1, 9))
"""Purpose of each node: the status of its agent, or the fault of its check."""
TIMEOUT_S = 2


class Site:
    """A cluster whose nodes have our hooks, each with an agent's status or its own check."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.config = folder / "fleetpulse.toml"
        self.config.write_text(f"[spool]\ndirectory = '{folder}/spool'\n")
        command = self.program("fleetpulse", f'exec {sys.executable} {ROOT}/fleetpulse.py "$@"')
        hanging_program, crashes = (
            self.program("hanging_program", "exec sleep 600"),
            self.program("crashes", "kill -SEGV $$"),
        )
        loud = self.program("loud", "echo CRITICAL; echo 'CRITICAL: it broke - x' >&2; exit 2")
        lines = [f"FLEETPULSE={command}", f"CONFIG={self.config}", f"TIMEOUT={TIMEOUT_S}"]
        lines += [f"export SLURM_CONF={slurm.folder}/slurm.conf"]  # Slurm passes it to a prolog, not to a health check
        lines += ["export FLEETPULSE__AGENT__NODE=$SLURMD_NODENAME", "case $SLURMD_NODENAME in"]
        lines += [f"{NO_COMMAND}) FLEETPULSE=/nowhere/fleetpulse ;;", f"{FROZEN}) FLEETPULSE={hanging_program} ;;"]
        self._silent = socket.create_server(("127.0.0.1", 0))  # an API that accepts the connection and sends nothing
        url = f"http://127.0.0.1:{self._silent.getsockname()[1]}"
        lines += [f"{SICK}) export FLEETPULSE__CHECK__API_URL={url} ;;"]
        lines += [f"{CRASHES}) FLEETPULSE={crashes} ;;", f"{LOUD}) FLEETPULSE={loud} ;;", "esac"]
        (slurm.folder / "hooks.conf").write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        self._silent.close()

    def program(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return file

    def write_status(self, node: str, *events: Event) -> NodeHealth:
        """Writes the status of a node's agent after these events."""
        (self.folder / "spool" / node).mkdir(parents=True, exist_ok=True)
        origin = Origin("local", node, bytes(16), False)
        health = open_health(load_config(self.config), origin, lambda *_: None, {})
        health.update((), events, (), 0)
        return health

    def node(self, name: str) -> str:
        return self.slurm.run("scontrol", "--oneliner", "show", "node", name)

    def job(self, job: str) -> str:
        return self.slurm.run("scontrol", "--oneliner", "show", "job", job)

    def wait(self, what: Callable[[], bool], job: str = "") -> None:
        until = time.monotonic() + 90  # on a busy machine Slurm's cycles take long
        while not what():
            assert time.monotonic() < until, (self.slurm.run("sinfo", "-R"), self.job(job) if job else "")
            time.sleep(0.1)  # Slurm is polled: there is no event to wait for


class HookedCluster(Cluster):
    """A cluster with the settings that docs/install.md requires beside prolog and epilog."""

    def _configure(self) -> None:
        super()._configure()
        with (self.folder / "slurm.conf").open("a") as conf:
            conf.write("SchedulerParameters=nohold_on_prolog_fail,sched_interval=2\n")  # it is 60 s otherwise
            conf.write(f"HealthCheckProgram={health_check(self)}\nHealthCheckInterval=2\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if lacking := missing():
        do_without("slurm", lacking)
    folder = tmp_path_factory.mktemp("hooks")
    try:
        with HookedCluster(folder / "lab", nodes=8) as slurm:
            site = Site(slurm, folder)
            yield site
            site.close()
    except SlurmError as error:
        do_without("slurm", str(error))


def health_check(slurm: Cluster) -> Path:
    """Our hook, on one node alone: on the others it would drain before their jobs start."""
    file = slurm.folder / "health_check"
    conf = f"export FLEETPULSE_HOOKS_CONF={slurm.folder}/hooks.conf\n"
    file.write_text(f"#!/bin/sh\n[ $SLURMD_NODENAME = {IDLE} ] || exit 0\n{conf}exec {HOOKS}/health_check.sh\n")
    file.chmod(0o755)
    return file


@contextmanager
def agent(site: Site, node: str) -> Iterator[None]:
    """A real agent of that node."""
    environ = {**os.environ, "FLEETPULSE__AGENT__NODE": node}
    command = [sys.executable, str(ROOT / "fleetpulse.py"), "agent", "--config", str(site.config)]
    with (site.folder / f"{node}.log").open("w") as log, subprocess.Popen(command, env=environ, stderr=log) as process:
        try:
            site.wait(lambda: (site.folder / "spool" / node / "status.json").exists())
            yield
        finally:
            process.terminate()


@pytest.mark.slurm
def test_a_job_runs_on_a_healthy_node_and_its_facts_exist_while_it_runs(site: Site) -> None:
    with agent(site, FIT):
        job = site.slurm.batch("while [ ! -e done ]; do sleep 0.1; done", "-w", FIT, "--gres=gpu:2", "-J", "train")
        site.wait(lambda: "JobState=RUNNING" in site.job(job), job)
        facts = site.slurm.facts(FIT) / f"{job}.env"
        site.wait(facts.exists)
        facts_of_job = dict(line.split("=", 1) for line in facts.read_text().splitlines())
        assert facts_of_job["SLURM_JOB_ID"] == job
        assert facts_of_job["SLURM_JOB_GPUS"] == "0,1"
        assert all(name.startswith("SLURM") for name in facts_of_job)
        assert stat.S_IMODE(facts.stat().st_mode) == 0o644
        (site.slurm.folder / "done").touch()
        site.wait(lambda: not facts.exists())
    assert "DRAIN" not in site.node(FIT)


@pytest.mark.slurm
def test_an_unfit_node_is_drained_with_our_reason_and_its_job_runs_elsewhere(site: Site) -> None:
    site.write_status(UNFIT, Event(1, f"gpu:{UNFIT}.3", "xid", XID))
    job = site.slurm.batch("true", "--requeue", "-w", UNFIT)
    site.wait(lambda: "DRAIN" in site.node(UNFIT), job)
    assert f"Reason=fleetpulse: gpu:{UNFIT}.3 XID 79 GPU has fallen off the bus: reboot node" in site.node(UNFIT)
    site.wait(lambda: "Restarts=1" in site.job(job), job)
    assert list(site.slurm.facts(UNFIT).iterdir()) == []
    site.wait(
        lambda: "JobState=PENDING Reason=BeginTime" in site.job(job), job
    )  # before that, its requeue sets it again
    site.slurm.run("scontrol", "update", f"JobId={job}", f"ReqNodeList={FIT}", "StartTime=now")  # otherwise after 2 min
    site.wait(lambda: "JobState=COMPLETED" in site.job(job), job)


@pytest.mark.slurm
@pytest.mark.parametrize("node", [NO_COMMAND, FROZEN, CRASHES, LOUD, SICK])
def test_a_job_runs_if_the_check_is_missing_hangs_crashes_prints_garbage_or_has_no_agent(site: Site, node: str) -> None:
    assert site.slurm.run("srun", "-w", node, "echo", "ran") == "ran\n"
    assert "DRAIN" not in site.node(node)


@pytest.mark.slurm
def test_slurm_s_own_health_check_drains_an_idle_node(site: Site) -> None:
    site.write_status(IDLE, Event(1, f"gpu:{IDLE}.3", "gpu_lost", {}))
    site.wait(lambda: "DRAIN" in site.node(IDLE))
    assert f"Reason=fleetpulse: gpu:{IDLE}.3 lost, it does not respond to its driver" in site.node(IDLE)


def hook(name: str, folder: Path, conf: str, **variables: str) -> tuple[int, float]:
    """Runs a hook like slurmd, without PATH: (exit code, seconds until its output ended)."""
    file = folder / "hooks.conf"
    file.write_text(conf)
    environ = {"FLEETPULSE_HOOKS_CONF": str(file), "FLEETPULSE_JOBS_DIR": str(folder / "jobs"), "SLURMD_NODENAME": "n1"}
    began = time.monotonic()
    done = subprocess.run([str(HOOKS / name)], env=environ | variables, capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"", b"")
    return done.returncode, time.monotonic() - began


def hanging_program(folder: Path, name: str, output: str = "") -> Path:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{f'echo {output!r}' if output else ''}\nexec sleep 600\n")
    file.chmod(0o755)
    return file


@pytest.mark.slow
def test_the_prolog_ends_a_second_after_the_timeout_at_the_latest_also_if_slurm_itself_hangs(tmp_path: Path) -> None:
    output = hanging_program(tmp_path, "output", "CRITICAL - gpu:n1.0 lost | x=1")
    conf = f"FLEETPULSE={output}\nTIMEOUT=1\nSCONTROL={hanging_program(tmp_path, 'scontrol')}\n"
    code, took = hook("prolog.sh", tmp_path, conf, SLURM_JOB_ID="7")
    assert code == 1
    assert took < 1 + 1 + 1  # the last for a busy machine
    code, took = hook(
        "prolog.sh", tmp_path, f"FLEETPULSE={hanging_program(tmp_path, 'silent')}\nTIMEOUT=1\n", SLURM_JOB_ID="7"
    )
    assert code == 0
    assert took < 1 + 1 + 1


@pytest.mark.parametrize("name", ["prolog.sh", "epilog.sh", "health_check.sh"])
@pytest.mark.parametrize(
    "conf",
    ["FLEETPULSE=\n", "if then\n", "TIMEOUT=x\nFLEETPULSE=/dev/null\n", "JOBS=/proc/no\n", "FLEETPULSE=/bin/false\n"],
)
def test_no_setting_makes_a_hook_fail(tmp_path: Path, name: str, conf: str) -> None:
    file = tmp_path / "hooks.conf"
    file.write_text(conf)
    environ = {"FLEETPULSE_HOOKS_CONF": str(file), "FLEETPULSE_JOBS_DIR": str(tmp_path / "jobs"), "SLURM_JOB_ID": "7"}
    assert subprocess.run([str(HOOKS / name)], env=environ, capture_output=True, timeout=60).returncode == 0


def test_a_dry_run_drains_nothing(tmp_path: Path) -> None:
    output = hanging_program(tmp_path, "output", "CRITICAL - gpu:n1.0 lost | x=1")
    called = tmp_path / "called"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* >> {called}\n")
    scontrol.chmod(0o755)
    conf = f"FLEETPULSE={output}\nTIMEOUT=1\nSCONTROL={scontrol}\n"
    assert hook("prolog.sh", tmp_path, f"{conf}DRAIN=no\n", SLURM_JOB_ID="7")[0] == 0
    assert not called.exists()
    assert (tmp_path / "jobs" / "7.env").exists()
    assert hook("health_check.sh", tmp_path, conf)[0] == 0
    assert "Reason=fleetpulse: gpu:n1.0 lost" in called.read_text()


def test_the_health_check_keeps_the_reason_of_an_earlier_drain(tmp_path: Path) -> None:
    output = hanging_program(tmp_path, "output", "CRITICAL - gpu:n1.0 lost | x=1")
    called, scontrol = tmp_path / "called", tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* >> {called}\necho NodeName=n1 State=IDLE+DRAIN Reason=disk\n")
    scontrol.chmod(0o755)
    assert hook("health_check.sh", tmp_path, f"FLEETPULSE={output}\nTIMEOUT=1\nSCONTROL={scontrol}\n")[0] == 0
    assert called.read_text() == "--oneliner show node n1\n"


@pytest.mark.parametrize("name", ["prolog.sh", "epilog.sh", "health_check.sh"])
def test_a_hook_behind_a_symlink_finds_its_settings_and_one_without_them_reports_that(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "link").symlink_to(HOOKS / name)
    unfit = tmp_path / "unfit"
    unfit.write_text(f"#!/bin/sh\n>{tmp_path}/asked; echo 'CRITICAL - lost | x=1'\n")
    unfit.chmod(0o755)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "7.env").write_text("")
    code, _ = hook(str(tmp_path / "link"), tmp_path, f"FLEETPULSE={unfit}\nSCONTROL=/bin/true\n", SLURM_JOB_ID="7")
    assert code == (1 if name == "prolog.sh" else 0)
    assert (tmp_path / "asked").exists() == (name != "epilog.sh")
    assert (tmp_path / "jobs" / "7.env").exists() == (name == "health_check.sh")
    alone = tmp_path / name
    alone.write_bytes((HOOKS / name).read_bytes())
    alone.chmod(0o755)
    done = subprocess.run([str(alone)], env={}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == f"{alone}: no {tmp_path}/hooks.sh: this hook does nothing\n"


def test_facts_contain_no_more_than_allowed(tmp_path: Path) -> None:
    """No line breaks that would forge another fact, no unlimited text, nothing of the job's own environment."""
    name, conf = "a\nSLURM_JOB_UID=0", "FLEETPULSE=/bin/false\n"
    more = {"SLURM_JOB_NAME": name, "SLURM_JOB_NODELIST": "n" * 5000, "SECRET": "x", "SLURM_JOB_USER": "$(id) `id`"}
    assert hook("prolog.sh", tmp_path, conf, SLURM_JOB_ID="7", **more)[0] == 0
    assert (tmp_path / "jobs/7.env").read_text() == "SLURM_JOB_ID=7\nSLURM_JOB_USER=$(id) `id`\nSLURMD_NODENAME=n1\n"
    assert hook("epilog.sh", tmp_path, conf, SLURM_JOB_ID="7")[0] == 0
    assert hook("prolog.sh", tmp_path, conf, SLURM_JOB_ID="../7")[0] == 0
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.slow
def test_a_hanging_check_is_killed_and_leaves_no_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = tmp_path / "hangs"
    hangs.write_text(f"#!/bin/sh\necho $$ >{pid}\nexec sleep 30\n")
    hangs.chmod(0o755)
    assert hook("prolog.sh", tmp_path, f"FLEETPULSE={hangs}\nTIMEOUT=1\n", SLURM_JOB_ID="7")[0] == 0
    left = Path(f"/proc/{pid.read_text().strip()}/cmdline")
    until = time.monotonic() + 5
    while left.exists() and left.read_bytes():  # an ended process has no command line, and soon no folder
        assert time.monotonic() < until
        time.sleep(0.02)
