"""The node's part of `fleetpulse doctor`: reads each collector once, as the agent does, and checks privileges.

Absent hardware is information, not a failure. A missing privilege is a warning with its fix. A collector that fails or
hangs is a failure, and so is a failed GPU: it is found in the readings of one read, without history. The result holds
for the user who runs the command; the privileges of the agent are in its own log. The drop-in files that grant
privileges are in deploy/systemd/fleetpulse-agent.service.d; docs/agent.md lists what else each one allows.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Reading
from agents.collectors.registry import configured_collectors
from agents.node.health import status_file
from agents.node.once import NO_ANSWER_YET, CollectorReport, find_unreachable, read_once
from agents.node.workers.processes import WorkerProcesses
from agents.node.workers.worker import NO_PROCESS
from pipeline.commands.checks import Check
from pipeline.commands.next_steps import STARTING
from pipeline.config.sections import Config
from pipeline.model.records import Event
from pipeline.model.signals import CATALOGUE
from pipeline.runtime import systemd
from pipeline.runtime.guides import guide

START_S = 30.0
"""Time (s) for the start of the process that forks collectors, if it cannot be forked. Chosen: half of the time of
a check; its imports took more than 5 s on a host with a load of 20 per core."""
_COLLECTOR_SIGNALS = ("gpu.present", "gpu.call_latency_max", "gpu.field_latency")
"""Signals of the collector itself, present even if the GPU reports nothing."""
_RECOVERY_ACTIONS = CATALOGUE["gpu.recovery_action"].states


def gpu_failures(readings: Sequence[Reading]) -> list[str]:
    """Returns one text per GPU that is lost, silent or needs a recovery action, and one per wrong number of GPUs."""
    found: dict[str, str] = {}
    for reading in readings:
        if reading.device_class == "gpu":
            found |= dict(_failures_in_columns(reading))
        for event in reading.events:
            found |= dict(_failures_in_events(event))
    return [f"{entity}: {what}" for entity, what in found.items()]


def _failures_in_columns(reading: Reading) -> Iterator[tuple[str, str]]:
    """Yields the failures in the columns of a reading. A missing column proves nothing."""
    reported = [
        _present_values(values) for signal, values in reading.columns.items() if signal not in _COLLECTOR_SIGNALS
    ]
    present, action = (reading.columns.get(signal) for signal in ("gpu.present", "gpu.recovery_action"))
    for i, entity in enumerate(reading.entities):
        if present is not None and present[i] == 0:
            yield entity, "lost: no response to its driver"
        elif reported and not any(known[i] for known in reported):
            yield entity, "silent: all its signals are missing"
        elif action is not None and _present_values(action)[i] and action[i] != 0:
            yield entity, _recovery_text(action[i])


def _failures_in_events(event: Event) -> Iterator[tuple[str, str]]:
    """Yields the failures in an event, with what a technician needs to find the GPU."""
    if event.kind == "gpu_lost":
        known = ", ".join(f"{key} {event.data[key]}" for key in ("pci", "serial") if event.data.get(key))
        yield event.entity, f"lost: no response to its driver{f' ({known})' if known else ''}"
    elif event.kind == "gpu_count" and event.data.get("present") != event.data.get("expected"):
        missing = ", ".join(map(str, event.data.get("missing") or ()))
        counted = f"{event.data.get('present')} of {event.data.get('expected')} GPUs by {event.data.get('source')}"
        yield event.entity, f"{counted}{f', missing: {missing}' if missing else ''}"
    elif event.kind == "recovery_action" and event.data.get("to"):
        yield event.entity, _recovery_text(event.data["to"])


def _recovery_text(action: float) -> str:
    number = int(action)
    known = 0 <= number < len(_RECOVERY_ACTIONS)
    return f"recovery action required by its driver: {_RECOVERY_ACTIONS[number] if known else number}"


def _present_values(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns which values are present. NaN, and the largest number of an unsigned type, mean missing."""
    if values.dtype.kind == "u":
        return np.asarray(values != np.iinfo(values.dtype).max)
    return np.asarray(~np.isnan(values))


