"""Who may call: nobody needs to say who they are on loopback, everybody does elsewhere."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from pipeline.config.sections import Api
from pipeline.http.addresses import is_loopback
from pipeline.model.errors import ConfigError

MIN_TOKEN_CHARACTERS = 16
"""Characters of a token at least (chosen: 16 random letters cannot be guessed over a network)."""
INITIAL_USERS = ("dashboard", "operator")
"""Who gets a token from `fleetpulse init`; the first line is the one that a client shows."""


class Tokens:
    """The configured identities. With none, every caller is `local`."""

    def __init__(self, users: dict[str, str]) -> None:
        self._users = [(_digest(token), user) for user, token in users.items()]

    def __bool__(self) -> bool:
        return bool(self._users)

    def find_user(self, authorization: str) -> str | None:
        """Whose `Bearer` token this is; None if nobody's. Looks at every token, so that time tells nothing."""
        scheme, _, token = authorization.partition(" ")
        given, found = _digest(token.strip()), None
        for digest, user in self._users:
            if hmac.compare_digest(digest, given):
                found = user
        return found if scheme.lower() == "bearer" else None


def read_tokens(api: Api) -> Tokens:
    """The tokens of [api] token_file. Raises ConfigError, also when the host is not loopback and there is no file."""
    if api.token_file is None:
        if not is_loopback(api.host):
            raise ConfigError(
                f"[api] host = {api.host!r}: listens beyond loopback without tokens; "
                "set [api] token_file to a file of name:token lines, or host = '127.0.0.1'"
            )
        return Tokens({})
    return Tokens(_users(api.token_file))


def create_token_file(path: Path) -> None:
    """A new file with a random token for each of MADE, for its owner alone. Raises OSError, also where there is one."""
    text = "".join(f"{name}:{secrets.token_urlsafe(24)}\n" for name in INITIAL_USERS)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _users(path: Path) -> dict[str, str]:
    """name -> token of each line; blank lines and lines that begin with # are left out."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[api] token_file = {str(path)!r}: cannot be read: {error}") from error
    users: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, token = (part.strip() for part in line.partition(":"))
        if not re.fullmatch(r"[\w.@-]{1,64}", name) or len(token) < MIN_TOKEN_CHARACTERS or name in users:
            raise ConfigError(
                f"{path}: line {number}: wanted name:token with a new name of letters, digits, . @ - _ "
                f"and a token of at least {MIN_TOKEN_CHARACTERS} characters"
            )
        users[name] = token
    if not users:
        raise ConfigError(f"{path}: holds no token; wanted name:token lines")
    return users


def _digest(token: str) -> bytes:
    """Equal lengths for the constant-time comparison."""
    return hashlib.sha256(token.encode()).digest()
