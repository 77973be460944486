"""What doctor says of the collectors: hardware that is absent is news, a missing right a warning, a fault a failure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agents import examination, rights
from agents.collector import Reading
from agents.collectors import COLLECTORS
from agents.once import Look
from pipeline.config import Config

ROOT = Path(__file__).parents[2]
WELL = Look("nvme", 1, (Reading("disk", ("disk:n1.nvme0",), {"disk.temperature": np.array([300.0])}),))
NOTHING: frozenset[str] = frozenset()


def test_a_collector_that_brings_something_is_ok_and_says_how_much() -> None:
    found = examination.judged(WELL)
    assert (found.name, found.state, found.found) == ("collector nvme", "ok", "1 signals of 1 entity")


@pytest.mark.parametrize(
    ("reason", "state", "mend"),
    [
        ("no RDMA device below /sys/class/infiniband: no RDMA adapter", "info", "ibv_devinfo"),
        ("no libnvidia-ml.so.1: no NVIDIA driver", "info", "nvidia-smi"),
        ("/sys/devices/system/edac/mc: no memory controller; wanted the EDAC driver", "info", "modprobe"),
        (
            "/run/dbus/system_bus_socket: No such file; wanted the system bus of a host with systemd",
            "info",
            "systemctl",
        ),
        ("/dev/nvidiactl: Permission denied", "warn", "ls -l /dev/nvidia*"),
        ("/dev/kmsg: not readable: add CAP_SYSLOG", "warn", "deploy/fleetpulse-agent.service"),
        ("energy_uj: not readable; add CAP_DAC_READ_SEARCH", "warn", "AmbientCapabilities=CAP_DAC_READ_SEARCH"),
        ("something else entirely", "info", ""),
    ],
)
def test_what_is_not_there_is_news_and_what_is_closed_to_us_a_warning_each_with_its_mend(
    reason: str, state: str, mend: str
) -> None:
    found = examination.judged(Look("kernel_log", 1, (), f"no data: {reason}"))
    assert found.state == state
    assert mend in found.mend


@pytest.mark.parametrize("trouble", ["hung: no answer within 5 s", "fault: OSError: bus error"])
def test_a_collector_that_hangs_or_fails_fails_the_check(trouble: str) -> None:
    found = examination.judged(Look("host", 1, (), trouble))
    assert (found.state, found.found) == ("fail", trouble)


def test_each_right_names_the_drop_in_that_gives_it() -> None:
    for right in rights.RIGHTS:
        if right.drop_in:
            text = (ROOT / "deploy" / rights.DROP_INS / f"{right.drop_in}.example").read_text()
            assert rights.mend(right.collector, right.capabilities).startswith(
                f"cp deploy/{rights.DROP_INS}/{right.drop_in}"
            )
            assert all(f"AmbientCapabilities={' '.join(right.capabilities)}" in text for _ in "x") or "Groups=" in text
        else:
            unit = (ROOT / "deploy/fleetpulse-agent.service").read_text()
            assert all(f"AmbientCapabilities={name}" in unit for name in right.capabilities)


def test_every_right_is_of_a_collector_that_exists() -> None:
    known = {collector.name for collector in COLLECTORS}
    assert {right.collector for right in rights.RIGHTS} <= known


def test_a_part_that_is_closed_to_a_working_collector_is_a_warning_with_what_it_costs(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvme0").touch()
    (found,) = examination.missing_rights([WELL], NOTHING, tmp_path)
    assert (found.name, found.state) == ("collector nvme", "warn")
    assert found.found == "no CAP_SYS_ADMIN and CAP_DAC_READ_SEARCH"
    assert "media errors" in found.meaning
    assert "nvme.conf" in found.mend
    everything = frozenset(name for right in rights.RIGHTS for name in right.capabilities)
    assert examination.missing_rights([WELL], everything, tmp_path) == []
    (tmp_path / "dev/nvme0").unlink()
    assert examination.missing_rights([WELL], NOTHING, tmp_path) == []


def test_files_that_are_open_to_us_need_no_capability(tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "energy_uj").write_text("1\n")
    assert examination.missing_rights([Look("powercap", 1)], NOTHING, tmp_path) == []


@pytest.mark.parametrize(("value", "state"), [(1.0, "ok"), (0.0, "warn")])
def test_a_clock_that_nobody_keeps_is_a_warning(value: float, state: str) -> None:
    reading = Reading("node", ("node:n1",), {"node.clock_synchronized": np.array([value])})
    (found,) = examination.clock([Look("clock", 1, (reading,))])
    assert (found.name, found.state) == ("node clock", state)
    assert examination.clock([]) == []


def test_the_capabilities_of_a_process_are_read_from_the_kernel() -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv (util-linux) to run a process with fewer rights")
    program = "from agents import rights; print(*sorted(rights.held()))"
    line = ["setpriv", "--bounding-set=-syslog,-sys_admin", "--inh-caps=-all", sys.executable, "-c", program]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if "setpriv" in done.stderr:
        pytest.skip(f"this user cannot give rights up: {done.stderr.strip()}")
    assert done.stdout.split() == sorted(rights.held() - {"CAP_SYSLOG", "CAP_SYS_ADMIN"})


def test_the_collectors_of_this_host_are_asked_and_none_hangs() -> None:
    found = examination.collectors(Config())
    assert {f"collector {c.name}" for c in COLLECTORS} <= {check.name for check in found}
    assert [check for check in found if check.state == "fail"] == []


def test_without_the_right_to_the_kernel_log_doctor_names_it_and_its_mend() -> None:
    if shutil.which("setpriv") is None or Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() != "1":
        pytest.skip("the kernel log is open to everybody here (kernel.dmesg_restrict), or there is no setpriv")
    line = ["setpriv", "--bounding-set=-syslog,-sys_admin", "--inh-caps=-all", sys.executable]
    done = subprocess.run([*line, "fleetpulse.py", "doctor"], cwd=ROOT, capture_output=True, text=True)
    if "setpriv" in done.stderr:
        pytest.skip(f"this user cannot give rights up: {done.stderr.strip()}")
    told = done.stdout.partition("collector kernel_log: ")[2].splitlines()
    assert told[0] == "/dev/kmsg: not readable: add CAP_SYSLOG"
    assert "deploy/fleetpulse-agent.service" in told[2]
