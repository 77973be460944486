"""Makes a folder that runs on any Linux with a new enough glibc, wherever it lies: Fleetpulse with its own Python.

    python deploy/packages/bundle.py agent dist/fleetpulse-0.2.0-py3-none-any.whl FOLDER

Python is the interpreter that runs this, with the libraries that it links to, except glibc. Needs patchelf. FOLDER gets
bin/fleetpulse, python/ and share/; share/glibc names the glibc that the target needs at least, share/libraries.json the
packages of this machine that own the libraries, share/doc/fleetpulse are the guides of the wheel.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from libraries import find_owner

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
GLIBC = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|util|resolv|nsl|crypt))\.so.*")
"""Libraries of glibc: those of the target, which fit its kernel and loader."""
LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data", "site-packages")
LEFT_OUT += ("readline*", "_curses*", "nis.*", "_dbm*", "_gdbm*")  # not used; readline and gdbm are under the GPL
LEFT_OUT += ("dist-packages", "__pycache__", "config-*", "*.a", "_tkinter*", "_test*", "xxlimited*", "libpython*")
LAUNCHER = """#!/bin/sh
# Runs with the Python of this folder, whatever the site's environment modules set.
home=$(dirname "$(dirname "$(readlink -f "$0")")")
unset PYTHONHOME PYTHONPATH
export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
# Python's OpenSSL looks for certificates where Debian has them; Red Hat and SUSE have them elsewhere.
if [ -z "$SSL_CERT_FILE" ] && [ ! -e /etc/ssl/certs/ca-certificates.crt ]; then
    for file in /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem; do
        [ ! -e "$file" ] || export SSL_CERT_FILE="$file"
    done
fi
exec "$home/python/bin/VERSION" -m fleetpulse "$@"
"""


def copy_python(target: Path) -> None:
    """Copies the interpreter, its standard library and the libraries that these link to."""
    library, own = target / "lib", Path(sysconfig.get_path("stdlib"))
    (target / "bin").mkdir(parents=True)
    program = target / "bin" / VERSION
    shutil.copy(Path(sys.executable).resolve(), program)
    shutil.copytree(own, library / VERSION, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (library / VERSION / "site-packages").mkdir()
    modules = list((library / VERSION / "lib-dynload").glob("*.so"))
    needed = {path for file in (program, *modules) for path in linked_libraries(file)}
    for path in sorted(needed):
        shutil.copy(path, library / path.name)
    (target.parent / "share").mkdir(exist_ok=True)
    owners = {path.name: find_owner(path) for path in sorted(needed)}
    (target.parent / "share" / "libraries.json").write_text(json.dumps(owners, indent=1) + "\n")
    for file, home in [(program, "$ORIGIN/../lib"), *((m, "$ORIGIN/../..") for m in modules)]:
        set_search_path(file, home)
    for path in needed:
        set_search_path(library / path.name, "$ORIGIN")


def linked_libraries(file: Path) -> Iterator[Path]:
    """Yields the libraries that a file links to, in turn too, without those of glibc."""
    said = subprocess.run(["ldd", file], capture_output=True, text=True).stdout
    for name, path in re.findall(r"(\S+) => (/\S+)", said):
        if not GLIBC.fullmatch(name):
            yield Path(path)


def set_search_path(file: Path, folder: str) -> None:
    """Makes a file find its libraries beside itself, and removes what debuggers alone need."""
    file.chmod(0o755)
    subprocess.run(["strip", "--strip-unneeded", file], check=True)
    subprocess.run(["patchelf", "--set-rpath", folder, file], check=True)


def install(extra: str, wheel: Path, site: Path) -> None:
    """Installs dependencies with the hashes of constraints.txt, then the wheel."""
    spec = importlib.util.spec_from_file_location("requirements", ROOT / "deploy" / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    listing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(listing)
    wanted = sorted(listing.requirements(listing.read_project(), [extra]))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile"]
    pip += ["--target", str(site)]
    held = ["--require-hashes", "--only-binary", ":all:", "--constraint", str(ROOT / "constraints.txt"), *wanted]
    subprocess.run([*pip, *held], check=True)
    shutil.rmtree(site / "bin", ignore_errors=True)  # they name the Python of the machine that built them
    shutil.rmtree(site / "share", ignore_errors=True)  # of notebooks; pip would leave our own share out
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    shutil.rmtree(site / "bin")
    for tests in [*site.glob("*/tests"), *site.glob("*/*/tests")]:
        shutil.rmtree(tests)


def compile_all(library: Path) -> None:
    """Writes bytecode that is used whatever times a package manager gives files: no user of the bundle may write."""
    words = ["-m", "compileall", "-q", "-j", "2", "--invalidation-mode", "unchecked-hash"]
    words += ["-s", str(library), "-p", f"/opt/fleetpulse/python/lib/{library.name}", str(library)]
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=False)  # templates are no Python


def least_glibc(folder: Path) -> str:
    """Returns the newest version of glibc that any file of the bundle asks for."""
    found = {(2, 17)}
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink() and (".so" in file.name or os.access(file, os.X_OK)):
            with open(file, "rb") as opened:
                if opened.read(4) != b"\x7fELF":
                    continue
                found |= {(2, int(n)) for n in re.findall(rb"GLIBC_2\.(\d+)\0", opened.read())}
    return "{}.{}".format(*max(found))


def main(extra: str, wheel: str, target: str) -> None:
    """Makes the bundle of an extra of pyproject.toml, `agent` or `all`."""
    folder = Path(target)
    shutil.rmtree(folder, ignore_errors=True)
    copy_python(folder / "python")
    library = folder / "python" / "lib" / VERSION
    install(extra, Path(wheel), library / "site-packages")
    compile_all(library)
    launcher = folder / "bin" / "fleetpulse"
    launcher.parent.mkdir()
    launcher.write_text(LAUNCHER.replace("VERSION", VERSION))
    launcher.chmod(0o755)
    share = folder / "share"
    (library / "site-packages" / "share" / "doc").rename(share / "doc")
    (library / "site-packages" / "share").rmdir()
    shutil.copytree(ROOT / "deploy" / "systemd", share / "systemd")
    shutil.copytree(ROOT / "deploy" / "slurm", share / "slurm")
    for name in ("LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, share)
    (share / "glibc").write_text(least_glibc(folder) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
