"""`fleetpulse doctor`: numbered checks (ok, warn or fail), each with its meaning and the command that fixes it.

A check is a function Config -> Check (or a list) and one line in CHECKS. Checks change nothing, except that with Kafka
two small records are written to a topic for this purpose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.commands import doctor_dashboard, doctor_senders, doctor_slurm, doctor_units
from pipeline.commands.checks import Check
from pipeline.commands.installed import is_node
from pipeline.commands.next_steps import AS_ROOT, lacks_rights
from pipeline.config.addresses import hide_in_text
from pipeline.config.changes import compare_configs
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import FleetpulseError, HeldStore, NoAnswer, Unreachable
from pipeline.runtime import private_files, systemd
from pipeline.runtime.guides import guide
from pipeline.runtime.secret_contents import list_old_copies
from pipeline.transport import segments
from pipeline.transport.salvage import SegmentCheck

SLOW_S = 1.0
"""A disk that takes this long for 4 KiB is slow (s). Chosen: the agent writes every second; a disk takes some ms."""
ANSWER_S = 10.0
"""Longest wait for the disk (s). Chosen."""
SHOWN = 3
"""Problems that are named; more are counted."""
SETUP = "fleetpulse setup"


def disk_speed(config: Config, answer_s: float = ANSWER_S, synced: Callable[[int], object] = os.fsync) -> Check:
    """Measures the time of a durable write of 4 KiB to the spool's disk. The file is removed."""
    directory = config.spool.directory
    took: list[float | OSError] = []
    if not directory.is_dir():
        return Check("spool's speed", "info", f"{directory} does not exist yet")
    thread = threading.Thread(target=_measure, args=(directory, took, synced), daemon=True)
    thread.start()
    thread.join(answer_s)
    meaning = "telemetry waits in the agent's memory and is lost if that is full"
    fix = (
        f"iostat -x 1; another disk: [spool] directory; memory limit: [spool] queue_bytes ({config.spool.queue_bytes})"
    )
    if not took:
        return Check("spool's speed", "fail", f"{directory}: no answer within {answer_s:g} s", meaning, fix)
    if isinstance(took[0], OSError):
        return Check("spool's speed", "fail", f"{directory}: {took[0].strerror}", meaning, fix)
    found = f"{directory}: 4 KiB durable in {took[0] * 1000:.0f} ms"
    if took[0] >= SLOW_S:
        return Check("spool's speed", "warn", found, meaning, fix)
    return Check("spool's speed", "ok", found)


def _measure(directory: Path, took: list[float | OSError], synced: Callable[[int], object]) -> None:
    path, began = directory / f".doctor-{os.getpid()}", time.monotonic()
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(bytes(4096))
            synced(file.fileno())
        took.append(time.monotonic() - began)
    except OSError as error:
        took.append(error)
    with contextlib.suppress(OSError):
        path.unlink()


def spool_files(config: Config) -> Check:
    """Checks the marks of all streams, and that there are no unknown files."""
    found = [fault for folder in _folders(config.spool.directory) for fault in _faults(folder)]
    if not found:
        return Check("spool's files", "ok", "marks and segment names are valid")
    more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
    return Check(
        "spool's files",
        "warn",
        "; ".join(found[:SHOWN]) + more,
        "valid records are still read; the rest counts as a gap",
        "start the agent, which writes a new mark; move unknown files out of the directory",
    )


def _folders(directory: Path) -> Iterator[Path]:
    """Yields the newest epoch of each stream, to which the agent writes."""
    for home in sorted(directory.glob("*/*/")) if directory.is_dir() else ():
        yield from segments.epoch_folders(home)[-1:]


def _faults(folder: Path) -> Iterator[str]:
    strays = SegmentCheck()
    held = strays.list_segments(folder, segments.parse_epoch(folder))
    if segments.read_mark(folder) is None and (held or strays.found):
        yield f"{folder / 'mark'}: {'damaged' if (folder / 'mark').exists() else 'missing'}"
    for path, why in sorted(strays.found.items()):
        yield f"{path}: {why}"


