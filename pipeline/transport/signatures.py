"""Signatures of messages on Kafka (HMAC-SHA256), and the check that a message comes from the node that it names.

A folder holds one file per node, `NODE.key`, with one key per line. Agents sign with the first key; the pipeline
accepts any of them, so that a key can be replaced without a gap. The signature is a record header: the message itself
stays as it is in the spool.
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

from pipeline.model.errors import ConfigError, Rejected, Retryable
from pipeline.model.names import find_name_fault
from pipeline.transport import Message
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


class SenderCheck:
    """Binds messages to nodes. `node_keys`: [kafka] node_keys; with it messages on Kafka must be signed."""

    def __init__(self, node_keys: Path | None = None) -> None:
        self._keys = None if node_keys is None else NodeKeys(node_keys)

    def check(self, message: Message, node: str | None) -> None:
        """Raises Rejected unless the message comes from `node` as far as its transport can tell, and that is a name.

        In a spool the folder is the node: who may write it speaks for the node. On Kafka the record's key is the node,
        and the signature proves it where there are keys. node: None where the message cannot be read, as it is of a
        later wire version.
        """
        partition = message.partition
        if node is None:
            if partition.spooled or self._keys is None:
                return
            node = (message.sender or b"").decode(errors="replace")
        if fault := find_name_fault((node,)):  # before anything is kept of it, such as its clock
            raise Rejected("name", fault)
        if message.sender != node.encode():
            raise Rejected("sender", f"message of node {node!r} {_instead(message)}")
        if partition.spooled or self._keys is None:
            return
        if wrong := self._keys.wrong(node, partition.topic, message.value, message.signature):
            raise Rejected("signature", wrong)


def _instead(message: Message) -> str:
    """What the transport says of the sender."""
    if message.partition.spooled:
        return f"in the spool of {message.partition.name!r}"
    if message.key is None:
        return "without a key; wanted the node as its key"
    return f"under the key {message.key[:80]!r}"
