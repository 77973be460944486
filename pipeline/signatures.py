"""Signatures of messages on Kafka: HMAC-SHA256 by a key that the agent of one node and the pipeline have.

A folder holds one file for each node, `NODE.key`, with one key to a line. Agents sign with the first; the pipeline
accepts any of them, so that a key can be replaced without a gap. The signature is a header of the record: the message
itself stays as it is in the spool.
"""

from __future__ import annotations

import errno
import hmac
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.model.errors import ConfigError, Retryable
from pipeline.transport.segments import folder_name

HEADER = "fleetpulse-signature"
LEAST = 32
"""Characters of a key; chosen: 128 bits as hexadecimal digits, the shortest that `openssl rand -hex 16` writes."""
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # this process wants for something: no fault of a key
RENEW_S = 60.0
"""How often a key file is read anew; chosen: so long a key that was taken away may still be used."""

MOST = 100_000
"""Nodes whose keys are kept; senders may make up names, which have no file. Chosen: as the senders (senders.py)."""


def sign(key: bytes, topic: str, value: bytes) -> bytes:
    """The signature of a message for one topic: 32 bytes."""
    return hmac.digest(key, topic.encode() + b"\0" + value, "sha256")


@dataclass
class NodeKeys:
    """The keys in a folder, read when they are first needed and again every RENEW_S. For one thread."""

    folder: Path
    monotonic: Callable[[], float] = time.monotonic
    _known: dict[str, tuple[float, tuple[bytes, ...]]] = field(default_factory=dict, repr=False)

    def of(self, node: str) -> tuple[bytes, ...]:
        """Keys of a node, the newest first; () if it has no file. Raises ConfigError on a file that cannot be used."""
        read_at, keys = self._known.get(node, (float("-inf"), ()))
        if self.monotonic() - read_at >= RENEW_S:
            keys = _read(self.folder / f"{folder_name(node)}.key")
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[node] = self.monotonic(), keys
        return keys

    def _none(self) -> tuple[bytes, ...]:
        """No keys, if the folder can be looked into."""
        try:
            os.stat(self.folder / ".")
        except OSError as error:
            self._known.clear()
            raise Retryable(f"[kafka] node_keys: {self.folder}: {error.strerror}; no message can be checked") from error
        return ()

    def signing(self, node: str) -> bytes:
        """The key that `node` signs with. Raises ConfigError if it has none."""
        if keys := self.of(node):
            return keys[0]
        raise ConfigError(f"[kafka] node_keys: {self.folder}: no {folder_name(node)}.key; wanted the key of {node}")

    def wrong(self, node: str, topic: str, value: bytes, signature: bytes | None) -> str | None:
        """Why a message is not by `node`; None if it is signed with one of its keys.

        Raises Retryable if the folder is not there or cannot be opened: that says nothing of any message.
        """
        try:
            keys = self.of(node) or self._none()
        except ConfigError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _OURS:
                raise Retryable(str(error)) from error
            return str(error)
        if not keys:
            return f"no key of node {node} in [kafka] node_keys"
        if signature is None:
            return f"no signature; node {node} has a key: set [kafka] node_keys of its agent"
        if any(hmac.compare_digest(sign(key, topic, value), signature) for key in keys):
            return None
        return f"wrong signature: not signed with a key of node {node}"


def _read(path: Path) -> tuple[bytes, ...]:
    """The keys in a file; () without one. Raises ConfigError if others may read it, or a key is too short."""
    try:
        with open(path, "rb") as opened:
            mode, text = os.fstat(opened.fileno()).st_mode, opened.read(4096)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"[kafka] node_keys: {path}: cannot be read: {error.strerror}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"[kafka] node_keys: {path}: every user may open it; wanted chmod 600")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys or any(len(key) < LEAST for key in keys):
        raise ConfigError(f"[kafka] node_keys: {path}: wanted one key to a line, each of at least {LEAST} characters")
    return keys
