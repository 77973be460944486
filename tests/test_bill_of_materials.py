"""The bill of materials names what wheels bring along: shared libraries, and what their own bills say."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
ELF = b"\x7fELF\x02"


def install(site: Path, name: str, files: dict[str, bytes], bills: dict[str, Any] | None = None) -> None:
    """Writes a wheel as pip leaves it; bills: files of its bills of materials."""
    info = f"{name}-1.0.dist-info"
    files = {**files, f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()}
    files |= {
        f"{info}/sboms/{n}": b if isinstance(b, bytes) else json.dumps(b).encode() for n, b in (bills or {}).items()
    }
    for place, written in files.items():
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        (site / place).write_bytes(written)
    lines = [f"{place},,\n" for place in (*files, f"{name}/removed.so")]
    (site / info / "RECORD").write_text("".join(lines))


def write_bill(folder: Path) -> tuple[dict[str, Any], str]:
    """Returns the bill of an environment and its stderr."""
    words = [sys.executable, ROOT / "deploy/packages/sbom.py", folder, "0.2.0"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment with Fleetpulse, in which a test installs wheels."""
    made = tmp_path / "lib/python3.11/site-packages"
    install(made, "fleetpulse", {})
    return made


def parts_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {part["bom-ref"]: part for part in document["components"]}


def below(document: dict[str, Any], ref: str) -> set[str]:
    """Returns names of what a component depends on."""
    parts = parts_of(document)
    return {parts[one]["name"] for edge in document["dependencies"] if edge["ref"] == ref for one in edge["dependsOn"]}


