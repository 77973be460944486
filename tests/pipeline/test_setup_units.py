"""`fleetpulse setup --units`: an installation by pip gets the units that a package has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.commands import units
from pipeline.commands.arguments import build_parser
from pipeline.commands.setup import next_commands, run_setup
from pipeline.commands.setup_answers import Answers
from pipeline.model.errors import Refused, UsageError
from pipeline.runtime import systemd

SOURCE = Path(__file__).parents[2] / "deploy" / "systemd"


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("node", ["agent"]),
        ("server", ["dashboard", "executor", "pipeline"]),
        ("one-host", ["agent", "dashboard", "executor", "pipeline"]),
    ],
)
def test_a_role_gets_its_units_users_and_folders(role: str, expected: list[str], tmp_path: Path) -> None:
    said = units.install_units(role, SOURCE, Path("/opt/fleet pulse/bin/fleetpulse"), tmp_path)
    found = sorted(path.name for path in (tmp_path / "systemd/system").glob("*.service"))
    assert found == [f"fleetpulse-{name}.service" for name in expected]
    kinds = {"node": ["agent"], "server": ["server"], "one-host": ["agent", "server"]}[role]
    for form in ("sysusers.d", "tmpfiles.d"):
        assert sorted(p.name for p in (tmp_path / form).iterdir()) == [f"fleetpulse-{kind}.conf" for kind in kinds]
    drop_in = tmp_path / "systemd/system/fleetpulse-agent.service.d/one-host.conf"
    assert drop_in.exists() == (role == "one-host")
    assert (tmp_path / "fleetpulse/conf.d").stat().st_mode & 0o777 == 0o755
    assert len(said) == sum(path.is_file() for path in tmp_path.rglob("*"))


def test_the_units_run_the_installed_program(tmp_path: Path) -> None:
    units.install_units("one-host", SOURCE, Path("/srv/fp/bin/fleetpulse"), tmp_path)
    for path in (tmp_path / "systemd/system").glob("*.service"):
        text = path.read_text()
        assert "ExecStart=/srv/fp/bin/fleetpulse " in text
        assert "/opt/fleetpulse/bin" not in "\n".join(line for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize(
    ("guides", "named"),
    [
        ("/srv/100% f/share/doc/fleetpulse/docs", "/srv/100%%25%%20f/share/doc/fleetpulse/docs"),
        ("docs", "/opt/fleetpulse/share/doc/fleetpulse/docs"),
    ],
)
def test_the_units_name_the_guides_of_the_installation(
    guides: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "find_guides", lambda: guides)
    units.install_units("node", SOURCE, Path("/srv/fp/bin/fleetpulse"), tmp_path)
    text = (tmp_path / "systemd/system/fleetpulse-agent.service").read_text()
    assert f"\nDocumentation=file://{named}/agent.md\n" in text


def test_a_checkout_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    given = build_parser().parse_args(["setup", "--units", "--role", "node", "--config", str(tmp_path / "f.toml")])
    with pytest.raises(UsageError, match="expected an installed wheel"):
        run_setup(given, lambda _: "")
    assert list(tmp_path.iterdir()) == []


def test_another_file_than_that_of_the_units_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "find_units", lambda: SOURCE)
    monkeypatch.setattr(units, "find_program", lambda: Path("/opt/fleetpulse/bin/fleetpulse"))
    given = build_parser().parse_args(["setup", "--units", "--role", "node", "--config", str(tmp_path / "f.toml")])
    with pytest.raises(UsageError, match=r"the units read /etc/fleetpulse/fleetpulse.toml; expected that file, or no"):
        run_setup(given, lambda _: pytest.fail("asked"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prefix", ["/home/ada/venv", "/root/venv", "/nowhere"])
def test_a_program_that_services_cannot_reach_is_refused(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(Path, "is_file", lambda path: "nowhere" not in str(path))
    with pytest.raises(UsageError, match="services cannot run that; expected a folder such as /opt/fleetpulse"):
        units.find_program()


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "systemd").write_text("a file")
    with pytest.raises(UsageError, match="expected to run as root; written: nothing; not written: other units, and"):
        units.install_units("node", SOURCE, Path("/opt/fleetpulse/bin/fleetpulse"), tmp_path)


def test_two_commands_follow_for_a_node_and_one_host() -> None:
    program = "/opt/fleetpulse/bin/fleetpulse"
    for role, first in (("node", "agent"), ("one-host", "agent fleetpulse-pipeline fleetpulse-dashboard")):
        answers = Answers(role, "east", "k:9092", 0, None, packaged=True)
        start, wait = next_commands(answers, Path("/etc/fleetpulse/fleetpulse.toml"), program)
        assert start == f"systemctl enable --now fleetpulse-{first}"
        assert wait.startswith(f"{program} doctor --wait ")


@pytest.mark.parametrize(
    ("running", "commands"),
    [
        (
            {"pipeline", "dashboard"},
            [
                "systemctl daemon-reload",
                "systemctl restart fleetpulse-pipeline fleetpulse-dashboard",
                "systemctl enable --now fleetpulse-agent",
            ],
        ),
        (
            {"agent", "pipeline", "dashboard"},
            ["systemctl daemon-reload", "systemctl restart fleetpulse-agent fleetpulse-pipeline fleetpulse-dashboard"],
        ),
    ],
)
def test_units_that_run_are_restarted_which_enable_now_does_not(
    running: set[str], commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `setup --replace` the new receiver and the new site were not in force."""
    monkeypatch.setattr(systemd, "is_running", lambda service: service in running)
    answers = Answers("one-host", "east", "k:9092", 0, None, packaged=True)
    path = Path("/etc/fleetpulse/fleetpulse.toml")
    assert next_commands(answers, path, "/opt/fleetpulse/bin/fleetpulse")[:-1] == commands


