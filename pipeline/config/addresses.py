"""What people may see of addresses: scheme and host. Users, paths and queries may be keys: Slack and Teams use paths.

One rule for all that is pasted into tickets: `fleetpulse config show` and `diff`, records of a reload, `support`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_PLACEHOLDER = re.compile(r"(host(:port)?(/path)?)|(HOST(\[?:PORT\]?)?(/PATH)?)")
"""What messages expect, which is no address."""
_LOGIN = re.compile(r"(?!User:)[^\s:/@]+:\S.*@[\w[].*", re.DOTALL)
"""An address without its scheme, with a login; no principal of Kafka."""
_WHOLE = re.compile(r"(\w[\w+.-]*://)(.*)", re.DOTALL)
_IN_TEXT = re.compile(r"(\w[\w+.-]*://)((?:\\\\|[^\s'\"<>\\])*)")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^][:@]+)(?::[0-9]*)?")
"""An authority without a user; anything else may be half of a password that has a slash."""


def hide_addresses(value: Any) -> Any:
    """Returns a value of the configuration; each address in it, also with quotes and spaces, only to its host."""
    if isinstance(value, Mapping):
        return {key: hide_addresses(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_addresses(one) for one in value]
    if not isinstance(value, str):
        return value
    found = _WHOLE.fullmatch(value)
    if found is None and _LOGIN.fullmatch(value):
        return _hide_rest(value)
    return found[1] + _hide_rest(found[2]) if found else hide_in_text(value)


def hide_address(text: str) -> str:
    """Returns an address only to its host; also one that lacks its scheme, by mistake."""
    return str(hide_addresses(text)) if _WHOLE.fullmatch(text) else _hide_rest(text)


def hide_in_text(text: str) -> str:
    """Returns a text, such as a log, with each address only to its host."""
    return _IN_TEXT.sub(_hide_match, text)


def _hide_match(found: re.Match[str]) -> str:
    rest = found[2].rstrip(".,;:)]}") if not found[2].endswith(("]", HIDDEN)) else found[2]
    return found[1] + (rest if _PLACEHOLDER.fullmatch(rest) else _hide_rest(rest)) + found[2][len(rest) :]


def _hide_rest(rest: str) -> str:
    """Returns the host of an address without its scheme, and whether more followed; if in doubt not even the host."""
    if not rest:
        return rest
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    below, host = rest[len(authority) :], authority.rpartition("@")[2]
    if "@" in below or not _HOST.fullmatch(host):
        return HIDDEN
    return host + (f"/{HIDDEN}" if below not in ("", "/") else "")
