"""`fleetpulse doctor`: numbered checks, each ok, warn or fail, with what it means and the command that mends it.

A check is a function Config -> Check (or several), and one line in CHECKS. None changes anything; with Kafka, two tiny
records go into a topic that is there for this alone.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import client
from pipeline.checks import Check
from pipeline.config import Config
from pipeline.errors import FleetpulseError, Unreachable
from pipeline.respond import delivery

LEAST_PYTHON = (3, 11)
PACKAGES = ("agents", "pipeline", "detectors", "dashboards")
DISK_FLOOR = 1 << 30
"""Bytes below which a disk is called nearly full: about an hour of hot telemetry of 1,000 nodes. Chosen."""
Examiner = Callable[[Config], "Check | list[Check]"]
COLUMNS = ("number", "check", "state", "found", "meaning", "mend")


def python_version(config: Config, version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Python 3.11 or newer runs this."""
    found = ".".join(map(str, version))
    if version[:2] >= LEAST_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "fail", found, "Fleetpulse needs Python 3.11 or newer", "make install PYTHON=python3.11")


def configuration(config: Config) -> Check:
    """The file was read already, otherwise no check would run; says which one is in force."""
    return Check("configuration", "ok", config.source)


def package_names(config: Config, claims: Mapping[str, Sequence[str]] | None = None) -> Check:
    """No other distribution installed a top-level package under one of our four names."""
    owners = importlib.metadata.packages_distributions() if claims is None else claims
    foreign = [f"{name} (of {d})" for name in PACKAGES for d in owners.get(name, ()) if d != "fleetpulse"]
    if not foreign:
        return Check("package names", "ok", "no other distribution claims " + ", ".join(PACKAGES))
    meaning = "another distribution installed a package of the same name: one of the two overwrites the other"
    return Check("package names", "fail", ", ".join(sorted(set(foreign))), meaning, "make clean install")


def store(config: Config) -> Check:
    """The store's file can be written, or a running pipeline has it."""
    path = config.store.path
    place = _writable(path.parent)
    if place is not None:
        meaning = "the pipeline could not keep anything"
        return Check("store", "fail", place, meaning, f"mkdir -p {path.parent} && chown $USER {path.parent}")
    if not path.exists():
        return Check("store", "warn", f"{path} is not there yet", "nothing was ever stored here", "fleetpulse init")
    holder = _holder(path)
    return Check("store", "ok", f"{path}, {path.stat().st_size >> 20} MiB{f', held by {holder}' if holder else ''}")


def spool(config: Config) -> Check:
    """The spool's folder can be written."""
    directory = config.spool.directory
    place = _writable(directory)
    if place is not None:
        meaning = "the agent could not keep what is not yet stored"
        return Check("spool", "fail", place, meaning, f"mkdir -p {directory} && chown $USER {directory}")
    if not directory.exists():
        return Check("spool", "warn", f"{directory} is not there yet", "no agent ever ran here", "fleetpulse init")
    nodes = sum(1 for entry in directory.iterdir() if entry.is_dir())
    return Check("spool", "ok", f"{directory}, {nodes} node{'' if nodes == 1 else 's'}")


def disk(config: Config, floor: int = DISK_FLOOR) -> Check:
    """Store and spool have room to grow."""
    places = {_existing(config.store.path.parent), _existing(config.spool.directory)}
    free, place = min((shutil.disk_usage(p).free, p) for p in places)
    found = f"{free / (1 << 30):.1f} GiB free at {place}"
    if free >= floor:
        return Check("disk", "ok", found)
    meaning = f"below {floor / (1 << 30):.1f} GiB: the spool will drop its oldest and the pipeline is not ready"
    return Check("disk", "fail", found, meaning, f"df -h {place}; or lower [store] hot_hours, [spool] max_bytes")


