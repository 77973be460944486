"""The Ansible role: Ansible reads it, its configuration is valid, and it names what packages and units contain."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from pipeline.commands.setup_receiver import find_secret_file
from pipeline.config.sections import load_config
from tests.parts import do_without

ROOT = Path(__file__).parents[1]
ANSIBLE = ROOT / "deploy" / "ansible"
ROLE = ANSIBLE / "roles" / "fleetpulse"
CACHED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse" / "ansible" / "2.19.14" / "bin"
"""Path in which part_ansible of deploy/parts.sh installs it."""
DEFAULTS: dict[str, Any] = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())


def render(**values: Any) -> str:
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["to_json"] = json.dumps
    return environment.from_string((ROLE / "templates" / "fleetpulse.toml.j2").read_text()).render(DEFAULTS | values)


@pytest.mark.parametrize(
    "values",
    [
        {"fleetpulse_kafka": "k:9092"},
        {
            "fleetpulse_kind": "server",
            "fleetpulse_kafka": "k1:9093,k2:9093",
            "fleetpulse_kafka_security": "SASL_SSL",
            "fleetpulse_kafka_username": 'a "b"',
            "fleetpulse_kafka_ca": "/etc/ssl/kafka.pem",
            "fleetpulse_gpus": "8",
            "fleetpulse_webhook": "https://alerts.example/hook?a=b",
        },
    ],
    ids=["node", "server with all"],
)
def test_the_configuration_that_the_role_writes_is_valid(values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "fleetpulse.toml"
    path.write_text(render(**values))
    config = load_config(path, {})
    assert config.kafka.bootstrap_servers == values["fleetpulse_kafka"]
    assert config.kafka.username == values.get("fleetpulse_kafka_username", "")
    hooks = [str(hook.url_file) for hook in config.notify.webhooks]
    assert hooks == ["/run/credentials/fleetpulse-pipeline.service/on-call.secret"] * ("fleetpulse_webhook" in values)


def test_the_address_of_the_webhook_is_private_on_the_server_and_absent_on_nodes() -> None:
    """Its path may be a key. The unit gets a copy, of the file that setup writes too."""
    address = "https://hooks.example/key"
    assert "key" not in render(fleetpulse_kind="server", fleetpulse_webhook=address)
    assert "notify" not in render(fleetpulse_webhook=address)
    tasks = yaml.safe_load((ROLE / "tasks" / "main.yml").read_text())
    (task,) = [t for t in tasks if "fleetpulse_webhook" in str(t.get("ansible.builtin.copy"))]
    written = task["ansible.builtin.copy"]
    own = find_secret_file(Path("/etc/fleetpulse/fleetpulse.toml"))
    assert (written["dest"], written["mode"]) == (str(own), "0600")
    assert "fleetpulse_kind == 'server'" in task["when"]
    credentials = (ROLE / "tasks" / "credentials.yml").read_text()
    assert f"LoadCredential={Path(written['dest']).name}:{written['dest']}" in credentials


def test_every_variable_has_a_default() -> None:
    files = [*ROLE.rglob("*.yml"), *ROLE.rglob("*.j2"), *ANSIBLE.glob("*.yml")]
    named = {name for file in files for name in re.findall(r"\bfleetpulse_\w+", file.read_text())}
    made = {
        "fleetpulse_file",
        "fleetpulse_copied",
        "fleetpulse_same",
        "fleetpulse_store",
        "fleetpulse_called",
        "fleetpulse_made",
        "fleetpulse_newer",
        "fleetpulse_draft",
        "fleetpulse_removed",
        "fleetpulse_present",
        "fleetpulse_older",
        "fleetpulse_other",
        "fleetpulse_sections",
    }
    made |= {"fleetpulse_batches", "fleetpulse_server", "fleetpulse_nodes"}
    assert named - made == set(DEFAULTS)


def test_the_role_names_the_packages_and_units_that_exist() -> None:
    text = "\n".join(file.read_text() for file in ROLE.rglob("*.yml"))
    units = {path.stem for path in (ROOT / "deploy" / "systemd").glob("*.service")}
    assert set(re.findall(r"'(fleetpulse-(?!%)[a-z]+)'", text)) <= units
    hooks = re.search(r"loop: \[(prolog.sh.*)\]", text)
    assert hooks is not None
    assert set(hooks[1].split(", ")) == {path.name for path in (ROOT / "deploy" / "slurm").iterdir()}
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert DEFAULTS["fleetpulse_version"] == version[1]


def test_packages_are_installed_and_removed_by_command() -> None:
    """Ansible's modules for packages want python3-apt, which a minimal Debian lacks, or are not in ansible-core."""
    for name in ("main.yml", "uninstall.yml"):
        tasks = (ROLE / "tasks" / name).read_text()
        assert re.findall(r"ansible\.builtin\.(?:apt|dnf\w*|yum|package):", tasks) == []


