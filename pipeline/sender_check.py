"""Who sent a message: its transport must confirm the node that it names."""

from __future__ import annotations

from pathlib import Path

from pipeline.model.errors import Rejected
from pipeline.model.names import name_fault
from pipeline.signatures import NodeKeys
from pipeline.transport import Message


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
        if fault := name_fault((node,)):  # before anything is kept of it, such as its clock
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
