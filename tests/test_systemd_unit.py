"""The agent's systemd unit and its drop-ins, checked by systemd itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agents.collectors.jobs.jobs import Jobs
from agents.collectors.training import agent_socket
from agents.node.health import status_file
from tests.parts import do_without

DEPLOY = Path(__file__).parents[1] / "deploy"
UNIT = "fleetpulse-agent.service"
DROP_INS = sorted(DEPLOY.glob(f"{UNIT}.d/*.conf.example"))
TIGHT, WITH_RIGHTS = 25, 35
"""Most exposure, in tenths: of the unit itself (the goal is 2.5), and with every optional right."""


@pytest.fixture
def analyze(tmp_path: Path) -> Path:
    """The unit in a new folder, with a command that exists on this machine."""
    if shutil.which("systemd-analyze") is None:
        do_without("systemd", "no systemd-analyze here; install the package systemd")
    text = (DEPLOY / UNIT).read_text()
    (tmp_path / UNIT).write_text(text.replace("/opt/fleetpulse/bin/fleetpulse", sys.executable))
    return tmp_path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def install(folder: Path, drop_ins: list[Path]) -> None:
    """Installs drop-ins as an administrator would."""
    (folder / f"{UNIT}.d").mkdir()
    for example in drop_ins:
        shutil.copy(example, folder / f"{UNIT}.d" / example.name.removesuffix(".example"))


def exposure_level(folder: Path, threshold: int) -> float:
    done = run("security", "--offline=yes", "--no-pager", f"--threshold={threshold}", folder / UNIT)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert done.returncode == 0, done.stdout
    return float(found[1])


def test_the_unit_reaches_its_security_score(analyze: Path) -> None:
    assert exposure_level(analyze, TIGHT) <= TIGHT / 10


def test_systemd_understands_every_line_of_the_unit(analyze: Path) -> None:
    done = run("verify", "--man=no", analyze / UNIT)
    assert (done.returncode, systemd_messages(done)) == (0, [])


@pytest.mark.parametrize("drop_in", DROP_INS, ids=lambda path: path.name)
def test_each_drop_in_adds_a_privilege_that_systemd_understands(analyze: Path, drop_in: Path) -> None:
    before = exposure_level(analyze, 100)
    install(analyze, [drop_in])
    done = run("verify", "--man=no", analyze / UNIT)
    assert (done.returncode, systemd_messages(done)) == (0, [])
    assert exposure_level(analyze, 100) > before  # so it was read


def test_with_all_drop_ins_the_unit_is_still_confined(analyze: Path) -> None:
    install(analyze, DROP_INS)
    assert exposure_level(analyze, WITH_RIGHTS) <= WITH_RIGHTS / 10


def systemd_messages(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The messages of systemd about our unit, without those about other units of this machine."""
    return [line for line in done.stderr.splitlines() if "fleetpulse" in line]


def test_every_drop_in_is_documented() -> None:
    page = (DEPLOY.parent / "docs/agent.md").read_text()
    assert DROP_INS
    assert [example.name for example in DROP_INS if example.name not in page] == []


def test_the_unit_removes_nothing_that_collectors_need() -> None:
    """Usual hardening settings that would make signals disappear silently."""
    lines = (DEPLOY / UNIT).read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    taken = {
        "ProtectClock": "adjtimex",
        "PrivateDevices": "NVML",
        "PrivateNetwork": "NICs",
        "PrivateUsers": "CAP_SYSLOG",
    }
    assert {key: why for key, why in taken.items() if settings.get(key) == "yes"} == {}
    assert settings["ProtectKernelLogs"] == "no"
    assert settings["ProcSubset"] == "all"
    assert settings["ProtectProc"] == "default"


def test_shared_files_are_where_the_service_allows_access() -> None:
    """Job facts, which root's prolog writes, must not be in the folder that is removed with the service."""
    lines = (DEPLOY / UNIT).read_text().splitlines()
    assert f"RuntimeDirectory={status_file.RUN_FOLDER.relative_to('/run')}" in lines
    assert "RuntimeDirectoryMode=0755" in lines
    assert Path(agent_socket.SERVICE_SOCKET).parent == status_file.RUN_FOLDER
    assert not Jobs().facts.is_relative_to(status_file.RUN_FOLDER)


UNDER_THE_UNITS_MEMORY_RULE = """
import ctypes, os, sys
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1  # include/uapi/linux/prctl.h, Linux 6.3
if ctypes.CDLL(None).prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0):
    sys.exit(77)
program = "import ctypes, pynvml; from agents.node.agent import run; print('well')"
os.execv(sys.executable, [sys.executable, "-c", program])
"""


def test_the_agent_loads_with_memory_deny_write_execute() -> None:
    """With MemoryDenyWriteExecute; ctypes and NumPy could fail."""
    words = [sys.executable, "-c", UNDER_THE_UNITS_MEMORY_RULE]
    done = subprocess.run(words, cwd=DEPLOY.parent, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3)")
    assert (done.stdout, done.stderr) == ("well\n", "")
