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
from functools import lru_cache
from pathlib import Path

from pipeline.model.errors import ConfigError, Rejected, Retryable, SpoolError
from pipeline.model.names import MAX_NAME, find_name_fault
from pipeline.model.regular_files import check_regular
from pipeline.transport import Message
from pipeline.transport.segments import folder_name

HEADER = "fleetpulse-signature"
MIN_KEY_CHARS = 32
"""Minimum characters of a key; chosen: 128 bits in hexadecimal, as `openssl rand -hex 16` writes."""
_PROCESS_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # limits of this process, not a fault of a key
RENEW_S = 60.0
"""How often a key file is read again; chosen: a removed key stays valid this long."""

MAX_NODES = 100_000
"""Nodes whose keys are cached; bounds made-up names, which have no file. Chosen: as the senders (senders.py)."""


def sign(key: bytes, topic: str, value: bytes) -> bytes:
    """The signature of a message for one topic: 32 bytes."""
    return hmac.digest(key, topic.encode() + b"\0" + value, "sha256")


@dataclass
class NodeKeys:
    """The keys in a folder, read at first use and again every RENEW_S. For one thread."""

    folder: Path
    monotonic: Callable[[], float] = time.monotonic
    _cache: dict[str, tuple[float, tuple[bytes, ...]]] = field(default_factory=dict, repr=False)

    def keys_of(self, node: str) -> tuple[bytes, ...]:
        """Keys of a node in file order; () if it has no file. Raises ConfigError on an unusable file."""
        read_at, keys = self._cache.get(node, (float("-inf"), ()))
        if self.monotonic() - read_at >= RENEW_S:
            keys = _read_keys(self.folder / f"{folder_name(node)}.key")
            if len(self._cache) >= MAX_NODES:
                self._cache.clear()
            self._cache[node] = self.monotonic(), keys
        return keys

    def _no_keys(self) -> tuple[bytes, ...]:
        """(), if the folder is readable. Raises Retryable if it is not."""
        try:
            os.stat(self.folder / ".")
        except OSError as error:
            self._cache.clear()
            raise Retryable(f"[kafka] node_keys: {self.folder}: {error.strerror}; no message can be checked") from error
        return ()

    def signing_key(self, node: str) -> bytes:
        """The key with which `node` signs. Raises ConfigError without one."""
        if keys := self.keys_of(node):
            return keys[0]
        raise ConfigError(f"[kafka] node_keys: {self.folder}: no {folder_name(node)}.key; expected the key of {node}")

    def find_fault(self, node: str, topic: str, value: bytes, signature: bytes | None) -> str | None:
        """Describes why a message is not from `node`; None if it is signed with one of its keys.

        Raises Retryable if the folder is missing or cannot be opened, which says nothing about the message.
        """
        try:
            keys = self.keys_of(node) or self._no_keys()
        except ConfigError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _PROCESS_LIMITS:
                raise Retryable(str(error)) from error
            return str(error)
        except SpoolError:
            return f"node {node!r} cannot have a key file in [kafka] node_keys: the name is too long for one, or a path"
        if not keys:
            return f"no key of node {node} in [kafka] node_keys"
        if signature is None:
            return f"no signature; node {node} has a key: set [kafka] node_keys of its agent"
        if any(hmac.compare_digest(sign(key, topic, value), signature) for key in keys):
            return None
        return f"wrong signature: not signed with a key of node {node}"


def _read_keys(path: Path) -> tuple[bytes, ...]:
    """The keys in a file; () without a file. Raises ConfigError if other users may read it or a key is too short."""
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as opened:
            check_regular(opened.fileno(), path)
            mode, text = os.fstat(opened.fileno()).st_mode, opened.read(4096)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"[kafka] node_keys: {path}: cannot be read: {error.strerror}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"[kafka] node_keys: {path}: readable for every user; set chmod 600")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys or any(len(key) < MIN_KEY_CHARS for key in keys):
        raise ConfigError(
            f"[kafka] node_keys: {path}: expected one key per line, each of at least {MIN_KEY_CHARS} characters"
        )
    return keys


class SenderCheck:
    """Checks that messages come from the node that they name. With `node_keys`, messages on Kafka must be signed."""

    def __init__(self, node_keys: Path | None = None) -> None:
        self._keys = None if node_keys is None else NodeKeys(node_keys)

    def check_sender(self, message: Message, node: str | None) -> None:
        """Raises Rejected unless the message comes from `node`, as far as its transport can identify it, and is valid.

        In a spool the folder is the node: write access means acting as the node. On Kafka the record key is the node,
        and the signature proves it if there are keys. node: None if the message is of a newer wire version.
        """
        partition = message.partition
        if node is None:
            if partition.spooled or self._keys is None:
                return
            node = (message.sender or b"").decode(errors="replace")
        # before anything about it is kept, such as its clock
        if fault := _find_node_fault(node) if len(node) <= MAX_NAME else find_name_fault((node,)):
            raise Rejected("name", fault)
        if partition.name != node if partition.spooled else message.key != node.encode():
            raise Rejected("sender", f"message of node {node!r} {_describe_sender(message)}")
        if partition.spooled or self._keys is None:
            return
        if wrong := self._keys.find_fault(node, partition.topic, message.value, message.signature):
            raise Rejected("signature", wrong)


@lru_cache(MAX_NODES)
def _find_node_fault(node: str) -> str | None:
    return find_name_fault((node,))


def _describe_sender(message: Message) -> str:
    """The sender as the transport has it."""
    if message.partition.spooled:
        return f"in the spool of {message.partition.name!r}"
    if message.key is None:
        return "without a key; expected the node as its key"
    return f"under the key {message.key[:80]!r}"
