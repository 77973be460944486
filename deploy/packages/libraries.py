"""Which package of the machine that builds owns a native library, for the bill of materials of a bundle."""

import functools
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

_DEB = "${binary:Package}\t${Version}\t${Architecture}\t${source:Package}"
_RPM = "%{NAME}\t%{VERSION}-%{RELEASE}\t%{ARCH}\t%{SOURCERPM}\t%{LICENSE}"


def find_owner(file: Path) -> dict[str, str]:
    """Returns name, version, purl and, if known, licence of the package that owns a file; empty if none does."""
    return next((found for path in _names_of(file) if (found := _ask_dpkg(path) or _ask_rpm(path))), {})


def _names_of(file: Path) -> Iterator[str]:
    """Yields the paths under which a package may have a file: /lib is a link to /usr/lib, dpkg knows either."""
    for path in dict.fromkeys((str(file), os.path.realpath(file))):
        yield path
        yield path.removeprefix("/usr") if path.startswith("/usr/") else f"/usr{path}"


def _ask_dpkg(path: str) -> dict[str, str]:
    owner = _ask("dpkg-query", "--search", path).partition(": ")[0].split(",")[0]
    if not owner or owner.startswith("diversion "):
        return {}
    name, version, architecture, source = _ask("dpkg-query", "--show", "--showformat", _DEB, owner).split("\t")
    name = name.partition(":")[0]
    purl = f"pkg:deb/{_distribution()[0]}/{name}@{quote(version, safe='')}?arch={architecture}&upstream={source}"
    licence = _read_licence(Path("/usr/share/doc") / name / "copyright", Path(path).name.partition(".so")[0])
    return {"name": name, "version": version, "purl": f"{purl}&distro={'-'.join(_distribution())}", "licence": licence}


def _ask_rpm(path: str) -> dict[str, str]:
    found = _ask("rpm", "--query", "--queryformat", _RPM, "--file", path).split("\t")
    if len(found) != 5:  # "... is not owned by any package"
        return {}
    name, version, architecture, source, licence = found
    purl = f"pkg:rpm/{_distribution()[0]}/{name}@{quote(version, safe='')}?arch={architecture}&upstream={source}"
    return {"name": name, "version": version, "purl": f"{purl}&distro={'-'.join(_distribution())}", "licence": licence}


def _read_licence(copyright_file: Path, library: str) -> str:
    """Returns the licence of a library's folder in Debian's machine-readable form, else of `Files: *`, else of the
    first files; empty in other forms. A source such as util-linux has libraries under another licence than the rest."""
    try:
        paragraphs = copyright_file.read_text(errors="replace").split("\n\n")
    except OSError:
        return ""
    found: dict[int, str] = {}
    for text in paragraphs:
        files = re.search(r"^Files:((?:.*\n)(?:[ \t].*\n)*)", text, re.MULTILINE)
        licence = re.search(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE)
        if files and licence:
            names = files[1].split()
            rank = 0 if any(name.startswith(f"{library}/") for name in names) else 1 if "*" in names else 2
            found.setdefault(rank, licence[1].strip())
    return found[min(found)] if found else ""


@functools.cache
def _distribution() -> tuple[str, str]:
    release = platform.freedesktop_os_release()
    return release.get("ID", "linux"), release.get("VERSION_ID", "")


def _ask(*words: str) -> str:
    """Returns what a program prints; empty if it fails, or is not here."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