def test_libraries_of_a_wheel_are_named_by_file_and_hash_with_no_invented_version(site: Path, tmp_path: Path) -> None:
    module = ELF + b"\0PyInit__alpha\0"
    files = {"alpha.libs/libfoo-1a2b.so.1.2": ELF + b"foo", "alpha/libfoo.so": ELF + b"foo", "alpha/run": ELF + b"run"}
    files |= {"alpha/_alpha.cpython-311-x86_64-linux-gnu.so": module, "alpha/libnone.so.txt": b"text"}
    files |= {"alpha/lib.cpython-311-x86_64-linux-gnu.so": ELF + b"\0PyInit_lib\0"}
    files |= {"alpha/libpart_python.so.2": ELF + b"\0PyInit_libpart_python\0"}  # as of pyarrow
    install(site, "Alpha_Wheel", files)
    document, said = write_bill(tmp_path)
    owner = "pkg:pypi/alpha-wheel@1.0"
    assert below(document, owner) == {"libfoo-1a2b.so.1.2", "libpart_python.so.2", "run"}
    (foo,) = [part for part in document["components"] if part["name"] == "libfoo-1a2b.so.1.2"]
    assert foo["type"] == "library"
    assert "version" not in foo
    assert foo["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(ELF + b"foo").hexdigest()}]
    places = [one["location"] for one in foo["evidence"]["occurrences"]]
    assert places == ["alpha.libs/libfoo-1a2b.so.1.2", "alpha/libfoo.so"]
    assert [part["type"] for part in document["components"] if part["name"] == "run"] == ["application"]
    assert document["compositions"] == [{"aggregate": "unknown", "assemblies": [owner]}]
    assert said == ""


def test_the_own_bills_of_a_wheel_are_merged(site: Path, tmp_path: Path) -> None:
    """As auditwheel writes them for libraries of a distribution, and maturin for crates."""
    own = {"bom-ref": "pkg:pypi/beta@1.0?file_name=b.whl", "purl": "pkg:pypi/beta@1.0?file_name=b.whl", "name": "beta"}
    gomp = {"type": "library", "bom-ref": "g", "purl": "pkg:rpm/alma/libgomp@8.5", "name": "libgomp", "version": "8.5"}
    first = {"bomFormat": "CycloneDX", "metadata": {"component": own}, "components": [own, gomp]}
    first["dependencies"] = [{"ref": own["bom-ref"], "dependsOn": ["g"]}, {"ref": "g"}]
    crate = {"type": "library", "bom-ref": "c", "name": "beta-rust", "version": "1.0", "description": "left out"}
    crate["purl"] = "pkg:cargo/beta-rust@1.0?download_url=file://."
    serde = {"type": "library", "bom-ref": "s", "purl": "pkg:cargo/serde@1.0.2", "name": "serde", "version": "1.0.2"}
    second = {"bomFormat": "CycloneDX", "metadata": {"component": crate}, "components": [serde]}
    second["dependencies"] = [{"ref": "c", "dependsOn": ["s", "gone"]}]
    alone = {"bomFormat": "CycloneDX", "components": [{"type": "library", "name": "openssl", "version": "4.0"}]}
    bills = {"auditwheel.cdx.json": first, "beta.cyclonedx.json": second, "sbom.json": alone}
    install(site, "beta", {"beta/libx.so": ELF}, bills)
    install(site, "gamma", {"gamma/libx.so": ELF}, {"a.json": {"bomFormat": "CycloneDX", "components": [serde]}})
    document, said = write_bill(tmp_path)
    parts = parts_of(document)
    assert len(parts) == len(document["components"])
    assert below(document, "pkg:pypi/beta@1.0") == {"libgomp", "beta-rust", "openssl", "libx.so"}
    assert below(document, "pkg:pypi/beta@1.0#beta-rust@1.0") == {"serde"}
    assert below(document, "pkg:pypi/gamma@1.0") == {"serde", "libx.so"}
    assert parts["pkg:rpm/alma/libgomp@8.5"] == {**gomp, "bom-ref": "pkg:rpm/alma/libgomp@8.5"}
    kept = {"type": "library", "bom-ref": "pkg:pypi/beta@1.0#beta-rust@1.0", "name": "beta-rust", "version": "1.0"}
    assert parts[kept["bom-ref"]] == kept, "no path of the machine that built it"
    assert [part["name"] for part in document["components"]].count("beta") == 1
    assert document["compositions"] == []
    assert said == ""


@pytest.mark.parametrize("content", [b"<bom/>", b'{"spdxVersion": "SPDX-2.3"}', b"[]"])
def test_a_bill_of_another_form_is_named_and_the_wheel_is_of_unknown_completeness(
    content: bytes, site: Path, tmp_path: Path
) -> None:
    install(site, "beta", {"beta/libx.so": ELF}, {"beta.bill": content})
    document, said = write_bill(tmp_path)
    assert said == "sbom: beta-1.0.dist-info: beta.bill is not merged: no CycloneDX in JSON\n"
    assert document["compositions"] == [{"aggregate": "unknown", "assemblies": ["pkg:pypi/beta@1.0"]}]
    assert below(document, "pkg:pypi/beta@1.0") == {"libx.so"}


def test_every_library_and_every_stated_component_of_this_environment_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "deploy/packages")
    contents = importlib.import_module("wheel_contents").Contents()
    site = Path(np.__file__).parents[1]
    for one in importlib.metadata.distributions(path=[str(site)]):
        name = one.name.lower().replace("_", "-")
        contents.add_wheel(one, {"type": "library", "bom-ref": f"pkg:pypi/{name}@{one.version}", "name": name})
    places = {
        occurrence["location"]: part["hashes"][0]["content"]
        for part in contents.components.values()
        for occurrence in part.get("evidence", {}).get("occurrences", [])
    }
    libraries = [*site.glob("*.libs/*.so*"), *site.glob("pyarrow/lib*.so.*"), *site.glob("llvmlite/binding/*.so")]
    assert len(libraries) > 3
    for path in libraries:
        assert places[str(path.relative_to(site))] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert not [place for place in places if ".cpython-" in place]
    names = {part["name"] for part in contents.components.values()}
    bills = list(site.glob("*.dist-info/sboms/*.json"))
    assert bills
    stated = {part["name"].lower() for path in bills for part in json.loads(path.read_text())["components"]}
    assert stated - {name.lower() for name in names} == set()
    known = contents.components.keys()
    edges = {one for ref, others in contents.edges.items() for one in (ref, *others)}
    assert edges <= known
    reached = {one for others in contents.edges.values() for one in others}
    assert [ref for ref in known - reached if "#" in ref or not ref.startswith("pkg:pypi/")] == []
