"""The answers of `fleetpulse setup`: each is checked when it is given, and a question is asked again."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.commands.setup_receiver import SecretReceiver
from pipeline.commands.setup_webhook import MOST_TEXT, ask_webhook, parse_webhook
from pipeline.commands.site_arguments import ROLES
from pipeline.config.sections import Config
from pipeline.config.settings import build_section
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.names import MAX_NAME, find_name_fault

ONE_HOST = "one-host"
"""The role of a host with agent, pipeline and dashboard, over spools: without a broker."""
MOST_GPUS = 64
"""GPUs of a node at most. Chosen: servers have up to 16, with PCIe expansion about 32; more is a typing error."""
Ask = Callable[[str], str]


@dataclass(frozen=True)
class Answers:
    """The answers. kafka: empty: none.   packaged: units run the services, as their own users."""

    role: str
    site: str
    kafka: str
    gpus: int
    receiver: SecretReceiver | None
    packaged: bool


def ask_all(given: argparse.Namespace, ask: Ask, packaged: bool, usual_role: str = ONE_HOST) -> Answers:
    """Asks what no flag answers, again after an answer that cannot work. Enter takes the default in brackets.

    Raises UsageError or ConfigError for a flag that cannot work, and what `ask` raises when the input ends.
    """

    _check_flags(given)
    answer = functools.partial(_answer, ask)
    role = ask_role(given, ask, usual_role)
    site = answer(given.site, "2/4 Name of the site", "local", _check_site)
    alone = role == ONE_HOST
    brokers = "" if given.kafka is None and alone else given.kafka
    check = functools.partial(_check_kafka, role)
    kafka = answer(brokers, "3/4 Kafka brokers, with commas", "kafka-1:9092", check)
    flag = str(given.gpus) if given.gpus is not None else "0" if role == "server" else None  # it has none to count
    gpus = answer(flag, f"{4 - alone}/4 GPUs of each node, 0: not checked", "0", _check_gpus)
    question = "4/4 Webhook for alerts, empty: none"
    receiver = None if role == "node" else ask_webhook(given, ask, question)
    _check_allowances(given, role, "" if receiver is None else None)
    return Answers(role, site, kafka, int(gpus), receiver, packaged)


def ask_role(given: argparse.Namespace, ask: Ask, usual: str) -> str:
    """Returns the role of the host; asks for it if no flag says it. usual: what Enter takes."""
    question = f"1/4 This host is a {', '.join(ROLES[:2])} or {ROLES[2]}"
    return _answer(ask, given.role, question, usual, _check_role)


def _answer(ask: Ask, flag: str | None, question: str, default: str, check: Callable[[str], object]) -> str:
    if flag is not None:
        check(flag)
        return flag
    problem = ""
    while True:
        text = ask(f"{problem}{question} [{default}]: ").strip() or default
        try:
            check(text)
        except (ConfigError, UsageError) as error:
            problem = f"{error}\n"
        else:
            return text


def _check_flags(given: argparse.Namespace) -> None:
    """Checks what depends on no answer, before the first question."""
    _check_allowances(given, given.role, given.webhook)
    for flag, check in ((given.site, _check_site), (given.gpus, lambda gpus: _check_gpus(str(gpus)))):
        if flag is not None:
            check(flag)
    if given.kafka is not None and (given.kafka or given.role):
        _check_kafka(given.role, given.kafka)
    if given.webhook and given.role != "node":
        parse_webhook(given, given.webhook)


def _check_allowances(given: argparse.Namespace, role: str | None, webhook: str | None) -> None:
    """Raises UsageError for flags of a webhook that there will not be. None: not known yet."""
    flag = "--allow-http" if given.allow_http else "--allow-private" if given.allow_private is not None else None
    if flag and (role == "node" or webhook == ""):
        raise UsageError(f"setup: {flag}: there is no webhook; expected --webhook URL, or no {flag}")


def _check_role(text: str) -> None:
    if text not in ROLES:
        raise UsageError(f"setup: role {text!r}: expected one of {', '.join(ROLES)}")


def _check_site(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"setup: {text[:60]!r}: is not text; expected UTF-8") from None
    _check_length("--site", text, MAX_NAME, "a name")
    build_section(Config, {"site": {"name": text}}, "setup")
    if fault := find_name_fault((text,)):  # the pipeline would reject all messages of such a site
        raise UsageError(f"setup: --site: {fault}; expected a name of visible characters")


def _check_kafka(role: str, text: str) -> None:
    _check_length("--kafka", text, MOST_TEXT, "brokers")
    if text and role == ONE_HOST:
        raise UsageError(f"setup: --kafka {text!r}: {ONE_HOST} has no broker; expected no --kafka, or --role server")
    if text:
        build_section(Config, {"kafka": {"bootstrap_servers": text}}, "setup")
    elif role != ONE_HOST:
        raise UsageError(f"setup: a {role} needs Kafka: expected --kafka host:port; without it: --role one-host")


def _check_gpus(text: str) -> None:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) > MOST_GPUS:
        raise UsageError(f"setup: GPUs {text[:60]!r}: expected a number from 0 to {MOST_GPUS}, such as 8")


def _check_length(flag: str, text: str, most: int, what: str) -> None:
    if len(text) > most:
        raise UsageError(f"setup: {flag}: found {len(text):,} characters; expected {what} of at most {most:,}")