@pytest.mark.parametrize("package_manager", ["apt", "dnf"])
def test_uninstalling_runs_dpkg_or_rpm_for_what_is_installed(package_manager: str, tmp_path: Path) -> None:
    tasks = yaml.safe_load((ROLE / "tasks" / "uninstall.yml").read_text())
    task = next(t for t in tasks if t.get("register") == "fleetpulse_removed")
    command = jinja2.Template(task["ansible.builtin.shell"]["cmd"]).render(ansible_facts={"pkg_mgr": package_manager})
    for program in ("dpkg", "rpm"):
        (tmp_path / program).write_text(
            f'#!/bin/sh\n[ "$*" != "-q --quiet fleetpulse-server" ] || exit 1\necho {program} "$*" >> {tmp_path}/said\n'
        )
        (tmp_path / program).chmod(0o755)
    subprocess.run(["/bin/sh", "-c", command], env={"PATH": str(tmp_path)}, check=True)
    wanted = ["dpkg --purge fleetpulse-agent fleetpulse-server"]
    if package_manager != "apt":
        wanted = ["rpm -q --quiet fleetpulse-agent", "rpm -e -v fleetpulse-agent"]
    assert (tmp_path / "said").read_text().splitlines() == wanted


@pytest.mark.parametrize(
    ("file", "line", "stays"),
    [
        ("slurm.conf", "Prolog=/etc/slurm/fleetpulse/prolog.sh", True),
        ("prolog.sh", "/etc/slurm/fleetpulse/prolog.sh || exit $?", True),
        ("slurm.conf", " # Prolog=/etc/slurm/fleetpulse/prolog.sh", False),
        ("fleetpulse/prolog.sh", "# ours: /etc/slurm/fleetpulse\n. /etc/slurm/fleetpulse/hooks.sh", False),
    ],
)
def test_hooks_that_slurm_calls_are_not_removed(file: str, line: str, stays: bool, tmp_path: Path) -> None:
    tasks = yaml.safe_load((ROLE / "tasks" / "uninstall.yml").read_text())
    command = next(t["ansible.builtin.shell"]["cmd"] for t in tasks if t.get("register") == "fleetpulse_called")
    (tmp_path / "fleetpulse").mkdir()
    (tmp_path / file).write_text(f"ClusterName=a\n{line}\n")
    assert command.count(" /etc/slurm/ ") == 1
    command = command.replace(" /etc/slurm/ ", f" {tmp_path}/ ")
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert (done.returncode == 0) is stays, done.stderr
    assert done.stdout == (f"{tmp_path}/{file}:{line}\n" if stays else "")
    removed = next(t["loop"] for t in tasks if t["name"] == "Remove what is left")
    assert "[] if fleetpulse_called.rc == 0 else ['/etc/slurm/fleetpulse']" in removed


