"""What people may see of addresses: scheme and host. Users, paths and queries may be keys: Slack and Teams use paths.

One rule for all that is pasted into tickets: `fleetpulse config show` and `diff`, records of a reload, `support`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeline.model.entity_names import KINDS

HIDDEN = "(hidden)"
_PLACEHOLDER = re.compile(r"(host(:port)?(/path)?)|(HOST(\[?:PORT\]?)?(/PATH)?)")
"""What messages expect, which is no address."""
_LOGIN = re.compile(r"(?!User:)[^\s:/@]+:\S.*@[\w[].*", re.DOTALL)
"""An address without its scheme, with a login; no principal of Kafka."""
_ADDRESS_KEY = re.compile(r"(?:\w+_)?(?:urls?|endpoints?|issuer|address)")
"""A key whose value is an address, also where its scheme is missing: `ada:pa55@h`, `token@h`, `h/key`."""
_NAME_KEYS = ("scope", "entities", "matchers", "source_matchers", "target_matchers")
"""Keys whose values are names of entities, or patterns of them, of kinds that a site chooses."""
_MAIL = re.compile(r"mailto:[^\s:/@]+@[\w.-]+")
_PROGRAMS = ("agent", "collector", "detector", "exporter", "service")
"""Kinds of entities that are usual users of databases too."""
_KINDS = "|".join(("account", "acct", "mailto", "oidc", *(kind for kind in KINDS if kind not in _PROGRAMS)))
_NAME = re.compile(rf"(?:{_KINDS}):[^\s:/@?#]+@[\w.-]+")
"""A name that has the form of a login. One with a port, path or query may be an address, whose user is named so."""
_ARGUMENTS = re.compile(r"(?:.*\.)?acts\.exec\.[^.]+")
"""Keys of the programs that carry out acts, in a configuration and in a group of it."""
_ARGUMENT = re.compile(r"(--?[A-Za-z]|--[a-z][a-z-]*|\{(?:node|act|reason)\})(?:(=.*))?", re.DOTALL)
_WHOLE = re.compile(r"(\w[\w+.-]*://)(.*)", re.DOTALL)
_IN_TEXT = re.compile(r"(?<![\w+.-])([+.-]*+)(\w[\w+.-]*+://)((?:\\\\|[^\s'\"<>\\])*+)")
"""Looked for where a word begins, not at each of its letters: a word of 100,000 letters, as base64, took minutes."""
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^][:@]+)(?::[0-9]*)?")
"""An authority without a user; anything else may be half of a password that has a slash."""


def hide_addresses(value: Any, key: str = "") -> Any:
    """Returns a value of the configuration; each address in it, also with quotes and spaces, only to its host, and of
    the programs of [acts] exec no argument, which may be a token.

    key: of the value, such as `notify.webhooks[0].url`; says whether a text without a scheme is an address or a name.
    """
    if isinstance(value, Mapping):
        return {name: hide_addresses(one, f"{key}.{name}" if key else str(name)) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        if _ARGUMENTS.fullmatch(key):
            return [*value[:1], *map(_hide_argument, value[1:])]
        return [hide_addresses(one, key) for one in value]
    if not isinstance(value, str):
        return value
    if found := _WHOLE.fullmatch(value):
        return found[1] + _hide_rest(found[2])
    return _hide_rest(value) if _is_address(value, key) else hide_in_text(value)


def _hide_argument(word: object) -> str:
    """Returns an argument of a program if it is the name of an option or the placeholder of a node; else none of it."""
    found = _ARGUMENT.fullmatch(str(word))
    return HIDDEN if found is None else f"{found[1]}={HIDDEN}" if found[2] else str(word)


def hide_address(text: str) -> str:
    """Returns an address only to its host; also one that lacks its scheme, by mistake."""
    return str(hide_addresses(text, "url"))


def _is_address(text: str, key: str) -> bool:
    """Returns whether a text without a scheme is an address whose user, path or query must be hidden."""
    name = re.split(r"[\s.]", re.sub(r"(\[\d+\])+$", "", key))[-1]
    if _ADDRESS_KEY.fullmatch(name):
        return _MAIL.fullmatch(text) is None
    return name not in _NAME_KEYS and _LOGIN.fullmatch(text) is not None and _NAME.fullmatch(text) is None


def hide_in_text(text: str) -> str:
    """Returns a text, such as a log, with each address only to its host."""
    return _IN_TEXT.sub(_hide_match, text)


def _hide_match(found: re.Match[str]) -> str:
    rest = found[3].rstrip(".,;:)]}") if not found[3].endswith(("]", HIDDEN)) else found[3]
    shown = rest if _PLACEHOLDER.fullmatch(rest) else _hide_rest(rest)
    return found[1] + found[2] + shown + found[3][len(rest) :]


def _hide_rest(rest: str) -> str:
    """Returns the host of an address without its scheme, and whether more followed; if in doubt not even the host."""
    if not rest:
        return rest
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    below, host = rest[len(authority) :], authority.rpartition("@")[2]
    if "@" in below or not _HOST.fullmatch(host):
        return HIDDEN
    return host + (f"/{HIDDEN}" if below not in ("", "/") else "")
