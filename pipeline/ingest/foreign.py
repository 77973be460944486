"""Ingest of other senders' telemetry (topic `otlp_metrics`): one message may have samples of many nodes.

Its offset is its identity, so each is stored once. Rules besides those of admission: of a node with an agent of ours,
only custom signals are stored, since the agent measures the rest itself; a time ahead of ours by more than the clock
bound is moved back, but never forward, since a late message looks like a clock that is behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from pipeline.ingest.messages import EARLIEST, NEWER, Arrival, DeadLetter, ForeignBatch, Item, open_envelope
from pipeline.model.errors import NewerWireError, Rejected, WireError
from pipeline.model.records import SECOND, TELEMETRY, Event, EventBatch, Origin, Rows, select_rows
from pipeline.store.database import Database
from pipeline.store.devices import EXCLUDED, Devices
from pipeline.transport import Message, wire

if TYPE_CHECKING:
    from pipeline.foreign.otlp import OtlpDecoder
    from pipeline.foreign.plan import NodeSamples, PartPlan, RowShape, Samples
    from pipeline.foreign.remote_write import RemoteWriteDecoder

INVENTORY_EVERY = 60 * SECOND
"""Least time between two inventories of a node (us). Chosen: a sender that adds series all the time costs no more."""
TAKEOVER = 600 * SECOND
"""How long after its last telemetry a node counts as having an agent; chosen: as [admission] takeover."""
REMOTE_WRITE: Mapping[str, int] = {"prometheus1": 1, "prometheus2": 2}
"""Format of a gateway's request -> version of remote write."""
FOREIGN_COUNTERS: Mapping[str, int] = dict.fromkeys(
    (
        "foreign_messages",
        "foreign_values",
        "foreign_custom",
        "foreign_shadowed",
        "foreign_own",
        "foreign_stale",
        "foreign_exemplars",
        "foreign_buckets",
    ),
    0,
)
"""Counters of ingest, from the start on 0; docs/otlp.md explains them."""
NODE_ATTRIBUTES = ("host.id", "host.name", "k8s.node.name")


class ForeignDecoder:
    """Makes items of messages. For one thread. The decoder is loaded with the first message: it is compiled code."""

    def __init__(self, site: str = "local", node_attributes: Sequence[str] = NODE_ATTRIBUTES) -> None:
        self._site, self._node_attributes = site, node_attributes
        self._otlp: OtlpDecoder | None = None
        self._remote_write: RemoteWriteDecoder | None = None

    def decode(self, message: Message, arrival: Arrival, confirm: Callable[[Message, str | None], None]) -> Item:
        """An item with the samples of a message; a DeadLetter if it is malformed.

        confirm: raises Rejected unless a gateway's message comes from that node.
        """
        try:
            request = self._open(message, confirm)
            found = list(self._decode_values(message) if request is None else self._decode_request(request))
        except NewerWireError as error:
            return Item.from_dead_letter(DeadLetter(message, str(error), NEWER))
        except Rejected as error:
            return Item.from_dead_letter(DeadLetter(message, str(error), error.rule))
        except WireError as error:
            return Item.from_dead_letter(DeadLetter(message, str(error)))
        faults = [fault for samples in found for fault in samples.faults]
        counts = Counter[str]()
        nodes = []
        for samples in found:
            for what, number in samples.dropped.items():
                if number:
                    counts[what] += number
            for node in samples.nodes:
                if len(node.times) and node.times[0] >= EARLIEST and node.times[-1] < wire.MAX_TIME:
                    nodes.append(_limit_times(node, arrival))
                else:
                    faults.append(f"times of node {node.part.layout.node!a} outside the years 2000 to 9999")
        gateway = "" if request is None else request.node
        return _build_item(message, ForeignBatch(tuple(nodes), tuple(faults), counts, gateway=gateway), arrival)

    def _decode_values(self, message: Message) -> Iterable[Samples]:
        """The samples of a message that is an OTLP request."""
        return self._decode_request(wire.Request("", "otlp", memoryview(message.value)))

    def _decode_request(self, request: wire.Request) -> Iterable[Samples]:
        if request.format == "otlp":
            if self._otlp is None:
                from pipeline.foreign.otlp import OtlpDecoder

                self._otlp = OtlpDecoder(self._site, self._node_attributes)
            return self._otlp.decode(request.data, request.node if request.local else "")
        version = REMOTE_WRITE.get(request.format)
        if version is None:
            known = ", ".join(["otlp", *REMOTE_WRITE])
            raise WireError(f"request of format {request.format!a}, expected {known}: upgrade the pipeline")
        if self._remote_write is None:
            from pipeline.foreign.remote_write import RemoteWriteDecoder

            self._remote_write = RemoteWriteDecoder(self._site, self._node_attributes)
        return self._remote_write.decode(bytes(request.data), version)

    @staticmethod
    def _open(message: Message, confirm: Callable[[Message, str | None], None]) -> wire.Request | None:
        """The request in a gateway's message; None if the message is a request itself, as a Collector writes it.

        No request begins as an envelope does: its first byte would be a field of a wire type that does not exist.
        """
        if message.value[: len(wire.MAGIC)] != wire.MAGIC:
            return None
        request = wire.open_request(message.value, open_envelope(message, confirm))
        confirm(message, request.node)
        return request