CLOCK_UNITS = ("chrony", "chronyd", "ntpsec", "systemd-timesyncd")
"""Units of programs that set the clock: chrony is Debian's name, chronyd that of others."""
CLOCK_FOLDERS = (Path("/etc/systemd/system"), Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))
UNITS = str(systemd.UNIT_FOLDER) if systemd.UNIT_FOLDER.is_dir() else "deploy/systemd"
DROP_INS = "fleetpulse-agent.service.d"
_NAMES = re.compile(r"\bCAP_[A-Z_]+")


@dataclass(frozen=True, slots=True)
class Privilege:
    """Capabilities that a collector needs to read `gives`, if a path below the root matches `hardware`.

    drop_in: the file that adds them to the unit; "" if the unit has them by default.
    """

    collector: str
    capabilities: tuple[str, ...]
    hardware: str
    gives: str
    drop_in: str


PRIVILEGES: tuple[Privilege, ...] = (
    Privilege("kernel_log", ("CAP_SYSLOG",), "dev/kmsg", "XIDs and every other event of the kernel", ""),
    Privilege(
        "nvme",
        ("CAP_SYS_ADMIN", "CAP_DAC_READ_SEARCH"),
        "dev/nvme[0-9]*",
        "spare, wear, media errors and warnings of NVMe disks",
        "nvme.conf",
    ),
    Privilege("powercap", ("CAP_DAC_READ_SEARCH",), "sys/class/powercap/*/energy_uj", "energy of CPUs", "rapl.conf"),
    Privilege("ipmi", ("CAP_DAC_OVERRIDE",), "dev/ipmi0", "the BMC's sensors and its log", "ipmi.conf"),
    Privilege(
        "ethtool",
        ("CAP_NET_ADMIN",),
        "sys/class/net/*/device",
        "temperature, light and bias of NIC modules",
        "optics.conf",
    ),
    Privilege(
        "jobs",
        ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"),
        "dev/nvidia[0-9]*",
        "ranks of jobs by the environment of their processes",
        "jobs.conf",
    ),
)
_BITS = {
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYSLOG": 34,
}
"""Numbers of capabilities: include/uapi/linux/capability.h."""


