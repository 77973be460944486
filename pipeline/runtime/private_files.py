"""File modes: state is private (folders 0700, files 0600); paths that other users can access are found and named.

Processes with state set UMASK (fleetpulse.py), which also applies to files that DuckDB creates, such as the write-ahead
log and temporary files. The spool sets its modes itself, since any program may write one.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.model.regular_files import read_regular
from pipeline.runtime.credentials import explain_missing, is_copy, list_handed_out

if TYPE_CHECKING:
    from pipeline.config.sections import Config

UMASK = 0o077
FOLDER, FILE = 0o700, 0o600
SECRET_KEYS = (
    *("token_file", "password_file", "key_file", "headers_file", "keytab_file"),
    *("url_file", "urls_file", "routing_key_file", "signing_secret_file", "webhook_secret_file"),
    *("secret_file", "client_secret_file", "cookie_secret_file", "kubeconfig"),
)
"""Configuration keys, in any section, of files with a secret."""
CERTIFICATE_KEYS = ("certificate_file", "ca_file", "token_ca_file")
"""Those of files with certificates, which are public; such a file is secret if a private key is in it too."""
PRIVATE_KEY = "PRIVATE KEY-----"
"""Text in the first and the last line of each private key in PEM."""
IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""Variable that the kubelet sets in every container."""
_OTHERS, _WRITABLE, _PASS = 0o077, 0o022, 0o011
_STATUS = frozenset({"status.json", "status.json.new"})
"""Health status of the agent, which it makes readable for `fleetpulse check` of any user."""
_NAMED = 3  # paths named in a message; chosen: the fix covers all


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents, all of them 0700; one that exists keeps its mode. Raises OSError."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=FOLDER, exist_ok=True)


def give_to_owner(path: Path) -> int | None:
    """Gives the files of a store that root made to the owner of their folder: the pipeline runs as that user.

    Returns the owner's number; None if nothing had to be done. Raises OSError.
    """
    owner = path.parent.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        return None
    for file in path.parent.glob(f"{path.name}*"):
        below = file.rglob("*") if file.is_dir() and not file.is_symlink() else ()
        for one in (file, *below):
            os.chown(one, owner.st_uid, owner.st_gid, follow_symlinks=False)
    return owner.st_uid


def open_private(path: str, flags: int) -> int:
    """Opener for `open(..., opener=)` that creates files with mode 0600."""
    return os.open(path, flags, FILE)


def list_secret_files(config: Config) -> dict[str, Path]:
    """Returns configuration key -> file with a token, password or private key; of a unit's copy, what it is made from.

    Also what drop-ins of our units hand out by LoadCredential=, as its key may be set by the unit alone. Of a file that
    is encrypted (LoadCredentialEncrypted=) the copy: only that has the secret.
    """
    found = list_named_secrets(config)
    sources = {copy: copy if out.encrypted else out.file for copy, out in list_handed_out().items()}
    found = {key: sources.get(path, path) for key, path in found.items()}
    others = {path: copy.name for copy, path in sources.items() if path not in found.values() and os.path.exists(path)}
    return found | {f"LoadCredential={name}": path for path, name in others.items()}


def list_named_secrets(config: Config) -> dict[str, Path]:
    """Returns configuration key -> file with a secret, as the key names it: of a unit's copy, the copy."""
    found: dict[str, Path] = {}
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    _find_secrets("", sections, found)
    return found


def list_node_keys(folder: Path | None) -> list[Path]:
    """Returns the files with the keys that sign messages of nodes; none where this user may not look for them."""
    try:
        return sorted(folder.glob("*.key")) if folder is not None else []
    except OSError:  # this user may not look into it
        return []


def _find_secrets(where: str, value: Any, found: dict[str, Path]) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        value = {str(i): one for i, one in enumerate(value)}
    for key, below in value.items() if isinstance(value, Mapping) else ():
        name = f"{where}.{key}" if where else str(key)
        if below and (key in SECRET_KEYS or (key in CERTIFICATE_KEYS and _may_have_key(Path(below).expanduser()))):
            found[name] = Path(below).expanduser()
        _find_secrets(name, below, found)


