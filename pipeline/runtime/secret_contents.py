"""What the files with secrets contain, as digests: a reload reads them again, and says where only a restart does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.model.regular_files import read_regular
from pipeline.runtime.credentials import is_copy, list_handed_out
from pipeline.runtime.private_files import list_named_secrets

if TYPE_CHECKING:
    from pipeline.config.sections import Config

Digests = Mapping[str, tuple[Path, bytes]]
"""Key of the configuration -> its file, and the digest of its content; empty of one that cannot be read."""


def read_digests(config: Config) -> Digests:
    """Returns the digests of all secret files of a configuration."""
    return {key: (path, _digest(path)) for key, path in list_named_secrets(config).items()}


def list_new_contents(before: Digests, after: Digests) -> list[str]:
    """Returns each key whose file is the same and has another content, in words."""
    return [
        f"{key}: {path} has a new content"
        for key, (path, digest) in after.items()
        if key in before and before[key][0] == path and before[key][1] != digest
    ]


def list_old_copies(config: Config) -> list[str]:
    """Returns for each unit's copy that is older than the file that it is made from, what to do, in words."""
    handed_out, found = list_handed_out(), []
    for key, copy in list_named_secrets(config).items():
        if copy in handed_out and _is_newer(source := handed_out[copy].file, copy):
            unit = copy.parent.name
            found.append(f"{key}: {source} changed, and {unit} has a copy of before; run: systemctl restart {unit}")
    return found


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(read_regular(path)).digest()
    except OSError:
        return b""  # what needs it says so


def _is_newer(source: Path, copy: Path) -> bool:
    """Returns whether a file was changed after the copy of it was made; False if this user cannot read either."""
    try:
        return is_copy(copy) and source.stat().st_mtime > copy.stat().st_mtime
    except OSError:
        return False
