"""The first hour: `setup` writes a working configuration, `doctor` ends with the next step, `support` hides secrets."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
import typing
from pathlib import Path
from urllib.parse import quote

import pytest

from pipeline.commands.arguments import build_parser
from pipeline.commands.checks import Check
from pipeline.commands.configuration import show_config
from pipeline.commands.next_steps import check_gate, suggest_next, wait_until_sound
from pipeline.commands.setup import run_setup
from pipeline.commands.support import collect, write_support
from pipeline.commands.support_secrets import find_secrets, hide
from pipeline.config.addresses import HIDDEN, hide_address, hide_addresses, hide_in_text
from pipeline.config.sections import Config, Pipeline, load_config
from pipeline.model.errors import ConfigError, Refused, UsageError

ROOT = Path(__file__).parents[2]


def set_up(
    path: Path, *words: str, answers: str = "", packaged: bool = True, of_units: Path | None = None
) -> list[str]:
    given = build_parser().parse_args(["setup", "--config", str(path), *words])
    lines = io.StringIO(answers)
    return run_setup(given, lambda question: lines.readline(), packaged, path.parent, of_units or path)


def test_four_answers_make_a_server_with_tokens_and_three_commands(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "fleetpulse.toml"
    said = set_up(path, answers="server\neast\nk1:9092,k2:9092\nhttps://alerts.example/hook\n")
    config = load_config(path, {})
    assert (config.site.name, config.pipeline.transport) == ("east", "kafka")
    assert config.kafka.bootstrap_servers == "k1:9092,k2:9092"
    assert config.collector == {}  # it counts no GPUs
    copy = Path("/run/credentials/fleetpulse-pipeline.service/on-call.secret")
    assert (config.notify.webhooks[0].url, config.notify.webhooks[0].url_file) == ("", copy)
    drop_in = path.parent / "systemd/system/fleetpulse-pipeline.service.d/on-call.conf"
    assert drop_in.read_text() == f"[Service]\nLoadCredential=on-call.secret:{path.parent}/on-call.secret\n"
    assert config.api.token_file == path.parent / "tokens"
    assert config.dashboard.token_file is None  # its unit passes it
    assert (path.parent / "tokens").stat().st_mode & 0o777 == 0o600
    assert said[said.index("Next:") + 1 :] == [
        "    fleetpulse init",
        "    systemctl enable --now fleetpulse-pipeline fleetpulse-dashboard",
        "    fleetpulse doctor --wait 120s",
    ]


def test_a_folder_is_not_replaced_by_a_configuration(tmp_path: Path) -> None:
    """/etc/fleetpulse has tokens and secrets: it was moved to /etc/fleetpulse.old."""
    (tmp_path / "tokens").touch()
    for words in ((), ("--replace",)):
        with pytest.raises(UsageError, match=rf"expected a file in it: --config {tmp_path}/fleetpulse.toml"):
            set_up(tmp_path, *words, answers="\n\n\n\n\n")
    assert (tmp_path / "tokens").exists()


def test_names_in_any_script_are_written_and_what_is_no_text_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("Zürich", "東京", "east 😀", 'a"b\\c')):
        path = tmp_path / f"{number}.toml"
        set_up(path, "--site", name, answers="\n\n\n\n", packaged=False)
        assert load_config(path, {}).site.name == name
    with pytest.raises(ConfigError, match="no control character"):
        set_up(tmp_path / "none.toml", "--site", "a\x7fb", answers="\n\n\n\n", packaged=False)
    with pytest.raises(UsageError, match="is not text; expected UTF-8"):
        set_up(tmp_path / "none.toml", "--site", "a\udcff", answers="\n\n\n\n", packaged=False)
    assert not (tmp_path / "none.toml").exists()


def test_enter_five_times_makes_one_host_without_a_broker(tmp_path: Path) -> None:
    path = tmp_path / "fleetpulse.toml"
    said = set_up(path, answers="\n\n\n\n\n", packaged=False)
    config = load_config(path, {})
    assert (config.pipeline.transport, config.notify.webhooks, config.collector) == ("spool", (), {})
    assert said[-1].strip() == f"fleetpulse up --config {path}"
    assert config.dashboard.token_file == config.api.token_file == tmp_path / "tokens", "else its pages show no data"


def test_flags_ask_nothing_and_a_node_gets_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "fleetpulse.toml"
    words = ["--role", "node", "--site", 'a "b" <c>', "--kafka", "k:9092", "--gpus", "8"]
    said = set_up(path, *words)
    assert load_config(path, {}).site.name == 'a "b" <c>'
    assert not (tmp_path / "tokens").exists()
    assert "    systemctl enable --now fleetpulse-agent" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kafka", "nowhere"], "bootstrap_servers = 'nowhere': expected host:port"),
        (["--kafka", ""], "a node needs Kafka"),
        (["--kafka", "k:1", "--site", "a/b"], "name = 'a/b': expected a name"),
        (["--kafka", "k:99999"], "bootstrap_servers = 'k:99999': expected host:port with a port from 1 to 65535"),
        (["--kafka", "k:1,[::1]:0"], "expected host:port with a port from 1 to 65535"),
        (["--kafka", "k:1", "--gpus", "-1"], "GPUs '-1': expected a number from 0 to 64"),
        (["--kafka", "k:1", "--gpus", "65"], "GPUs '65': expected a number from 0 to 64, such as 8"),
    ],
)
def test_an_answer_that_cannot_work_is_refused_and_nothing_is_written(
    tmp_path: Path, words: list[str], said: str
) -> None:
    path = tmp_path / "fleetpulse.toml"
    with pytest.raises((ConfigError, UsageError)) as caught:
        set_up(path, "--role", "node", "--gpus", "0", *words, answers="\n")
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_question_is_asked_again_after_an_answer_that_cannot_work_and_says_why(tmp_path: Path) -> None:
    path, asked = tmp_path / "fleetpulse.toml", []
    digits = "9" * 5000
    answers = iter(f"head\none-host\na/b\neast\n800\n²\n{digits}\n8\nhttp://x.example/\nno\n\n".splitlines())

    def ask(question: str) -> str:
        asked.append(question)
        return next(answers)

    run_setup(build_parser().parse_args(["setup", "--config", str(path)]), ask, True, tmp_path, path)
    config = load_config(path, {})
    assert (config.site.name, config.pipeline.transport) == ("east", "spool")
    assert config.collector["pci"]["gpus_expected"] == 8
    again = [question.split("\n")[0] for question in asked if "\n" in question]
    assert [text.rpartition("expected ")[2] for text in again] == [
        "one of node, server, one-host",
        "a name: not empty, no slash, no control character, not '.' or '..'",
        "a number from 0 to 64, such as 8",
        "a number from 0 to 64, such as 8",
        "a number from 0 to 64, such as 8",
        "https, or allow_http = true; flags of setup: --allow-http, --allow-private NETWORK",
    ]
    assert [question.split("\n")[-1][:3] for question in asked] == [
        *(f"{n}/4" for n in (1, 1, 2, 2, 3, 3, 3, 3, 4)),
        "x.e",  # it is called by http
        "4/4",
    ]


def test_only_a_host_with_a_broker_is_asked_for_it(tmp_path: Path) -> None:
    """One host was asked for brokers too, and then advised to run `fleetpulse up`, which is without any."""
    path, asked = tmp_path / "fleetpulse.toml", []
    answers = iter("server\neast\nk:99999\nk:9092\n\n".splitlines())

    def ask(question: str) -> str:
        asked.append(question)
        return next(answers)

    run_setup(build_parser().parse_args(["setup", "--config", str(path)]), ask, True, tmp_path, path)
    assert load_config(path, {}).kafka.bootstrap_servers == "k:9092"
    assert "expected host:port with a port from 1 to 65535" in asked[3]
    assert [question.split("\n")[-1][:3] for question in asked] == [f"{n}/4" for n in (1, 2, 3, 3, 4)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "65"), "from 0 to 64"),
        (("--kafka", "k:99999"), "from 1 to 65535"),
        (("--kafka", "", "--role", "server"), "a server needs Kafka"),
        (("--kafka", "k:9092", "--role", "one-host"), "one-host has no broker; expected no --kafka, or --role server"),
        (("--webhook", "http://x.example"), "found http"),
        (("--webhook", "", "--allow-http"), "--allow-http: there is no webhook"),
        (("--role", "node", "--allow-private", "10.0.0.0/8"), "--allow-private: there is no webhook"),
    ],
)
def test_a_flag_that_cannot_work_is_refused_before_the_first_question(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    given = build_parser().parse_args(["setup", "--config", str(tmp_path / "f.toml"), *words])
    with pytest.raises(UsageError, match=said):
        run_setup(given, lambda _: pytest.fail("asked"), True, tmp_path)


SERVER = ("--role", "server", "--site", "a", "--kafka", "k:9092", "--gpus", "0", "--webhook", "https://h.example/key")


def list_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("blocked", ["on-call.secret.new", "tokens.new", "fleetpulse.toml.new"])
def test_a_file_that_cannot_be_prepared_leaves_nothing_of_the_others(blocked: str, tmp_path: Path) -> None:
    """The configuration was written first, and named a secret that was never there."""
    (tmp_path / blocked).mkdir()
    with pytest.raises(UsageError) as caught:
        set_up(tmp_path / "fleetpulse.toml", *SERVER)
    assert str(tmp_path / blocked.removesuffix(".new")) in str(caught.value)
    assert str(caught.value).endswith("; nothing was written")
    assert list_below(tmp_path) == []
    (tmp_path / blocked).rmdir()
    set_up(tmp_path / "fleetpulse.toml", *SERVER)


def test_a_file_that_cannot_get_its_name_is_said_with_what_was_written_and_the_command_can_be_repeated(
    tmp_path: Path,
) -> None:
    path = tmp_path / "fleetpulse.toml"
    path.write_text('[site]\nname = "before"\n')
    (tmp_path / "fleetpulse.toml.old").mkdir()
    with pytest.raises(UsageError, match="Is a directory") as caught:
        set_up(path, *SERVER, "--replace")
    drop_in = "systemd/system/fleetpulse-pipeline.service.d/on-call.conf"
    written = ", ".join(str(tmp_path / name) for name in ("on-call.secret", drop_in, "tokens"))
    assert str(caught.value).endswith(f"; written: {written}; not written: {path}.old, {path}")
    assert list_below(tmp_path) == ["fleetpulse.toml", "on-call.secret", drop_in, "tokens"]
    assert load_config(path, {}).site.name == "before"
    (tmp_path / "fleetpulse.toml.old").rmdir()
    set_up(path, *SERVER, "--replace")
    assert load_config(path, {}).site.name == "a"


@pytest.mark.parametrize("name", ["trial.toml", "fleetpulse.new", "fleetpulse"])
def test_another_file_than_that_of_the_units_changes_nothing_of_the_running_service(tmp_path: Path, name: str) -> None:
    """A trial with --config: the drop-in of the service named the trial's secret, without --replace."""
    path = tmp_path / "fleetpulse.toml"
    set_up(path, *SERVER)
    before = {name: (tmp_path / name).read_bytes() for name in list_below(tmp_path)}
    trial = tmp_path / name
    words = [word.replace("/key", "/trial") for word in SERVER]
    said = set_up(trial, *words, of_units=path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert sorted({*list_below(tmp_path)} - before.keys()) == sorted([name, f"{name}.on-call.secret"])
    config = load_config(trial, {})
    assert config.notify.webhooks[0].url_file == tmp_path / f"{name}.on-call.secret"
    assert config.store.path == Config().store.path
    assert f"unit: none reads {trial}, and none was changed; they read {path}. It is for commands with" in said
    commands = said[said.index("Next:") + 1 :]
    assert [command.split() for command in commands] == [
        ["fleetpulse", word, "--config", str(trial)] for word in ("init", "doctor", "pipeline")
    ]


def test_another_path_to_the_file_of_the_units_is_that_file_unless_a_link_would_be_replaced(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    path = etc / "fleetpulse.toml"
    set_up(path, *SERVER)
    (etc / "sub").mkdir()
    (tmp_path / "linked").symlink_to(etc)
    for same in (etc / "sub" / ".." / path.name, tmp_path / "linked" / path.name):
        said = run_setup(parse_setup(same, "--replace"), lambda _: "", True, etc, path)
        assert f"configuration: {path} written" in said
        assert not [line for line in said if "none was changed" in line]
    link = etc / "link.toml"
    link.symlink_to(path)
    said = run_setup(parse_setup(link, "--replace"), lambda _: "", True, etc, path)
    assert f"unit: none reads {link}, and none was changed; they read {path}. It is for commands with" in said
    path.rename(tmp_path / "real.toml")
    path.symlink_to(tmp_path / "real.toml")
    said = run_setup(parse_setup(tmp_path / "real.toml", "--replace"), lambda _: "", True, etc, path)
    assert not [line for line in said if "none was changed" in line]


def parse_setup(path: Path, *words: str) -> argparse.Namespace:
    return build_parser().parse_args(["setup", "--config", str(path), *SERVER, *words])


def test_a_receiver_that_is_replaced_by_none_leaves_no_secret_and_no_drop_in(tmp_path: Path) -> None:
    path, none = tmp_path / "fleetpulse.toml", [*SERVER[:-1], "", "--replace"]
    drop_in = "systemd/system/fleetpulse-pipeline.service.d/on-call.conf"
    set_up(path, *SERVER)
    (tmp_path / "conf.d").mkdir()
    reader = tmp_path / "conf.d" / "50.toml"
    copy = load_config(path, {}).notify.webhooks[0].url_file
    reader.write_text(f'[[notify.webhooks]]\nname = "moved"\nurl_file = "{copy}"\n')
    assert f"receiver: {tmp_path}/on-call.secret stays, as {reader} names it" in set_up(path, *none)
    assert {drop_in, "on-call.secret"} <= {*list_below(tmp_path)}
    reader.unlink()
    said = set_up(path, *none)
    assert [f"receiver: {tmp_path}/{name} removed" for name in (drop_in, "on-call.secret")] == said[:2]
    assert list_below(tmp_path) == ["fleetpulse.toml", "fleetpulse.toml.old", "fleetpulse.toml.old.2", "tokens"]


KEY = "0123456789abcdefghijklmnopqrstuv"


@pytest.mark.parametrize(
    ("address", "section", "key"),
    [
        ("https://hooks.slack.com/services/T0/B0/key", "slack", "url_file"),
        ("https://x.webhook.office.com/webhookb2/key", "teams", "url_file"),
        ("https://prod-1.westeurope.logic.azure.com:443/workflows/key?sig=key", "teams", "url_file"),
        (f"https://events.eu.pagerduty.com/integration/{KEY}/enqueue", "pagerduty", "routing_key_file"),
        ("https://alerts.example/hook?sig=key", "webhooks", "url_file"),
    ],
)
def test_the_address_of_a_receiver_is_in_a_private_file_and_nowhere_where_people_look(
    address: str, section: str, key: str, tmp_path: Path
) -> None:
    """The path may be the key. Neither the configuration, nor `config show`, nor the support archive has it."""
    path = tmp_path / "fleetpulse.toml"
    set_up(path, answers=f"one-host\na\n\n0\n{address}\n", packaged=False)
    secret = tmp_path / "on-call.secret"
    assert secret.read_text() == f"{KEY if section == 'pagerduty' else address}\n"
    assert secret.stat().st_mode & 0o777 == 0o600
    config = load_config(path, {})
    (receiver,) = getattr(config.notify, section)
    assert (receiver.name, getattr(receiver, key)) == ("on-call", secret)
    assert getattr(receiver, "region", "eu") == "eu"
    below = address.removeprefix("https://").partition("/")[2]
    shown = path.read_text() + str(show_config(config, str(path), {})) + "".join(t for _, t in collect(config, ""))
    assert below not in shown
    assert KEY not in shown
    assert hide(f"POST {address}", find_secrets(config)).endswith(HIDDEN)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://user:pw@alerts.example/hook", "contains a user or password"),
        ("http://alerts.example/hook", "found http; expected https"),
        ("alerts.example", "expected https://HOST"),
        ("https://events.pagerduty.com/v2/enqueue", "has no key"),
    ],
)
def test_an_address_that_nothing_can_be_posted_to_is_refused_and_nothing_is_written(
    address: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, UsageError), match=said):
        set_up(tmp_path / "fleetpulse.toml", "--webhook", address, answers="one-host\na\n\n0\n")
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_with_keys_is_kept_and_one_of_a_package_is_not(tmp_path: Path) -> None:
    path, words = tmp_path / "fleetpulse.toml", ("--role", "one-host", "--site", "a", "--kafka", "", "--gpus", "0")
    path.write_text("# every key has a default\n")
    set_up(path, *words, "--webhook", "")
    with pytest.raises(Refused, match="exists; expected a new file"):
        set_up(path, *words, "--webhook", "")
    before = path.read_text()
    set_up(path, *words, "--webhook", "", "--replace")
    assert (tmp_path / "fleetpulse.toml.old").read_text() == before
    path.write_text("[broken")
    with pytest.raises(Refused, match="exists; expected a new file"):
        set_up(path, *words, "--webhook", "")
    set_up(path, *words, "--webhook", "", "--replace")
    assert (tmp_path / "fleetpulse.toml.old.2").read_text() == "[broken"
    assert (tmp_path / "fleetpulse.toml.old").read_text() == before
    path.write_text("[third")
    assert f"configuration: the one before is {path}.old.3" in set_up(path, *words, "--webhook", "", "--replace")


