"""Doctor's checks of collectors: absent hardware is information, a missing privilege a warning, a fault a failure."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agents.collector import Reading
from agents.collectors.registry import COLLECTORS
from agents.node import doctor
from agents.node.once import CollectorReport
from pipeline.config.sections import Config
from pipeline.model.records import Event
from tests.agents import nvml_stub

ROOT = Path(__file__).parents[2]
WELL = CollectorReport("nvme", 1, (Reading("disk", ("disk:n1.nvme0",), {"disk.temperature": np.array([300.0])}),))
NOTHING: frozenset[str] = frozenset()


def test_a_collector_with_readings_is_ok_and_states_how_many() -> None:
    found = doctor.check_report(WELL)
    assert (found.name, found.state, found.found) == ("collector nvme", "ok", "1 signals of 1 entity")


@pytest.mark.parametrize(
    ("reason", "state", "mend"),
    [
        ("no RDMA device below /sys/class/infiniband: no RDMA adapter", "info", "ibv_devinfo"),
        ("no libnvidia-ml.so.1: no NVIDIA driver", "info", "nvidia-smi"),
        ("no NVIDIA driver", "info", "nvidia-smi"),
        ("/sys/devices/system/edac/mc: no memory controller; wanted the EDAC driver", "info", "modprobe"),
        (
            "/run/dbus/system_bus_socket: No such file; wanted the system bus of a host with systemd",
            "info",
            "systemctl",
        ),
        ("/dev/nvidiactl: Permission denied", "warn", "ls -l /dev/nvidia*"),
        ("/dev/kmsg: not readable: add CAP_SYSLOG", "warn", "deploy/systemd/fleetpulse-agent.service"),
        ("energy_uj: not readable; add CAP_DAC_READ_SEARCH", "warn", "AmbientCapabilities=CAP_DAC_READ_SEARCH"),
        ("something else entirely", "info", ""),
    ],
)
def test_an_absent_source_is_information_and_an_unreadable_one_a_warning_each_with_its_fix(
    reason: str, state: str, mend: str
) -> None:
    found = doctor.check_report(CollectorReport("kernel_log", 1, (), f"no data: {reason}"))
    assert found.state == state
    assert mend in found.fix


@pytest.mark.parametrize("trouble", ["hung: no answer within 5 s", "fault: OSError: bus error"])
def test_a_collector_that_hangs_or_fails_fails_the_check(trouble: str) -> None:
    found = doctor.check_report(CollectorReport("host", 1, (), trouble))
    assert (found.state, found.found) == ("fail", trouble)


def test_one_for_which_no_process_starts_says_nothing_of_an_agent_or_its_hardware() -> None:
    found = doctor.check_report(CollectorReport("nvml", 1, (), "fault: no process for it: timed out"))
    assert found.state == "fail"
    assert "not read" in found.meaning
    assert "uptime" in found.fix
    assert "dmesg" not in found.fix


def test_doctor_reads_collectors_without_the_start_of_an_interpreter() -> None:
    """It took longer than its timeout on a host with a load of 40, and failed four collectors without a fault."""
    program = """from agents.node import doctor
from agents.node.workers import processes
from pipeline.commands.doctor import run_checks
from pipeline.config.sections import Config
def start(): raise OSError("a fresh interpreter")
processes._start_fork_server = start
for check in run_checks(Config(), [doctor.prepare_collector_checks(Config())]):
    print(check.state, check.name, check.found)
