"""Tokens of API callers: optional on loopback, required on other addresses."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from pipeline.config.sections import Api, Gateway
from pipeline.http.addresses import is_loopback
from pipeline.model.errors import ConfigError

MIN_TOKEN_CHARACTERS = 16
"""Minimum length of a token (chosen: 16 random letters cannot be guessed over a network)."""
INITIAL_USERS = ("dashboard", "operator")
"""Users that get a token from `fleetpulse init`; clients use the first line of the file."""


class Tokens:
    """The configured users. With none, every caller is `local`."""

    def __init__(self, users: dict[str, str]) -> None:
        self._users = [(_digest(token), user) for user, token in users.items()]

    def __bool__(self) -> bool:
        return bool(self._users)

    def find_user(self, authorization: str) -> str | None:
        """Returns the user of a `Bearer` token, or None. Compares all tokens, so that the time reveals nothing."""
        scheme, _, token = authorization.partition(" ")
        given, found = _digest(token.strip()), None
        for digest, user in self._users:
            if hmac.compare_digest(digest, given):
                found = user
        return found if scheme.lower() == "bearer" else None


def read_tokens(api: Api | Gateway, section: str = "api") -> Tokens:
    """Reads the token_file of [api] or [gateway]. Raises ConfigError, also beyond loopback without a file."""
    if api.token_file is None:
        if not is_loopback(api.host):
            raise ConfigError(
                f"[{section}] host = {api.host!r}: listens beyond loopback without tokens; "
                f"set [{section}] token_file to a file of name:token lines, or host = '127.0.0.1'"
            )
        return Tokens({})
    return Tokens(_users(api.token_file, section))


def create_token_file(path: Path) -> None:
    """Creates a file with a random token for each of INITIAL_USERS, mode 0600. Raises OSError, also if it exists."""
    text = "".join(f"{name}:{secrets.token_urlsafe(24)}\n" for name in INITIAL_USERS)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _users(path: Path, section: str) -> dict[str, str]:
    """Returns name -> token of each line; skips blank lines and lines that begin with #."""
    try:
        lines = path.read_text().splitlines()
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