def test_a_node_without_units_is_not_told_to_make_topics(tmp_path: Path) -> None:
    """As in a container."""
    path = tmp_path / "fleetpulse.toml"
    words = ("--role", "node", "--site", "a", "--kafka", "k:9092", "--gpus", "0", "--webhook", "")
    assert [line.split()[1] for line in set_up(path, *words, packaged=False)[-2:]] == ["doctor", "agent"]


def test_doctor_ends_with_the_fixes_of_what_fails_first() -> None:
    checks = [
        Check("disk", "warn", "x", "", "clear it"),
        Check("store", "fail", "x", "", "chown it"),
        Check("clock", "ok", "x"),
    ]
    said = suggest_next(Config(), checks)
    assert said[0] == "Next: correct what fails, then run fleetpulse doctor again"
    assert said[1:] == ["    1. store: chown it", "    2. disk: clear it"]
    assert "fleetpulse setup" in suggest_next(Config(), [Check("clock", "ok", "x")])[0]
    assert "http://127.0.0.1:8501" in suggest_next(Config(source="a.toml"), [Check("clock", "ok", "x")])[0]


def test_the_gate_repeats_until_nothing_fails_and_gives_up_in_time(tmp_path: Path) -> None:
    count = tmp_path / "count"
    program = (
        f"import pathlib, sys; p = pathlib.Path({str(count)!r}); n = int(p.read_text()) + 1 if p.exists() else 1\n"
        "p.write_text(str(n)); print('round', n); sys.exit(0 if n == 3 else 3)"
    )
    times = iter(range(0, 1000, 2))
    words = [sys.executable, "-c", program]
    assert wait_until_sound(words, 60, lambda s: None, lambda: next(times)) == 0
    assert count.read_text() == "3"
    assert wait_until_sound(words, 6, lambda s: None, lambda: next(times)) == 3


