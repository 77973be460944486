"""`fleetpulse setup`: five questions, one configuration file, the next commands. It starts nothing."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.api import tokens
from pipeline.commands import setup_receiver, units
from pipeline.commands.site_arguments import ROLES
from pipeline.config import files
from pipeline.config.sections import Config
from pipeline.config.settings import build_section
from pipeline.model.errors import ConfigError, Refused, UsageError
from pipeline.runtime.systemd import UNIT_FOLDER

FOLDER = Path("/etc/fleetpulse")
Ask = Callable[[str], str]


@dataclass(frozen=True)
class Answers:
    """The answers. kafka, webhook: empty: none.   packaged: units run the services, as their own users."""

    role: str
    site: str
    kafka: str
    gpus: int
    webhook: str
    packaged: bool


def run_setup(given: argparse.Namespace, ask: Ask, packaged: bool | None = None, etc: Path = Path("/etc")) -> list[str]:
    """Writes the configuration and, on a server, tokens and the secret of a receiver. Returns the lines to print.

    Raises Refused if a configuration exists, UsageError or ConfigError for an answer that cannot work.
    """
    has_units = given.units or UNIT_FOLDER.is_dir() if packaged is None else packaged
    where = (units.find_units(), units.find_program()) if given.units else None
    path = Path(given.config or (FOLDER / "fleetpulse.toml" if has_units else "fleetpulse.toml"))
    _check_target(path, given.replace)
    answers = ask_all(given, ask, has_units)
    token_file = path.parent / "tokens" if answers.role != "node" else None
    receiver = setup_receiver.parse_receiver(answers.webhook) if answers.webhook else None
    secret = setup_receiver.find_secret_file(path)
    shown = setup_receiver.find_copy(secret) if has_units else secret
    text = write_text(answers, token_file, receiver.write_lines(shown) if receiver else [])
    _check_text(text, path)
    said = _write(path, text)
    if receiver is not None:
        said += setup_receiver.write_secret(receiver, secret, etc if has_units else None)
    if token_file is not None and not token_file.exists():
        tokens.create_token_file(token_file)
        said.append(f"tokens: {token_file} written, for {' and '.join(tokens.INITIAL_USERS)}")
    if where is not None:
        said += units.install_units(answers.role, *where)
    program = str(where[1]) if where is not None else None
    return [*said, "", "Next:", *(f"    {command}" for command in next_commands(answers, path, program))]


def ask_all(given: argparse.Namespace, ask: Ask, packaged: bool) -> Answers:
    """Asks what no flag answers. Enter takes the default in brackets."""

    def answer(flag: str | None, question: str, default: str) -> str:
        return (ask(f"{question} [{default}]: ").strip() or default) if flag is None else flag

    role = answer(given.role, f"1/5 This host is a {', '.join(ROLES[:2])} or {ROLES[2]}", "one-host")
    if role not in ROLES:
        raise UsageError(f"setup: role {role!r}: expected one of {', '.join(ROLES)}")
    site = answer(given.site, "2/5 Name of the site", "local")
    usual = "" if role == "one-host" else "kafka-1:9092"
    kafka = answer(given.kafka, "3/5 Kafka brokers, with commas", usual)
    gpus = answer(None if given.gpus is None else str(given.gpus), "4/5 GPUs of each node, 0: not checked", "0")
    webhook = "" if role == "node" else answer(given.webhook, "5/5 Webhook for alerts, empty: none", "")
    if not gpus.isdecimal():
        raise UsageError(f"setup: GPUs {gpus!r}: expected a number, such as 8")
    if role != "one-host" and not kafka:
        raise UsageError(f"setup: a {role} needs Kafka: expected --kafka host:port; without it: --role one-host")
    return Answers(role, site, kafka, int(gpus), webhook, packaged)


def write_text(answers: Answers, token_file: Path | None, receiver: Sequence[str]) -> str:
    """Returns the configuration as TOML; receiver: lines of that of alerts."""
    lines = ["# Written by `fleetpulse setup`. Every key: docs/configuration.md", "[site]"]
    lines.append(f"name = {_quote(answers.site)}")
    if answers.kafka:
        lines += ["[pipeline]", 'transport = "kafka"', "[kafka]", f"bootstrap_servers = {_quote(answers.kafka)}"]
    if answers.packaged:
        lines += ["[spool]", 'directory = "/var/lib/fleetpulse/spool"']
    if answers.packaged and answers.role != "node":
        lines += ["[store]", 'path = "/var/lib/fleetpulse-server/store.duckdb"']
    if token_file is not None:
        lines += ["[api]", f"token_file = {_quote(str(token_file.absolute()))}"]
    if answers.gpus:
        lines += ["[collector.pci]", f"gpus_expected = {answers.gpus}"]
    return "\n".join([*lines, *receiver]) + "\n"


def next_commands(answers: Answers, path: Path, installed: str | None = None) -> list[str]:
    """Returns the commands that bring the host into service, at most three. installed: program of --units."""
    program = installed or "fleetpulse"
    if not answers.packaged:
        known = "" if str(path) == "fleetpulse.toml" else f" --config {path}"
        start = {"node": "agent", "server": "pipeline", "one-host": "up"}[answers.role]
        return [f"fleetpulse {word}{known}" for word in ("init", "doctor", start)]
    if answers.role == "node":
        wait = f"{program} doctor --wait 60s"
        first = [] if installed else ["fleetpulse doctor"]
        return [*first, "systemctl enable --now fleetpulse-agent", wait]
    services = "fleetpulse-pipeline fleetpulse-dashboard"
    if answers.role == "server":
        return [f"{program} init", f"systemctl enable --now {services}", f"{program} doctor --wait 120s"]
    drop_in = "/etc/systemd/system/fleetpulse-agent.service.d/one-host.conf"
    first = [] if installed else [f"install -D -m 0644 {UNIT_FOLDER}/one-host.conf {drop_in}"]
    return [*first, f"systemctl enable --now fleetpulse-agent {services}", f"{program} doctor --wait 120s"]


def _quote(text: str) -> str:
    """Returns text as a string of TOML: that of JSON, except DEL and pairs of escapes for what is beyond 16 bits."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"setup: {text!r}: is not text; expected UTF-8") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_target(path: Path, replace: bool) -> None:
    """Raises UsageError for a folder, and Refused if the file has keys; that of a package has none."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; expected a file in it: --config {path / 'fleetpulse.toml'}")
    if not replace and _has_keys(path):
        raise Refused(f"{path}: exists; expected a new file; change it by hand, or: fleetpulse setup --replace")


def _has_keys(path: Path) -> bool:
    """Returns whether a file must be kept: also one that is no TOML, which somebody wrote."""
    try:
        return path.exists() and bool(files.read_table(path))
    except ConfigError:
        return True


def _check_text(text: str, path: Path) -> None:
    """Raises ConfigError for an answer that no key takes."""
    import tomllib

    build_section(Config, tomllib.loads(text), str(path))


def _write(path: Path, text: str) -> list[str]:
    said = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _has_keys(path):
            path.rename(f"{path}.old")
            said.append(f"configuration: the one before is {path}.old")
        draft = path.with_name(f"{path.name}.new")
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o644)  # services of other users read it; it has no secrets
        os.replace(draft, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; expected a writable folder") from error
    return [*said, f"configuration: {path} written"]
