"""What `fleetpulse support` hides: what files of secrets contain, in the forms in which logs have it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from pipeline.commands.support_salvage import Salvage
from pipeline.config.addresses import HIDDEN, hide_in_text
from pipeline.config.changes import flatten
from pipeline.config.sections import Config
from pipeline.model.regular_files import read_regular
from pipeline.runtime.private_files import list_node_keys, list_secret_files

MIN_SECRET = 6
"""Shortest text that is replaced (characters): shorter ones occur in any text. Chosen."""
_PEM = re.compile(r"^-----BEGIN [A-Z0-9 ]+-----\s*$", re.MULTILINE)
_PRIVATE = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(.*?)(?:-----END|\Z)", re.DOTALL)
_KUBECONFIG = re.compile(r"""["']?kind["']?\s*:\s*["']?Config\b""")
_KUBECONFIG_SECRET = re.compile(
    r"""["']?[\w-]*(?:token|password|secret|key-data|value)["']?\s*:\s*["']?([^"'\s,{}]+)""", re.IGNORECASE
)
"""What logs in: `token`, `password`, `client-key-data`, `client-secret`, and the `value` of variables of a program."""
_CALLED_SECRET = re.compile(r"auth|bearer|token|pass|secret|key|cookie|credential", re.IGNORECASE)
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w.~+=-]{16,}")
_BASE64_LINE = re.compile(r"\s*[A-Za-z0-9+/]{40,}={0,2}\s*")
"""A line of a longer value, as YAML folds it."""


def find_secrets(config: Config, salvage: Salvage | None = None) -> list[str]:
    """Returns what the files of secrets contain, as text and as JSON and addresses write it; the longest first.

    Of each line: all of it, what follows a colon, and the words of that (`Authorization: Bearer TOKEN`); of a file in
    PEM private keys alone, of a kubeconfig what its keys call a secret. Of addresses in the configuration: the
    password; of [acts] exec the arguments that may be secrets. salvage: more of both, of a configuration that is wrong.
    """
    found = {part for _, value in flatten(config) for part in _find_passwords(value)}
    found |= {part for words in config.acts.exec.values() for part in _find_in_words(words)}
    if salvage is not None:
        found |= {*salvage.secrets, *(part for text in salvage.addresses for part in _find_passwords(text))}
    for path in _list_files(config, salvage):
        try:
            text = read_regular(path).decode(errors="replace")
        except OSError:
            continue  # see list_unread
        found |= {*_find_in_file(text)}
    written = {form for text in found if len(text) >= MIN_SECRET for form in _list_forms(text)}
    return sorted((text for text in written if len(text) >= MIN_SECRET), key=len, reverse=True)


def list_unread(config: Config, salvage: Salvage | None = None) -> list[str]:
    """Returns the files of secrets that exist and that this user may not read: what they contain is not hidden."""
    found = []
    for path in sorted({*_list_files(config, salvage), *filter(None, (config.kafka.node_keys,))}):
        try:
            os.listdir(path) if path.is_dir() else read_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
    return found


def _list_files(config: Config, salvage: Salvage | None) -> set[Path]:
    files = {*list_secret_files(config).values(), *list_node_keys(config.kafka.node_keys)}
    return files | {*(salvage.files if salvage is not None else ())}


def _list_forms(text: str) -> Iterator[str]:
    """Yields a secret as logs write it: as JSON, in addresses and forms, as Python shows it, in base64."""
    yield from (text, json.dumps(text)[1:-1], quote(text, safe=""), quote(text), quote_plus(text))
    shown = text.encode("unicode_escape").decode()
    yield from (shown, shown.replace("'", "\\'"), repr(text)[1:-1])
    content = text.encode(errors="replace")
    for before in range(3):  # bytes of what stands before it in the same group of three, such as `user:`
        start, end = -(-8 * before // 6), 8 * (before + len(content)) // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(before) + content).decode()[start:end]


def _find_in_words(words: Sequence[str]) -> Iterator[str]:
    """Yields the secrets among arguments of a program: those after the name of one, and those that look like one."""
    for before, word in itertools.pairwise(words):
        called = _CALLED_SECRET.search(word) or (before.startswith("-") and _CALLED_SECRET.search(before))
        if called or _RANDOM.fullmatch(word):
            value = re.split("[:=]", word, maxsplit=1)[-1].strip()
            yield from (word, value, *value.split())


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
