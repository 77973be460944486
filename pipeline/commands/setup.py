"""`fleetpulse setup`: four questions, one configuration file, the next commands. It starts nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from os.path import realpath
from pathlib import Path

from pipeline.api import tokens
from pipeline.commands import setup_receiver, units
from pipeline.commands.setup_answers import Answers, Ask, ask_all
from pipeline.commands.setup_files import PreparedFiles, find_free
from pipeline.commands.setup_renewal import TOKENS, find_installed_role, renew_units
from pipeline.config.files import HOST, check_links, list_files, read_table
from pipeline.config.layers import list_layers
from pipeline.config.replaced_lists import describe_replaced
from pipeline.config.sections import Config
from pipeline.config.settings import build_section
from pipeline.model.errors import ConfigError, Refused, UsageError
from pipeline.model.toml_text import parse_toml
from pipeline.runtime import systemd
from pipeline.runtime.guides import guide
from pipeline.runtime.systemd import HOST_UNITS, UNIT_FOLDER, has_unit, is_first_process


def run_setup(
    given: argparse.Namespace,
    ask: Ask,
    packaged: bool | None = None,
    etc: Path = Path("/etc"),
    of_units: Path = HOST,
) -> list[str]:
    """Writes the configuration and, on a server, tokens and the secret of a receiver. Returns the lines to print.

    The configuration is the last, as it names the others: after an error the same command can be repeated. Raises
    Refused if a configuration exists, UsageError or ConfigError for an answer that cannot work or a file that cannot be
    written. of_units: the file that the units read; they, their drop-ins and their secrets have no part in another.
    """
    has_units = given.units or any(map(has_unit, ("agent", "pipeline"))) if packaged is None else packaged
    where = (units.find_units(), units.find_program()) if given.units else None
    path = Path(given.config or (of_units if has_units else "fleetpulse.toml"))
    check_links(path)
    is_theirs = _is_same_place(path, of_units) or (realpath(path) == realpath(of_units) and not path.is_symlink())
    path = of_units if _is_same_place(path, of_units) else path  # of sub/../fleetpulse.toml the usual name
    if where is not None and not is_theirs:
        raise UsageError(
            f"setup --units: --config {path}: the units read {of_units}; expected that file, or no --units"
        )
    if where is not None and not given.replace and _has_keys(path) and not path.is_dir():
        return renew_units(given, ask, path, *where)
    _check_target(path, given.replace)
    role = find_installed_role() if packaged is None and is_theirs else None
    answers = ask_all(given, ask, has_units and is_theirs, role or "one-host")
    with PreparedFiles() as files:
        said = _prepare(files, answers, path, etc)
        if where is not None:
            said += units.install_units(answers.role, *where)
        files.place()
    said += _warn_of_drop_ins(path)
    program = str(where[1]) if where is not None else None
    if has_units and not is_theirs:
        said.append(f"unit: none reads {path}, and none was changed; they read {of_units}. It is for commands with")
        said.append(f"    --config {path}, or FLEETPULSE_CONFIG")
    if not has_units and (wheel := units.find_wheel_program()):
        said.append(f"unit: none is installed, and {path} is for commands of a person; for services, as root:")
        said.append(f"    {wheel} setup --units --role {answers.role}")
    return [*said, "", "Next:", *(f"    {command}" for command in next_commands(answers, path, program))]


def _prepare(files: PreparedFiles, answers: Answers, path: Path, etc: Path) -> list[str]:
    """Prepares all files, the configuration last. Returns the lines to print."""
    token_file = path.parent / TOKENS if answers.role != "node" else None
    receiver = answers.receiver
    secret = setup_receiver.find_secret_file(path)
    shown = setup_receiver.find_copy(secret) if answers.packaged else secret
    text = write_text(answers, token_file, receiver.write_lines(shown) if receiver else [])
    _check_text(text, path)
    said = []
    if receiver is not None:
        said += setup_receiver.prepare_secret(files, receiver, secret, etc if answers.packaged else None)
    elif answers.packaged and _has_keys(path):
        said += setup_receiver.remove_secret(files, secret, etc, path)
    if token_file is not None and not token_file.exists():
        files.prepare(token_file, tokens.write_initial_tokens().encode(), 0o600)
        said.append(f"tokens: {token_file} written, for {' and '.join(tokens.INITIAL_USERS)}")
    if _has_keys(path):
        old = find_free(path)
        files.prepare_copy(path, old)
        said.append(f"configuration: the one before is {old}")
    files.prepare(path, text.encode(), 0o644)  # services of other users read it; it has no secrets
    return [*said, f"configuration: {path} written"]


def write_text(answers: Answers, token_file: Path | None, receiver: Sequence[str]) -> str:
    """Returns the configuration as TOML; receiver: lines of that of alerts."""
    lines = [f"# Written by `fleetpulse setup`. Every key: {guide('configuration.md')}", "[site]"]
    lines.append(f"name = {_quote(answers.site)}")
    if answers.kafka:
        lines += ["[pipeline]", 'transport = "kafka"', "[kafka]", f"bootstrap_servers = {_quote(answers.kafka)}"]
    if answers.packaged:
        lines += ["[spool]", 'directory = "/var/lib/fleetpulse/spool"']
    if answers.packaged and answers.role != "node":
        lines += ["[store]", 'path = "/var/lib/fleetpulse-server/store.duckdb"']
    if token_file is not None:
        tokens_line = f"token_file = {_quote(str(token_file.absolute()))}"
        lines += ["[api]", tokens_line]
        lines += [] if answers.packaged else ["[dashboard]", tokens_line]  # units pass it to the dashboard
    if answers.gpus:
        lines += ["[collector.pci]", f"gpus_expected = {answers.gpus}"]
    return "\n".join([*lines, *receiver]) + "\n"


def next_commands(answers: Answers, path: Path, installed: str | None = None) -> list[str]:
    """Returns the commands that bring the host into service: three; more where a wheel's units are to be written or
    units run.

    installed: program of --units.
    """
    wheel = None if installed else units.find_wheel_program()
    program = installed or wheel or "fleetpulse"
    if not answers.packaged:
        known = "" if str(path) == "fleetpulse.toml" else f" --config {path}"
        start = {"node": "agent", "server": "pipeline", "one-host": "up"}[answers.role]
        first = [] if answers.role == "node" else ["init"]  # the topics are the server's
        if is_first_process():
            return [
                "the host itself has no command fleetpulse: start a container of this image with the same folder,",
                f"    whose arguments are: {start}{known}",
                f"    and in it: fleetpulse doctor{known}",
            ]
        return [f"{program} {word}{known}" for word in (*first, "doctor", start)]
    first = [f"{program} setup --units --role {answers.role}"] if wheel and units.find_missing(answers.role) else []
    has_package = not installed and not wheel
    if answers.role == "node":
        first += ["fleetpulse doctor"] if has_package else []
        return [*first, *start_units("agent"), f"{program} doctor --wait 120s"]
    if answers.role == "server":
        return [*first, f"{program} init", *start_units("pipeline", "dashboard"), f"{program} doctor --wait 120s"]
    if has_package:
        first += [f"install -D -m 0644 {UNIT_FOLDER}/one-host.conf {HOST_UNITS / units.ONE_HOST}"]
    return [*first, *start_units("agent", "pipeline", "dashboard"), f"{program} doctor --wait 120s"]


def start_units(*services: str) -> list[str]:
    """Returns the commands after which units run with what was written: `enable --now` leaves those that run as they
    are, and a reload takes neither a new drop-in nor a new site."""
    running = [service for service in services if systemd.is_running(service)]
    if not running:
        return [f"systemctl enable --now {_name_units(services)}"]
    first = [service for service in services if service not in running]
    commands = ["systemctl daemon-reload", f"systemctl restart {_name_units(running)}"]
    return [*commands, *([f"systemctl enable --now {_name_units(first)}"] if first else [])]


def _name_units(services: Sequence[str]) -> str:
    return " ".join(f"fleetpulse-{service}" for service in services)


def _quote(text: str) -> str:
    """Returns text as a string of TOML: that of JSON, except DEL and pairs of escapes for characters beyond 16 bits."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_same_place(path: Path, other: Path) -> bool:
    """Returns whether a file written to both paths is one. A link is replaced, not followed: only folders resolve."""
    return path.name == other.name and realpath(path.parent) == realpath(other.parent)


def _check_target(path: Path, replace: bool) -> None:
    """Raises UsageError for a folder, and Refused if the file has keys; that of a package has none."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; expected a file in it: --config {path / 'fleetpulse.toml'}")
    if not replace and _has_keys(path):
        raise Refused(f"{path}: exists; expected a new file; change it by hand, or: fleetpulse setup --replace")


def _has_keys(path: Path) -> bool:
    """Returns whether a file must be kept: also one that is no TOML, which a person wrote."""
    try:
        return path.exists() and bool(read_table(path))
    except ConfigError:
        return True


def _warn_of_drop_ins(path: Path) -> list[str]:
    """Returns what of the written file, or of one beside it, is not in force, and which file beside it is wrong."""
    try:
        return [f"warning: {line}" for line in describe_replaced(list_layers(path, {}), list_files(path))]
    except ConfigError as error:
        return [f"warning: {error}"]


def _check_text(text: str, path: Path) -> None:
    """Raises ConfigError for an answer that no key takes."""
    build_section(Config, parse_toml(text), str(path))
