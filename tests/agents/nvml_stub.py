"""Builds the stand-in for the NVIDIA driver's library (nvml_stub.c lists its settings) and its environment.

Also loaded by path from benchmarks, so it needs nothing but the standard library and a C compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml_stub.c")
LIBRARY = "libnvidia-ml.so.1"


def compiler() -> str | None:
    """The C compiler to build with; None where there is none."""
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path) -> Path:
    """Compiles the library into `folder`; returns its path."""
    path = folder / LIBRARY
    command = [
        compiler() or "cc",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-o",
        str(path),
        str(SOURCE),
    ]
    subprocess.run(command, check=True)
    return path


def environment(
    library: Path,
    settings: Iterable[str] = (),
    *,
    control: Path | None = None,
    calls: Path | None = None,
    events: Path | None = None,
) -> dict[str, str]:
    """This process's environment, changed so that a child process loads the stub with these settings."""
    environ = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "STUB": ";".join(settings)}
    paths = {"STUB_CONTROL": control, "STUB_CALLS": calls, "STUB_EVENTS": events}
    return environ | {key: str(path) for key, path in paths.items() if path is not None}


def write_control(control: Path, *lines: str) -> None:
    """Replaces the control file atomically: the stub reads either the old or the new one."""
    fresh = control.with_suffix(".new")
    fresh.write_text("".join(f"{line}\n" for line in lines))
    fresh.replace(control)


def calls_made(calls: Path) -> list[tuple[str, int, int]]:
    """(function, GPU or -1, number of requested fields or metrics) of every call listed in a STUB_CALLS file."""
    lines = calls.read_text().splitlines() if calls.exists() else []
    return [(name, int(gpu), int(count)) for name, gpu, count in (line.split() for line in lines)]
