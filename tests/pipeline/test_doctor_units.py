"""The doctor finds what a unit cannot read, and a running service that has another configuration than the disk."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agents.collector import Reading
from agents.node import doctor as node_doctor
from agents.node.once import CollectorReport
from dashboards import serve
from detectors.runner import Runner
from pipeline.commands import doctor, doctor_units, next_steps, run_pipeline
from pipeline.commands.checks import Check
from pipeline.config import accepted
from pipeline.config.sections import Config, load_config
from pipeline.model.errors import ConfigError
from pipeline.runtime import credentials, systemd, unit_rights
from pipeline.runtime.reload import Reload
from pipeline.runtime.systemd import SystemdNotifier

UNITS = Path(__file__).parents[2] / "deploy/systemd"
LOGIN = """
[dashboard]
token_file = "{etc}/dashboard-token"
roles = {{ "sre" = "operator" }}
[dashboard.oidc]
issuer = "https://id.example.org/realms/fleet"
client_id = "fleetpulse"
client_secret_file = "{secret}"
"""


class Host:
    """A host with the packaged units, whose state and status tests set."""

    def __init__(self, etc: Path) -> None:
        self.etc, self.file = etc, etc / "fleetpulse.toml"
        self.running = {"dashboard"}
        self.status: dict[str, str] = {}

    def write(self, text: str) -> Config:
        self.file.write_text(text)
        return load_config(self.file, {})

    def write_secret(self, name: str, mode: int = 0o600) -> Path:
        path = self.etc / name
        path.write_text("a-secret-of-24-characters\n")
        path.chmod(mode)
        return path

    def write_drop_in(self, service: str, *lines: str) -> None:
        folder = self.etc / "units" / f"fleetpulse-{service}.service.d"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "secrets.conf").write_text("\n".join(["[Service]", *lines, ""]))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(credentials, "PACKAGED", UNITS)
    monkeypatch.setattr(credentials, "RUNTIME", tmp_path / "none")
    monkeypatch.setattr(credentials, "DROP_INS", tmp_path / "units")
    monkeypatch.setattr(doctor_units, "HOST", made.file)
    monkeypatch.setattr(unit_rights, "HIDDEN", ())
    monkeypatch.setattr(systemd, "has_unit", lambda service: True)
    monkeypatch.setattr(systemd, "is_expected", lambda service: service in made.running)
    monkeypatch.setattr(systemd, "is_running", lambda service: service in made.running)
    monkeypatch.setattr(systemd, "read_status", lambda service: made.status.get(service, ""))
    real = unit_rights._has_bit  # folders of pytest are 0700
    monkeypatch.setattr(
        unit_rights, "_has_bit", lambda path, bit, rights: path in tmp_path.parents or real(path, bit, rights)
    )
    return made


def of_units(config: Config, name: str) -> list[tuple[str, str, str]]:
    checks = [one for one in doctor.CHECKS if one.__module__ == doctor_units.__name__]
    found = doctor.run_checks(config, checks)
    return [(one.state, one.found, one.fix) for one in found if one.name == name]


def test_a_secret_of_root_that_the_dashboards_own_user_cannot_read_fails(host: Host) -> None:
    """`config check` and `doctor` run as root, so both said that all is well; only the journal had the refusal."""
    secret = host.write_secret("oidc-secret")
    config = host.write(LOGIN.format(etc=host.etc, secret=secret))
    ((state, found, fix),) = of_units(config, "unit secrets")
    assert (state, found) == (
        "fail",
        f"dashboard.oidc.client_secret_file = '{secret}': the user of fleetpulse-dashboard.service cannot read it",
    )
    assert f"LoadCredential=oidc-secret:{secret} below" in fix
    assert '"/run/credentials/fleetpulse-dashboard.service/oidc-secret"' in fix
    secret.chmod(0o644)
    assert [state for state, *_ in of_units(config, "unit secrets")] == ["ok"]


def test_its_own_copy_is_readable_and_that_of_another_unit_is_not(host: Host) -> None:
    copy = "/run/credentials/fleetpulse-{}.service/oidc-secret"
    own, other = (
        host.write(LOGIN.format(etc=host.etc, secret=copy.format(unit))) for unit in ("dashboard", "pipeline")
    )
    assert [state for state, *_ in of_units(own, "unit secrets")] == ["ok"]
    ((state, found, _),) = of_units(other, "unit secrets")
    assert (state, copy.format("pipeline") in found) == ("fail", True)


def test_a_key_that_the_unit_sets_counts_as_the_unit_has_it_and_the_owner_and_capabilities_count(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packaged units pass the tokens; a node with jobs.conf reads every file."""
    host.running = {"agent", "pipeline"}
    entry = os.stat(host.etc)
    known = unit_rights.pwd.struct_passwd(("x", "", 61000, 61000, "", "", ""))
    monkeypatch.setattr(unit_rights.pwd, "getpwnam", lambda name: known)
    monkeypatch.setattr(unit_rights.grp, "getgrnam", lambda name: unit_rights.grp.struct_group((name, "", 61000, [])))
    tokens, password = host.write_secret("tokens"), host.write_secret("kafka.password")
    text = f'[api]\ntoken_file = "{tokens}"\n[pipeline]\ntransport = "kafka"\n[kafka]\npassword_file = "{password}"\n'
    config = host.write(text)
    found = [text for _, text, _ in of_units(config, "unit secrets")]
    assert found == [
        f"kafka.password_file = '{password}': the user of fleetpulse-{unit}.service cannot read it"
        for unit in ("agent", "pipeline")
    ]
    for unit, (_, _, fix) in zip(("agent", "pipeline"), of_units(config, "unit secrets"), strict=True):
        variable = f"FLEETPULSE__KAFKA__PASSWORD_FILE=/run/credentials/fleetpulse-{unit}.service/kafka.password"
        assert fix.startswith(f"LoadCredential=kafka.password:{password} and Environment={variable} below")
        assert "the key stays as it is" in fix, "one key, two units"
    host.write_drop_in("agent", "AmbientCapabilities=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH")
    variable = "FLEETPULSE__KAFKA__PASSWORD_FILE=/run/credentials/fleetpulse-pipeline.service/kafka.password"
    host.write_drop_in("pipeline", f"LoadCredential=kafka.password:{password}", f"Environment={variable}")
    assert [state for state, *_ in of_units(config, "unit secrets")] == ["ok"]
    host.write_drop_in("pipeline")
    monkeypatch.setattr(
        unit_rights.pwd, "getpwnam", lambda name: unit_rights.pwd.struct_passwd(("x", "", entry.st_uid, 9, "", "", ""))
    )
    assert [state for state, *_ in of_units(config, "unit secrets")] == ["ok"], "its user owns the file"
    assert unit_rights.find_unreadable(replace(config, pipeline=Config().pipeline), "pipeline") == []


