"""What `fleetpulse support` hides: what files of secrets contain, in the forms in which logs have it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from pipeline.commands.support_salvage import Salvage
from pipeline.config.addresses import HIDDEN, hide_in_text
from pipeline.config.changes import flatten
from pipeline.config.sections import Config
from pipeline.model.regular_files import read_regular
from pipeline.runtime.private_files import list_secret_files

MIN_SECRET = 6
"""Shortest text that is replaced (characters): shorter ones occur in any text. Chosen."""
_PEM = re.compile(r"^-----BEGIN [A-Z0-9 ]+-----\s*$", re.MULTILINE)
_PRIVATE = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(.*?)(?:-----END|\Z)", re.DOTALL)
_KUBECONFIG = re.compile(r"""["']?kind["']?\s*:\s*["']?Config\b""")
_KUBECONFIG_SECRET = re.compile(
    r"""["']?[\w-]*(?:token|password|secret|key-data|value)["']?\s*:\s*["']?([^"'\s,{}]+)""", re.IGNORECASE
)
"""What logs in: `token`, `password`, `client-key-data`, `client-secret`, and the `value` of variables of a program."""
_BASE64_LINE = re.compile(r"\s*[A-Za-z0-9+/]{40,}={0,2}\s*")
"""A line of a longer value, as YAML folds it."""


def find_secrets(config: Config, salvage: Salvage | None = None) -> list[str]:
    """Returns what the files of secrets contain, as text and as JSON and addresses write it; the longest first.

    Of each line: all of it, what follows a colon, and the words of that (`Authorization: Bearer TOKEN`); of a file in
    PEM private keys alone, of a kubeconfig what its keys call a secret. Of addresses in the configuration: the
    password. salvage: more of both, of a configuration that is wrong.
    """
    found = {part for _, value in flatten(config) for part in _find_passwords(value)}
    files = {*list_secret_files(config).values(), *_list_node_keys(config.kafka.node_keys)}
    if salvage is not None:
        found |= {*salvage.secrets, *(part for text in salvage.addresses for part in _find_passwords(text))}
        files |= {*salvage.files}
    for path in files:
        try:
            text = read_regular(path).decode(errors="replace")
        except OSError:
            continue
        found |= {*_find_in_file(text)}
    written = {form for text in found for form in (text, json.dumps(text)[1:-1], quote(text, safe=""))}
    return sorted((text for text in written if len(text) >= MIN_SECRET), key=len, reverse=True)


def _find_in_file(text: str) -> Iterator[str]:
    """Yields what of a file of secrets is to be hidden."""
    if _PEM.search(text):
        yield from (line.strip() for key in _PRIVATE.findall(text) for line in key.splitlines())
    elif _KUBECONFIG.search(text):
        yield from (found[1].strip() for found in _KUBECONFIG_SECRET.finditer(text))
        yield from (line.strip() for line in text.splitlines() if _BASE64_LINE.fullmatch(line))
    else:
        for line in text.splitlines():
            value = line.partition(":")[2].strip()
            yield from (line.strip(), value, *value.split())


def _list_node_keys(folder: Path | None) -> list[Path]:
    """Returns the files with the keys that sign messages of nodes."""
    try:
        return sorted(folder.glob("*.key")) if folder is not None else []
    except OSError:  # this user may not look into it, so nothing in the archive was read from there
        return []


def _find_passwords(value: Any) -> Iterator[str]:
    """Yields what stands between the scheme and the last @ of an address, after its first colon if it has one."""
    if isinstance(value, (list, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _find_passwords(one)
    elif isinstance(value, str) and "://" in value and "@" in value:
        name, _, password = value.partition("://")[2].rpartition("@")[0].partition(":")
        yield from (password or name, unquote(password or name))


def hide(text: str, secrets: list[str]) -> str:
    """Returns the text without secrets, and addresses without user, path and query, in which services have keys."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return hide_in_text(text)
