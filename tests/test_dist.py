"""What `make dist` builds: a wheel and an sdist that run elsewhere, bundles with their own Python, deb and rpm."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import string
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import quote

import pytest

from pipeline.commands.checkout import find_commit
from tests.bare_machine import BareMachine, missing
from tests.guides import find_broken_links, find_named, list_printed, print_named
from tests.parts import do_without
from tests.until import until

ROOT = Path(__file__).parents[1]
DATA = (".toml", ".json", ".css", ".js", ".html", ".png", ".dictionary")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist."""
    folder = tmp_path_factory.mktemp("built")
    environ = {**os.environ, "FLEETPULSE_COMMIT": "0123456789ab"}
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, env=environ, check=True)
    return folder


def run(program: str | Path, *words: str, cwd: Path, **environ: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLEETPULSE"))}
    done = subprocess.run([program, *words], cwd=cwd, env={**kept, **environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_contains_every_file_of_the_four_packages(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    packages = ("agents/", "pipeline/", "detectors/", "dashboards/")
    wanted = {name for name in tracked if name.startswith(packages) and (ROOT / name).exists()}
    assert wanted - inside == set()
    assert sum(name.endswith(DATA) for name in inside) > 30
    assert not {name for name in inside if name.startswith(("tests/", "deploy/", "benchmarks/"))}


def test_the_sdist_builds_the_same_wheel_of_the_same_commit(built: Path, tmp_path: Path) -> None:
    (packed,) = built.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "d"], cwd=source, check=True
    )
    (first,), (second,) = built.glob("*.whl"), (tmp_path / "d").glob("*.whl")
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()


@pytest.mark.slow
def test_the_installed_wheel_runs_from_anywhere_and_knows_its_commit(built: Path, tmp_path: Path) -> None:
    """With the dependencies of this environment; those of the wheel alone are tried with the bundle."""
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, *words], check=True)
    program = (
        "import sys, fleetpulse; assert fleetpulse.__file__.startswith(sys.argv.pop(1)); sys.exit(fleetpulse.main())"
    )
    said = run(sys.executable, "-P", "-c", program, str(site), "--version", cwd=tmp_path, PYTHONPATH=str(site))
    assert said == "fleetpulse 0.2.0 (0123456789ab)\n"
    for words in (["signals"], ["detectors"], ["simulate", "--list"]):
        assert run(sys.executable, "-P", "-c", program, str(site), *words, cwd=tmp_path, PYTHONPATH=str(site))


def test_every_message_names_a_guide_and_a_section_that_exist_by_the_function_that_knows_their_place() -> None:
    named, spelled_out = find_named(ROOT)
    assert spelled_out == [], "these name a guide by a path of the source code: use pipeline.runtime.guides.guide"
    assert len(named) > 15
    for page, section in named:
        text = (ROOT / "docs" / page).read_text()
        assert not section or f"\n## {section}\n" in text, f"docs/{page} has no section {section}"
    for unit in (ROOT / "deploy/systemd").glob("*.service"):
        (place,) = [line for line in unit.read_text().splitlines() if line.startswith("Documentation=")]
        assert (ROOT / "docs" / Path(place).name).exists()
        assert place.startswith("Documentation=file:///opt/fleetpulse/share/doc/fleetpulse/docs/")