def test_a_configuration_that_an_earlier_run_wrote_restarts_what_runs(tmp_path: Path) -> None:
    tasks = yaml.safe_load((ROLE / "tasks" / "main.yml").read_text())
    task = next(t for t in tasks if t.get("register") == "fleetpulse_newer")
    command = (
        task["ansible.builtin.shell"]["cmd"].replace("{{ item }}", "a").replace("/etc/fleetpulse", f"{tmp_path}/etc")
    )
    (tmp_path / "etc" / "conf.d").mkdir(parents=True)
    written = tmp_path / "etc" / "conf.d" / "50-site.toml"
    written.touch()
    os.utime(written, (1_764_331_200, 1_764_331_200))  # 2025-11-28 12:00:00 UTC

    def ask(began: str) -> str:
        (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho '{began}'\n")
        (tmp_path / "systemctl").chmod(0o755)
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TZ": "Asia/Tokyo"}
        done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert ask("Fri 2025-11-28 11:59:59 UTC") == str(written)
    assert ask("Fri 2025-11-28 12:00:01 UTC") == ""
    assert ask("") == ""  # it never ran
    assert task["notify"] == "Restart"


def find_program() -> str:
    program = shutil.which("ansible-playbook") or (str(CACHED / "ansible-playbook") if CACHED.is_dir() else None)
    if program is None:
        do_without("ansible", "no ansible-playbook here: run 'make parts'")
    return program


@pytest.mark.ansible
def test_a_dry_run_on_a_fresh_host_goes_on_where_no_unit_is_installed_yet(tmp_path: Path) -> None:
    """`--check` ended at the handler: a unit that it had not installed cannot be restarted. A real run still ends."""
    systemctl = tmp_path / "systemctl"
    systemctl.write_text('#!/bin/sh\ncase "$1" in show) echo LoadState=not-found ;; *) exit 1 ;; esac\n')
    systemctl.chmod(0o755)
    tasks = yaml.safe_load((ROLE / "tasks" / "main.yml").read_text())
    changed = {"name": "Changed", "ansible.builtin.debug": {"msg": ""}, "changed_when": True, "notify": "Restart"}
    wanted = [changed, *(task for task in tasks if task["name"].startswith(("Start anew", "Units")))]
    handlers = yaml.safe_load((ROLE / "handlers" / "main.yml").read_text())
    for one in (*wanted, *handlers):
        one.get("ansible.builtin.systemd_service", {}).pop("daemon_reload", None)
    interpreter = {"ansible_python_interpreter": sys.executable}
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": DEFAULTS | interpreter}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{**play, "tasks": wanted, "handlers": handlers}]))
    environ = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path), "ANSIBLE_HOME": str(tmp_path)}
    environ["PATH"] = f"{tmp_path}:{environ['PATH']}"
    for words, code in (["--check"], 0), ([], 2):
        line = [find_program(), "-i", "localhost,", "play.yml", *words]
        done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert "Could not find the requested service" in done.stdout, done.stdout + done.stderr
        assert done.returncode == code, done.stdout + done.stderr


MARK = "# Written by Ansible; changes here are lost: the variable fleetpulse_config.\n"


class Sections:
    """A host whose configuration the tasks of the role write, below a folder."""

    def __init__(self, tmp_path: Path) -> None:
        program = tmp_path / "fleetpulse"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "fleetpulse.py"} "$@"\n')
        program.chmod(0o755)
        shutil.copytree(ROLE / "templates", tmp_path / "templates")
        self.tmp_path, self.folder = tmp_path, tmp_path / "etc" / "fleetpulse"
        (self.folder / "conf.d").mkdir(parents=True)
        self.drop_in = self.folder / "conf.d" / "50-site.toml"
        text = (ROLE / "tasks" / "main.yml").read_text().replace("/etc/fleetpulse", str(self.folder))
        names = ("Check the whole", "Configuration", "More sections")
        tasks = [task for task in yaml.safe_load(text) if task["name"].startswith(names)]
        self.play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
        self.play |= {"handlers": [{"name": "Restart", "ansible.builtin.debug": {"msg": "restarted"}}]}

    def run(self, webhook: str, more: str) -> tuple[int, str]:
        """Returns exit code and output of a run of the tasks."""
        values = {"fleetpulse_kind": "server", "fleetpulse_kafka": "k:9092", "fleetpulse_webhook": webhook}
        values |= {"ansible_python_interpreter": sys.executable, "fleetpulse_config": more}
        (self.tmp_path / "play.yml").write_text(yaml.safe_dump([{**self.play, "vars": DEFAULTS | values}]))
        environ = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(self.tmp_path), "ANSIBLE_HOME": str(self.tmp_path)}
        environ |= {"PATH": f"{self.tmp_path}:{environ['PATH']}", "TMPDIR": str(self.tmp_path)}
        words = [find_program(), "-i", "localhost,", "play.yml"]
        done = subprocess.run(words, cwd=self.tmp_path, env=environ, capture_output=True, text=True)
        return done.returncode, done.stdout


@pytest.mark.ansible
def test_sections_that_a_person_wrote_stay_unless_the_inventory_has_some(tmp_path: Path) -> None:
    """The default, none, emptied the file that the guide asks people to write, without a copy of it."""
    host, own = Sections(tmp_path), "[api]\nsql_rows = 7\n"
    host.drop_in.write_text(own)
    assert host.run("", "")[0] == 0
    assert host.drop_in.read_text() == own
    host.drop_in.write_text("[api]\nprot = 1\n")
    code, said = host.run("", "")
    assert (code, "did you mean 'port'?" in said) == (2, True), "it is checked with the rest"
    host.drop_in.write_text(own)
    for number in (8, 9):
        assert host.run("", f"[api]\nsql_rows = {number}\n")[0] == 0
        assert host.drop_in.read_text() == f"{MARK}[api]\nsql_rows = {number}\n"
    (kept,) = (path for path in host.drop_in.parent.iterdir() if path != host.drop_in)
    assert (kept.read_text(), kept.name.startswith("50-site.toml."), kept.suffix == ".toml") == (own, True, False)
    code, said = host.run("", "")
    assert (code, host.drop_in.exists(), "restarted" in said) == (0, False, True)
    assert "restarted" not in host.run("", "")[1]