class Host:
    """A configured host with an installation by pip, below a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.etc = folder / "fleetpulse" / "fleetpulse.toml", folder / "etc"
        self.units, install = self.etc / "systemd/system", units.install_units
        self.path.parent.mkdir()
        monkeypatch.setattr(units, "find_units", lambda: SOURCE)
        monkeypatch.setattr(units, "find_program", lambda: Path("/opt/fleetpulse/bin/fleetpulse"))
        monkeypatch.setattr(units, "install_units", lambda *words: install(*words, self.etc))
        monkeypatch.setattr(systemd, "HOST_UNITS", self.units)

    def run(self, *words: str, answer: str = "\n") -> list[str]:
        given = build_parser().parse_args(["setup", "--units", "--config", str(self.path), *words])
        return run_setup(given, lambda _: answer, of_units=self.path)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


NODE = '[site]\nname = "east"\n[pipeline]\ntransport = "kafka"\n[kafka]\nbootstrap_servers = "k:9092"\n'
SERVER = f'{NODE}[api]\ntoken_file = "/etc/fleetpulse/tokens"\n'


def test_a_configured_host_gets_the_units_of_a_new_version_and_keeps_its_configuration(host: Host) -> None:
    """After an upgrade by pip the units of the old version stayed: setup refused, or wrote another configuration."""
    host.path.write_text(SERVER)
    assert host.run(answer="server\n")[-4:] == [
        f"configuration: {host.path} stays",
        "",
        "Next:",
        "    systemctl try-restart fleetpulse-pipeline fleetpulse-dashboard fleetpulse-executor",
    ]
    assert len(list(host.units.iterdir())) == 3
    assert host.path.read_text() == SERVER
    assert [file.name for file in host.path.parent.iterdir()] == ["fleetpulse.toml"], "no tokens, no secret, no copy"


@pytest.mark.parametrize(
    ("flag", "values"),
    [("kafka", ["k:9092"]), ("allow-http", []), ("allow-private", ["10.0.0.0/8"])],
)
def test_a_flag_that_would_change_the_configuration_is_refused(host: Host, flag: str, values: list[str]) -> None:
    host.path.write_text(SERVER)
    with pytest.raises(
        Refused, match=rf"exists; expected no --{flag}, then the units alone .* setup --units --replace"
    ):
        host.run("--role", "server", f"--{flag}", *values)
    assert not host.etc.exists()


@pytest.mark.parametrize(
    ("text", "installed", "expected"),
    [
        (NODE, None, "node"),
        (SERVER, None, "server"),
        ('[api]\ntoken_file = "/etc/fleetpulse/tokens"\n', None, "one-host"),
        (SERVER, "one-host", "one-host"),
        (NODE, "server", "server"),
        (SERVER, "node", "node"),
    ],
)
def test_enter_takes_the_role_that_the_units_or_the_configuration_have(
    host: Host, text: str, installed: str | None, expected: str
) -> None:
    """It was one-host: a node got pipeline, dashboard and executor, and the agent the drop-in of one host."""
    host.path.write_text(text)
    if installed:
        units.install_units(installed, SOURCE, Path("/opt/fleetpulse/bin/fleetpulse"))
    assert host.run()[-1].split()[2:] == [f"fleetpulse-{service}" for service in units.SERVICES[expected]]
    assert sorted(path.name for path in host.units.glob("*.service")) == sorted(
        f"fleetpulse-{service}.service" for service in units.SERVICES[expected]
    )


def test_a_role_that_the_configuration_cannot_have_is_refused_with_what_to_do(host: Host) -> None:
    host.path.write_text(NODE)
    for role in ("server", "one-host"):
        with pytest.raises(Refused, match=rf"of a node: .* expected --role node; .* --units --replace --role {role}"):
            host.run("--role", role)
    assert not host.etc.exists()
    (host.path.parent / "tokens").touch()
    host.run("--role", "server")
    with pytest.raises(Refused, match="this host is a server; expected --role server, or one-host"):
        host.run("--role", "node")
    host.run("--role", "one-host")


def test_a_wheel_without_units_says_the_path_of_the_program_and_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said `fleetpulse`, which was not on PATH, and the drop-in of one host in a folder that no wheel has."""
    monkeypatch.setattr(units, "WHEEL_UNITS", SOURCE)
    monkeypatch.setattr(systemd, "HOST_UNITS", tmp_path / "etc/systemd/system")
    monkeypatch.setattr(units, "HOST_UNITS", tmp_path / "etc/systemd/system")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    program, path = f"{tmp_path}/venv/bin/fleetpulse", tmp_path / "f.toml"
    words = ["--role", "one-host", "--site", "a", "--kafka", "", "--gpus", "0", "--webhook", ""]
    said = run_setup(
        build_parser().parse_args(["setup", "--config", str(path), *words]), lambda _: pytest.fail("asked")
    )
    assert f"    {program} setup --units --role one-host" in said[: said.index("Next:")]
    assert said[-3:] == [f"    {program} {word} --config {path}" for word in ("init", "doctor", "up")]
    answers = Answers("one-host", "a", "", 0, None, packaged=True)
    start = "systemctl enable --now fleetpulse-agent fleetpulse-pipeline fleetpulse-dashboard"
    last = [start, f"{program} doctor --wait 120s"]
    assert next_commands(answers, path) == [f"{program} setup --units --role one-host", *last]
    units.install_units("one-host", SOURCE, Path(program), tmp_path / "etc")
    assert next_commands(answers, path) == last


def test_setup_without_the_flag_knows_the_units_that_an_earlier_one_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked all questions and wrote ./fleetpulse.toml, which no unit reads."""
    monkeypatch.setattr(systemd, "HOST_UNITS", tmp_path / "etc/systemd/system")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    units.install_units("server", SOURCE, tmp_path / "venv/bin/fleetpulse", tmp_path / "etc")
    path = tmp_path / "etc/fleetpulse/fleetpulse.toml"
    path.write_text('[site]\nname = "east"\n')
    with pytest.raises(Refused, match=f"{path}: exists"):
        run_setup(build_parser().parse_args(["setup"]), lambda _: pytest.fail("asked"), of_units=path)