@pytest.mark.parametrize(
    ("transport", "states", "failed"),
    [
        ("spool", {"api": "warn", "agent": "info"}, True),
        ("spool", {"api": "warn", "agent": "ok"}, True),  # as `up` begins
        ("spool", {"api": "ok", "agent": "info"}, False),
        ("kafka", {"api": "warn", "agent": "info"}, True),
        ("kafka", {"api": "warn", "agent": "ok"}, False),
        ("kafka", {"api": "ok", "agent": "info"}, False),
        ("spool", {"api": "fail", "agent": "info"}, False),  # it has failed already
    ],
)
def test_a_gate_fails_where_nothing_runs(transport: str, states: dict[str, str], failed: bool) -> None:
    """Within a second of `fleetpulse up`, without a unit, `doctor --wait` passed: it only warned of no pipeline."""
    config = Config(pipeline=Pipeline(transport=transport))  # type: ignore[arg-type]
    checks = [Check(name, state, "x") for name, state in states.items()]  # type: ignore[arg-type]
    assert [check.state for check in check_gate(config, checks)] == ["fail"] * failed


def test_an_agent_that_is_starting_does_not_pass_a_gate() -> None:
    config = Config(pipeline=Pipeline(transport="kafka"))
    assert check_gate(config, [Check("agent", "ok", "is starting")])


