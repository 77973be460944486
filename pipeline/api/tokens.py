"""Tokens of API callers: optional on loopback, required on other addresses."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.config.sections import Api, Gateway
from pipeline.http.addresses import is_loopback
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.records import SECOND, Caller
from pipeline.model.regular_files import read_regular_text
from pipeline.model.roles import Role
from pipeline.runtime.private_files import give_to_owner

_LOG = logging.getLogger(__name__)

MIN_TOKEN_CHARACTERS = 16
"""Minimum length of a token (chosen: 16 random letters cannot be guessed over a network)."""
MAX_DAYS = 366
"""Longest life of a token with a role (days). Chosen: a year; 0 is for machines that no person can reach."""
INITIAL_USERS = ("dashboard", "operator")
"""Users that get a token from `fleetpulse init`; clients use the first line of the file."""


@dataclass(frozen=True, slots=True)
class RoleToken:
    """A token with a role, as it is stored: its hash, never itself. Times in UTC us; expires: None: never."""

    id: str
    owner: str
    role: Role
    hash: str
    created: int
    created_by: str
    expires: int | None = None
    revoked: int | None = None
    revoked_by: str | None = None
    on_behalf_of: bool = False
    """Whether its owner, such as the dashboard, may name the person who writes."""
    executor: bool = False
    """Whether its owner carries out acts on machines."""

    def is_valid(self, now: int) -> bool:
        """Returns whether it is accepted at `now`."""
        return self.revoked is None and (self.expires is None or now < self.expires)


def find_role_file(store: Path) -> Path:
    """Returns the file with the tokens that have roles: beside the store, readable for its owner alone."""
    return store.with_name(f"{store.name}.tokens")


def load_role_tokens(path: Path) -> list[RoleToken]:
    """Returns all tokens of the file, also revoked ones; none without a file. Raises ConfigError."""
    try:
        return [RoleToken(**row) for row in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; expected what `fleetpulse token create` wrote") from error


def change_role_tokens(path: Path, change: Callable[[list[RoleToken]], list[RoleToken]]) -> None:
    """Changes the file in one step, with a lock against other writers: a reader sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [asdict(token) for token in change(load_role_tokens(path))]
        draft = path.with_name(f"{path.name}.new")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(rows, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        give_to_owner(path)  # else the pipeline could not read what root wrote, as in the guides
        draft.replace(path)


def create_role_token(
    path: Path,
    owner: str,
    role: Role,
    days: float,
    by: str,
    now: int,
    on_behalf_of: bool = False,
    executor: bool = False,
) -> tuple[RoleToken, str]:
    """Adds a token and returns it with its text, which is stored nowhere. days: until it expires; 0: never."""
    if not re.fullmatch(r"[\w.@-]{1,64}", owner):
        raise UsageError(f"owner = {owner!r}: expected 1 to 64 letters, digits, . @ - _")
    if not 0 <= days <= MAX_DAYS:
        raise UsageError(f"days = {days:g}: expected 0 (never expires) to {MAX_DAYS}")
    if on_behalf_of and executor:
        raise UsageError(
            "on_behalf_of and executor: expected one; what carries out acts must not approve them for people"
        )
    text = f"fp_{secrets.token_urlsafe(24)}"
    expires = now + int(days * 86_400 * SECOND) if days else None
    made = RoleToken(
        secrets.token_hex(4),
        owner,
        role,
        _digest(text).hex(),
        now,
        by,
        expires,
        on_behalf_of=on_behalf_of,
        executor=executor,
    )
    change_role_tokens(path, lambda known: [*known, made])
    return made, text


def revoke_role_token(path: Path, id_: str, by: str, now: int, elsewhere: str = "") -> RoleToken:
    """Revokes a token immediately. Raises UsageError if there is no such token, or it is revoked.

    elsewhere: where a token of that name is instead, in words.
    """
    found: list[RoleToken] = []

    def change(known: list[RoleToken]) -> list[RoleToken]:
        found.extend(replace(t, revoked=now, revoked_by=by) for t in known if t.id == id_ and t.revoked is None)
        if not found:
            raise UsageError(
                f"token {id_}: {elsewhere or 'no such token, or it is revoked; see fleetpulse token list'}"
            )
        return [found[0] if t.id == id_ else t for t in known]

    change_role_tokens(path, change)
    return found[0]


class Tokens:
    """The configured users, all admins, and the tokens with roles, read again when their file changes.

    With none, every caller is `local`.
    """

    def __init__(self, users: dict[str, str], roles: Path | None, now: Callable[[], int]) -> None:
        self._users = [(_digest(token), user) for user, token in users.items()]
        self._roles, self._now = roles, now
        self._known = [] if roles is None else load_role_tokens(roles)
        self._read: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        self._refresh()
        return bool(self._users or self._known)

    def _refresh(self) -> None:
        """Reads the file with roles again if it changed; one that cannot be read keeps the tokens of before."""
        if self._roles is None:
            return
        try:
            status = self._roles.stat()
        except FileNotFoundError:
            return
        if self._read != (stamp := (status.st_ctime_ns, status.st_ino)):
            self._read = stamp
            try:
                self._known = load_role_tokens(self._roles)
            except ConfigError as error:
                _LOG.error("%s; the tokens of before stay valid", error)

    def find_user(self, authorization: str) -> Caller | None:
        """Returns the owner of a `Bearer` token, or None. Compares all tokens, so that the time reveals nothing."""
        scheme, _, token = authorization.partition(" ")
        given, found = _digest(token.strip()), None
        for digest, user in self._users:
            if hmac.compare_digest(digest, given):
                found = Caller(user, "admin")
        now = self._now()
        for known in self._known:
            if hmac.compare_digest(bytes.fromhex(known.hash), given) and known.is_valid(now):
                executor = known.executor and not known.on_behalf_of  # older files may have both: two people and more
                found = Caller(known.owner, known.role, "", known.on_behalf_of, is_executor=executor)
        return found if scheme.lower() == "bearer" else None

    def explain(self, authorization: str) -> tuple[str, str]:
        """Returns who tried with what, for the audit of an attempt that `find_user` does not accept."""
        given, now = _digest(authorization.partition(" ")[2].strip()), self._now()
        for known in self._known:
            if hmac.compare_digest(bytes.fromhex(known.hash), given) and not known.is_valid(now):
                return known.owner, f"{'expired' if known.revoked is None else 'revoked'} token {known.id}"
        return "unknown", "no token, or an unknown one"


def _utc_now() -> int:
    return time.time_ns() // 1000


def read_tokens(
    api: Api | Gateway, section: str = "api", roles: Path | None = None, now: Callable[[], int] = _utc_now
) -> Tokens:
    """Reads the token_file of [api] or [gateway], and the tokens with roles. Raises ConfigError, also beyond loopback
    without any."""
    if api.token_file is None:
        found = Tokens({}, roles, now)
        check_users(api, section, bool(found))
        return found
    return Tokens(_users(api.token_file, section), roles, now)


def check_users(api: Api | Gateway, section: str, has_tokens: bool) -> None:
    """Raises ConfigError if [api] or [gateway] would listen beyond loopback without tokens."""
    if not is_loopback(api.host) and not has_tokens:
        raise ConfigError(
            f"[{section}] host = {api.host!r}: listens beyond loopback without tokens; "
            f"set [{section}] token_file to a file of name:token lines, or host = '127.0.0.1'"
        )


def create_token_file(path: Path) -> None:
    """Creates a file with a random token for each of INITIAL_USERS, mode 0600. Raises OSError, also if it exists."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(write_initial_tokens())


def write_initial_tokens() -> str:
    """Returns the lines of a token file with a random token for each of INITIAL_USERS."""
    return "".join(f"{name}:{secrets.token_urlsafe(24)}\n" for name in INITIAL_USERS)


def _users(path: Path, section: str) -> dict[str, str]:
    """Returns name -> token of each line; skips blank lines and lines that begin with #."""
    try:
        lines = read_regular_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[{section}] token_file = {str(path)!r}: cannot be read: {error}") from error
    users: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, token = (part.strip() for part in line.partition(":"))
        if not re.fullmatch(r"[\w.@-]{1,64}", name) or len(token) < MIN_TOKEN_CHARACTERS or name in users:
            raise ConfigError(
                f"{path}: line {number}: expected name:token with a new name of letters, digits, . @ - _ "
                f"and a token of at least {MIN_TOKEN_CHARACTERS} characters"
            )
        users[name] = token
    if not users:
        raise ConfigError(f"{path}: holds no token; expected name:token lines")
    return users


def _digest(token: str) -> bytes:
    """Returns the hash of a token: equal lengths for the constant-time comparison."""
    return hashlib.sha256(token.encode()).digest()