def nvml(config: Config, library: str = "libnvidia-ml.so.1") -> Check:
    """The NVIDIA management library can be loaded. A node without GPUs does not need it."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return Check(
            "nvml", "warn", f"no {library}", "this host gives no GPU telemetry", "nvidia-smi  # if it has GPUs"
        )
    return Check("nvml", "ok", library)


def transport(config: Config) -> Check | list[Check]:
    """What the transport needs: the spool nothing, Kafka brokers that let us in, topics, and clocks that agree."""
    if config.pipeline.transport == "spool":
        return Check("transport", "ok", "spool: no broker needed")
    from pipeline import doctor_kafka  # loads the client, which the spool does not need

    return doctor_kafka.checks(config)


def api(config: Config) -> Check:
    """A pipeline answers on [api], and is ready."""
    try:
        status, answer = client.get(config, "/readyz")
    except Unreachable as error:
        return Check("api", "warn", str(error).partition(";")[0], "no pipeline runs here", "fleetpulse pipeline")
    if status == 200:
        return Check("api", "ok", f"{client.base_url(config)} is ready")
    reasons = answer.get("reasons", []) if isinstance(answer, dict) else []
    found = "; ".join(map(str, reasons)) or f"HTTP {status}"
    meaning = "a pipeline runs but does not take in telemetry"
    return Check("api", "fail", found, meaning, f"curl {client.base_url(config)}/readyz")


def webhooks(config: Config) -> Check:
    """Every receiver's address is one that can be posted to. Nothing is sent."""
    hooks = config.notify.webhooks
    bad = [f"{hook.name}: {why}" for hook in hooks if (why := delivery.refusal(hook))]
    if bad:
        meaning = "alerts to this receiver would go nowhere"
        return Check("webhooks", "fail", "; ".join(bad), meaning, "[[notify.webhooks]] url = 'https://HOST/PATH'")
    if not hooks:
        return Check("webhooks", "warn", "none", "incidents show on the dashboard only", "add [[notify.webhooks]]")
    return Check("webhooks", "ok", ", ".join(hook.name for hook in hooks))


CHECKS: tuple[Examiner, ...] = (
    configuration,
    python_version,
    package_names,
    store,
    spool,
    disk,
    nvml,
    transport,
    api,
    webhooks,
)


def examine(config: Config, checks: Sequence[Examiner] = CHECKS) -> list[Check]:
    """All checks in order. One that breaks is itself a fail."""
    found: list[Check] = []
    for check in checks:
        try:
            made = check(config)
            found += [made] if isinstance(made, Check) else made
        except (OSError, FleetpulseError) as error:
            found.append(Check(check.__name__, "fail", str(error), "the check itself could not be made"))
    return found


def exit_code(checks: Sequence[Check]) -> int:
    """3 if a dependency is unreachable, else 1 if a check failed, else 0."""
    return 3 if any(c.unreachable for c in checks) else int(any(c.state == "fail" for c in checks))


def as_rows(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """The checks numbered from 1, as rows of COLUMNS."""
    return [
        {"number": i, "check": c.name, "state": c.state, "found": c.found, "meaning": c.meaning, "mend": c.mend}
        for i, c in enumerate(checks, 1)
    ]


def as_text(checks: Sequence[Check]) -> str:
    """One line per check; below those that are not ok what it means and the mend."""
    lines = []
    for i, c in enumerate(checks, 1):
        lines.append(f"{i:2d} {c.state:4s} {c.name}: {c.found}")
        lines.extend(f"        {label}: {text}" for label, text in (("means", c.meaning), ("mend", c.mend)) if text)
    return "\n".join(lines) + "\n"


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def _writable(folder: Path) -> str | None:
    """None if the folder can be written, or be made; else what stands against it."""
    place = _existing(folder)
    if not place.is_dir():
        return f"{place} is no folder"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


def _holder(path: Path) -> str | None:
    """The process that has the store open for writing, as DuckDB tells it; None if it is free."""
    import duckdb

    try:
        duckdb.connect(str(path), read_only=True).close()
    except duckdb.Error as error:
        owner = re.search(r"PID (\d+)", str(error))
        if owner is None and "lock" not in str(error):
            raise FleetpulseError(f"{path}: cannot be opened: {error}") from error
        return f"process {owner[1]}" if owner else "another process"
    return None
