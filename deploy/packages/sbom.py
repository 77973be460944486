"""Writes a bill of materials (CycloneDX 1.6, JSON): Python packages with what their wheels bring along, Python, and in
a bundle linked libraries.

    python deploy/packages/sbom.py FOLDER VERSION > fleetpulse-agent.cdx.json

FOLDER is a bundle or, in an image, a virtual environment. Packages, versions and licences are those of the metadata
that pip installed; of native libraries those of the package of the machine that built the bundle, which has its fixes.
"""

import hashlib
import importlib.metadata
import json
import platform
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wheel_contents import Contents


def components(folder: Path, contents: Contents) -> Iterator[dict[str, Any]]:
    """Yields Python and the libraries beside it; packages and what they bring along are added to the contents."""
    home = folder / "python" if (folder / "python").is_dir() else folder
    library = next((home / "lib").glob("python3.*"))
    found = importlib.metadata.distributions(path=[str(library / "site-packages")])
    for one in sorted(found, key=lambda one: one.name.lower()):
        name = one.name.lower().replace("_", "-")
        purl = f"pkg:pypi/{name}@{one.version}"
        known = {"type": "library", "bom-ref": purl, "purl": purl, "name": name, "version": one.version}
        contents.add_wheel(one, {**known, **licence(one.metadata)})
    python = platform.python_version()
    yield {
        "type": "platform",
        "bom-ref": f"pkg:generic/python@{python}",
        "purl": f"pkg:generic/python@{python}",
        "name": "python",
        "version": python,
        "licenses": [{"license": {"id": "PSF-2.0"}}],
    }
    yield from native_libraries(sorted((home / "lib").glob("*.so*")), folder / "share" / "libraries.json", python)


def native_libraries(files: list[Path], owners: Path, python: str) -> Iterator[dict[str, Any]]:
    """Yields a component per package that owns some of the files, with these in it; then each file without a package.

    owners: what bundle.py found where it copied them. That of Python is of its own build if no package has it.
    """
    known = json.loads(owners.read_text()) if owners.exists() else {}
    packages: dict[str, dict[str, Any]] = {}
    rest = []
    for file in files:
        hashes = [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}]
        part = {"type": "file", "bom-ref": f"file:{file.name}", "name": file.name, "hashes": hashes}
        if owner := known.get(file.name):
            package = packages.setdefault(owner["purl"], _describe_package(owner))
            package["components"].append(part)
        elif file.name.startswith("libpython"):
            licences = [{"license": {"id": "PSF-2.0"}}]
            rest.append({**part, "type": "library", "version": python, "licenses": licences})
        else:
            rest.append({**part, "type": "library"})
    yield from (packages[purl] for purl in sorted(packages))
    yield from rest


def _describe_package(owner: dict[str, str]) -> dict[str, Any]:
    named = {"licenses": [{"license": {"name": owner["licence"]}}]} if owner["licence"] else {}
    purl, name, version = owner["purl"], owner["name"], owner["version"]
    return {
        "type": "library",
        "bom-ref": purl,
        "purl": purl,
        "name": name,
        "version": version,
        **named,
        "components": [],
    }


def licence(metadata: Any) -> dict[str, Any]:
    """Returns the licence as its package states it: an SPDX expression, else a name, else the classifier."""
    if expression := metadata.get("License-Expression"):
        return {"licenses": [{"expression": expression}]}
    classifiers = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    name = classifiers[0] if classifiers else (metadata.get("License") or "").split("\n")[0]
    return {"licenses": [{"license": {"name": name}}]} if name else {}


def main(folder: str, version: str) -> None:
    """Prints the document."""
    contents = Contents()
    beside = list(components(Path(folder), contents))
    parts = [*contents.components.values(), *beside]
    own = next(part for part in parts if part["name"] == "fleetpulse")
    parts.remove(own)
    content = json.dumps([parts, contents.describe()], sort_keys=True)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": {**own, "type": "application", "version": version}},
        "components": parts,
        **contents.describe(),
    }
    json.dump(document, sys.stdout, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
