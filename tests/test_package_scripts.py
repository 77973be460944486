"""What deb packages of agent and server do to each other's files and units, with a real dpkg in a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPTS = {"postinstall": "postinst", "preremove": "prerm", "postremove": "postrm"}
CONFFILE = "etc/fleetpulse/fleetpulse.toml"
OF_AGENT = (
    "etc/fleetpulse/on-call.secret",
    "var/lib/fleetpulse/spool",
    "etc/systemd/system/fleetpulse-agent.service.d/a",
)
OF_SERVER = ("etc/systemd/system/fleetpulse-pipeline.service.d/a", "var/cache/fleetpulse/a")


class Host:
    """A folder into which packages are installed. A systemctl that only writes down its words replaces systemd."""

    def __init__(self, folder: Path) -> None:
        self.root, self.folder = folder / "root", folder
        for name in ("var/lib/dpkg/updates", "var/lib/dpkg/info", "run/systemd/system", "usr/bin"):
            (self.root / name).mkdir(parents=True)
        (self.root / "var/lib/dpkg/status").touch()
        (folder / "bin").mkdir()
        said = folder / "systemctl.said"
        said.touch()
        (folder / "systemctl.does").touch()
        for name, does in {
            "systemctl": f'echo "$@" >> {said}; . {folder}/systemctl.does',
            "systemd-sysusers": ":",
            "systemd-tmpfiles": ":",
        }.items():
            (folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
            (folder / "bin" / name).chmod(0o755)

    def dpkg(self, *words: str) -> str:
        force = "--force-script-chrootless,bad-path,depends"
        environ = {**os.environ, "PATH": f"{self.folder / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"}
        command = ["dpkg", f"--root={self.root}", f"--log={self.folder}/log", force, *words]
        done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def write(self, names: Sequence[str]) -> None:
        for name in names:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text("kept\n")

    def missing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if not (self.root / name).exists()]

    def stopped(self) -> list[str]:
        lines = (self.folder / "systemctl.said").read_text().splitlines()
        return [line.split()[-1] for line in lines if line.startswith("disable --now")]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    if shutil.which("dpkg-deb") is None or os.geteuid() != 0:
        pytest.skip("needs dpkg and root")
    return Host(tmp_path)


@pytest.fixture(scope="module")
def debs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Agent and server with the scripts, conflicts and conffile of ours, and nothing of the software."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg")
    folder = tmp_path_factory.mktemp("debs")
    for kind, other in (("agent", "server"), ("server", "agent")):
        (folder / kind / "DEBIAN").mkdir(parents=True)
        (folder / kind / "DEBIAN/control").write_text(
            f"Package: fleetpulse-{kind}\nVersion: 1\nArchitecture: all\nMaintainer: a <a@localhost>\n"
            f"Description: a\nConflicts: fleetpulse-{other}\nReplaces: fleetpulse-{other}\n"
        )
        (folder / kind / "DEBIAN/conffiles").write_text(f"/{CONFFILE}\n")
        for ours, theirs in SCRIPTS.items():
            text = (ROOT / "deploy/packages/scripts" / ours).read_text()
            (folder / kind / "DEBIAN" / theirs).write_text(text.replace("@KIND@", kind).replace("@OTHER@", other))
            (folder / kind / "DEBIAN" / theirs).chmod(0o755)
        (folder / kind / "opt/fleetpulse").mkdir(parents=True)
        (folder / kind / CONFFILE).parent.mkdir(parents=True)
        shutil.copy(ROOT / "deploy/packages/fleetpulse.toml", folder / kind / CONFFILE)
        subprocess.run(["dpkg-deb", "--build", folder / kind, folder / f"{kind}.deb"], check=True, capture_output=True)
    return {kind: str(folder / f"{kind}.deb") for kind in ("agent", "server")}


@pytest.mark.parametrize(("first", "second"), [("agent", "server"), ("server", "agent")])
@pytest.mark.parametrize("changed", [True, False], ids=["changed", "as installed"])
def test_purging_a_replaced_package_leaves_what_the_installed_one_has(
    host: Host, debs: dict[str, str], first: str, second: str, changed: bool
) -> None:
    host.dpkg("-i", debs[first])
    host.write([*OF_AGENT, *([CONFFILE] if changed else [])])
    host.dpkg("-i", debs[second])
    host.write(OF_SERVER)
    said = host.dpkg("--purge", f"fleetpulse-{first}")
    assert host.missing([CONFFILE, *OF_AGENT]) == []
    assert f"package fleetpulse-{second}, which has them too, is purged (installed)" in said
    assert host.missing(OF_SERVER) == ([] if second == "server" else list(OF_SERVER))
    host.dpkg("--purge", f"fleetpulse-{second}")
    assert host.missing([CONFFILE, *OF_AGENT, *OF_SERVER]) == [CONFFILE, *OF_AGENT, *OF_SERVER]


def test_purging_a_package_leaves_secrets_and_spool_of_one_that_is_removed_and_not_purged(
    host: Host, debs: dict[str, str]
) -> None:
    """Not the conffile, which dpkg itself removes: it belongs to the package that was installed last."""
    host.dpkg("-i", debs["server"])
    host.write([CONFFILE, *OF_AGENT, *OF_SERVER])
    host.dpkg("-i", debs["agent"])
    assert "(config-files)" in host.dpkg("--purge", "fleetpulse-agent")
    assert host.missing([*OF_AGENT, *OF_SERVER]) == []
    host.dpkg("--purge", "fleetpulse-server")
    assert host.missing([CONFFILE, *OF_AGENT, *OF_SERVER]) == [CONFFILE, *OF_AGENT, *OF_SERVER]


def test_the_agent_goes_on_when_the_other_package_replaces_its_own(host: Host, debs: dict[str, str]) -> None:
    host.dpkg("-i", debs["agent"])
    host.dpkg("-i", debs["server"])
    assert host.stopped() == []
    host.dpkg("-i", debs["agent"])
    assert host.stopped() == [f"fleetpulse-{unit}.service" for unit in ("executor", "dashboard", "pipeline")]
    host.dpkg("--remove", "fleetpulse-agent")
    assert host.stopped()[3:] == ["fleetpulse-agent.service"]


def test_an_installation_names_a_unit_that_ran_and_does_not_start_again(host: Host, debs: dict[str, str]) -> None:
    """The agent's package has no other unit; systemctl fails for one that there is not, too."""
    (host.folder / "systemctl.does").write_text(
        'case "$*" in\n"try-restart fleetpulse-agent.service") exit 1 ;;\ntry-restart*) exit 5 ;;\n'
        '"is-active fleetpulse-agent.service") echo failed; exit 3 ;;\nis-active*) echo inactive; exit 3 ;;\nesac\n'
    )
    said = [line for line in host.dpkg("-i", debs["agent"]).splitlines() if line.startswith("fleetpulse: ")]
    reason = "journalctl -n 20 -u fleetpulse-agent.service"
    assert said == [f"fleetpulse: fleetpulse-agent.service ran and did not start again (failed); the reason: {reason}"]