def held_capabilities(status: Path = Path("/proc/self/status")) -> frozenset[str]:
    """The effective capabilities of this process, as far as PRIVILEGES names them."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    bits = int(found[1], 16) if found else 0
    return frozenset(name for name, bit in _BITS.items() if bits >> bit & 1)


def find_missing_privileges(holds: frozenset[str], root: Path = Path("/")) -> list[tuple[Privilege, tuple[str, ...]]]:
    """Privileges that this process lacks although their hardware is present; with the missing capabilities."""
    found = []
    for privilege in PRIVILEGES:
        missing = tuple(name for name in privilege.capabilities if name not in holds)
        if missing and next(iter(root.glob(privilege.hardware)), None) is not None:
            found.append((privilege, missing))
    return found


def find_capabilities(problem: str) -> tuple[str, ...]:
    """Capabilities that the message of a collector names."""
    return tuple(dict.fromkeys(_NAMES.findall(problem)))


def suggest_privilege(collector: str, missing: tuple[str, ...]) -> str:
    """How to give a collector its missing capabilities."""
    privilege = next((r for r in PRIVILEGES if r.collector == collector and set(missing) & set(r.capabilities)), None)
    if privilege is None:
        return f"AmbientCapabilities={' '.join(missing)} and CapabilityBoundingSet= likewise in the agent's unit"
    if not privilege.drop_in:
        return f"run the agent with {UNITS}/fleetpulse-agent.service, which has it; as a person: sudo fleetpulse doctor"
    return f"cp {UNITS}/{DROP_INS}/{privilege.drop_in}.example /etc/systemd/system/{DROP_INS}/{privilege.drop_in}"


_DENIED = re.compile(r"\bCAP_|not readable|not permitted|not open to us|permission|refuses us|access ?denied", re.I)
"""How collectors, the kernel, NVML and D-Bus report a source that this user may not read."""
_FIXES = (
    (
        re.compile(r"libnvidia-ml|NVML.*librar|no NVIDIA driver$", re.I),
        "nvidia-smi  # if this host has GPUs: install the NVIDIA driver",
    ),
    (re.compile(r"driver.*not (loaded|running)|kernel module", re.I), "modprobe nvidia; dmesg | grep -i nvrm"),
    (
        re.compile(r"nvidia.*(permission|not permitted|refuses us)", re.I),
        "ls -l /dev/nvidia*  # expected: readable and writable for this user",
    ),
    (re.compile(r"ipmi_devintf"), "modprobe -a ipmi_si ipmi_devintf  # if this host has a BMC"),
    (re.compile(r"EDAC"), "modprobe the EDAC driver of this processor  # if its memory has ECC"),
    (re.compile(r"intel_rapl"), "modprobe intel_rapl_msr  # on bare metal"),
    (re.compile(r"system bus|systemd"), "systemctl status dbus  # only where this host runs systemd"),
    (re.compile(r"RDMA"), "ibv_devinfo  # if this host has RDMA adapters: load their driver"),
    (re.compile(r"nvidia-ml-py"), "pip install 'fleetpulse[agent]'"),
)
_AS_ROOT = f"sudo fleetpulse doctor  # if that is ok: give the agent's user the privilege, {guide('agent.md')}"
_LOST = "nvidia-smi; dmesg | grep -i -e xid -e nvrm  # then drain the node: it needs a reset, a reboot or a repair"
_MEANING_REMOTE = "its devices are not monitored"
_REMOTE_FIXES = {
    "redfish": f"check its url, password_file and ca_file in [[collector.redfish.bmcs]]; then {guide('redfish.md')}",
    "prometheus": "check its url, token_file and ca_file in [[collector.prometheus.endpoints]]; then curl the url",
}
_MEANING_AGENT = "no telemetry of this node is sent"
_ENABLE = "systemctl enable --now fleetpulse"
_MEANING_CLOCK = "timestamps of this node do not match those of others"


def prepare_collector_checks(config: Config) -> Callable[[Config], list[Check]]:
    """`check_collectors` with its collectors. Raises ConfigError: a wrong setting ends doctor as any command.

    Checks run in threads, in which no process is forked: a fresh interpreter takes many seconds on a busy host. So the
    process that forks the collectors' ones is forked here.
    """
    chosen = configured_collectors(config.collector, config.source, config.agent.collectors)
    processes = WorkerProcesses(START_S)
    with contextlib.suppress(OSError):  # out of memory or processes: the check itself tries again, and reports it
        processes.fork_server()
    return partial(check_collectors, chosen=chosen, processes=processes)


def check_agent(config: Config) -> Check:
    """Whether the agent of this node runs: it writes a status every 10 s. If it only holds its spool, it hangs."""
    written = next((age for path in status_file.status_paths(config) if (age := _file_age(path)) is not None), None)
    lock, lock_age = _read_lock(config)
    if lock == "unknown" and written is not None and written <= status_file.STALE_S:
        return Check("agent", "ok", f"wrote its status {written:.0f} s ago")
    if lock != "held":
        return _judge_absence(written)
    age = lock_age if written is None else written
    if age <= status_file.STALE_S:
        return Check("agent", "ok", STARTING if written is None else f"wrote its status {age:.0f} s ago")
    remedy = "ps -o pid,stat,cmd -C fleetpulse  # T: kill -CONT PID; else systemctl restart fleetpulse-agent"
    return Check("agent", "fail", f"has been hung or stopped for {age:.0f} s", _MEANING_AGENT, remedy)


def _judge_absence(written: float | None) -> Check:
    """No agent runs: a failure where one should, or has run; a unit that was stopped and disabled is a warning."""
    expected, has_unit = systemd.is_expected("agent"), systemd.has_unit("agent")
    if written is None and not expected:
        return Check("agent", "info", "no agent has run here")
    found = "does not run, " + ("and has written no status" if written is None else f"last status {written:.0f} s ago")
    if expected:
        remedy = "journalctl -u fleetpulse-agent; systemctl restart fleetpulse-agent"
        remedy += "; to keep it off: systemctl disable --now fleetpulse-agent"
        return Check("agent", "fail", found, _MEANING_AGENT, remedy)
    if has_unit:
        return Check("agent", "warn", f"{found}; its unit is disabled", _MEANING_AGENT, f"{_ENABLE}-agent")
    return Check("agent", "fail", found, _MEANING_AGENT, f"fleetpulse agent, or up  # or, with a unit: {_ENABLE}-agent")


def _file_age(path: Path) -> float | None:
    """Seconds since a file was written; None if it does not exist."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _read_lock(config: Config) -> tuple[Literal["held", "free", "unknown"], float]:
    """Whether a process holds this node's spool, and the age (s) of its lock; unknown: this user may not see it."""
    folder = config.spool.directory / quote(config.agent.node, safe="")
    try:
        locks = [folder / stream / "lock" for stream in os.listdir(folder)]
    except OSError as error:
        return ("unknown" if isinstance(error, PermissionError) else "free"), 0.0
    found: Literal["free", "unknown"] = "free"
    for lock in locks:
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "held", _file_age(lock) or 0.0
        except PermissionError:
            found = "unknown"
        except OSError:
            continue  # no stream
    return found, 0.0