@pytest.fixture
def secret_site(tmp_path: Path) -> Path:
    """A site with secrets where a site has them, some of which its agent also wrote into its status."""
    (tmp_path / "tokens").write_text("dashboard:tok-dashboard-123456\noperator:tok-operator-123456\n")
    (tmp_path / "kafka.password").write_text("pa55-of-kafka\n")
    status = tmp_path / "spool" / "n1"
    status.mkdir(parents=True)
    (status / "status.json").write_text('{"error": "login with pa55-of-kafka refused"}')
    text = f"""
[api]
port = 1
token_file = "{tmp_path}/tokens"
[kafka]
password_file = "{tmp_path}/kafka.password"
[spool]
directory = "{tmp_path}/spool"
[store]
path = "{tmp_path}/store/s.duckdb"
[[notify.webhooks]]
name = "chat"
url = "https://user:pw@hooks.example/T000/B000/key-of-a-webhook"
"""
    path = tmp_path / "fleetpulse.toml"
    path.write_text(text)
    return path


def test_the_support_archive_has_everything_but_no_secret(secret_site: Path, tmp_path: Path) -> None:
    target = tmp_path / "support.tar.gz"
    doctor = json.dumps([{"found": "token tok-operator-123456 refused"}])
    names = write_support(load_config(secret_site, {}), target, doctor)
    wanted = {"version.txt", "system.txt", "packages.txt", "configuration.json", "doctor.json", "folders.txt"}
    assert wanted <= set(names)
    assert "status/n1-status.json" in names
    with tarfile.open(target) as archive:
        texts = {m.name: archive.extractfile(m).read().decode() for m in archive}  # type: ignore[union-attr]
    whole = "\n".join(texts.values())
    planted = ("tok-dashboard", "tok-operator", "pa55-of-kafka", "key-of-a-webhook", "user:pw", "B000")
    assert [secret for secret in planted if secret in whole] == []
    assert f"https://hooks.example/{HIDDEN}" in texts["fleetpulse-support/configuration.json"]
    assert "numpy" in texts["fleetpulse-support/packages.txt"]
    assert target.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="exists; expected a new file"):
        write_support(load_config(secret_site, {}), target, doctor)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://user:p@ss@hooks.example/x", f"https://hooks.example/{HIDDEN}"),
        ("https://user:pa/ss@hooks.example/x", f"https://{HIDDEN}"),
        ("https://user:12/ss@hooks.example/x", f"https://{HIDDEN}"),
        ("https://hooks.example?token=ss", f"https://hooks.example/{HIDDEN}"),
        ("https://hooks.example#ss", f"https://hooks.example/{HIDDEN}"),
        ("postgresql+x://u:ss@db:5432/d", f"postgresql+x://db:5432/{HIDDEN}"),
        ("http://[::1]:8600/ss", f"http://[::1]:8600/{HIDDEN}"),
        ("service://ss:with/colon", f"service://{HIDDEN}"),
    ],
)
def test_an_address_shows_at_most_its_host(address: str, shown: str) -> None:
    assert hide_addresses(address) == shown
    assert hide(f'"{shown}"', []) == f'"{shown}"', "a hidden value does not change again"
    assert hide(f'see ({address}), then "{address}".', []) == f'see ({shown}), then "{shown}".'