@pytest.mark.ansible
def test_a_wrong_configuration_is_refused_before_it_replaces_anything(tmp_path: Path) -> None:
    """The wrong drop-in stayed on the host: the next start of the unit read it, ended, and stayed down."""
    host, names = Sections(tmp_path), ("fleetpulse.toml", "conf.d/50-site.toml", "conf.d/60-own.toml")
    folder = host.folder
    (folder / names[2]).write_text("[detector.link]\n")

    def run(webhook: str, more: str) -> tuple[int, str, list[str]]:
        code, said = host.run(webhook, more)
        return code, said, [(folder / name).read_text() for name in names if (folder / name).exists()]

    escalation = "[[incidents.escalation]]\nafter_minutes = 5\nreceivers = ['on-call']\n"
    code, _, written = run("https://h.example/key", escalation)
    assert (code, len(written), written[1:2]) == (0, 3, [f"{MARK}{escalation}"])
    for webhook, more, why in (
        ("https://h.example/key", "[api]\nprot = 1\n", "did you mean 'port'?"),
        ("", escalation, "'on-call' is not a receiver"),
    ):
        code, said, left = run(webhook, more)
        assert (code, left) == (2, written)
        assert why in said
    code, _, written = run("", "[api]\nsql_rows = 7\n")
    assert (code, written[1]) == (0, f"{MARK}[api]\nsql_rows = 7\n")
    code, _, written = run("", f"# {'x' * 200_000}\n[api]\nsql_rows = 8\n")
    assert (code, len(written[1]) > 200_000) == (0, True), "more than a variable of the environment takes"
    others = folder / "conf.d"
    for name in ("70-off.toml.disabled", "note"):
        (others / name).symlink_to("nowhere")
    (tmp_path / "kept.toml").write_text("[site]\nname = 'east'\n")
    (others / "80-a site.toml").symlink_to("../../../kept.toml")
    assert run("", "[api]\nsql_rows = 9\n")[0] == 0
    (others / ".#80-a site.toml").symlink_to("ann@h1.4711")  # Emacs keeps one while a file is edited
    assert run("", "[api]\nsql_rows = 10\n")[0] == 0
    (others / "90-gone.toml").symlink_to("nowhere")
    code, said, left = run("", "[api]\nsql_rows = 11\n")
    assert (code, left[1]) == (2, f"{MARK}[api]\nsql_rows = 10\n")
    assert "conf.d/90-gone.toml: cannot be read: No such file" in said
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("fleetpulse.", "tmp."))]