def check_collectors(
    config: Config, chosen: Sequence[Collector] | None = None, processes: WorkerProcesses | None = None
) -> list[Check]:
    """One check per collector, then privileges for a part of a collector's signals, then the clock."""
    if chosen is None:
        chosen = configured_collectors(config.collector, config.source, config.agent.collectors)
    held = check_held(config, [collector.name for collector in chosen if collector.exclusive])
    taken = {check.name for check in held}
    read = [collector for collector in chosen if f"collector {collector.name}" not in taken]
    reports = read_once(config, read, processes)
    checks = held + [check_report(report) for report in reports]
    reported = {c.name for c in checks if c.state != "ok"}
    checks += [check for check in check_privileges(reports) if check.name not in reported]
    return checks + check_clock(reports)


def check_held(config: Config, exclusive: Sequence[str]) -> list[Check]:
    """The checks of collectors that the agent of this host has to itself, by its status; none if it does not run."""
    try:
        states = status_file.read_status(config).collectors
    except status_file.NoStatus:  # it starts, hangs, or does not run
        if _read_lock(config)[0] != "held":
            return []
        states = {}
    return [_check_state(f"collector {name}", *states.get(name, ("", ""))) for name in exclusive]


def _check_state(name: str, state: str, reason: str) -> Check:
    found = ": ".join(part for part in ("read by the agent of this host, which runs", state, reason) if part)
    if state in ("", "starting", "ok"):
        return Check(name, "ok", found)
    absent = state == "no data"
    meaning = "nothing to measure on this host" if absent else "its telemetry of this node is missing"
    return Check(name, "info" if absent else "fail", found, meaning, "" if absent else "journalctl -u fleetpulse-agent")