def test_ansible_installs_over_a_configuration_that_was_here_first(host: Host, debs: dict[str, str]) -> None:
    """By itself dpkg asks which one to take, and fails without a terminal."""
    tasks = yaml.safe_load((ROOT / "deploy/ansible/roles/fleetpulse/tasks/main.yml").read_text())
    (task,) = (one["ansible.builtin.command"] for one in tasks if one["name"] == "Install it")
    said = jinja2.Template(task["cmd"]).render(ansible_facts={"pkg_mgr": "apt"}, fleetpulse_file="a.deb").split()
    assert (said[0], said[-1]) == ("dpkg", "/var/cache/a.deb")
    host.write([CONFFILE])
    host.dpkg(*said[1:-1], debs["agent"])
    assert (host.root / CONFFILE).read_text() == "kept\n"


@pytest.mark.parametrize("verb", ["--remove", "--purge"])
def test_a_folder_of_the_system_that_is_empty_again_stays(host: Host, debs: dict[str, str], verb: str) -> None:
    """dpkg removes each empty folder that a package has, and no other package of Debian has /opt."""
    (host.root / "opt").mkdir()
    host.dpkg("-i", debs["agent"])
    host.dpkg(verb, "fleetpulse-agent")
    assert [path.name for path in (host.root / "opt").iterdir()] == []


@pytest.mark.parametrize(
    ("kind", "other", "left", "units"),
    [
        ("agent", True, "0", []),
        ("server", True, "0", ["executor", "dashboard", "pipeline"]),
        ("agent", False, "0", ["agent"]),
        ("server", False, "0", ["agent", "executor", "dashboard", "pipeline"]),
        ("server", False, "1", []),
    ],
)
def test_the_agent_goes_on_when_rpm_has_both_packages(
    host: Host, kind: str, other: bool, left: str, units: list[str]
) -> None:
    """rpm erases an obsoleted package after it installed the new one."""
    (host.folder / "bin/rpm").write_text(f"#!/bin/sh\nexit {0 if other else 1}\n")
    (host.folder / "bin/rpm").chmod(0o755)
    text = (ROOT / "deploy/packages/scripts/preremove").read_text().replace("@KIND@", kind)
    script = host.folder / "preremove"
    script.write_text(text.replace("@OTHER@", "server" if kind == "agent" else "agent"))
    environ = {"PATH": f"{host.folder / 'bin'}:/usr/bin:/bin", "DPKG_ROOT": str(host.root)}
    subprocess.run(["/bin/sh", script, left], env=environ, check=True)
    assert host.stopped() == [f"fleetpulse-{unit}.service" for unit in units]