def test_keys_of_nodes_must_belong_to_the_user_as_they_can_be_no_copies(host: Host) -> None:
    """All of a folder are one result: a server has thousands."""
    host.running = {"dashboard", "agent"}
    host.write_drop_in("agent", "User=nobody", "Group=")
    (host.etc / "keys").mkdir(0o755)
    for number in range(3):
        host.write_secret(f"keys/n{number}.key")
    kafka = f'[pipeline]\ntransport = "kafka"\n[kafka]\nnode_keys = "{host.etc / "keys"}"\n'
    ((state, found, fix),) = of_units(host.write(kafka), "unit secrets")
    assert (state, fix) == ("fail", f"chown nobody {host.etc / 'keys'}/*.key")
    assert found.startswith(f"kafka.node_keys = '{host.etc / 'keys/n0.key'}'")


def test_a_person_without_rights_on_a_host_with_units_is_told_to_run_it_as_root(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven failures with names of functions were named, and three of them as the next steps."""
    config = host.write("")

    def check_agent(_: Config) -> Check:
        raise PermissionError(13, "Permission denied", "/var/lib/fleetpulse/spool")

    checks = doctor.run_checks(config, [check_agent])
    assert [(one.name, one.state) for one in checks] == [("agent", "fail")]
    monkeypatch.setattr(next_steps.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(doctor, "_write_obstacle", lambda folder: f"{folder} cannot be written")
    assert {check(config).fix for check in (doctor.store, doctor.spool)} == {"sudo fleetpulse doctor"}
    (line,) = next_steps.suggest_next(config, checks)
    assert line.endswith("sudo fleetpulse doctor")
    monkeypatch.setattr(next_steps.os, "geteuid", lambda: 0)
    assert "sudo" not in "".join(next_steps.suggest_next(config, checks))
    assert doctor.spool(config).fix.startswith("mkdir -p ")


@pytest.mark.parametrize(
    ("unit", "fix"),
    [("chronyd", "systemctl enable --now chronyd"), (None, "apt-get install chrony, or dnf install chrony")],
)
def test_the_command_for_the_clock_is_of_a_program_that_is_installed(
    unit: str | None, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_doctor, "CLOCK_FOLDERS", (tmp_path,))
    if unit:
        (tmp_path / f"{unit}.service").touch()
    columns = {"node.clock_synchronized": np.zeros(1)}
    report = CollectorReport("clock", 1, (Reading("node", ("node:n1",), columns),))
    assert [(one.state, one.fix) for one in node_doctor.check_clock([report])] == [("warn", fix)]


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[SystemdNotifier, socket.socket]]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    listener.bind(str(tmp_path / "notify"))
    before = signal.getsignal(signal.SIGHUP)
    notifier = SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000"})
    yield notifier, listener
    signal.signal(signal.SIGHUP, before)
    notifier.close()
    listener.close()


def read_status(listener: socket.socket) -> str:
    """Returns the last status that systemd got."""
    lines: list[str] = []
    while True:
        try:
            lines += listener.recv(4096).decode().splitlines()
        except BlockingIOError:
            return [line for line in lines if line.startswith("STATUS=")][-1].removeprefix("STATUS=")


def test_a_login_whose_reload_the_dashboard_refused_is_not_in_force(
    host: Host, told: tuple[SystemdNotifier, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`systemctl reload` succeeds, and without a login the pages stay open."""
    monkeypatch.setattr(serve, "record_reload", lambda *_: None)
    notifier, listener = told
    before = host.write("")
    hangup = serve.watch_hangup(before, lambda: load_config(host.file, {}), notifier)
    host.status["dashboard"] = read_status(listener)
    assert of_units(before, "in force") == [("ok", f"dashboard: run with {host.file} as it is now", "")]
    config = host.write(LOGIN.format(etc=host.etc, secret=host.etc / "absent"))
    ((state, found, fix),) = of_units(config, "in force")
    assert (state, "was changed after it was read" in found) == ("warn", True)
    assert fix.startswith("systemctl reload fleetpulse-dashboard")
    signal.raise_signal(signal.SIGHUP)
    assert not hangup.poll()
    notifier.notify_alive()
    host.status["dashboard"] = read_status(listener)
    ((state, found, fix),) = of_units(config, "in force")
    assert state == "fail"
    assert f"the last reload was refused: {host.file}: [dashboard.oidc] {host.etc / 'absent'}: cannot be read" in found
    assert fix == "correct that, then systemctl reload fleetpulse-dashboard"
    same = host.write("# nothing of it\n")
    signal.raise_signal(signal.SIGHUP)
    assert not hangup.poll()
    host.status["dashboard"] = read_status(listener)
    assert [state for state, *_ in of_units(same, "in force")] == ["ok"], "a comment changes nothing but the text"


def test_a_refused_secret_is_of_the_drop_in_that_names_it(host: Host) -> None:
    """A start of pipeline and dashboard named fleetpulse.toml, or no file at all."""
    absent, folder = host.etc / "absent", host.etc / "conf.d"
    folder.mkdir()
    (folder / "50.toml").write_text(f"[[notify.slack]]\nname = 's'\nurl_file = '{absent}'\n")
    with pytest.raises(ConfigError, match=rf"^{folder}/50.toml: \[\[notify.slack\]\] s: url_file = '{absent}'"):
        run_pipeline.run(host.write(f"[store]\npath = '{host.etc}/store.duckdb'\n"), Runner([]))
    (folder / "50.toml").write_text(LOGIN.format(etc=host.etc, secret=absent))
    with pytest.raises(ConfigError, match=rf"^{folder}/50.toml: \[dashboard.oidc\] {absent}: cannot be read"):
        serve.check_settings(host.write(""))


def test_what_needs_a_restart_names_it_and_the_agents_own_status_stays_before_it(
    host: Host, told: tuple[SystemdNotifier, socket.socket]
) -> None:
    host.running = {"pipeline"}
    notifier, listener = told
    before = host.write("[site]\nname = 'one'\n")
    load = lambda: load_config(host.file, {})  # noqa: E731 - as the services give it
    hangup = Reload("pipeline", before, load, ("site.name",), lambda *_: None, print, notifier.notify_configuration)
    config = host.write("[site]\nname = 'two'\n")
    signal.raise_signal(signal.SIGHUP)
    assert not hangup.poll()
    notifier.notify_alive("12 collectors, failing: none")
    host.status["pipeline"] = read_status(listener)
    assert host.status["pipeline"].startswith(f"12 collectors, failing: none; configuration {before.digest}, a later")
    ((state, found, fix),) = of_units(config, "in force")
    assert (state, fix) == ("fail", "systemctl restart fleetpulse-pipeline: a reload cannot change it")
    assert "site.name changed: restart the pipeline for that" in found
    accepted.take_texts(os.environ)


def test_after_a_refusal_for_a_missing_copy_the_fix_is_what_makes_one(
    host: Host, told: tuple[SystemdNotifier, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`correct that, then systemctl reload` can never make a copy: each reload was refused again."""
    monkeypatch.setattr(serve, "record_reload", lambda *_: None)
    for module in (credentials, doctor_units):
        monkeypatch.setattr(module, "CREDENTIALS", host.etc / "credentials")
    notifier, listener = told
    copy = host.etc / "credentials/fleetpulse-dashboard.service/oidc-secret"
    hangup = serve.watch_hangup(host.write(""), lambda: load_config(host.file, {}), notifier)
    config = host.write(LOGIN.format(etc=host.etc, secret=copy))

    def reload() -> str:
        signal.raise_signal(signal.SIGHUP)
        assert not hangup.poll()
        notifier.notify_alive()
        host.status["dashboard"] = read_status(listener)
        ((state, found, fix),) = of_units(config, "in force")
        assert (state, str(copy) in found) == ("fail", True)
        return fix

    restart = "systemctl daemon-reload && systemctl restart fleetpulse-dashboard: a reload makes no copies"
    drop_in = "/etc/systemd/system/fleetpulse-dashboard.service.d/secrets.conf"
    assert reload() == f"LoadCredential=oidc-secret:FILE below [Service] in {drop_in}; then {restart}"
    host.write_drop_in("dashboard", f"LoadCredential=oidc-secret:{host.etc}/oidc-secret")
    assert reload() == restart
    copy.parent.mkdir(parents=True)
    copy.touch()
    assert reload() == f"correct {host.etc}/oidc-secret, then {restart}"


def test_another_file_than_that_of_the_units_is_not_compared(host: Host, tmp_path: Path) -> None:
    host.write("")
    other = tmp_path / "other.toml"
    other.write_text("[site]\nname = 'two'\n")
    expected = [("info", f"the units read {host.file}, not {other}", "")]
    assert of_units(load_config(other, {}), "in force") == of_units(load_config(other, {}), "unit secrets") == expected
    host.running = set()
    assert of_units(load_config(other, {}), "in force") == [("info", "no unit runs here", "")]


def test_a_service_that_does_not_say_which_it_has_is_no_fault(host: Host) -> None:
    host.status["dashboard"] = "STORE migrated"
    ((state, found, _),) = of_units(host.write(""), "in force")
    assert (state, found.startswith("dashboard: does not say which it has")) == ("info", True)


def test_the_digest_is_no_section_of_a_file(host: Host) -> None:
    with pytest.raises(ConfigError, match=r"\[digest\] is not a section"):
        host.write("digest = 'abc'\n")