LEAST_PYTHON = (3, 11)
PACKAGES = ("agents", "pipeline", "detectors", "dashboards")
MIN_FREE_BYTES = 1 << 30
"""Free bytes below which the check fails: about one hour of hot telemetry of 1,000 nodes. Chosen."""
VOLATILE = ("tmpfs", "ramfs")
REMOTE = ("nfs", "lustre", "beegfs", "ceph", "gpfs", "cifs", "fuse.", "9p", "wekafs")
"""Prefixes of file systems that another host or a process serves."""
SPOOL_ELSEWHERE = "[spool] directory = a folder on a local disk, such as '/var/lib/fleetpulse/spool'"
LIMIT_S = 60.0
"""Limit of one check (s). Chosen: the check of the brokers takes some seconds for each."""
CheckFunction = Callable[[Config], "Check | list[Check]"]
COLUMNS = ("number", "check", "state", "found", "meaning", "mend")  # "mend" is `fix`: programs read this name


def python_version(config: Config, version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Checks that Python is 3.11 or newer."""
    found = ".".join(map(str, version))
    if version[:2] >= LEAST_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "fail", found, "Fleetpulse needs Python 3.11 or newer", "make install PYTHON=python3.11")


def configuration(config: Config) -> Check:
    """Reports which configuration file is used, which was already read; and a packaged host that was never set up."""
    if _lacks_setup(config):
        meaning = "its site, brokers and GPUs are not known, and no path is that of the units"
        return Check("configuration", "warn", f"{config.source}: no key is set", meaning, SETUP)
    return Check("configuration", "ok", config.source)


def _lacks_setup(config: Config) -> bool:
    """Returns whether a package is installed and every key has its default."""
    return systemd.UNIT_FOLDER.is_dir() and not compare_configs(config, Config())


def _suggest_start(config: Config, fix: str) -> str:
    """Returns the fix of what no one has started or created yet; before a packaged host is set up, to set it up."""
    return SETUP if _lacks_setup(config) else fix


def package_names(config: Config, claims: Mapping[str, Sequence[str]] | None = None) -> Check:
    """Checks that no other distribution installed a top-level package with one of our four names."""
    owners = importlib.metadata.packages_distributions() if claims is None else claims
    foreign = [f"{name} (of {d})" for name in PACKAGES for d in owners.get(name, ()) if d != "fleetpulse"]
    if not foreign:
        return Check("package names", "ok", "no other distribution uses " + ", ".join(PACKAGES))
    meaning = "another distribution installed a package of the same name; one overwrites the other"
    return Check("package names", "fail", ", ".join(sorted(set(foreign))), meaning, "make clean install")


def store(config: Config) -> Check:
    """Checks that the store can be opened, or that a running pipeline holds it."""
    if is_node():
        return Check("store", "info", "the pipeline is not installed here (extra 'pipeline'); a node needs no store")
    path = config.store.path
    place = _write_obstacle(path.parent)
    if place is not None:
        meaning = "the pipeline cannot store anything"
        return Check("store", "fail", place, meaning, _suggest_folder(path.parent))
    if not path.exists():
        fix = _suggest_start(config, "fleetpulse init")
        return Check("store", "warn", f"{path} does not exist yet", "nothing was stored here so far", fix)
    try:
        holder = _find_holder(path)
    except FleetpulseError as error:
        meaning = "the pipeline cannot start with this file"
        return Check("store", "fail", str(error), meaning, f"read {guide('store.md', 'Recovery')}; ls -l {path}*")
    return Check("store", "ok", f"{path}, {path.stat().st_size >> 20} MiB{f', held by {holder}' if holder else ''}")


def spool(config: Config) -> Check:
    """Checks that the spool directory can be written."""
    directory = config.spool.directory
    place = _write_obstacle(directory)
    if place is not None:
        meaning = "the agent cannot keep telemetry until it is stored"
        return Check("spool", "fail", place, meaning, _suggest_folder(directory))
    if not directory.exists() and config.pipeline.transport == "kafka" and not is_node():
        return Check(
            "spool", "info", f"{directory} does not exist: no agent has run here; with Kafka a server needs none"
        )
    if not directory.exists():
        fix = "systemctl enable --now fleetpulse-agent" if systemd.has_unit("agent") else "fleetpulse init"
        return Check(
            "spool",
            "warn",
            f"{directory} does not exist yet",
            "no agent has run here so far",
            _suggest_start(config, fix),
        )
    nodes = sum(1 for entry in directory.iterdir() if entry.is_dir())
    return Check("spool", "ok", f"{directory}, {nodes} node{'' if nodes == 1 else 's'}")


def disk(config: Config, floor: int = MIN_FREE_BYTES) -> Check:
    """Checks the free disk space of store and spool."""
    places = {_nearest_existing(config.store.path.parent), _nearest_existing(config.spool.directory)}
    free, place = min((shutil.disk_usage(p).free, p) for p in places)
    found = f"{free / (1 << 30):.1f} GiB free at {place}"
    if free >= floor:
        return Check("disk", "ok", found)
    meaning = f"below {floor / (1 << 30):.1f} GiB: the spool drops its oldest data, and the pipeline is not ready"
    return Check("disk", "fail", found, meaning, f"df -h {place}; or lower [store] hot_hours, [spool] max_bytes")


def permissions(config: Config) -> Check:
    """Checks that other users of this host cannot access the state."""
    found = private_files.find_open_state(private_files.list_state_paths(config))
    if not found:
        return Check("permissions", "ok", "other users cannot access the state")
    meaning = "other users of this host can read telemetry or change stored data"
    text = f"accessible to other users: {private_files.describe_open_paths(found)}"
    return Check("permissions", "fail", text, meaning, private_files.suggest_fix(found))


def secrets(config: Config) -> Check:
    """Checks that files with tokens, passwords and keys exist, that other users cannot read them, and that units have
    copies of what they contain now."""
    files = set(private_files.list_secret_files(config).values())
    if found := private_files.list_open_secrets(config):
        paths = " ".join(dict.fromkeys(str(path) for _, path, _ in found))
        text = "; ".join(private_files.find_open_secrets(config))
        return Check("secrets", "warn", text, "other users can use these secrets", f"chmod 600 {paths}")
    if absent := private_files.find_absent_secrets(config):
        meaning = "what needs them does not start or cannot log in"
        fix = f"write them (tokens: fleetpulse init), or correct the keys; {guide('security.md', 'Secrets')}"
        return Check("secrets", "warn", "; ".join(absent), meaning, fix, is_cause=True)
    if old := list_old_copies(config):
        units = " ".join(sorted({text.rpartition(" ")[2] for text in old}))
        return Check(
            "secrets", "warn", "; ".join(old), "the unit uses the secrets of before", f"systemctl restart {units}"
        )
    if hidden := private_files.find_hidden_secrets(config):
        text = f"{len(hidden)} of {len(files)} cannot be looked at by this user; run doctor as root"
        return Check("secrets", "info", text)
    count = f"{len(files)} file{'' if len(files) == 1 else 's'}"
    return Check("secrets", "ok", f"{count}, not accessible to other users" if files else "none configured")


def spool_disk(config: Config, mounts: Path = Path("/proc/self/mounts")) -> Check:
    """Checks that the spool is on a local disk: memory is lost at reboot, and a remote file system may hang."""
    place = _nearest_existing(config.spool.directory).resolve()
    try:
        lines = [line.split(" ") for line in mounts.read_text().splitlines()]
    except OSError:
        return Check("spool's disk", "info", f"{place}: no {mounts} here, its file system is unknown")
    around = [(len(line[1]), i, line[2]) for i, line in enumerate(lines) if place.is_relative_to(_unescaped(line[1]))]
    kind = max(around)[2] if around else "unknown"
    found = f"{place} is {kind}"
    if kind in VOLATILE:
        return Check("spool's disk", "warn", found, "unsent telemetry is lost at reboot", SPOOL_ELSEWHERE)
    if kind.startswith(REMOTE):
        return Check("spool's disk", "warn", found, "the agent stops if the file server hangs", SPOOL_ELSEWHERE)
    return Check("spool's disk", "ok", found)


def transport(config: Config) -> Check | list[Check]:
    """Checks the transport; with Kafka: brokers, credential, topics and clock."""
    if config.pipeline.transport == "spool":
        return Check("transport", "ok", "spool: no broker needed")
    from pipeline.commands import doctor_kafka  # loads the Kafka client

    return doctor_kafka.check_kafka(config)


def api(config: Config) -> Check:
    """Checks that a pipeline answers on [api] and is ready. None where one should run is a failure: a gate waits."""
    try:
        status, answer = client.get(config, "/readyz")
    except NoAnswer as error:
        meaning = "a pipeline listens but does not answer: telemetry is not evaluated, no alerts are sent"
        fix = "ps -o pid,stat,cmd -C fleetpulse  # T: kill -CONT PID; else restart the pipeline"
        return Check("api", "fail", str(error), meaning, fix, unreachable=True)
    except Unreachable as error:
        if is_node():
            return Check("api", "info", "no pipeline on this host; a node needs none")
        return _judge_silence(config, str(error).partition(";")[0])
    if status == 200:
        return Check("api", "ok", f"{client.base_url(config)} is ready")
    if status in (401, 403):
        found = f"{client.base_url(config)} wants a token (HTTP {status})"
        meaning = "a pipeline runs, but tells this configuration nothing"
        fix = "run as root, or set [api] token_file to a file with a valid token; "
        fix += "if it is another installation's pipeline: another [api] port"
        return Check("api", "info" if is_node() else "fail", found, meaning, fix)
    reasons = answer.get("reasons", []) if isinstance(answer, dict) else []
    found = "; ".join(map(str, reasons)) or f"HTTP {status}"
    meaning = "a pipeline runs but is not ready"
    return Check(
        "api", "fail", found, meaning, f"wait if it starts; else {guide('api.md')} says what each reason means"
    )


def _judge_silence(config: Config, found: str) -> Check:
    """Returns the check of an API that does not answer: a failure where a pipeline should run, else a warning."""
    if holder := _find_starting(config.store.path):
        meaning = f"{holder} has the store open: a pipeline that starts, or whose API has ended"
        fix = "wait if it starts; else journalctl -u fleetpulse-pipeline, or what `fleetpulse up` said"
        return Check("api", "fail", found, meaning, fix, unreachable=True)
    if systemd.is_expected("pipeline"):
        meaning = "the pipeline that should run here does not: telemetry is not evaluated, no alerts are sent"
        fix = "journalctl -u fleetpulse-pipeline; systemctl restart fleetpulse-pipeline"
        fix += "; to keep it off: systemctl disable --now fleetpulse-pipeline"
        return Check("api", "fail", found, meaning, fix, unreachable=True)
    by_hand = "fleetpulse up" if config.pipeline.transport == "spool" else "fleetpulse pipeline"  # as setup says
    fix = "systemctl enable --now fleetpulse-pipeline" if systemd.has_unit("pipeline") else by_hand
    return Check("api", "warn", found, "no pipeline runs here", _suggest_start(config, fix))


def _find_starting(path: Path) -> str | None:
    """Returns the process that has the store open; None if there is none, or the check `store` says why not."""
    try:
        return _find_holder(path) if path.exists() else None
    except (OSError, FleetpulseError):
        return None


def receivers(config: Config) -> Check | list[Check]:
    """Checks every receiver of alerts by its own health check. Sends nothing that people see.

    Only hosts of addresses are shown: paths of webhooks are keys. Those of token endpoints and issuers are none.
    """
    if is_node():
        return Check("receivers", "info", "the pipeline is not installed here (extra 'pipeline')")
    from pipeline.commands.notify import check_receivers  # loads the notifier

    found = check_receivers(config)
    checks = [found] if isinstance(found, Check) else found
    out_of_force = [line for line in config.replaced if ": [[notify." in line]
    fix = "move all entries into one of the two files: fleetpulse config check"
    checks = [*checks, *(Check("receivers", "warn", line, "no alert goes there", fix) for line in out_of_force)]
    return [dataclasses.replace(one, found=hide_in_text(one.found)) for one in checks]


def topology(config: Config) -> Check | list[Check]:
    """Reads the configured sources of the site's topology."""
    if is_node():
        return Check("topology", "info", "the pipeline is not installed here (extra 'pipeline'), which reads it")
    from pipeline.commands.site_reload import list_settings  # imported here: a node has no reader of them
    from pipeline.topology.merge import merge_sources
    from pipeline.topology.site import find_faults

    settings = list_settings(config.topology)
    good, faults = find_faults(settings)
    if faults:
        found = "; ".join(list(faults.values())[:SHOWN])
        meaning = "these sources keep what they said before; a new rack or cable in them is not known"
        return Check("topology", "fail", found, meaning, "correct the file: fleetpulse topology check")
    if not settings:
        return Check("topology", "info", "no files of the site: incidents know what agents see, not racks or loops")
    merged = merge_sources(list(good.items()))
    if merged.conflicts or merged.refused:
        found = f"{len(merged.conflicts)} conflicts between sources, {len(merged.refused)} lines refused"
        return Check("topology", "warn", found, "the first source counts", "fleetpulse topology check")
    return Check("topology", "ok", f"{len(settings)} sources, {len(merged.parents)} entities")


CHECKS: tuple[CheckFunction, ...] = (
    configuration,
    python_version,
    package_names,
    store,
    spool,
    permissions,
    secrets,
    doctor_units.check_unit_secrets,
    doctor_units.check_in_force,
    spool_files,
    disk,
    spool_disk,
    disk_speed,
    transport,
    topology,
    api,
    doctor_dashboard.check_dashboard,
    doctor_dashboard.check_login,
    doctor_units.check_executor,
    receivers,
    doctor_senders.check_gateway,
    doctor_senders.check_rejected,
    doctor_slurm.check_reservations,
)


def run_checks(config: Config, checks: Sequence[CheckFunction] = CHECKS, limit_s: float = LIMIT_S) -> list[Check]:
    """Runs all checks in order. A check that raises or takes longer than `limit_s` is a fail."""
    found: list[Check] = []
    for check in checks:
        made: list[Check] = []
        thread = threading.Thread(target=_examined, args=(check, config, made), daemon=True)
        thread.start()
        thread.join(limit_s)
        hangs = f"not finished within {limit_s:g} s"
        meaning = "unknown: a disk or a server may not answer, or this host is too busy"
        fix = "uptime; cat /proc/pressure/io  # then fleetpulse doctor again"
        found += made or [Check(_name_check(check), "fail", hangs, meaning, fix)]
    return found


def _name_check(check: CheckFunction) -> str:
    """Returns the name of a check's function as words, also of one with arguments already given."""
    name = str(getattr(getattr(check, "func", check), "__name__", "check"))
    return name.removeprefix("check_").replace("_", " ")


def _examined(check: CheckFunction, config: Config, made: list[Check]) -> None:
    try:
        result = check(config)
    except (OSError, FleetpulseError) as error:
        result = Check(_name_check(check), "fail", hide_in_text(str(error)), "the check could not run")
    except Exception as error:  # noqa: BLE001 - reported, since a thread would lose it
        text = f"{type(error).__name__}: {hide_in_text(str(error))}"
        result = Check(_name_check(check), "fail", text, "an error in the check itself")
    made.extend([result] if isinstance(result, Check) else result)


def exit_code(checks: Sequence[Check]) -> int:
    """Returns 3 if a dependency is unreachable, 1 if a check failed, else 0."""
    return 3 if any(c.unreachable for c in checks) else int(any(c.state == "fail" for c in checks))


def check_rows(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Returns the checks as rows of COLUMNS, numbered from 1."""
    return [
        {"number": i, "check": c.name, "state": c.state, "found": c.found, "meaning": c.meaning, "mend": c.fix}
        for i, c in enumerate(checks, 1)
    ]


def format_checks(checks: Sequence[Check]) -> str:
    """Returns one line per check, with meaning and fix below if it is not ok."""
    lines = []
    for i, c in enumerate(checks, 1):
        lines.append(f"{i:2d} {c.state:4s} {c.name}: {c.found}")
        lines.extend(f"        {label}: {text}" for label, text in (("means", c.meaning), ("fix", c.fix)) if text)
    return "\n".join(lines) + "\n"


def _nearest_existing(path: Path) -> Path:
    """Returns the path, or its nearest existing parent."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def _unescaped(point: str) -> Path:
    """Returns the path of a mount point in /proc/mounts, which has octal escapes (getmntent(3))."""
    return Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point))


def _write_obstacle(folder: Path) -> str | None:
    """Returns None if the directory can be written or created, else the reason."""
    place = _nearest_existing(folder)
    if not place.is_dir():
        return f"{place} is not a directory"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


def _suggest_folder(folder: Path) -> str:
    """Returns how to get a folder that this user can write; where it is that of a service, to look as root."""
    return AS_ROOT if lacks_rights() else f"mkdir -p {folder} && chown $USER {folder}"


def _find_holder(path: Path) -> str | None:
    """Returns the process that has the store open for writing, None if there is none.

    Opens the file read-only, which changes nothing. Raises FleetpulseError if it is damaged or of an unknown version.
    """
    import duckdb

    from pipeline.store import database, schema

    try:
        with database.open_file(path, {}, read_only=True) as connection:
            schema.check_version(connection)
    except duckdb.Error as error:
        raise database.explain_error(path, error) from error
    except HeldStore as error:
        return error.holder
    return None
