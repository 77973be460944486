"""Which secret files the user of a systemd unit of ours cannot read, by the unit, its drop-ins and the modes of files.

A command of root reads every file, so that nothing but this tells that a service will not: units have users of their
own, and a file of mode 0600 that root owns reaches them as a copy alone (LoadCredential=).
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.runtime.credentials import is_copy, list_texts
from pipeline.runtime.private_files import list_named_secrets, list_node_keys
from pipeline.runtime.systemd import CREDENTIALS

if TYPE_CHECKING:
    from pipeline.config.sections import Config

READ: Mapping[str, tuple[str, ...]] = {
    "agent": ("agent", "collector", "kafka", "opentelemetry"),
    "pipeline": ("api", "kafka", "notify", "topology"),
    "dashboard": ("dashboard",),
    "executor": ("acts", "executor"),
}
"""Service -> sections of which it reads the secret files."""
SHARED = ("kafka",)
"""Sections that several units read: a key of them cannot name the copy of one, so that each unit sets it for itself."""
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Folders that units do not see as others do: ProtectHome= and PrivateTmp= of systemd.exec(5)."""
NODE_KEYS = "kafka.node_keys"
"""Key of a folder of files that are read by their names."""
_DYNAMIC = 61184
"""First of the numbers that systemd has for DynamicUser= (UIDS-GIDS.md of systemd)."""
_READS_ALL = ("CAP_DAC_READ_SEARCH", "CAP_DAC_OVERRIDE")
_SETTING = re.compile(r"^[ \t]*(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_ACL = "system.posix_acl_access"


@dataclass(frozen=True, slots=True)
class Rights:
    """What a unit's user may read. variables: what the unit sets in place of the configuration's keys."""

    uid: int
    groups: frozenset[int]
    reads_all: bool
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A secret file that a service cannot read, with its key. owner: who must own it, as it cannot be a copy."""

    service: str
    key: str
    path: Path
    owner: str = ""


def find_unreadable(config: Config, service: str) -> list[Unreadable]:
    """Returns the secret files of a service that its unit's user cannot read. None of a user that is not known here:
    systemd says so when the unit starts."""
    unit = f"fleetpulse-{service}.service"
    rights = read_rights(unit)
    if rights is None or rights.reads_all:
        return []
    sections = set(READ[service]) - (set() if config.pipeline.transport == "kafka" else {"kafka"})
    found = []
    for key, named in list_named_secrets(config).items():
        path = Path(rights.variables.get(name_variable(key), named))
        if key.partition(".")[0] in sections and not _may_read(path, unit, rights):
            found.append(Unreadable(service, key, path))
    keys = list_node_keys(config.kafka.node_keys) if "kafka" in sections else []
    first = next((path for path in keys if not _may_read(path, unit, rights)), None)
    return found + ([Unreadable(service, NODE_KEYS, first, _name_user(rights.uid))] if first else [])


def name_variable(key: str) -> str:
    """Returns the variable of the environment that goes before a key of the configuration."""
    return f"FLEETPULSE__{key.upper().replace('.', '__')}"


def _name_user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def read_rights(unit: str) -> Rights | None:
    """Returns the rights of a unit's user by its files; None if there is no such unit or no such user."""
    settings = [pair for name, text in list_texts() if name == unit for pair in _SETTING.findall(text)]
    if not settings:
        return None
    last = dict(settings)
    more = [name for key, value in settings if key == "SupplementaryGroups" for name in value.split()]
    try:
        uid, group = _find_user(last)
        names = [*more, *([last["Group"]] if last.get("Group") and not _is_dynamic(last) else [])]
        groups = {group, *(grp.getgrnam(name).gr_gid for name in names)}
    except KeyError:
        return None
    held = {word for key, value in settings if key == "AmbientCapabilities" for word in value.split()}
    variables = dict(_split_variables(settings))
    return Rights(uid, frozenset(groups), bool(held & set(_READS_ALL)), variables)


def _is_dynamic(last: Mapping[str, str]) -> bool:
    return last.get("DynamicUser", "").lower() in ("yes", "true", "on", "1")


def _find_user(last: Mapping[str, str]) -> tuple[int, int]:
    """Returns the numbers of a unit's user and of its group. Raises KeyError for a user that is not known here."""
    if _is_dynamic(last):
        return _DYNAMIC, _DYNAMIC
    if not (name := last.get("User", "")):
        return 0, 0
    known = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    return known.pw_uid, known.pw_gid


def _split_variables(settings: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for key, value in settings:
        if key == "Environment":
            with contextlib.suppress(ValueError):  # a quotation that does not end: systemd reports it
                for word in shlex.split(value):
                    name, _, text = word.partition("=")
                    yield name, text


def _may_read(path: Path, unit: str, rights: Rights) -> bool:
    """Returns whether a unit can read a file. True also of one that is not there: the check `secrets` says that."""
    if is_copy(path):
        return path.is_relative_to(CREDENTIALS / unit)
    try:
        file = path.resolve()
        if any(file.is_relative_to(folder) for folder in HIDDEN):
            return False
        return all(_has_bit(folder, 1, rights) for folder in file.parents) and _has_bit(file, 4, rights)
    except OSError:
        return True


def _has_bit(path: Path, bit: int, rights: Rights) -> bool:
    """Returns whether the mode of a path has a bit for a user. A list of further users (ACL) counts as one with it."""
    found = os.stat(path)
    kind = 6 if found.st_uid == rights.uid else 3 if found.st_gid in rights.groups else 0
    return bool(found.st_mode >> kind & bit) or _has_acl(path)


def _has_acl(path: Path) -> bool:
    try:
        return _ACL in os.listxattr(path)
    except OSError:  # a file system without them
        return False