@pytest.mark.ansible
@pytest.mark.parametrize("package_manager", ["apt", "dnf"])
def test_copied_packages_of_other_versions_go_and_an_upgrade_is_not_undone(
    package_manager: str, tmp_path: Path
) -> None:
    """Each package stayed on each host, and an inventory that named an old version installed it again."""
    cache, source, suffix = tmp_path / "cache", tmp_path / "dist", {"apt": "deb", "dnf": "rpm"}[package_manager]
    names = {"apt": "fleetpulse-agent_{}-1_amd64.deb", "dnf": "fleetpulse-agent-{}-1.x86_64.rpm"}[package_manager]
    for folder, name in ((cache, names.format("0.1.0")), (cache, f"fleetpulse-server_0.1.0-1_amd64.{suffix}")):
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
    (cache / "other.deb").touch()
    source.mkdir()
    for version in ("0.2.0", "0.10.0"):
        (source / names.format(version)).write_text(version)
    installed = tmp_path / "installed"
    installed.write_text("0.2.0")
    answers = {
        "dpkg-query": f"echo installed $(cat {installed})-1; echo not-installed",
        "rpm": "[ $2 != --quiet ] || exit 1\n"
        f"[ $1 = -q ] || exec {tmp_path}/dpkg $*\ncat {installed}\necho; echo package x is not installed",
        "dpkg": f"for last; do :; done; cat $last > {installed}",
        "dpkg-deb": "echo",
    }
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    tasks = yaml.safe_load((ROLE / "tasks" / "main.yml").read_text().replace("/var/cache", str(cache)))
    begin = next(number for number, task in enumerate(tasks) if task["name"] == "The package's name")
    end = next(number for number, task in enumerate(tasks) if task["name"] == "Folder of drop-ins")
    facts = {"ansible_facts": {"pkg_mgr": package_manager, "architecture": "x86_64"}}
    handler = {"name": "Restart", "ansible.builtin.debug": {"msg": ""}}
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "handlers": [handler]}
    play["tasks"] = [{"name": "Facts", "ansible.builtin.set_fact": facts["ansible_facts"]}, *tasks[begin:end]]
    environ = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path), "ANSIBLE_HOME": str(tmp_path)}
    environ["PATH"] = f"{tmp_path}:{environ['PATH']}"

    def run(version: str, **more: Any) -> tuple[int, str]:
        values = {"fleetpulse_packages": str(source), "fleetpulse_version": version, **more, **facts}
        play["vars"] = DEFAULTS | values | {"ansible_python_interpreter": sys.executable}
        (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
        words = [find_program(), "-i", "localhost,", "play.yml"]
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, said = run("0.10.0")
    assert (code, installed.read_text()) == (0, "0.10.0"), said
    assert {path.name for path in cache.iterdir()} == {names.format("0.10.0"), "other.deb"}
    code, said = run("0.2.0")
    assert (code, installed.read_text()) == (2, "0.10.0"), said
    assert "found version 0.10.0, newer than fleetpulse_version = 0.2.0" in " ".join(said.split())
    code, said = run("0.2.0", fleetpulse_downgrade=True)
    assert (code, installed.read_text()) == (0, "0.2.0"), said
    assert {path.name for path in cache.iterdir()} == {names.format("0.2.0"), "other.deb"}


UNITS = "systemd/system"
KAFKA, HOOK = ("fleetpulse/kafka.password", "kafka.conf"), ("fleetpulse/on-call.secret", "on-call.conf")


@pytest.mark.ansible
@pytest.mark.parametrize(
    ("kind", "unit", "kept"),
    [
        ("server", "fleetpulse-pipeline", ()),
        ("agent", "fleetpulse-agent", (HOOK,)),
        ("server", "fleetpulse-pipeline", (HOOK,)),
    ],
    ids=["both emptied", "an agent beside a server", "one emptied"],
)
def test_a_secret_that_the_inventory_no_longer_has_leaves_the_host(
    kind: str, unit: str, kept: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    """Files and drop-ins stayed: the old password of Kafka on every node, and units that got it."""
    etc = tmp_path / "etc"
    hook_of = {"server": f"{UNITS}/{unit}.service.d", "agent": f"{UNITS}/fleetpulse-pipeline.service.d"}[kind]
    files = [KAFKA[0], f"{UNITS}/{unit}.service.d/{KAFKA[1]}", HOOK[0], f"{hook_of}/{HOOK[1]}"]
    for name in (*files, "fleetpulse/tokens"):
        (etc / name).parent.mkdir(parents=True, exist_ok=True)
        (etc / name).write_text("x")
    tasks = (ROLE / "tasks" / "credentials.yml").read_text().replace("/etc/", f"{etc}/")
    interpreter = {"ansible_python_interpreter": sys.executable}
    handler = {"name": "Restart", "ansible.builtin.debug": {"msg": "restarted"}}
    values = {
        "fleetpulse_kind": kind,
        "fleetpulse_webhook": "https://hooks.example/key" if kept and kind == "server" else "",
    }
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": DEFAULTS | values | interpreter}
    play |= {"tasks": yaml.safe_load(tasks), "handlers": [handler]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    environ = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path), "ANSIBLE_HOME": str(tmp_path)}

    def run() -> str:
        words = [find_program(), "-i", "localhost,", "play.yml"]
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "restarted" in run()
    left = {str(path.relative_to(etc)) for path in etc.rglob("*") if path.is_file()}
    assert left == {"fleetpulse/tokens"} | (set(files[2:]) if kept else set())
    assert "restarted" not in run(), "a second run changes nothing"


@pytest.mark.ansible
def test_a_host_in_both_groups_has_the_package_of_the_server_alone_and_runs_its_agent_too(tmp_path: Path) -> None:
    """The agent's package replaced the server's, and the run was green."""
    groups = {"fleetpulse_server": {"hosts": {"both": {}}}, "fleetpulse_nodes": {"hosts": {"both": {}, "node": {}}}}
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    environ = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path), "ANSIBLE_HOME": str(tmp_path)}
    words = [find_program(), "-i", str(tmp_path / "inventory.yml"), str(ANSIBLE / "site.yml"), "--list-hosts"]
    said = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout
    assert [re.findall(r"^ {6}(\w+)$", part, re.MULTILINE) for part in said.split("play #")[1:]] == [["both"], ["node"]]

    (refusal,) = [
        task
        for task in yaml.safe_load((ROLE / "tasks" / "main.yml").read_text())
        if task["name"].startswith("Does the agent's package")
    ]
    told = {"ansible.builtin.debug": {"msg": "units {{ fleetpulse_units | join(' ') }} of {{ inventory_hostname }}"}}
    play = {"gather_facts": False, "connection": "local", "tasks": [told, refusal]}
    values = DEFAULTS | {"ansible_python_interpreter": sys.executable}

    def run(hosts: str, kind: str) -> tuple[int, str]:
        play.update({"hosts": hosts, "vars": values | {"fleetpulse_kind": kind}})
        (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
        line = [*words[:3], str(tmp_path / "play.yml")]
        done = subprocess.run(line, env=environ, capture_output=True, text=True)
        return done.returncode, done.stdout

    code, said = run("both", "server")
    assert (code, "units fleetpulse-pipeline fleetpulse-dashboard fleetpulse-agent of both" in said) == (0, True), said
    code, said = run("node", "agent")
    assert (code, "units fleetpulse-agent of node" in said) == (0, True), said
    code, said = run("both", "agent")
    assert (code, "expected a play for nodes with hosts: fleetpulse_nodes:!" in said) == (2, True), said


@pytest.mark.ansible
def test_the_commands_of_the_guide_find_the_packages_that_make_dist_wrote(tmp_path: Path) -> None:
    """`dist` was looked for below deploy/ansible. Roll-outs of the benchmarks name the folder from the root."""
    shutil.copytree(ANSIBLE, tmp_path / "deploy/ansible")
    shutil.copy(ANSIBLE / "inventory.example.yml", tmp_path / "inventory.yml")
    tasks_file = tmp_path / "deploy/ansible/roles/fleetpulse/tasks/main.yml"
    tasks = yaml.safe_load(tasks_file.read_text().replace("/var/cache", str(tmp_path / "cache")))
    wanted = [task for task in tasks if task["name"] in ("The package's name", "Copy the package")]
    tasks_file.write_text(yaml.safe_dump(wanted))
    version, machine = DEFAULTS["fleetpulse_version"], os.uname().machine
    names = {f"fleetpulse-{kind}-{version}-1.{machine}.rpm" for kind in ("agent", "server")}
    deb = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine)
    names |= {f"fleetpulse-{kind}_{version}-1_{deb}.deb" for kind in ("agent", "server")}
    for folder in ("dist", "cache"):
        (tmp_path / folder).mkdir()
    guide = (ROOT / "docs/install.md").read_text()
    command = re.search(r"^    ansible-playbook (-i \S+ \S+/site\.yml)", guide, re.MULTILINE)
    assert command is not None
    hosts = ["--limit", "fleetpulse.example,gpu001.example", "-e", "ansible_connection=local ansible_become=false"]
    words = [find_program(), *command[1].split(), *hosts, "-e", f"ansible_python_interpreter={sys.executable}"]
    environ = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path), "ANSIBLE_HOME": str(tmp_path)}

    def run() -> tuple[int, str]:
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    code, said = run()
    assert (code, f"'{tmp_path}/dist/fleetpulse-server" in said) == (2, True), said
    for name in names:
        (tmp_path / "dist" / name).write_text(name)
    code, said = run()
    assert code == 0, said
    copied = {path.name for path in (tmp_path / "cache").iterdir()}
    assert copied <= names
    assert {name.split(version)[0][:-1] for name in copied} == {"fleetpulse-agent", "fleetpulse-server"}


@pytest.mark.ansible
@pytest.mark.parametrize("playbook", ["site.yml", "uninstall.yml"])
def test_ansible_reads_the_playbooks(playbook: str, tmp_path: Path) -> None:
    words = [find_program(), "-i", "inventory.example.yml", "--syntax-check", playbook]
    environ = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path), "ANSIBLE_HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=ANSIBLE, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
