"""Builds real Kubernetes (etcd, apiserver, controller manager, scheduler, kubectl) and kwok from Go modules, once.

    python3 tests/kubernetes_build.py      builds missing programs and prints the folder

Cold this takes about 11 CPU minutes, 2.4 GB of memory at the link and 4.5 GB of Go's build cache; the result stays
in a folder named after the versions. Only the standard library is imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

KUBERNETES, KWOK = "1.35.4", "0.8.0"
SOURCE = Path(__file__).with_name("kubernetes_parts.go")
BUILD_S = 3600
"""Chosen: five times the cold build on two idle cores."""
STAGES = (
    *("node/fast/node-initialize.yaml", "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml"),
    *("pod/fast/pod-ready.yaml", "pod/fast/pod-delete.yaml"),
)
"""Stages that kwok simulates: nodes that become ready and stay, pods that run until they are deleted."""


class BuildError(Exception):
    """Kubernetes cannot be built here; the text gives the reason."""


def folder() -> Path:
    """Returns the folder of the built programs of these versions."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse" / "kubernetes"
    return cache / f"{KUBERNETES}-kwok{KWOK}-{key}"


def parts() -> Path:
    return folder() / "kubernetes-parts"


def kwok() -> Path:
    return folder() / "kwok"


def stages() -> Path:
    return folder() / f"stages-{hashlib.sha256(repr(STAGES).encode()).hexdigest()[:8]}.yaml"


def missing() -> str:
    """Returns missing programs with the fix; empty if all are built."""
    lacking = [file.name for file in (parts(), kwok(), stages()) if not file.exists()]
    return f"Kubernetes is not built ({', '.join(lacking)} missing): run 'make parts'" if lacking else ""


def build() -> Path:
    """Returns the folder with all programs. The first caller builds; others wait for it. Raises BuildError."""
    out = folder()
    if not missing():
        return out
    if shutil.which("go") is None:
        raise BuildError("no Go: install Go 1.25 or newer (https://go.dev/dl)")
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not parts().exists():
            _build_parts(parts())
        if not kwok().exists():
            _go(out, "install", f"sigs.k8s.io/kwok/cmd/kwok@v{KWOK}", GOBIN=str(out))
        if not stages().exists():
            place = Path(_download(f"sigs.k8s.io/kwok@v{KWOK}")["Dir"]) / "kustomize" / "stage"
            stages().write_text("\n---\n".join((place / name).read_text() for name in STAGES))
    return out


def _build_parts(out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fleetpulse-kubernetes-") as work:
        place = Path(work)
        shutil.copy(SOURCE, place / "main.go")
        (place / "go.mod").write_text(_module())
        _go(place, "mod", "tidy")
        version = "k8s.io/component-base/version"
        major, minor = KUBERNETES.split(".")[:2]
        # without these the server reports v0.0.0-master
        facts = f"-X {version}.gitVersion=v{KUBERNETES} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"
        _go(place, "build", "-trimpath", "-ldflags", f"-s -w {facts}", "-o", str(out.with_suffix(".part")), ".")
    out.with_suffix(".part").replace(out)


def _module() -> str:
    """go.mod with each staging module of k8s.io/kubernetes replaced by its release: v1.35.4 matches v0.35.4."""
    release = "0." + KUBERNETES.partition(".")[2]
    its = Path(_download(f"k8s.io/kubernetes@v{KUBERNETES}")["GoMod"]).read_text()
    staged = re.findall(r"^\s*(k8s\.io/[a-z0-9-]+) => \./staging", its, re.M)
    replaced = "".join(f"\t{name} => {name} v{release}\n" for name in staged)
    head = "module fleetpulse/kubernetesparts\n\ngo 1.25.0\n\n"
    return f"{head}require k8s.io/kubernetes v{KUBERNETES}\n\nreplace (\n{replaced})\n"


def _download(module: str) -> Mapping[str, str]:
    found: Mapping[str, str] = json.loads(_go(Path.cwd(), "mod", "download", "-json", module))
    return found


def _go(place: Path, *words: str, **environment: str) -> str:
    try:
        done = subprocess.run(
            ["go", *words],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            env={**os.environ, "GOFLAGS": "-buildvcs=false", **environment},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"go {words[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"go {words[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def main() -> None:
    with suppress(OSError):
        os.nice(10)
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as error:
        sys.exit(f"kubernetes_build: {error}")


if __name__ == "__main__":
    main()
