"""Builds real senders of telemetry from Go modules, once: a Prometheus server and an OpenTelemetry Collector.

    python3 tests/sender_build.py      builds missing programs and prints the folder

Cold this takes about 5 CPU minutes; the result stays in a folder named after the versions. The Collector has only the
parts of collector_parts.go, Prometheus no service discovery and no pages. Only the standard library is imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROMETHEUS, COLLECTOR, CONTRIB = "0.315.1", "0.165.0", "0.165.1"
"""Releases of the modules: Prometheus 3.15.1 is v0.315.1. contrib: of the Collector's further parts."""
CONFMAP = "1.71.0"
"""Release of the Collector's stable modules that goes with COLLECTOR."""
SOURCE = Path(__file__).with_name("collector_parts.go")
BUILD_S = 3600
"""Chosen: ten times the cold build on two idle cores."""
_CONTRIB = "github.com/open-telemetry/opentelemetry-collector-contrib"
_CORE = "go.opentelemetry.io/collector"
MODULES = (
    f"{_CONTRIB}/exporter/kafkaexporter@v{CONTRIB}",
    f"{_CONTRIB}/exporter/prometheusremotewriteexporter@v{CONTRIB}",
    f"{_CONTRIB}/processor/resourceprocessor@v{CONTRIB}",
    f"{_CONTRIB}/receiver/hostmetricsreceiver@v{CONTRIB}",
    f"{_CORE}/exporter/otlpexporter@v{COLLECTOR}",
    f"{_CORE}/exporter/otlphttpexporter@v{COLLECTOR}",
    f"{_CORE}/otelcol@v{COLLECTOR}",
    f"{_CORE}/receiver/otlpreceiver@v{COLLECTOR}",
    f"{_CORE}/confmap/provider/fileprovider@v{CONFMAP}",
)


class BuildError(Exception):
    """A sender cannot be built here; the text gives the reason."""


def folder() -> Path:
    """Returns the folder of the built programs of these versions."""
    key = hashlib.sha256(SOURCE.read_bytes() + repr(MODULES).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse" / "senders"
    return cache / f"prometheus{PROMETHEUS}-collector{COLLECTOR}-{key}"


def prometheus() -> Path:
    return folder() / "prometheus"


def collector() -> Path:
    return folder() / "otelcol"


def missing(program: Path) -> str:
    """Returns why a program cannot be started, with the fix; empty if it can."""
    return "" if program.exists() else f"{program.name} is not built: run 'make parts'"


def build() -> Path:
    """Returns the folder with all programs. The first caller builds; others wait for it. Raises BuildError."""
    out = folder()
    if prometheus().exists() and collector().exists():
        return out
    if shutil.which("go") is None:
        raise BuildError("no Go: install Go 1.26 or newer (https://go.dev/dl)")
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not prometheus().exists():
            _build_prometheus(prometheus())
        if not collector().exists():
            _build_collector(collector())
    return out


def _build_prometheus(out: Path) -> None:
    """A module that has the program as a tool: `go install` refuses a module with replacements."""
    program = "github.com/prometheus/prometheus/cmd/prometheus"
    with tempfile.TemporaryDirectory(prefix="fleetpulse-prometheus-") as work:
        place = Path(work)
        # the first release of this module is gone, and Prometheus excludes it too
        exclude = "exclude github.com/linode/linodego v1.0.0\n"
        (place / "go.mod").write_text(f"module fleetpulse/prometheus\n\ngo 1.26.0\n\n{exclude}")
        _go(place, "get", "-tool", f"{program}@v{PROMETHEUS}")
        _go(place, "build", "-trimpath", "-tags", "remove_all_sd,netgo", "-ldflags", "-s -w", "-o", _part(out), program)
    Path(_part(out)).replace(out)


def _build_collector(out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fleetpulse-collector-") as work:
        place = Path(work)
        shutil.copy(SOURCE, place / "main.go")
        (place / "go.mod").write_text("module fleetpulse/collector\n\ngo 1.26.0\n")
        _go(place, "get", *MODULES)
        _go(place, "build", "-mod=mod", "-trimpath", "-ldflags", "-s -w", "-o", _part(out), ".")
    Path(_part(out)).replace(out)


def _part(out: Path) -> str:
    return str(out.with_suffix(".part"))


def _go(place: Path, *words: str) -> None:
    try:
        subprocess.run(["go", *words], cwd=place, capture_output=True, text=True, timeout=BUILD_S, check=True)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"go {' '.join(words[:3])}: {error.stderr[-2000:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"go {' '.join(words[:3])}: {error}") from error


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as error:
        sys.exit(f"sender_build: {error}")
