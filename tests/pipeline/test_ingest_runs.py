"""A transaction that accepts the messages of each sender together records what it records one message at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.sections import Limits
from pipeline.ingest.admission import Admission
from pipeline.ingest.columns import ColumnLimits
from pipeline.ingest.messages import Arrival, Item, decode_item
from pipeline.ingest.offsets import Offsets
from pipeline.ingest.rejections import LetterLimits
from pipeline.ingest.runs import join_runs
from pipeline.ingest.transaction import TransactionWrites
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Batch, Block, Event, EventBatch, Origin
from pipeline.store.database import Database
from pipeline.store.gaps import Sender
from pipeline.transport import Message, Partition, wire
from tests.examples import examples

T0 = 1_790_000_000 * SECOND
NODES = ("n1", "n2", "sw1")
EPOCHS = (bytes(15) + b"\1", bytes(15) + b"\2")
ENTITIES = (("gpu:{}.0", "gpu:{}.1"), ("gpu:{}.0",), ("gpu:{}.0", "gpu:other.0"), ("gpu:n2.0",), ("port:sw1.1",))
"""Own entities, fewer, one and all of another node; a port, by claim until there is a sender sw1."""
ORDINARY: dict[str, Any] = {"epoch": 0, "late": 0, "entities": 0, "damage": None, "place": "0", "appended": True}
LIMITS = Limits(entities_per_sender=4)
Sent = dict[str, Any]


class OneByOne(TransactionWrites):
    """Accepts each message alone."""

    def _find_sender(self, item: Item, admission: Admission) -> Sender | None:
        return None


class Intake:
    """What ingest keeps from one transaction to the next, without a store."""

    def __init__(self, kind: type[TransactionWrites], database: Database) -> None:
        self.kind, self.offsets = kind, Offsets(database.connection)
        self.limits, self.admission = LetterLimits(2000), Admission(LIMITS)
        self.columns, self.shapes = ColumnLimits(lambda _: {}), set[wire.Shape]()

    def decode(self, message: Message, now: int) -> Item:
        time = message.appended or now
        arrival, confirm = Arrival(time, time + 5 * SECOND, False), self.admission.sender_check.check_sender
        return decode_item(message, self.columns, self.shapes, arrival, lambda *_: 0, confirm)

    def accept(self, messages: Sequence[Message], now: int) -> dict[str, object]:
        """Accepts messages as one durable transaction; returns everything that it recorded."""
        writes = self.kind(self.offsets, now, self.limits)
        self.limits.begin(now)
        self.admission.begin(now)
        kept = writes.accept_items([self.decode(message, now) for message in messages], self.admission)
        self.admission.commit()
        self.limits.commit()
        self.offsets.advance(writes.next_offsets, writes.marks, writes.last, writes.sent, writes.gaps)
        recorded = {name: getattr(writes, name) for name in RECORDED}
        owners, sequences = self.admission.owners, self.admission.sequences
        windows = {sender: window._checksums.tolist() for sender, window in sequences._windows.items()}
        parts = [(i.message, i.excluded, i.time, getattr(i.body, "events", None)) for i in kept]
        states = {"claims": repr(owners.claims), "newest": dict(owners._newest_of), "windows": windows}
        return recorded | states | {"kept": parts, "second": dict(sequences._second)}


RECORDED = (
    *("first_offsets", "next_offsets", "marks", "last", "sent", "gaps", "lost_ranges", "letters", "reread_letters"),
    *("counters", "rejected", "rejected_messages", "has_reported_loss"),
)


@st.composite
def telemetry(draw: st.DrawFn) -> Sent:
    """A message: mostly ordinary telemetry, else a repeat, a known or skipped number, of others, or damaged."""
    if draw(st.integers(0, 2)):
        step, after = draw(st.sampled_from((1, 1, 1, 1, 2))), draw(st.sampled_from((0, 1)))
        return {**ORDINARY, "node": draw(st.sampled_from(NODES)), "step": step, "after": after * SECOND}
    return {
        "node": draw(st.sampled_from(NODES)),
        "epoch": draw(st.sampled_from((0, 0, 0, 0, 1))),
        "step": draw(st.sampled_from((1, 1, 1, 1, 1, 1, 0, -1, -3, 2, 5, 300))),
        "after": draw(st.sampled_from((0, 1, 1, 1, 5, 40, 400, -60))) * SECOND,
        "late": draw(st.sampled_from((0, 0, 1, -1, 100, -100))) * SECOND,
        "entities": draw(st.sampled_from((0, 0, 0, 0, 1, 2, 3, 4, 4))),
        "damage": draw(st.sampled_from((None,) * 12 + ("cut", "flip", "newer", "again", "event"))),
        "place": draw(st.sampled_from(("spool", "spool", "0", "1"))),
        "appended": draw(st.booleans()),
    }


def telemetry_body(one: Sent, sequence: int, time: int) -> bytes:
    entities = tuple(name.format(one["node"]) for name in ENTITIES[one["entities"]])
    kind = "nic" if one["entities"] == 4 else "gpu"
    columns = {f"{kind}.temperature": np.full((1, len(entities)), sequence, "f4")}
    return wire.encode(
        Batch(Origin("local", one["node"], bytes(16)), np.array([time]), (Block(kind, entities, columns),))
    )


def event_body(one: Sent, sequence: int, time: int) -> bytes:
    """Messages that the sender dropped, and an inventory that no longer lists what it claimed."""
    node, epoch = one["node"], EPOCHS[one["epoch"]].hex()
    lost = {"topic": TELEMETRY, "epoch": epoch, "first": max(0, sequence - 2), "next": sequence + 2, "cause": "full"}
    listed = {"entities": {f"node:{node}": {"parents": [], "attributes": {}}}}
    events = (Event(time, f"node:{node}", "gap", lost), Event(time, f"node:{node}", "inventory", listed))
    return wire.encode_events(EventBatch(Origin("local", node, bytes(16)), events))


class Senders:
    """Makes the messages of a history, with the offsets of their partitions."""

    def __init__(self) -> None:
        self.time, self.sequences, self.offsets = T0, dict[tuple[str, int], int](), dict[Partition, int]()
        self.last = dict[str, bytes]()

    def make(self, one: Sent) -> Message:
        node, key = one["node"], (one["node"], one["epoch"])
        self.time += one["after"]
        sequence = max(0, self.sequences.get(key, -1) + one["step"])
        self.sequences[key] = max(sequence, self.sequences.get(key, -1))
        value = self._seal(one, sequence)
        topic, epoch = EVENTS if one["damage"] == "event" else TELEMETRY, EPOCHS[one["epoch"]].hex()
        spooled = one["place"] == "spool"
        partition = Partition(topic, node, epoch, True) if spooled else Partition(topic, one["place"], "id")
        offset = self.offsets[partition] = self.offsets.get(partition, -1) + 1
        appended = self.time if one["appended"] and not spooled else 0
        return Message(partition, offset, value, appended, None if spooled else node.encode())

    def _seal(self, one: Sent, sequence: int) -> bytes:
        if one["damage"] == "again" and one["node"] in self.last:
            return self.last[one["node"]]
        event = one["damage"] == "event"
        body = (event_body if event else telemetry_body)(one, sequence, self.time)
        kind = wire.EVENTS_KIND if event else wire.TELEMETRY_KIND
        value = wire.seal(body, kind, EPOCHS[one["epoch"]], sequence, self.time + one["late"])
        self.last[one["node"]] = value
        if one["damage"] == "cut":
            return value[:-7]
        if one["damage"] == "flip":
            return value[:60] + bytes([value[60] ^ 1]) + value[61:]
        return value[:3] + b"\xff" + value[4:] if one["damage"] == "newer" else value


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with closing(Database(tmp_path_factory.mktemp("runs") / "store.duckdb")) as database:
        yield database


@settings(max_examples=examples(300), deadline=None)
@given(history=st.lists(st.lists(telemetry(), min_size=10, max_size=40), min_size=1, max_size=5))
def test_messages_accepted_together_are_recorded_as_one_by_one(empty: Database, history: list[list[Sent]]) -> None:
    senders, together, alone = Senders(), Intake(TransactionWrites, empty), Intake(OneByOne, empty)
    for sent in history:
        messages = [senders.make(one) for one in sent]
        now = senders.time + SECOND
        assert together.accept(messages, now) == alone.accept(messages, now)


def test_telemetry_of_known_senders_is_accepted_in_one_run_per_sender(
    empty: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the test above compares a path with itself."""
    senders, intake, runs = Senders(), Intake(TransactionWrites, empty), []
    accepted = TransactionWrites._accept_run
    monkeypatch.setattr(
        TransactionWrites, "_accept_run", lambda self, *run: runs.append(len(run[1])) or accepted(self, *run)
    )
    for _ in range(2):
        messages = [
            senders.make({**ORDINARY, "node": node, "step": 1, "after": SECOND}) for _ in range(10) for node in NODES
        ]
        intake.accept(messages, senders.time)
    assert runs[-3:] == [10, 10, 10]


def test_runs_hold_what_comes_before_and_after_a_message_alone_apart() -> None:
    texts = ["a1", "b1", "a2", "-", "a3", "b2", "-", "-", "b3"]
    items: Any = texts
    found = list(join_runs(items, lambda item: None if str(item) == "-" else ("t", str(item)[0], "")))
    assert [run for _, run in found] == [["a1", "a2"], ["b1"], ["-"], ["a3"], ["b2"], ["-"], ["-"], ["b3"]]