@pytest.mark.parametrize("form", ["venv", "prefix", "target"])
def test_every_guide_that_a_message_names_is_installed_by_pip(form: str, built: Path, tmp_path: Path) -> None:
    """pipx makes a virtual environment too. Messages named docs/*.md, which no package had."""
    (wheel,) = built.glob("*.whl")
    home, python = tmp_path / "home", f"python{sys.version_info[0]}.{sys.version_info[1]}"
    words = {"venv": ["--prefix", home], "prefix": ["--prefix", home], "target": ["--target", home]}[form]
    pip = [sys.executable, "-m", "pip"]
    if form == "venv":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        pip, words = [*pip, "--python", home / "bin/python"], []
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", *words, wheel], check=True)
    site = home if form == "target" else home / "lib" / python / "site-packages"
    assert list_printed(print_named(sys.executable, site)) == sorted(
        {str(home / "share/doc/fleetpulse/docs" / page) for page, _ in find_named(ROOT)[0]}
    )
    assert find_broken_links(home / "share/doc/fleetpulse") == []
    program = "import sys, fleetpulse; sys.exit(fleetpulse.main())"
    environ = {**os.environ, "PYTHONPATH": str(site), "HOME": str(tmp_path)}
    words = [sys.executable, "-P", "-c", program, "--help"]
    narrow = {**environ, "COLUMNS": "30"}
    said = subprocess.run(words, cwd=tmp_path, env=narrow, capture_output=True, text=True).stdout
    assert said.endswith(f"\nGuides: {home}/share/doc/fleetpulse/docs/index.md\n")
    words = [sys.executable, "-P", "-c", program, "doctor", "--output", "jsonl"]
    said = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True).stdout
    assert list_printed(said)
    assert [place for place in list_printed(said) if not Path(place).is_file()] == []


def test_an_installation_without_guides_says_that_they_are_in_the_source_code(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert "(source code) docs/agent.md" in print_named(sys.executable, tmp_path / "site").splitlines()


def test_images_are_built_from_files_that_have_every_guide(tmp_path: Path) -> None:
    """What .dockerignore leaves and the Dockerfile copies, built as there: a wheel without guides is refused."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    source = (ROOT / "deploy/images/Dockerfile").read_text().partition("\nFROM source AS ")[0]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = [n for n in tracked if any(fnmatch(n, one) or n.startswith(f"{one}/") for one in allowed)]
    for *given, target in (line.split()[1:] for line in source.splitlines() if line.startswith("COPY ")):
        for name in names:
            for one in given:
                if (ROOT / name).exists() and (name == one or name.startswith(f"{one}/")):
                    place = tmp_path / target / (Path(name).name if name == one else Path(name).relative_to(one))
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / name, place)
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "d"]
    subprocess.run(words, cwd=tmp_path, check=True, env={**os.environ, "FLEETPULSE_COMMIT": "a"})
    (wheel,) = (tmp_path / "d").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (data,) = (tmp_path / "site").glob("*.data/data/share/doc/fleetpulse")
    assert [page for page, _ in find_named(ROOT)[0] if not (data / "docs" / page).is_file()] == []
    assert find_broken_links(data) == []


def test_the_compose_test_builds_from_all_that_the_dockerfile_copies() -> None:
    copied = (ROOT / "deploy/compose_test/run").read_text().partition("\ncp -r ")[2].partition('"$CHECKOUT"')[0].split()
    source = (ROOT / "deploy/images/Dockerfile").read_text()
    lines = [line.split()[1:-1] for line in source.splitlines() if line.startswith("COPY ") and "--from" not in line]
    wanted = {word.partition("/")[0] for words in lines for word in words if not word.startswith(".wheels")}
    assert len(wanted) > 8
    assert wanted - set(copied) == set()


def test_make_dist_leaves_what_it_built_and_nothing_of_a_run_before(tmp_path: Path) -> None:
    """Checksums of a former version, beside the new files, were handed out with them."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if not name.startswith(("tests/", "benchmarks/")) and (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name, follow_symlinks=False)
    dist = tmp_path / "dist"
    dist.mkdir()
    old = ("fleetpulse-0.0.9-py3-none-any.whl", "fleetpulse-server_0.0.9-1_amd64.deb", "fleetpulse-0.0.9.tar.gz")
    for name in (*old, "fleetpulse-agent-0.0.9.cdx.json", "SHA256SUMS", "notes.txt"):
        (dist / name).write_text("old")
    words = ["bash", str(tmp_path / "deploy/packages/make"), "wheel"]
    environ = {**os.environ, "PYTHON": sys.executable, "FLEETPULSE_COMMIT": "0123456789ab"}
    subprocess.run(words, env=environ, check=True, capture_output=True)
    ours = {"fleetpulse-0.2.0-py3-none-any.whl", "fleetpulse-0.2.0.tar.gz"}
    assert {path.name for path in dist.iterdir()} == {*ours, "SHA256SUMS", "notes.txt"}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist, check=True, capture_output=True)
    assert {line.split()[1] for line in (dist / "SHA256SUMS").read_text().splitlines()} == ours