def _limit_times(node: NodeSamples, arrival: Arrival) -> NodeSamples:
    """The samples with times that are not ahead of the arrival."""
    last = int(node.times[-1])
    return replace(node, times=node.times - (last - arrival.time)) if last > arrival.latest else node


def _build_item(message: Message, batch: ForeignBatch, arrival: Arrival) -> Item:
    if not batch.nodes:
        return Item(message, batch, arrival.time, None, {}, 0, len(message.value), arrival.time)
    first = min(int(node.times[0]) for node in batch.nodes)
    last = max(int(node.times[-1]) for node in batch.nodes)
    rows = batch.nodes[0].shape.rows
    if len(batch.nodes) > 1:
        rows = sum((Counter(node.shape.rows) for node in batch.nodes), Counter[str]())
    cells, size = sum(node.shape.cells for node in batch.nodes), len(message.value)
    return Item(message, batch, first, last, rows, cells, size, arrival.time)


# --- nodes with an agent ---------------------------------------------------------------------------------------------


class AgentPresence:
    """When each node's own agent sent telemetry last (us). A node counts as having one for `patience` (us)."""

    def __init__(self, newest: Mapping[str, int] = {}, patience: int = TAKEOVER) -> None:
        self._patience = patience
        self._newest = dict(newest)

    @classmethod
    def load(cls, database: Database) -> AgentPresence:
        """The last messages in the store."""
        query = (
            "SELECT node, epoch_us(max(updated)) FROM producer_mark WHERE topic = ? AND updated IS NOT NULL GROUP BY 1"
        )
        with database.lock:
            return cls(dict(database.connection.execute(query, [TELEMETRY]).fetchall()))

    def record(self, node: str, time: int) -> None:
        """Records telemetry of a node's agent."""
        self._newest[node] = time

    def has_agent(self, node: str, now: int) -> bool:
        """Whether the node's own agent sends telemetry."""
        last = self._newest.get(node)
        return last is not None and now - last <= self._patience


# --- inventory ------------------------------------------------------------------------------------------------------


