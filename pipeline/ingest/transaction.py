"""What one ingest transaction writes besides rows: offsets, sequence marks of senders, gaps, dead letters."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import duckdb
import pyarrow as pa

from pipeline.ingest.admission import Admission
from pipeline.ingest.foreign import AgentPresence, ForeignInventory, reject_faults
from pipeline.ingest.messages import DeadLetter, ForeignBatch, Item
from pipeline.ingest.offsets import Offsets, load_offsets
from pipeline.ingest.rejections import LetterLimits, remove_letters
from pipeline.ingest.runs import join_runs
from pipeline.ingest.sequences import RecentMessages
from pipeline.model.errors import GapError, Rejected, Retryable
from pipeline.model.names import clean_text
from pipeline.model.records import EVENTS, OTLP, SECOND, TELEMETRY, Event, EventBatch, Rows
from pipeline.store.append import insert_columns, register_columns, to_timestamps
from pipeline.store.events import write_events
from pipeline.store.gaps import UNEXPLAINED, Gap, Sender, explain_gaps, insert_gaps, replace_gaps
from pipeline.store.hot_tables import HotTables
from pipeline.transport import Message, Partition, wire

_MAX_SEQUENCE = 1 << 62  # maximum sequence number in the store
_REASON = 1000  # maximum characters of a dead letter's reason, which may quote the message; chosen
_TOPICS = (TELEMETRY, EVENTS, OTLP)
_MAX_AHEAD = 30 * SECOND  # sender clocks further ahead do not order messages; chosen: the lateness


@dataclass(slots=True)
class TransactionWrites:
    """Everything that one transaction writes besides rows. Takes effect only when durable."""

    offsets: Offsets
    now: int
    limits: LetterLimits
    agents: AgentPresence = field(default_factory=AgentPresence)
    inventory: ForeignInventory = field(default_factory=ForeignInventory)
    first_offsets: dict[Partition, int] = field(default_factory=dict)
    next_offsets: dict[Partition, int] = field(default_factory=dict)
    marks: dict[Sender, int] = field(default_factory=dict)
    last: dict[tuple[str, str], int] = field(default_factory=dict)
    sent: dict[Sender, int] = field(default_factory=dict)  # newest `sent` time of each sender, UTC us
    gaps: dict[Sender, list[Gap]] = field(default_factory=dict)
    lost_ranges: list[tuple[Sender, Gap]] = field(default_factory=list)
    letters: list[tuple[DeadLetter, bytes]] = field(default_factory=list)  # letters to keep, with the payload to keep
    reread_letters: list[Message] = field(default_factory=list)  # letters to delete, because they can be read now
    counters: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)  # letters by admission rule
    foreign_rejected: Counter[str] = field(default_factory=Counter)  # those of the topic otlp_metrics
    dropped_spools: list[Sender] = field(default_factory=list)  # spools dropped above the limit per node
    rejected_messages: list[tuple[Message, str]] = field(default_factory=list)  # messages rejected whole, with the rule
    measured: set[str] = field(default_factory=set)  # nodes with admitted telemetry, except of reread letters
    has_reported_loss: bool = False  # whether an agent reported dropped messages
    accepted: list[tuple[Sender | None, list[Item]]] = field(default_factory=list)  # what is stored, as join_runs does
    # by topic and node: epoch, highest sequence number and sender of the messages in runs
    _reached: dict[tuple[str, str], tuple[bytes, int, Sender]] = field(default_factory=dict)

    def record_lost(self, partition: Partition, gap: GapError) -> None:
        """Records offsets that the transport has lost."""
        self._advance_offset(partition, gap.first, gap.next_offset)
        source = (partition.topic, partition.name, partition.incarnation)
        self.lost_ranges.append((source, Gap(gap.first, gap.next_offset, gap.cause, self.now)))
        self.counters["gaps"] += 1
        if partition.spooled:
            self.counters["gap_messages"] += gap.next_offset - gap.first
            self._advance_mark(partition, gap.next_offset - 1)

    def accept_items(self, items: Sequence[Item], admission: Admission) -> list[Item]:
        """The parts of messages to store; records duplicates, letters and gaps."""
        self._advance_offsets(item.message for item in items)
        kept: dict[int, Item] = {}  # by id of the whole item
        for sender, run in join_runs(items, lambda item: self._find_sender(item, admission)):
            if sender is not None:
                self._accept_run(sender, run, admission)
                kept.update(zip(map(id, run), run, strict=True))
                self.accepted.append((sender, run))
            elif (part := self._accept_item(run[0], admission)) is not None:
                kept[id(run[0])] = part
                self.accepted.append((None, [part]))
        return [item for item in map(kept.get, map(id, items)) if item is not None]

    def _find_sender(self, item: Item, admission: Admission) -> Sender | None:
        """The sender of new telemetry that concerns no other sender and no other spool of its node; else None."""
        message, body = item.message, item.body
        if not isinstance(body, wire.Body) or item.newest is None or item.is_letter:
            return None
        layout, (_, _, epoch, sequence, _) = body.layout, body.envelope
        stream = message.partition.topic, layout.node
        known = self._reached.get(stream)
        spool, reached, sender = known or (epoch, -1, (*stream, epoch.hex()))
        if spool != epoch or sequence <= reached or sequence <= self._mark_of(sender):
            return None
        if not admission.is_settled(layout, min(item.newest, message.appended or self.now)):
            return None
        self._reached[stream] = epoch, sequence, sender
        return sender

    def _accept_run(self, sender: Sender, run: Sequence[Item], admission: Admission) -> None:
        """Accepts new telemetry of one sender: ascending sequence numbers, settled layouts."""
        messages = [item.message for item in run]
        envelopes = [item.body.envelope for item in run if isinstance(item.body, wire.Body)]
        numbers = [envelope.sequence for envelope in envelopes]
        has_gaps = numbers[-1] - numbers[0] >= len(numbers)
        for number in numbers if has_gaps else numbers[:1]:
            self._is_new_sequence(sender, number)
        self.marks[sender] = self.last[sender[:2]] = numbers[-1]
        admission.sequences.add_messages(sender, numbers, [message.value for message in messages])
        arrivals = [message.appended or self.now for message in messages]
        sent = max(min(e.sent, arrived + _MAX_AHEAD) for e, arrived in zip(envelopes, arrivals, strict=True))
        self.sent[sender] = max(sent, self.sent.get(sender, self.offsets.sent.get(sender)) or 0)
        admission.record_settled(sender[1], max(map(min, [item.newest or 0 for item in run], arrivals)))
        self.measured.add(sender[1])
        self.counters["messages"] += len(run)

    def _accept_item(self, item: Item, admission: Admission) -> Item | None:
        """The part of a message to store, None if nothing."""
        message, body = item.message, item.body
        if item.is_letter:
            self.reread_letters.append(message)
        if isinstance(body, DeadLetter):
            self.rejected_messages.append((message, body.rule))
            if not self._keep_letter(body):
                self._record_unkept(body)
            if message.partition.spooled:
                self._advance_mark(message.partition, message.offset)
            return None
        if isinstance(body, ForeignBatch):
            return self._accept_foreign(item, body, admission)
        if isinstance(body, wire.Body):
            node, envelope = body.layout.node, body.envelope
        else:
            node, envelope = body.origin.node, wire.unpack_envelope(message.value)
        if not self._is_first_copy(message, envelope, node, admission.sequences):
            return None
        admitted = admission.admit(message, body, self.now)
        for rejected in admitted.rejected:
            self._keep_letter(DeadLetter(message, str(rejected), rejected.rule))
        if admitted.body is None:
            self.rejected_messages += [(message, rejected.rule) for rejected in admitted.rejected[:1]]
            return None
        self.counters["messages"] += 1
        if isinstance(body, wire.Body) and not item.is_letter:
            self.measured.add(node)
        for event in admitted.body.events if isinstance(admitted.body, EventBatch) else ():
            if event.kind == "gap":
                self.has_reported_loss = True
                self._record_reported_loss(node, event)
        whole = admitted.body is body and not admitted.excluded
        return item if whole else item._replace(body=admitted.body, excluded=admitted.excluded)

    def _accept_foreign(self, item: Item, batch: ForeignBatch, admission: Admission) -> Item | None:
        """The admitted part of a message of another sender. Of a node with an agent only custom signals are kept."""
        if batch.gateway:
            envelope = wire.unpack_envelope(item.message.value)
            if not self._is_first_copy(item.message, envelope, batch.gateway, admission.sequences):
                return None
        rejected = reject_faults(batch)
        excluded: dict[int, frozenset[str]] = {}
        for i, samples in enumerate(batch.nodes):
            layout, time = samples.part.layout, min(int(samples.times[-1]), item.arrived)
            out, named = frozenset[str](), True
            if admission.is_settled(layout, time):
                admission.record_settled(layout.node, time)
            else:
                try:
                    out, refused = admission.admit_layout(layout, time)
                except Rejected as error:
                    out, refused, named = frozenset(samples.part.inventory), (error,), False
                rejected += refused
            if self.agents.has_agent(layout.node, self.now):
                self.counters["foreign_shadowed"] += samples.part.count_values(samples.part.measured)[2]
                out |= samples.part.measured
            elif named:  # a refused name would be refused again with each inventory
                self.inventory.add_part(samples.part, out)
            mapped, custom, _ = samples.part.count_values(out)
            self.counters["foreign_values"] += mapped + custom
            self.counters["foreign_custom"] += custom
            if out:
                excluded[i] = out
        for one in rejected:
            self._keep_letter(DeadLetter(item.message, str(one), one.rule))
        self.counters["messages"] += 1
        self.counters["foreign_messages"] += 1
        for what, number in batch.counts.items():
            self.counters[f"foreign_{what}"] += number
        return item._replace(body=replace(batch, excluded=excluded)) if excluded else item

    def admit_inventories(self, batches: Iterable[EventBatch], admission: Admission) -> list[EventBatch]:
        """The admitted part of inventories that the pipeline makes for senders without an agent; the rest is letters.

        The payload of such a letter is the whole inventory as JSON: no message has it.
        """
        admitted: list[EventBatch] = []
        for batch in batches:
            part = admission.admit_inventory(batch, self.now)
            if isinstance(part.body, EventBatch):
                admitted.append(part.body)
            if part.rejected:
                node = batch.origin.node
                data = json.dumps([event.data for event in batch.events]).encode()
                message = Message(Partition(OTLP, node, ""), 0, data, key=node.encode())
                for one in part.rejected:
                    self._keep_letter(DeadLetter(message, f"{one}; in the inventory of {node}", one.rule))
        return admitted

    def _keep_letter(self, letter: DeadLetter) -> bool:
        """Counts a letter; returns whether it is kept."""
        self.rejected[letter.rule] += 1
        if letter.message.partition.topic == OTLP:
            self.foreign_rejected[letter.rule] += 1
        self.counters["dead_letters"] += 1
        payload = self.limits.payload_to_keep(letter)
        if payload is not None:
            self.letters.append((replace(letter, reason=clean_text(letter.reason, _REASON)), payload))
        else:
            self.counters["dead_letters_not_kept"] += 1
        return payload is not None

    def _record_unkept(self, letter: DeadLetter) -> None:
        """Records a message without a kept letter as a gap; consecutive ones are joined."""
        partition, offset = letter.message.partition, letter.message.offset
        source, cause = (partition.topic, partition.name, partition.incarnation), f"dead letter not kept: {letter.rule}"
        if self.lost_ranges and self.lost_ranges[-1][0] == source:
            last = self.lost_ranges[-1][1]
            if (last.after, last.cause) == (offset, cause):
                self.lost_ranges[-1] = (source, Gap(last.first, offset + 1, cause, self.now))
                return
        self.lost_ranges.append((source, Gap(offset, offset + 1, cause, self.now)))
        self.counters["gaps"] += 1

    def _is_first_copy(self, message: Message, envelope: wire.Envelope, node: str, sequences: RecentMessages) -> bool:
        """Whether a message is not a duplicate. A different message with a known number is stored, and a letter."""
        sender, sequence = (message.partition.topic, node, envelope.epoch.hex()), envelope.sequence
        newest = self.sent.get(sender, self.offsets.sent.get(sender))
        latest = (message.appended or self.now) + _MAX_AHEAD
        made = envelope.sent if envelope.sent <= latest else None
        if self._is_new_sequence(sender, sequence):
            sequences.add_messages(sender, [sequence], [message.value])
        elif sequences.is_repeat(sender, sequence, message.value, made, newest):
            self.counters["duplicates"] += 1
            return False
        else:
            reason = f"sequence: another message of {node} had sequence {sequence} of {message.partition.topic} before"
            self._keep_letter(DeadLetter(message, f"{reason}; both are stored", "sequence"))
        self.sent[sender] = max(min(envelope.sent, latest), newest or 0)
        return True

    def _is_new_sequence(self, sender: Sender, sequence: int) -> bool:
        """Whether a sequence number is new. Shrinks the gap that it was in, or adds a gap for skipped numbers."""
        before = self._mark_of(sender)
        if sequence <= before:
            return self._heal_gap(sender, sequence)
        self._note_gap(sender, before, sequence)
        self.marks[sender] = self.last[sender[:2]] = sequence
        return True

    def _advance_offset(self, partition: Partition, first: int, after: int) -> None:
        self.first_offsets.setdefault(partition, first)
        self.next_offsets[partition] = after

    def _advance_offsets(self, messages: Iterable[Message]) -> None:
        """Advances the partitions of messages, each in its own order; letters have none."""
        first: dict[int, Message] = {}  # by identity: a partition's hash costs as much as all of this
        last: dict[int, Message] = {}
        for message in messages:
            at = id(message.partition)
            if at not in first:
                first[at] = message
            last[at] = message
        for at, message in first.items():
            if message.partition.incarnation:
                self._advance_offset(message.partition, message.offset, last[at].offset + 1)

    def _advance_mark(self, partition: Partition, sequence: int) -> None:
        """Advances the mark of a spool, where the offset is the sequence number, so that no gap appears."""
        sender = (partition.topic, partition.name, partition.incarnation)
        self.marks[sender] = self.last[sender[:2]] = max(sequence, self._mark_of(sender))

    def _mark_of(self, sender: Sender) -> int:
        return self.marks.get(sender, self.offsets.marks.get(sender, -1))

    def _gaps_of(self, sender: Sender) -> list[Gap]:
        if sender not in self.gaps:
            self.gaps[sender] = list(self.offsets.gaps.get(sender, ()))
        return self.gaps[sender]

    def _heal_gap(self, sender: Sender, sequence: int) -> bool:
        """Removes a late sequence number from its gap: senders resend, and partitions change."""
        known: Sequence[Gap] = self.gaps[sender] if sender in self.gaps else self.offsets.gaps.get(sender, [])
        at = bisect_right(known, sequence, key=lambda gap: gap.first) - 1
        if at < 0 or sequence >= known[at].after:
            return False
        self._gaps_of(sender)[at : at + 1] = known[at].split_at(sequence)
        self.counters["healed"] += 1
        return True

    def _note_gap(self, sender: Sender, before: int, sequence: int) -> None:
        """Records missing sequence numbers. After a new spool, the loss at the end of the old one is unknown."""
        last = self.last.get(sender[:2], self.offsets.last.get(sender[:2]))
        if before >= 0:
            self._add_gap(sender, before + 1, sequence, UNEXPLAINED)
        elif last is not None:
            cause = f"new spool; the old one was stored up to sequence {last}"
            self.lost_ranges.append((sender, Gap(0, 0, cause, self.now)))
            self.counters["gaps"] += 1
            self._add_gap(sender, 0, sequence, UNEXPLAINED)
        else:
            self._add_gap(sender, 0, sequence, "sent before this store existed")

    def _record_reported_loss(self, node: str, event: Event) -> None:
        """Records messages that a sender reports as dropped, as a gap with its cause."""
        topic, epoch, cause = (event.data.get(name) for name in ("topic", "epoch", "cause"))
        first, after = event.data.get("first"), event.data.get("next")
        if topic not in _TOPICS or not (isinstance(epoch, str) and isinstance(cause, str)):
            return
        if not (isinstance(first, int) and isinstance(after, int) and 0 <= first < after <= _MAX_SEQUENCE):
            return
        sender = (topic, node, epoch)
        before = self._mark_of(sender)
        if after - 1 > before:
            self._note_gap(sender, before, max(first, before + 1))
            self._add_gap(sender, max(first, before + 1), after, cause)
            self.marks[sender] = self.last[sender[:2]] = after - 1

    def _add_gap(self, sender: Sender, first: int, after: int, cause: str) -> None:
        if first >= after:
            return
        self._gaps_of(sender).append(Gap(first, after, cause, self.now))
        self.counters["gaps"] += 1
        self.counters["gap_messages"] += after - first

    # --- inside the transaction ---------------------------------------------------------------------------------

    def check_offsets(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Raises Retryable unless the stored offsets equal those in memory, in every partition.

        Otherwise another writer moved them, and the rest of memory, such as ids of devices, is stale too. Only a
        restart, which reads everything again, can continue.
        """
        durable = self.offsets.durable
        moved = ((p, found, durable.get(p)) for p, found in load_offsets(connection).items() if found != durable.get(p))
        skipped = ((p, durable[p], first) for p, first in self.first_offsets.items() if first != durable.get(p, first))
        for partition, found, expected in itertools.chain(moved, skipped):
            raise Retryable(
                f"{partition.topic}/{partition.name}: the store is at offset {found}, expected {expected}: another "
                "pipeline wrote to it"
            )

    def write_all(
        self,
        connection: duckdb.DuckDBPyConnection,
        tables: HotTables,
        rows: Iterable[Rows],
        events: list[EventBatch],
        closed: int,
    ) -> None:
        """Writes rows, events, inventory, letters, gaps, marks and offsets. closed: frames before it are closed."""
        total = tables.append(connection, rows, closed)
        if events:
            write_events(connection, events, closed)
        self._write_losses(connection)
        if self.gaps or self.has_reported_loss:
            explain_gaps(connection)
        self._write_marks(connection)
        self._write_offsets(connection, total)

    def _write_offsets(self, connection: duckdb.DuckDBPyConnection, rows: int) -> None:
        """Writes the commit, whose first offsets no other commit may have, and the next offset of each partition."""
        partitions = list(self.next_offsets)
        if not partitions:
            return
        names = {
            "topic": [p.topic for p in partitions],
            "partition": [p.name for p in partitions],
            "incarnation": [p.incarnation for p in partitions],
        }
        after = {"next_offset": [self.next_offsets[p] for p in partitions]}
        commit = {
            "first_offset": [self.first_offsets[p] for p in partitions],
            "rows": [rows] * len(partitions),
            "committed": to_timestamps([self.now] * len(partitions)),
        }
        insert_columns(connection, "ingest_commit", names | after | commit)
        renew = "ON CONFLICT (topic, partition, incarnation) DO UPDATE SET next_offset = excluded.next_offset"
        insert_columns(connection, "partition_offset", names | after, renew)

    def _write_marks(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.dropped_spools = self.offsets.spools_over_limit(self.marks)
        if known := [sender for sender in self.dropped_spools if sender in self.offsets.marks]:
            spools = dict(zip(("topic", "node", "epoch"), zip(*known, strict=True), strict=True))
            with register_columns(connection, "forgotten_spools", spools):
                connection.execute(
                    "DELETE FROM producer_mark WHERE (topic, node, epoch) IN (SELECT (topic, node, epoch) "
                    "FROM forgotten_spools)"
                )
        forgotten = set(self.dropped_spools)
        senders = [sender for sender in self.marks | self.sent if sender not in forgotten]
        if not senders:
            return
        topics, nodes, epochs = zip(*senders, strict=True)
        columns = {
            "topic": topics,
            "node": nodes,
            "epoch": epochs,
            "sequence": [self._mark_of(s) for s in senders],
            "sent": pa.array([self.sent.get(s, self.offsets.sent.get(s)) for s in senders], pa.int64()),
            "updated": to_timestamps([self.now] * len(senders)),
        }
        renew = "sequence = excluded.sequence, sent = excluded.sent, updated = excluded.updated"
        insert_columns(connection, "producer_mark", columns, f"ON CONFLICT (topic, node, epoch) DO UPDATE SET {renew}")

    def _write_losses(self, connection: duckdb.DuckDBPyConnection) -> None:
        remove_letters(connection, self.reread_letters)
        insert_gaps(connection, self.lost_ranges)
        replace_gaps(connection, self.offsets.gaps, self.gaps)
        if self.letters:
            letters, payloads = zip(*self.letters, strict=True)
            insert_columns(
                connection,
                "dead_letter",
                {
                    "time": to_timestamps([self.now] * len(letters)),
                    "topic": [letter.message.partition.topic for letter in letters],
                    "partition": [letter.message.partition.name for letter in letters],
                    "offset": [letter.message.offset for letter in letters],
                    "reason": [letter.reason for letter in letters],
                    "rule": [letter.rule for letter in letters],
                    "payload": pa.array(payloads, pa.binary()),
                    "key": pa.array([letter.message.key for letter in letters], pa.binary()),
                    "signature": pa.array([letter.message.signature for letter in letters], pa.binary()),
                },
            )
