"""What wheels bring along: shared libraries and programs, and what their own bills of materials (PEP 770) say.

The file of a library says which it is by its hash; its version is known only if the wheel's maker states it. What an
extension module is linked with statically is not seen: a wheel with native code and no bill of its own is said to be of
unknown completeness.
"""

import hashlib
import json
import re
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

Component = dict[str, Any]
KEPT = ("type", "group", "name", "version", "scope", "purl", "cpe", "hashes", "licenses")
"""Fields of a component of another document that are valid in CycloneDX 1.6 and say which software it is."""

_LIBRARY = re.compile(r"lib\w+\.so[.\d]*")
"""A library may have the code of a module in it, as libarrow_python.so."""


class Contents:
    """Components by their reference, and which depend on which.

    unknown: wheels with native code whose makers do not say what is in it.
    """

    def __init__(self) -> None:
        self.components: dict[str, Component] = {}
        self.edges: dict[str, set[str]] = {}
        self.unknown: list[str] = []

    def add_wheel(self, wheel: Distribution, component: Component) -> None:
        """Adds an installed wheel with what it brings along."""
        ref = component["bom-ref"]
        self.components[ref] = component
        bills, native = [], False
        for file in wheel.files or ():
            path = Path(str(file.locate()))
            if ".dist-info/sboms/" in str(file):
                bills.append(path)
            elif path.is_file() and _is_elf(path):
                native = True
                content = path.read_bytes()
                is_module = f"PyInit_{path.name.partition('.')[0]}\0".encode() in content
                if not is_module or _LIBRARY.fullmatch(path.name):
                    self._add_library(ref, str(file), hashlib.sha256(content).hexdigest())
        stated = [self._add_bill(component, path) for path in bills]
        if native and not any(stated):
            self.unknown.append(ref)

    def _add_library(self, owner: str, place: str, digest: str) -> None:
        """Adds a library; copies under further names are further occurrences of it."""
        ref = f"{owner}#sha256:{digest}"
        part = self.components.setdefault(
            ref,
            {
                "type": "library" if ".so" in place else "application",
                "bom-ref": ref,
                "name": Path(place).name,
                "hashes": [{"alg": "SHA-256", "content": digest}],
                "evidence": {"occurrences": []},
            },
        )
        part["evidence"]["occurrences"].append({"location": place})
        self._connect(owner, ref)

    def _add_bill(self, wheel: Component, path: Path) -> bool:
        """Merges a bill of a wheel, and returns whether it could: other forms than CycloneDX in JSON are named."""
        try:
            found = json.loads(path.read_bytes())
            if found["bomFormat"] != "CycloneDX":
                raise KeyError("bomFormat")
        except (ValueError, KeyError, TypeError):
            print(f"sbom: {path.parent.parent.name}: {path.name} is not merged: no CycloneDX in JSON", file=sys.stderr)
            return False
        refs: dict[str, str] = {}
        reached = {wheel["bom-ref"]}
        main = (found.get("metadata") or {}).get("component")
        for part in ([main] if main else []) + found.get("components", []):
            self._add_stated(wheel, part, refs)
        for edge in found.get("dependencies", []):
            for below in edge.get("dependsOn", []):
                if edge["ref"] in refs and below in refs:
                    self._connect(refs[edge["ref"]], refs[below])
                    reached.add(refs[below])
        for ref in refs.values():
            if ref not in reached:
                self._connect(wheel["bom-ref"], ref)
        return True

    def _add_stated(self, wheel: Component, part: Component, refs: dict[str, str]) -> None:
        """Adds a component that a bill states; what is one in several bills, by its purl, is one here."""
        purl, owner = part.get("purl", ""), wheel["bom-ref"]
        if re.sub(r"\?[^#]*", "", purl).lower().replace("_", "-") == owner:
            ref = owner  # the wheel itself
        else:
            # a purl with a path of its maker's machine names nothing elsewhere
            shared = purl and "=file:" not in purl
            ref = purl if shared else f"{owner}#{part['name']}@{part.get('version', '')}"
            kept = {key: part[key] for key in KEPT if key in part and (key != "purl" or shared)}
            self.components.setdefault(ref, {"bom-ref": ref, **kept})
        refs[part.get("bom-ref", ref)] = ref

    def _connect(self, above: str, below: str) -> None:
        if above != below:
            self.edges.setdefault(above, set()).add(below)

    def describe(self) -> dict[str, Any]:
        """Returns the parts of the document beside the components."""
        edges = [{"ref": ref, "dependsOn": sorted(self.edges[ref])} for ref in sorted(self.edges)]
        unknown = [{"aggregate": "unknown", "assemblies": sorted(self.unknown)}] if self.unknown else []
        return {"dependencies": edges, "compositions": unknown}


def _is_elf(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"
