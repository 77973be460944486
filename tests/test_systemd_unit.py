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
from pipeline.commands.arguments import COMMANDS
from pipeline.config.sections import load_config
from tests.parts import do_without

DEPLOY = Path(__file__).parents[1] / "deploy" / "systemd"
UNIT = "fleetpulse-agent.service"
DROP_INS = sorted(DEPLOY.glob(f"{UNIT}.d/*.conf.example"))
TIGHT, WITH_RIGHTS, SERVER = 25, 35, 20
"""Most exposure, in tenths: of the unit itself (the goal is 2.5), with every optional right, and of other units."""
OTHERS = sorted(path.name for path in DEPLOY.glob("*.service") if path.name != UNIT)


@pytest.fixture
def analyze(tmp_path: Path) -> Path:
    """The unit in a new folder, with a command that exists on this machine."""
    if shutil.which("systemd-analyze") is None:
        do_without("systemd", "no systemd-analyze here; install the package systemd")
    for unit in (UNIT, *OTHERS):
        text = (DEPLOY / unit).read_text()
        (tmp_path / unit).write_text(text.replace("/opt/fleetpulse/bin/fleetpulse", sys.executable))
    return tmp_path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def install(folder: Path, drop_ins: list[Path]) -> None:
    """Installs drop-ins as an administrator would."""
    (folder / f"{UNIT}.d").mkdir()
    for example in drop_ins:
        shutil.copy(example, folder / f"{UNIT}.d" / example.name.removesuffix(".example"))


def exposure_level(folder: Path, threshold: int, unit: str = UNIT) -> float:
    done = run("security", "--offline=yes", "--no-pager", f"--threshold={threshold}", folder / unit)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert done.returncode == 0, done.stdout
    return float(found[1])


def test_the_unit_reaches_its_security_score(analyze: Path) -> None:
    assert exposure_level(analyze, TIGHT) <= TIGHT / 10


@pytest.mark.parametrize("unit", OTHERS)
def test_the_units_of_the_server_reach_their_security_score(analyze: Path, unit: str) -> None:
    assert len(OTHERS) == 3
    assert exposure_level(analyze, SERVER, unit) <= SERVER / 10


@pytest.mark.parametrize("unit", [UNIT, *OTHERS])
def test_systemd_understands_every_line_of_the_unit(analyze: Path, unit: str) -> None:
    done = run("verify", "--man=no", analyze / unit)
    assert (done.returncode, systemd_messages(done)) == (0, [])


@pytest.mark.parametrize("unit", [UNIT, *OTHERS])
def test_every_unit_is_a_command_with_a_watchdog_and_does_not_restart_on_a_bad_configuration(unit: str) -> None:
    lines = (DEPLOY / unit).read_text().splitlines()
    command = re.search(
        r"ExecStart=/opt/fleetpulse/bin/fleetpulse (\w+) --config /etc/fleetpulse/fleetpulse.toml", "\n".join(lines)
    )
    assert command is not None
    assert command[1] in COMMANDS
    assert {"Type=notify", "RestartPreventExitStatus=2", "Restart=always"} <= set(lines)
    assert any(line.startswith("WatchdogSec=") for line in lines)


@pytest.mark.parametrize("unit", OTHERS)
def test_variables_of_units_are_keys_and_secrets_come_as_credentials(unit: str, tmp_path: Path) -> None:
    text = (
        (DEPLOY / unit).read_text().replace(f"/run/credentials/{unit}", str(tmp_path))
    )  # since systemd 247; %d is newer
    load_config(None, dict(re.findall(r"^Environment=(FLEETPULSE__\w+)=(.*)", text, re.MULTILINE)))
    loaded = re.findall(r"^LoadCredential=([\w.]+):/etc/fleetpulse/", text, re.MULTILINE)
    named = re.findall(rf"^Environment=FLEETPULSE__\w+_FILE={tmp_path}/([\w.]+)", text, re.MULTILINE)
    assert loaded == named


@pytest.mark.parametrize("unit", [UNIT, *OTHERS])
def test_no_unit_asks_for_a_change_of_itself_which_an_upgrade_undoes(unit: str) -> None:
    """Agents whose password was set up so ended with exit code 2 after the next `dpkg -i`."""
    text = (DEPLOY / unit).read_text()
    assert re.findall(r"^#\w+=.*", text, re.MULTILINE) == []
    assert "take away" not in text


def test_the_guides_hand_secrets_out_by_drop_ins_that_are_whole() -> None:
    """Each names a file below /etc/systemd/system, and hands out every copy that a key or variable of it names."""
    kafka, login = (text[text.index("\n## Login") :] for text in map(read_guide, ("kafka.md", "dashboard.md")))
    role = (DEPLOY.parent / "ansible/roles/fleetpulse/tasks/credentials.yml").read_text()
    lines = re.findall(r"^ +((?:LoadCredential|Environment)=.*)", kafka, re.MULTILINE)
    assert [line.replace("fleetpulse-agent", "{{ item }}") for line in lines] == re.findall(
        r"^ +((?:LoadCredential|Environment)=.*kafka.password)$", role, re.MULTILINE
    )
    for text in (kafka, login, read_guide("security.md")):
        handed_out = re.findall(r"LoadCredential=([\w.-]+):/etc/fleetpulse/", text)
        assert set(re.findall(r"/run/credentials/fleetpulse-\w+\.service/([\w.-]+)", text)) <= set(handed_out)
        assert re.search(r"/etc/systemd/system/fleetpulse-\w+\.service\.d/\w+\.conf", text)


def read_guide(name: str) -> str:
    return (DEPLOY.parents[1] / "docs" / name).read_text()


@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.glob("*.sysusers.conf")))
def test_users_of_units_are_made(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-sysusers") is None:
        do_without("systemd", "no systemd-sysusers here; install the package systemd")
    (tmp_path / "etc").mkdir()
    done = subprocess.run(["systemd-sysusers", f"--root={tmp_path}", DEPLOY / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = {line.split(":")[0] for line in (tmp_path / "etc/passwd").read_text().splitlines()}
    units = [UNIT] if "agent" in name else OTHERS
    users = re.findall(r"^User=(\S+)", "\n".join((DEPLOY / unit).read_text() for unit in units), re.MULTILINE)
    assert users
    assert set(users) <= made


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
    page = (DEPLOY.parents[1] / "docs/agent.md").read_text()
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
    done = subprocess.run(words, cwd=DEPLOY.parents[1], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3)")
    assert (done.stdout, done.stderr) == ("well\n", "")


def test_a_pipeline_without_a_broker_may_write_into_the_spool_that_it_reads_and_starts_after_its_agent() -> None:
    """Under a running systemd: benchmarks/installation.py, one-host."""
    text = (DEPLOY / "fleetpulse-pipeline.service").read_text()
    (spool,) = re.findall(r"^Environment=FLEETPULSE__SPOOL__DIRECTORY=(\S+)$", text, re.MULTILINE)
    (writable,) = re.findall(r"^ReadWritePaths=-(\S+)$", text, re.MULTILINE)
    assert Path(writable) in Path(spool).parents
    (after,) = re.findall(r"^After=(.*)$", text, re.MULTILINE)
    assert UNIT in after.split()