"""
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert " collector nvml " in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("fail")] == []


# --- permissions -----------------------------------------------------------------------------------------------------

SYSTEM = (
    "Permission denied",
    "Operation not permitted",
    "[Errno 13] Permission denied: '/x'",
    "Insufficient Permissions",
)
REFUSALS = (
    "the NVIDIA driver refuses us: give this user read and write access to /dev/nvidiactl and /dev/nvidia*",
    *(f"no NVIDIA driver: {text}" for text in SYSTEM),
    *(f"the NVIDIA driver does not count its GPUs: {text}" for text in SYSTEM),
    *(f"the NVIDIA driver gives no event set: {text}" for text in SYSTEM),
    *(f"the NVIDIA driver does not start: {text}" for text in SYSTEM),
    *(f"/dev/ipmi0: {text}" for text in SYSTEM),
    *(f"adjtimex: {text}; wanted a kernel that lets us read it" for text in SYSTEM),
    *(f"/proc/self/mountinfo: {text}; wanted the list of mounts: mount /proc" for text in SYSTEM),
    *(f"/run/dbus/system_bus_socket: {text}; wanted the system bus of a host with systemd" for text in SYSTEM),
    "/run/dbus/system_bus_socket: org.freedesktop.DBus.Error.AccessDenied; wanted an answer of systemd",
    "/run/dbus/system_bus_socket: the bus refuses user 990: b'REJECTED'; wanted the system bus of a host with systemd",
    "/dev/ipmi0: not open to us: add CAP_DAC_OVERRIDE, or give us the file",
    "/dev/kmsg: not readable: add CAP_SYSLOG",
    "/sys/x/energy_uj: not readable: it is for root alone since CVE-2020-8694; add CAP_DAC_READ_SEARCH",
    "/dev/nvme0: not permitted: add CAP_SYS_ADMIN",
)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("reason", REFUSALS)
def test_a_refused_permission_is_a_warning_with_a_fix_and_a_failure_if_it_is_a_fault(reason: str) -> None:
    for state, judged in (("no data", "warn"), ("fault", "fail")):
        found = doctor.check_report(CollectorReport("ipmi", 1, (), f"{state}: {reason}"))
        assert (found.state, bool(found.fix)) == (judged, True)


def texts_of_permissions() -> list[str]:
    """Every message of a collector that mentions a permission; values inserted at run time are `x`."""
    found = []
    for path in [*(ROOT / "agents/collectors").rglob("*.py"), *(ROOT / "agents/sources").rglob("*.py")]:
        for part in ast.walk(ast.parse(path.read_text())):
            if isinstance(part, ast.Constant | ast.JoinedStr):
                pieces = part.values if isinstance(part, ast.JoinedStr) else [part]
                whole = "".join(str(p.value) if isinstance(p, ast.Constant) else "x" for p in pieces)
                found += (
                    [whole] if re.search(r"CAP_[A-Z]|not permitted|refuses us|permission|not readable", whole) else []
                )
    return [text for text in found if "\n" not in text and ": " in text]


def test_every_message_of_a_collector_about_a_permission_is_a_warning() -> None:
    found = texts_of_permissions()
    assert len(found) >= 4
    judged = {text: doctor.check_report(CollectorReport("ipmi", 1, (), f"no data: {text}")).state for text in found}
    assert {text: state for text, state in judged.items() if state != "warn"} == {}


# --- GPUs that are lost ----------------------------------------------------------------------------------------------

NAN = float("nan")


def gpus(*events: Event, **columns: list[float]) -> CollectorReport:
    """A reading of three GPUs."""
    names = ("gpu:n1.0", "gpu:n1.1", "gpu:n1.2")
    found = {f"gpu.{name}": np.array(values) for name, values in columns.items()}
    return CollectorReport("nvml", 1, (Reading("gpu", names, found, tuple(events)),))


WELL_GPUS: dict[str, list[float]] = {"present": [1, 1, 1], "power": [300, 300, 300], "recovery_action": [0, NAN, 0]}


@pytest.mark.parametrize(
    ("report", "output"),
    [
        (gpus(**WELL_GPUS | {"present": [1, 0, 1]}), "gpu:n1.1: lost"),
        (
            gpus(**WELL_GPUS | {"power": [300, 300, NAN], "recovery_action": [0, 0, NAN]}),
            "gpu:n1.2: silent: all its signals are missing",
        ),
        (
            gpus(**WELL_GPUS | {"recovery_action": [2, 0, 0]}),
            "gpu:n1.0: recovery action required by its driver: reboot node",
        ),
        (
            gpus(Event(1, "gpu:n1.1", "recovery_action", {"to": 9}), **WELL_GPUS),
            "gpu:n1.1: recovery action required by its driver: 9",
        ),
        (
            gpus(Event(1, "gpu:n1.2", "gpu_lost", {"pci": "0000:19:00.0", "serial": "1650"}), **WELL_GPUS),
            "gpu:n1.2: lost: no response to its driver (pci 0000:19:00.0, serial 1650)",
        ),
        (
            gpus(
                Event(
                    1,
                    "node:n1",
                    "gpu_count",
                    {"expected": 4, "present": 3, "missing": ["0000:1a:00.0"], "source": "nvml"},
                )
            ),
            "node:n1: 3 of 4 GPUs by nvml, missing: 0000:1a:00.0",
        ),
    ],
)
def test_a_gpu_that_failed_fails_the_check_and_is_named(report: CollectorReport, output: str) -> None:
    found = doctor.check_report(report)
    assert found.state == "fail"
    assert found.found.startswith(output)
    assert found.fix
    assert ";" not in found.found  # the healthy ones are not named


@pytest.mark.parametrize(
    "look",
    [
        gpus(**WELL_GPUS),
        gpus(present=[1, 1, 1], call_latency_max=[0, 0, 0]),
        gpus(Event(1, "gpu:n1.1", "recovery_action", {"from": 1, "to": 0}), **WELL_GPUS),
        gpus(Event(1, "node:n1", "gpu_count", {"expected": 3, "present": 3, "missing": []}), **WELL_GPUS),
        CollectorReport("xid", 1, (Reading("gpu", (), {}),)),
    ],
)
def test_responding_gpus_are_ok(look: CollectorReport) -> None:
    assert doctor.check_report(look).state == "ok"


@pytest.mark.slow
def test_doctor_fails_on_a_node_with_a_lost_gpu(nvml_library: Path, tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(f"[collector.nvml]\npci = '{tmp_path}'\nseen = '{tmp_path}/seen.json'\n")
    line = [sys.executable, "fleetpulse.py", "doctor", "--config", str(tmp_path / "f.toml")]
    states = {}
    for reported in ("", "lost 1"):
        environ = nvml_stub.environment(nvml_library, ["gpus 3", reported])
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=environ)
        states[reported] = next(reported for reported in done.stdout.splitlines() if "collector nvml: " in reported)
    assert " ok " in states[""]
    assert " fail " in states["lost 1"]
    assert ".1: lost: no response to its driver" in states["lost 1"]
    assert done.returncode == 1


# --- privileges -----------------------------------------------------------------------------------------------------


def test_each_privilege_names_its_drop_in() -> None:
    for right in doctor.PRIVILEGES:
        if right.drop_in:
            text = (ROOT / "deploy" / "systemd" / doctor.DROP_INS / f"{right.drop_in}.example").read_text()
            assert doctor.suggest_privilege(right.collector, right.capabilities).startswith(
                f"cp deploy/systemd/{doctor.DROP_INS}/{right.drop_in}"
            )
            assert all(f"AmbientCapabilities={' '.join(right.capabilities)}" in text for _ in "x") or "Groups=" in text
        else:
            unit = (ROOT / "deploy/systemd/fleetpulse-agent.service").read_text()
            assert all(f"AmbientCapabilities={name}" in unit for name in right.capabilities)


def test_every_privilege_belongs_to_an_existing_collector() -> None:
    known = {collector.name for collector in COLLECTORS}
    assert {right.collector for right in doctor.PRIVILEGES} <= known


def test_a_missing_privilege_of_a_working_collector_is_a_warning_with_its_cost(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvme0").touch()
    (found,) = doctor.check_privileges([WELL], NOTHING, tmp_path)
    assert (found.name, found.state) == ("collector nvme", "warn")
    assert found.found == "no CAP_SYS_ADMIN and CAP_DAC_READ_SEARCH"
    assert "media errors" in found.meaning
    assert "nvme.conf" in found.fix
    everything = frozenset(name for right in doctor.PRIVILEGES for name in right.capabilities)
    assert doctor.check_privileges([WELL], everything, tmp_path) == []
    (tmp_path / "dev/nvme0").unlink()
    assert doctor.check_privileges([WELL], NOTHING, tmp_path) == []


def test_readable_files_need_no_capability(tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "energy_uj").write_text("1\n")
    assert doctor.check_privileges([CollectorReport("powercap", 1)], NOTHING, tmp_path) == []


@pytest.mark.parametrize(("value", "state"), [(1.0, "ok"), (0.0, "warn")])
def test_an_unsynchronized_clock_is_a_warning(value: float, state: str) -> None:
    reading = Reading("node", ("node:n1",), {"node.clock_synchronized": np.array([value])})
    (found,) = doctor.check_clock([CollectorReport("clock", 1, (reading,))])
    assert (found.name, found.state) == ("node clock", state)
    assert doctor.check_clock([]) == []


def test_the_capabilities_of_a_process_are_read_from_the_kernel() -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv (util-linux) to run a process with fewer rights")
    program = "from agents.node import doctor; print(*sorted(doctor.held_capabilities()))"
    line = ["setpriv", "--bounding-set=-syslog,-sys_admin", "--inh-caps=-all", sys.executable, "-c", program]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if "setpriv" in done.stderr:
        pytest.skip(f"this user cannot give rights up: {done.stderr.strip()}")
    assert done.stdout.split() == sorted(doctor.held_capabilities() - {"CAP_SYSLOG", "CAP_SYS_ADMIN"})


def test_the_collectors_of_this_host_are_read_and_none_hangs() -> None:
    found = doctor.check_collectors(Config())
    assert {f"collector {c.name}" for c in COLLECTORS if c().has_work()} <= {check.name for check in found}
    assert [check for check in found if check.state == "fail"] == []


@pytest.mark.slow
def test_without_access_to_the_kernel_log_doctor_names_the_privilege_and_its_fix() -> None:
    if shutil.which("setpriv") is None or Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() != "1":
        pytest.skip("the kernel log is readable for all users here (kernel.dmesg_restrict), or there is no setpriv")
    line = ["setpriv", "--bounding-set=-syslog,-sys_admin", "--inh-caps=-all", sys.executable]
    done = subprocess.run([*line, "fleetpulse.py", "doctor"], cwd=ROOT, capture_output=True, text=True)
    if "setpriv" in done.stderr:
        pytest.skip(f"this user cannot give rights up: {done.stderr.strip()}")
    reported = done.stdout.partition("collector kernel_log: ")[2].splitlines()
    assert reported[0] == "/dev/kmsg: not readable: add CAP_SYSLOG"
    assert "deploy/systemd/fleetpulse-agent.service" in reported[2]