def test_an_address_without_a_scheme_shows_at_most_its_host_and_a_principal_is_none() -> None:
    assert hide_addresses("user:pa ss@hooks.example/x") == f"hooks.example/{HIDDEN}"
    assert hide_address("hooks.example/x") == f"hooks.example/{HIDDEN}"
    for shown in ("User:agent@REALM", "ada@site.example", "cdu:row3-*", "page: @on-call"):
        assert hide_addresses(shown) == shown


def test_what_messages_expect_is_no_address() -> None:
    sections = [one for one in typing.get_type_hints(Config).values() if dataclasses.is_dataclass(one)]
    said = [
        part.metadata.get("fleetpulse.constraint", ("",))[0] for one in sections for part in dataclasses.fields(one)
    ]
    assert len([text for text in said if "://" in text]) >= 2
    for text in (*said, "https://HOST[:PORT]/PATH (or http, see allow_http)"):
        assert hide_in_text(text) == text


def test_secrets_are_hidden_in_the_forms_in_which_logs_write_them(secret_site: Path, tmp_path: Path) -> None:
    (tmp_path / "oidc").write_text('client"secret\\1\n')
    (tmp_path / "headers").write_text("Authorization: Bearer bearer-token-1\n")
    more = f"""url = "https://user:pass word'q@hooks.example/x"
headers_file = "{tmp_path}/headers"
[dashboard]
token_file = "{tmp_path}/tokens"
roles = {{ "sre" = "operator" }}
[dashboard.oidc]
issuer = "https://id.example"
client_id = "f"
client_secret_file = "{tmp_path}/oidc"
[acts.webhook]
url = "https://acts.example"
secret_file = "{tmp_path}/headers"
"""
    text = secret_site.read_text()
    secret_site.write_text(text[: text.index("url = ")] + more)
    config = load_config(secret_site, {})
    planted = 'client"secret\\1', "bearer-token-1", "pass word'q"
    for secret in planted:
        for form in (secret, json.dumps(secret), quote(secret, safe="")):
            assert hide(f"got {form}", find_secrets(config)).strip('"') in (f"got {HIDDEN}", f'got "{HIDDEN}'), form
    values = next(content for name, content in collect(config, "") if name == "configuration.json")
    assert "word'q" not in values