def test_a_checkout_says_its_commit_and_whether_it_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        words = ("-c", "user.name=a", "-c", "user.email=a@b", *words)
        return subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert find_commit(str(tmp_path)) == "", "no checkout"
    git("init", "-q")
    assert find_commit(str(tmp_path)) == "", "no commit"
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    git("tag", "v1")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert find_commit(str(tmp_path)) == commit
    (tmp_path / "a").write_text("2")
    assert find_commit(str(tmp_path)) == f"{commit}-dirty"
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in a hook of another repository
    monkeypatch.setenv("GIT_WORK_TREE", "/")
    assert find_commit(str(tmp_path)) == f"{commit}-dirty"


def test_without_git_or_within_another_project_no_commit_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "site-packages").mkdir()
    assert find_commit(str(tmp_path / "site-packages")) == ""
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_commit(str(tmp_path)) == ""


def test_this_checkout_prints_its_commit() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    said = run(sys.executable, "fleetpulse.py", "--version", cwd=ROOT)
    assert f"(checkout {head.strip()}" in said


@pytest.fixture(scope="module")
def bundle(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent's bundle."""
    if any(shutil.which(name) is None for name in ("patchelf", "strip", "ldd")):
        do_without("dist", "no patchelf or strip here: run 'make parts'")
    folder = tmp_path_factory.mktemp("bundle") / "made"
    (wheel,) = built.glob("*.whl")
    words = [sys.executable, ROOT / "deploy/packages/bundle.py", "agent", wheel, folder]
    done = subprocess.run(words, capture_output=True, text=True)
    if "Could not find a version" in done.stderr:
        pytest.skip("no package index in reach")
    assert done.returncode == 0, done.stderr
    return folder


def test_make_dist_says_at_its_start_what_to_install(tmp_path: Path) -> None:
    for program in ("bash", "dirname", "git", "strip", "mktemp", "rm"):
        (tmp_path / program).symlink_to(shutil.which(program) or program)
    words = ["bash", str(ROOT / "deploy/packages/make"), "agent"]
    done = subprocess.run(words, env={"PATH": str(tmp_path), "PYTHON": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "apt-get install patchelf libc-bin, or as root: make parts PARTS=dist\n" in done.stderr


def test_parts_are_installed_by_name() -> None:
    words = ["bash", str(ROOT / "deploy/parts.sh")]
    done = subprocess.run([*words, "dist", "nosuch"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    known = done.stderr.partition("there are: ")[2].split()
    functions = [line[5:].partition("(")[0] for line in Path(words[1]).read_text().splitlines() if line[:5] == "part_"]
    assert sorted(known) == sorted(functions)


RPM_TO_SERVER = (("-e", "--justdb", "--noscripts", "fleetpulse-agent"), ("-U", "fleetpulse-server"))


@pytest.fixture(scope="module")
def packages(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns deb and rpm of agent and server by name, as `make dist` describes them, with the guides in place of a
    bundle."""
    nfpm = shutil.which("nfpm") or next(Path.home().glob(".cache/fleetpulse/nfpm/*/nfpm"), None)
    if nfpm is None or shutil.which("rpm") is None:
        do_without("dist", "no nfpm or rpm here: run 'make parts PARTS=dist'")
    folder = tmp_path_factory.mktemp("packages")
    made = {}
    for kind, other in (("agent", "server"), ("server", "agent")):
        (folder / kind / "bin").mkdir(parents=True)
        (folder / kind / "bin/fleetpulse").write_text(kind)
        (wheel,) = built.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder / "wheel")
        (data,) = (folder / "wheel").glob("*.data/data")
        shutil.copytree(data, folder / kind, dirs_exist_ok=True)
        values = {"KIND": kind, "OTHER": other, "SUMMARY": "a", "VERSION": "1.0.0", "COMMIT": "a", "ARCH": "amd64"}
        values |= {"BUNDLE": str(folder / kind), "MTIME": "2026-01-01T00:00:00Z", "SCRIPTS": "deploy/packages/scripts"}
        values |= {"SERVER": (ROOT / "deploy/packages/server.yaml").read_text() if kind == "server" else ""}
        for form in ("deb", "rpm"):
            values["GLIBC"] = "glibc"
            text = string.Template((ROOT / "deploy/packages/nfpm.yaml").read_text()).substitute(values)
            (folder / "nfpm.yaml").write_text(text)
            target = made[f"{kind}.{form}"] = folder / f"fleetpulse-{kind}.{form}"
            words = [nfpm, "package", "--config", folder / "nfpm.yaml", "--packager", form, "--target", target]
            subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    return made


@pytest.mark.parametrize(("kind", "other"), [("agent", "fleetpulse-server"), ("server", "fleetpulse-agent")])
def test_an_rpm_obsoletes_nothing_and_conflicts_with_the_other(
    kind: str, other: str, packages: dict[str, Path], tmp_path: Path
) -> None:
    """dnf installed the agent for who asked for the server, since each made the other obsolete."""
    rpm = packages[f"{kind}.rpm"]
    assert run("rpm", "-qp", "--obsoletes", str(rpm), cwd=tmp_path) == ""
    assert run("rpm", "-qp", "--conflicts", str(rpm), cwd=tmp_path) == f"{other}\n"
    if shutil.which("dpkg-deb"):
        deb = str(packages[f"{kind}.deb"])
        fields = run("dpkg-deb", "--field", deb, "Conflicts", "Replaces", "Recommends", cwd=tmp_path)
        assert fields == f"Conflicts: {other}\nReplaces: {other}\nRecommends: systemd\n"


@pytest.mark.parametrize("kind", ["agent", "server"])
def test_deb_and_rpm_have_every_guide_that_a_message_names(
    kind: str, packages: dict[str, Path], tmp_path: Path
) -> None:
    for form in ("deb", "rpm") if shutil.which("dpkg-deb") else ("rpm",):
        root, package = tmp_path / form, packages[f"{kind}.{form}"]
        root.mkdir()
        if form == "deb":
            run("dpkg-deb", "--extract", str(package), str(root), cwd=tmp_path)
        else:
            run("sh", "-c", f"rpm2archive - < {package} | tar -xzf - -C {root}", cwd=tmp_path)
        link = root / f"usr/share/doc/fleetpulse-{kind}"
        assert os.readlink(link) == "/opt/fleetpulse/share/doc/fleetpulse"
        there = root / os.readlink(link)[1:]
        assert [page for page, _ in find_named(ROOT)[0] if not (there / "docs" / page).is_file()] == []
        assert find_broken_links(there) == []


def test_an_rpm_host_becomes_a_server_as_documented_and_keeps_its_configuration(
    packages: dict[str, Path], tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    page = (ROOT / "docs/install.md").read_text().replace("\n  ", " ")
    config = tmp_path / "root/etc/fleetpulse/fleetpulse.toml"
    files = {f"fleetpulse-{k.partition('.')[0]}": p for k, p in packages.items() if k.endswith(".rpm")}

    def rpm(*words: str) -> subprocess.CompletedProcess[str]:
        named = [str(files[word]) if word in files and words[0] != "-e" else word for word in words]
        command = ["rpm", f"--root={tmp_path}/root", "--nodeps" if words[0] == "-e" else "--noscripts", *named]
        return subprocess.run(command, capture_output=True, text=True)

    (tmp_path / "root").mkdir()
    assert rpm("-i", "--nodeps", "fleetpulse-agent").returncode == 0
    config.write_text("# mine\n")
    refused = rpm("-U", "fleetpulse-server")
    assert refused.returncode != 0
    assert "conflicts with" in refused.stderr
    for words in RPM_TO_SERVER:
        assert f"rpm {' '.join(words)}" in page
        done = rpm(*words, *(("--nodeps",) if words[0] == "-U" else ()))
        assert done.returncode == 0, done.stderr
        assert "conflicts with" not in rpm("-U", "--test", "fleetpulse-server").stderr
    assert run("rpm", f"--root={tmp_path}/root", "-qa", cwd=tmp_path) == "fleetpulse-server-1.0.0-1.x86_64\n"
    assert config.read_text() == "# mine\n"
    assert (tmp_path / "root/opt/fleetpulse/bin/fleetpulse").read_text() == "server"
    assert (tmp_path / "root/usr/lib/systemd/system/fleetpulse-agent.service").exists()


@pytest.mark.slow
def test_the_bundle_runs_where_it_is_moved_to_with_its_own_python(bundle: Path, tmp_path: Path) -> None:
    moved = tmp_path / "a folder with spaces"
    shutil.copytree(bundle, moved)
    program = moved / "bin" / "fleetpulse"
    hostile = {"PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere"}
    assert run(program, "--version", cwd=tmp_path, **hostile) == "fleetpulse 0.2.0 (0123456789ab)\n"
    assert run(program, "once", "--output", "jsonl", cwd=tmp_path, **hostile)
    python = next((moved / "python" / "bin").iterdir())
    guides = {str(moved / "share/doc/fleetpulse/docs" / page) for page, _ in find_named(ROOT)[0]}
    assert set(print_named(python).splitlines()) >= guides
    assert [place for place in guides if not Path(place).is_file()] == []
    assert find_broken_links(moved / "share/doc/fleetpulse") == []
    assert not (python.parents[1] / "lib" / python.name / "site-packages" / "share").exists()
    said = run(python, "-P", "-c", "import ssl, sqlite3, numpy, zstandard, sys; print(sys.prefix)", cwd=tmp_path)
    assert said == f"{moved}/python\n"
    loaded = subprocess.run(["ldd", python], capture_output=True, text=True).stdout
    assert f"{moved}/python/bin/../lib/libpython" in loaded or "libpython" not in loaded


@pytest.mark.slow
def test_the_bill_of_materials_has_every_package_of_the_bundle(bundle: Path) -> None:
    words = [sys.executable, ROOT / "deploy/packages/sbom.py", bundle, "0.2.0"]
    document = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    names = {part["name"] for part in document["components"]}
    assert {"numpy", "zstandard", "kafka-python", "python"} <= names
    native = {file["name"]: part for part in document["components"] for file in part.get("components", [])}
    alone = {part["name"] for part in document["components"] if part["bom-ref"].startswith("file:")}
    crypto = next((name for name in native if name.startswith("libcrypto")), None)
    if shutil.which("dpkg-query") and crypto:
        part = native[crypto]
        version = run("dpkg-query", "-W", "-f", "${Version}\\n", part["name"], cwd=bundle).split()[0]
        assert part["version"] == version
        assert part["purl"].startswith("pkg:deb/")
        assert f"/{part['name']}@{quote(version, safe='')}?arch=" in part["purl"]
        assert part["licenses"]
    assert any(name.startswith("libcrypto") for name in native.keys() | alone)
    assert document["metadata"]["component"]["name"] == "fleetpulse"
    assert not names & {"duckdb", "streamlit", "pip"}
    installed = [p for p in document["components"] if p["bom-ref"].startswith(("pkg:pypi", "pkg:deb")) and "purl" in p]
    unlicensed = [p["name"] for p in installed if "#" not in p["purl"] and "licenses" not in p]
    assert unlicensed == []


def test_a_library_is_known_by_the_package_that_owns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files alone say nothing to who looks for their flaws."""
    monkeypatch.syspath_prepend(ROOT / "deploy/packages")
    libraries = importlib.import_module("libraries")
    assert libraries.find_owner(tmp_path / "libnone.so.1") == {}
    said = {"rpm": "openssl-libs\t1:3.0.7-6.el9\tx86_64\topenssl-3.0.7-6.el9.src.rpm\tASL 2.0", "dpkg-query": ""}
    for name, text in said.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '%s' '{text}'\n[ -n '{text}' ]\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = libraries.find_owner(Path("/usr/lib64/libcrypto.so.3"))
    assert (found["name"], found["version"], found["licence"]) == ("openssl-libs", "1:3.0.7-6.el9", "ASL 2.0")
    assert "/openssl-libs@1%3A3.0.7-6.el9?arch=x86_64&upstream=openssl-3.0.7-6.el9.src.rpm&distro=" in found["purl"]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ("Files: *\nLicense: GPL-2+\n\nFiles: lib/a.h\n libuuid/*\nLicense: BSD-3-Clause\n text\n", "BSD-3-Clause"),
        ("Files: src/a\nLicense: MIT\n\nFiles: *\nCopyright: a\n b\nLicense: Apache-2.0\n text\n", "Apache-2.0"),
        ("Files: src/a\nLicense: MIT\n", "MIT"),
        ("This package was debianized by\n", ""),
    ],
)
def test_a_library_has_the_licence_of_its_own_files(
    files: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "deploy/packages")
    (tmp_path / "copyright").write_text(f"Format: a\n\n{files}")
    assert importlib.import_module("libraries")._read_licence(tmp_path / "copyright", "libuuid") == found


@pytest.mark.slow
def test_the_agents_unit_runs_and_reloads_under_systemd_and_serves_other_users(bundle: Path, tmp_path: Path) -> None:
    """On a bare Debian without libnss-systemd and procps: what a unit needs beyond its text."""
    if lacking := missing():
        do_without("systemd", lacking)
    with BareMachine(tmp_path, "gpu001") as machine:
        shutil.copytree(bundle, machine.root / "opt/fleetpulse", symlinks=True)
        program, unit = "/opt/fleetpulse/bin/fleetpulse", "fleetpulse-agent"
        machine.run(f"{program} setup --units --role node --site east --kafka 127.0.0.1:9 --gpus 0")
        machine.run(f"systemctl enable --now {unit}")
        nobody = 65534
        until(lambda: machine.run(f"{program} check", check=False, user=nobody).returncode == 0, 120)
        machine.run("test -w /run/fleetpulse/agent/training.sock", user=nobody)
        before = machine.run(f"systemctl show -p MainPID -p NRestarts {unit}").stdout
        drop_in = "/etc/fleetpulse/conf.d/10.toml"
        machine.run(f"mkdir -p /etc/fleetpulse/conf.d; printf '[agent]\\ninterval = 2\\n' > {drop_in}")
        machine.run(f"systemctl reload {unit}")
        until(lambda: "started, every 2 s" in machine.run(f"journalctl -u {unit}").stdout, 60)
        assert machine.run(f"systemctl show -p MainPID -p NRestarts {unit}").stdout == before
        machine.run(f"echo '[agent' > {drop_in}")
        assert machine.run(f"systemctl reload {unit}", check=False).returncode == 1
        machine.run(f"systemctl stop {unit}")
        assert machine.run(f"systemctl show -p Result --value {unit}").stdout == "success\n"