def _may_have_key(path: Path) -> bool:
    """Returns whether a private key is in a file, or whether there is a file that this user may not read."""
    try:
        return PRIVATE_KEY.encode() in read_regular(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except OSError:
        return True


def list_open_secrets(config: Config) -> list[tuple[str, Path, int]]:
    """Returns (key, file, mode) of each secret file that other users can access."""
    modes = ((key, path, _mode(path, links=True)) for key, path in list_secret_files(config).items())
    return [(key, path, mode) for key, path, mode in modes if mode is not None and mode & _OTHERS]


def find_open_secrets(config: Config) -> list[str]:
    """Returns a warning for each secret file that other users can access."""
    return [
        f"{key} = '{path}' has mode {mode:04o}: other users of this host can read it; run: chmod 600 {path}"
        for key, path, mode in list_open_secrets(config)
    ]


def find_absent_secrets(config: Config) -> list[str]:
    """Returns which keys name a file that does not exist, and for a unit's copy that none hands out, its credential.

    A copy that the unit gets when it starts is not absent; the file that it is made from may be. What cannot be looked
    at, as this user may not enter its folder, does not count: see `find_hidden_secrets`.
    """
    copies, found = list_handed_out(), []
    for key, path in list_secret_files(config).items():
        file = copies[path].file if path in copies else path
        if is_absent(file):
            why = f"; {explain_missing(path)}" if is_copy(file) else ""
            found.append(f"{key} = '{file}' does not exist{why}")
    return found


def find_hidden_secrets(config: Config) -> list[Path]:
    """Returns the secret files in folders that this user may not enter."""
    return sorted({path for path in list_secret_files(config).values() if _look(path) is False})


def is_absent(path: Path) -> bool:
    """Returns whether there is no such file. What this user may not look for may be there."""
    return _look(path) is None


def _look(path: Path) -> bool | None:
    """Returns whether a file could be looked at; None if it does not exist."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return False
    return True


def list_state_roots(config: Config) -> Iterator[Path]:
    """Yields folder, file, log, temporary and state files of the store, and the folder of the spool."""
    store = config.store.path
    yield store.parent
    for suffix in ("", ".wal", ".tmp", ".state"):
        yield store.with_name(store.name + suffix)
    yield config.spool.directory


def list_state_paths(config: Config) -> Iterator[Path]:
    """Yields the paths of `list_state_roots` and everything in the spool."""
    yield from list_state_roots(config)
    for folder, folders, files in os.walk(config.spool.directory):
        yield from (Path(folder, name) for name in (*folders, *files))


def find_open_state(paths: Iterable[Path]) -> list[tuple[Path, int]]:
    """Returns (path, mode) of paths that other users can access; links and missing files are skipped."""
    found = ((path, _mode(path)) for path in paths)
    return [(path, mode) for path, mode in found if mode and mode & _forbidden_bits(path) and not _is_hidden(path)]


def _is_hidden(path: Path) -> bool:
    """Returns whether a folder above a path keeps all other users out, whatever the mode of the path itself is."""
    place = Path(os.path.realpath(path))
    try:
        owners = frozenset({0, os.stat(place).st_uid, os.stat(place.parent).st_uid})
        return any(_is_shut(folder, owners) for folder in place.parents)
    except OSError:
        return False


def _is_shut(folder: Path, owners: frozenset[int]) -> bool:
    """Returns whether only root and `owners` pass a folder. With a list of further users (ACL) the group's bits do."""
    found = os.stat(folder)
    return not found.st_mode & _PASS and found.st_uid in owners


def _forbidden_bits(path: Path) -> int:
    """Returns the mode bits that must not be set."""
    return _WRITABLE if path.name in _STATUS else _OTHERS


def describe_open_paths(found: list[tuple[Path, int]]) -> str:
    """Returns the first paths of `find_open_state` as text."""
    named = ", ".join(f"{path} ({mode:04o})" for path, mode in found[:_NAMED])
    return named + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def suggest_fix(found: list[tuple[Path, int]]) -> str:
    """Returns the command that removes the access; for a shared folder, the advice to use another one."""
    shared = next((path for path, mode in found if mode & stat.S_ISVTX), None)
    if shared is not None:
        return f"use a separate folder instead of {shared}: [store] path, [spool] directory"
    tops = [path for path, _ in found if not any(parent in path.parents for parent, _ in found)]
    return f"chmod -R go= {' '.join(map(str, tops[:_NAMED]))}"


def list_warnings(config: Config) -> list[str]:
    """Returns the warnings of a service at its start; each is also a check of `doctor`."""
    found = find_open_state(list_state_roots(config))
    state = (
        [f"state is accessible to other users: {describe_open_paths(found)}; run: {suggest_fix(found)}"]
        if found
        else []
    )
    return state + find_open_secrets(config)


def _mode(path: Path, links: bool = False) -> int | None:
    """Returns the mode of a path; None if it is missing, a link that is not followed, or a kubelet's."""
    try:
        found = os.stat(path, follow_symlinks=links)
    except OSError:
        return None
    return None if stat.S_ISLNK(found.st_mode) or _is_kubelets(found) else stat.S_IMODE(found.st_mode)


def _is_kubelets(found: os.stat_result) -> bool:
    """Returns whether a kubelet made a path for the group of this pod (fsGroup): a volume or a file of a Secret.

    The pod cannot change its mode (2775, 0440) and has no other user; on the node, folders of root hide it.
    """
    own = {os.getegid(), *os.getgroups()}
    return os.environ.get(IN_A_POD, "") != "" and found.st_uid == 0 != os.geteuid() and found.st_gid in own
