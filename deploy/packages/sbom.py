"""Writes a bill of materials (CycloneDX 1.6, JSON): Python packages, Python, and in a bundle linked libraries.

    python deploy/packages/sbom.py FOLDER VERSION > fleetpulse-agent.cdx.json

FOLDER is a bundle or, in an image, a virtual environment. Packages, versions and licences are those of the metadata
that pip installed.
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


def components(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields one component per package, then Python and the libraries beside it."""
    home = folder / "python" if (folder / "python").is_dir() else folder
    library = next((home / "lib").glob("python3.*"))
    found = importlib.metadata.distributions(path=[str(library / "site-packages")])
    for one in sorted(found, key=lambda one: one.name.lower()):
        name = one.name.lower().replace("_", "-")
        yield {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{one.version}",
            "purl": f"pkg:pypi/{name}@{one.version}",
            "name": name,
            "version": one.version,
            **licence(one.metadata),
        }
    python = platform.python_version()
    yield {
        "type": "platform",
        "bom-ref": f"pkg:generic/python@{python}",
        "purl": f"pkg:generic/python@{python}",
        "name": "python",
        "version": python,
        "licenses": [{"license": {"id": "PSF-2.0"}}],
    }
    for file in sorted((home / "lib").glob("*.so*")):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        hashes = [{"alg": "SHA-256", "content": digest}]
        yield {"type": "library", "bom-ref": f"file:{file.name}", "name": file.name, "hashes": hashes}


def licence(metadata: Any) -> dict[str, Any]:
    """Returns the licence as its package states it: an SPDX expression, else a name, else the classifier."""
    if expression := metadata.get("License-Expression"):
        return {"licenses": [{"expression": expression}]}
    classifiers = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    name = classifiers[0] if classifiers else (metadata.get("License") or "").split("\n")[0]
    return {"licenses": [{"license": {"name": name}}]} if name else {}


def main(folder: str, version: str) -> None:
    """Prints the document."""
    parts = list(components(Path(folder)))
    own = next(part for part in parts if part["name"] == "fleetpulse")
    parts.remove(own)
    content = json.dumps(parts, sort_keys=True)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": {**own, "type": "application", "version": version}},
        "components": parts,
    }
    json.dump(document, sys.stdout, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