@pytest.mark.parametrize("rest", ["@hooks.example/key", "?token=key", "/key"])
def test_what_follows_a_hidden_login_is_hidden_too(rest: str) -> None:
    assert "key" not in hide(f"POST https://user-token{rest} failed", ["user-token"])


def test_an_address_without_a_path_stays() -> None:
    assert hide("at http://127.0.0.1:8600, and http://a/", []) == "at http://127.0.0.1:8600, and http://a"


@pytest.mark.slow
def test_setup_and_support_run_as_commands(tmp_path: Path) -> None:
    path = tmp_path / "fleetpulse.toml"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, str(ROOT / "fleetpulse.py")]
    words = ["setup", "--config", str(path), "--role", "one-host", "--site", "a", "--kafka", "", "--gpus", "0"]
    ran = subprocess.run([*command, *words], input="\n", capture_output=True, text=True, env=environ)
    assert (ran.returncode, ran.stderr) == (0, "4/4 Webhook for alerts, empty: none []: ")
    words = ["setup", "--config", str(tmp_path / "more" / "fleetpulse.toml")]
    ended = subprocess.run([*command, *words], input="node\neast\n", capture_output=True, text=True, env=environ)
    assert ended.returncode == 2
    assert "its input ended, nothing was written" in ended.stderr
    assert not (tmp_path / "more").exists()
    target = str(tmp_path / "support.tar.gz")
    ran = subprocess.run(
        [*command, "support", target, "--config", str(path)], capture_output=True, text=True, env=environ
    )
    assert ran.returncode == 0, ran.stderr
    with tarfile.open(target) as archive:
        checks = json.loads(archive.extractfile("fleetpulse-support/doctor.json").read())  # type: ignore[union-attr]
    assert {"configuration", "store"} <= {check["check"] for check in checks}
