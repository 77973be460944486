"""The question of `fleetpulse setup` for the webhook. What a receiver inside the site needs is asked with yes or no."""

from __future__ import annotations

import argparse
import ipaddress
import socket
from collections.abc import Callable

from pipeline.commands.setup_receiver import SecretReceiver, parse_receiver
from pipeline.http.addresses import parse_host
from pipeline.model.errors import ConfigError, Refused, UsageError

MOST_TEXT = 4096
"""Characters of brokers or of an address at most. Chosen: some 100 brokers, and the addresses of chats have 300."""


def ask_webhook(given: argparse.Namespace, ask: Callable[[str], str], question: str) -> SecretReceiver | None:
    """Returns the receiver of the flag or of the answer, None without one; asks again after one that cannot work."""
    if given.webhook is not None:
        return parse_webhook(given, given.webhook)
    problem = ""
    while True:
        text = ask(f"{problem}{question} []: ").strip()
        try:
            _check_length(text)
            http, networks = given.allow_http, _list_networks(given)
            if text:
                http, networks = _ask_allowances(text, http, networks, ask)
            return parse_receiver(text, http, networks) if text else None
        except (ConfigError, UsageError) as error:
            problem = f"{error}\n"


def parse_webhook(given: argparse.Namespace, text: str) -> SecretReceiver | None:
    """Returns the receiver of an address, with what the flags allow. Raises ConfigError or UsageError."""
    _check_length(text)
    return parse_receiver(text, given.allow_http, _list_networks(given)) if text else None


def _list_networks(given: argparse.Namespace) -> list[str]:
    return [one.strip() for one in (given.allow_private or "").split(",") if one.strip()]


def _check_length(text: str) -> None:
    if len(text) > MOST_TEXT:
        raise UsageError(
            f"setup: --webhook: found {len(text):,} characters; expected an address of at most {MOST_TEXT:,}"
        )


def _ask_allowances(text: str, http: bool, networks: list[str], ask: Callable[[str], str]) -> tuple[bool, list[str]]:
    """Asks for what the address needs and no flag allows: plain http, and each private address of its host."""
    from pipeline.notify.delivery import Target, check_address  # loads the HTTP client

    host, allowed = parse_host(text), list(networks)
    if not http and _needs_http(text, allowed):
        http = _agrees(ask, f"{host} is called by http: others on its way can read and change alerts. Allow it?")
    for address in _find_addresses(host):
        try:
            check_address(address, Target("notify.webhooks", "on-call", text, True, tuple(allowed)), host)
        except Refused as error:
            if "allow_private" in str(error) and _agrees(ask, f"{host} has the private address {address}. Allow it?"):
                allowed.append(str(ipaddress.ip_network(address)))
    return http, allowed


def _needs_http(text: str, networks: list[str]) -> bool:
    """Returns whether an address is refused as it is http; other faults are said later."""
    try:
        parse_receiver(text, False, networks)
    except (ConfigError, UsageError) as error:
        return "found http" in str(error)
    return False


def _find_addresses(host: str) -> list[str]:
    """Returns the addresses of a host; none if they cannot be found now: each delivery checks them again."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found))


def _agrees(ask: Callable[[str], str], question: str) -> bool:
    return ask(f"{question} yes or no [no]: ").strip().lower() in ("y", "yes")