class ForeignInventory:
    """Entities of nodes without an agent, as inventories: their parents, and what custom signals are. For one thread.

    Memory: entities that admission counted.
    """

    def __init__(self) -> None:
        self._entities: dict[str, dict[str, dict[str, Any]]] = {}
        self._origins: dict[str, Origin] = {}
        self._seen: WeakSet[PartPlan] = WeakSet()
        self._due: dict[str, None] = {}
        self._reported: dict[str, int] = {}

    def add_part(self, part: PartPlan, excluded: Collection[str]) -> None:
        """Adds the entities of an admitted part."""
        if part in self._seen:
            return
        self._seen.add(part)
        node = part.layout.node
        known = self._entities.setdefault(node, {f"node:{node}": {"parents": [], "attributes": {}}})
        new = {e: facts for e, facts in part.inventory.items() if e not in excluded and e not in known}
        self._origins[node] = Origin(part.layout.site, node, b"", part.simulated)
        for entity, facts in new.items():
            known[entity] = {"parents": [f"node:{node}"], "attributes": dict(facts)}
        if new or node not in self._reported:
            self._due[node] = None

    def due_events(self, now: int) -> list[EventBatch]:
        """Inventories that changed; call `mark_reported` when they are stored."""
        due = [node for node in self._due if not 0 <= now - self._reported.get(node, 0) < INVENTORY_EVERY]
        listed = ((node, {"entities": dict(self._entities[node])}) for node in due)
        return [EventBatch(self._origins[n], (Event(now, f"node:{n}", "inventory", data),)) for n, data in listed]

    def mark_reported(self, batches: Iterable[EventBatch]) -> None:
        """Records that inventories of `due_events` are stored, or refused."""
        for batch in batches:
            self._due.pop(batch.origin.node, None)
            self._reported[batch.origin.node] = batch.events[0].time


# --- rows -----------------------------------------------------------------------------------------------------------


def build_foreign_rows(batches: Iterable[ForeignBatch], devices: Devices) -> list[Rows]:
    """Rows of all samples: one Rows per class and set of signals."""
    alike: dict[tuple[RowShape, frozenset[str]], list[NodeSamples]] = {}
    for batch in batches:
        for i, node in enumerate(batch.nodes):
            alike.setdefault((node.shape, batch.excluded.get(i, frozenset())), []).append(node)
    by_signals: dict[tuple[str, ...], list[Rows]] = {}
    for (shape, excluded), group in alike.items():
        cells = np.stack([node.cells for node in group])
        times = np.stack([node.times for node in group])
        at = 0
        for b, (device_class, signals, rows) in enumerate(shape.blocks):
            block = _build_block(group, b, cells[:, at : at + rows * len(signals)], times, devices, excluded)
            at += rows * len(signals)
            if len(block.time):
                by_signals.setdefault((device_class, *block.columns), []).append(block)
    return [_join_rows(found) for found in by_signals.values()]


def _build_block(
    group: Sequence[NodeSamples],
    b: int,
    cells: NDArray[np.uint64],
    times: NDArray[np.int64],
    devices: Devices,
    excluded: frozenset[str],
) -> Rows:
    shape = group[0].shape
    device_class, signals, rows = shape.blocks[b]
    ids = np.stack(
        [
            devices.assign_ids(
                device_class, n.part.layout.site, n.part.layout.node, n.part.simulated,
                n.part.layout.blocks[b].entities, excluded,
            )
            for n in group
        ]
    )  # fmt: skip
    device = ids[:, shape.row_entity[b]].reshape(-1)
    columns = {
        name: _to_type(cells[:, s * rows : (s + 1) * rows].reshape(-1), code) for s, (name, code) in enumerate(signals)
    }
    found = Rows(device_class, times[:, shape.row_tick[b]].reshape(-1), device, columns)
    return found if not excluded else select_rows(found, device != EXCLUDED)


def _to_type(cells: NDArray[np.uint64], code: str) -> NDArray[Any]:
    return cells.view(np.float64).astype(code, copy=False) if code[0] == "f" else cells.astype(code, copy=False)


def _join_rows(parts: Sequence[Rows]) -> Rows:
    """One Rows of several with the same signals."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: np.concatenate([rows.columns[name] for rows in parts]) for name in parts[0].columns}
    time = np.concatenate([rows.time for rows in parts])
    return Rows(parts[0].device_class, time, np.concatenate([rows.device for rows in parts]), columns)


def reject_faults(batch: ForeignBatch) -> list[Rejected]:
    """The rejected parts of a message."""
    return [Rejected("otlp", fault) for fault in batch.faults]