def check_report(report: CollectorReport) -> Check:
    """The check of one collector, by its report."""
    name, problem = f"collector {report.collector}", report.problem
    reason = problem.partition(": ")[2]
    if not problem:
        wrong = gpu_failures(report.readings)
        if wrong:
            return Check(name, "fail", "; ".join(wrong), "jobs that use this GPU fail, or get fewer", _LOST)
        return _check_remote(name, report) or Check(name, "ok", _summarize(report))
    missing = find_capabilities(reason)
    denied = bool(missing or _DENIED.search(reason))
    remedy = (
        suggest_privilege(report.collector, missing)
        if missing
        else _suggest_fix(reason) or (_AS_ROOT if denied else "")
    )
    if report.failed:
        if NO_PROCESS in problem:
            meaning = "unknown: it was not read, which says nothing about the agent"
            return Check(name, "fail", problem, meaning, "uptime; free -m; ulimit -u  # then fleetpulse doctor again")
        meaning = "an agent on this host sends nothing of it, and continues without it"
        return Check(name, "fail", problem, meaning, remedy or "dmesg | tail; then fleetpulse once, which shows more")
    if denied:
        return Check(name, "warn", reason, "its source is present, but this user may not read it", remedy)
    return Check(name, "info", problem, "nothing to measure on this host", remedy)


def _check_remote(name: str, report: CollectorReport) -> Check | None:
    """The check of BMCs and exporters that do not respond; None if all do. One without an answer yet may be slow."""
    silent = find_unreachable(report.readings)
    if not silent:
        return None
    found = "; ".join(f"{entity}: {reason}" for entity, reason in silent.items())
    state: Literal["warn", "fail"] = "warn" if set(silent.values()) == {NO_ANSWER_YET} else "fail"
    return Check(name, state, found, _MEANING_REMOTE, _REMOTE_FIXES.get(report.collector, ""))


def check_privileges(
    reports: Sequence[CollectorReport], holds: frozenset[str] | None = None, root: Path = Path("/")
) -> list[Check]:
    """Warnings for working collectors of which this user may not read a part."""
    working = {report.collector for report in reports if not report.problem}
    checks = []
    for privilege, missing in find_missing_privileges(held_capabilities() if holds is None else holds, root):
        if privilege.collector in working and not _is_readable(privilege, root):
            found, fix = f"no {' and '.join(missing)}", suggest_privilege(privilege.collector, missing)
            meaning = f"without it this user cannot read: {privilege.gives}"
            checks.append(Check(f"collector {privilege.collector}", "warn", found, meaning, fix))
    return checks


def check_clock(reports: Sequence[CollectorReport]) -> list[Check]:
    """Whether the clock of this node is synchronized, by the kernel's status."""
    signal = "node.clock_synchronized"
    values = [r.columns[signal][0] for report in reports for r in report.readings if signal in r.columns]
    if not values:
        return []
    if values[0]:
        return [Check("node clock", "ok", "synchronized")]
    return [Check("node clock", "warn", "not synchronized", _MEANING_CLOCK, _suggest_clock())]


def _suggest_clock() -> str:
    """Returns the command for the program of this host that sets clocks, whose unit has two names; without one, to
    install it."""
    units = [name for folder in CLOCK_FOLDERS for name in CLOCK_UNITS if (folder / f"{name}.service").exists()]
    return f"systemctl enable --now {units[0]}" if units else "apt-get install chrony, or dnf install chrony"


def _is_readable(privilege: Privilege, root: Path) -> bool:
    """Whether this user may read the files as owner or group: then no capability is needed."""
    needs_only_files = set(privilege.capabilities) <= {"CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
    return needs_only_files and all(os.access(path, os.R_OK) for path in root.glob(privilege.hardware))


def _summarize(report: CollectorReport) -> str:
    entities = {entity for reading in report.readings for entity in reading.entities}
    signals = {signal for reading in report.readings for signal in reading.columns}
    return f"{len(signals)} signals of {len(entities)} {'entity' if len(entities) == 1 else 'entities'}"


def _suggest_fix(reason: str) -> str:
    return next((remedy for pattern, remedy in _FIXES if pattern.search(reason)), "")
