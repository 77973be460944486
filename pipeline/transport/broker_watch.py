"""Watches the brokers from a thread of its own: which partitions there are, whether anybody answers, and why not.

A dead or frozen broker blocks whoever asks it; here that costs nobody anything. What was stored is published from here
too, as the offsets of the group GROUP, so that lag tools work; nothing is ever read back from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from kafka import KafkaAdminClient, TopicPartition
from kafka.errors import KafkaError, NoError, for_code
from kafka.structs import OffsetAndMetadata

from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.transport import Partition, diagnosis, kafka_clients

log = logging.getLogger("fleetpulse.kafka")

GROUP = "fleetpulse"
WATCH_S = 5.0
"""Seconds between two looks; chosen: with ANSWER_S well below 30 s, within which trouble must be seen."""
ANSWER_S = 5.0
"""Seconds that a broker has to answer."""
OVERDUE_S = 2 * (WATCH_S + ANSWER_S)
"""A look that takes longer has no answer, whatever the client thinks: its TLS handshake was seen to heed no limit."""
STUCK_S = 60.0
"""After so long another thread with another client looks. Chosen: three times OVERDUE_S."""
REFUSALS = 6
"""Refusals of offsets in a row before it is said; chosen: new brokers refuse the first, while they make a topic."""
_TRUNCATED = "~"  # between a topic's id and how often a partition of it was found cut short


class Watch:
    """What the brokers say of our topics. `known`: partitions that the store knows, with their incarnations."""

    def __init__(self, kafka: Kafka, known: Iterable[Partition], read: Sequence[str]) -> None:
        self._kafka, self._causes, self._read = kafka, diagnosis.Causes(), read
        self._cuts = _cuts(known)
        self._described: tuple[tuple[str, int, str], ...] = ()
        self._partitions: tuple[Partition, ...] = ()
        self._known: frozenset[Partition] = frozenset()
        self._answering = False
        self._stored: dict[TopicPartition, int] = {}
        self._published: dict[TopicPartition, int] = {}
        self._trouble: str | None = f"kafka {kafka.bootstrap_servers}: no answer yet"
        self._changed, self._wake = threading.Condition(), threading.Event()
        self._first = self._closed = self._said = False
        self._refusals = 0
        self._causes.attach()
        self._begin()

    # --- for the reader ----------------------------------------------------------------------------------------------

    def partitions(self, wait: float) -> tuple[Partition, ...]:
        """All partitions of the topics we read; waits at most `wait` seconds, and only for the first answer."""
        if time.monotonic() - self._looked > STUCK_S:
            self._begin()
        with self._changed:
            self._changed.wait_for(lambda: self._first, wait)
            return self._partitions

    def has(self, partition: Partition) -> bool:
        """Whether it is one of `partitions`."""
        return partition in self._known

    def cut_short(self, partition: Partition) -> None:
        """The log ends before what we stored: the brokers lost messages. It begins anew as another incarnation."""
        identity, _, number = partition.incarnation.partition(_TRUNCATED)
        with self._changed:
            self._cuts[partition.topic, partition.name, identity] = int(number or 0) + 1
            self._name_partitions()
        log.error(
            "%s/%s: the log ends before the offset that is stored: the brokers lost messages; reading it again from "
            "its start, what is stored already is passed over",
            partition.topic,
            partition.name,
        )

    def stored(self, partition: Partition, next_offset: int) -> None:
        """Everything before `next_offset` is durable in the store."""
        self._stored[TopicPartition(partition.topic, int(partition.name))] = next_offset

    @property
    def answering(self) -> bool:
        """Whether the last look got an answer, and was not long ago."""
        return self._answering and time.monotonic() - self._looked < OVERDUE_S

    def trouble(self) -> str | None:
        """Why the brokers cannot be used; None when all is well. For any thread."""
        if self._trouble is None and time.monotonic() - self._looked >= OVERDUE_S:
            return f"kafka {self._kafka.bootstrap_servers}: a question has had no answer for {OVERDUE_S:g} s"
        return self._trouble

    def close(self) -> None:
        """Publishes what was stored, if a broker answers at once, and ends; may be called twice."""
        self._closed = True
        self._wake.set()
        self._thread.join(1.0)  # a broker that is away holds the thread longer: it is a daemon and holds nothing
        self._causes.detach()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Starts looking, in place of a thread that is stuck in the client, if there is one: it ends if it returns."""
        self._looked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kafka-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        admin: KafkaAdminClient | None = None
        while not self._closed and self._thread is threading.current_thread():
            try:
                admin = self._turn(admin)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must be seen, and looked again after it
                admin, self._answering = None, False
                self._tell(f"kafka {self._kafka.bootstrap_servers}: {type(error).__name__}: {error}; trying again")
            self._looked = time.monotonic()
            self._wake.wait(WATCH_S)
        if admin is not None:
            self._publish(admin)
            admin.close()

    def _turn(self, admin: KafkaAdminClient | None) -> KafkaAdminClient | None:
        """One look. The client to look with next: none after trouble, since one whose brokers all moved finds none."""
        try:
            admin = admin or kafka_clients.admin(self._kafka, "watch", ANSWER_S)
            self._look(admin)
            self._publish(admin)
        except (KafkaError, ConfigError, OSError) as error:
            if admin is not None:
                admin.close()
            self._answering = False
            mine = isinstance(error, ConfigError)
            self._tell(str(error if mine else diagnosis.trouble(self._kafka, self._causes, error)))
            return None
        return admin

    def _look(self, admin: KafkaAdminClient) -> None:
        answers = {topic["name"]: topic for topic in admin.describe_topics(list(self._read))}
        self._causes.clear()
        described, bad = [], []
        for name in self._read:
            answer = answers.get(name, {"error_code": 3})
            if answer["error_code"]:
                bad.append(_said_of(name, for_code(answer["error_code"])))
                continue
            headless = [p["partition_index"] for p in answer["partitions"] if p["leader_id"] < 0]
            if headless:
                bad.append(f"topic {name}: {len(headless)} partitions have no leader: their brokers are away")
            described += [(name, p["partition_index"], str(answer["topic_id"])) for p in answer["partitions"]]
        self._tell(f"kafka {self._kafka.bootstrap_servers}: {'; '.join(bad)}" if bad else None)
        with self._changed:
            self._described = tuple(sorted(described))
            self._name_partitions()
            self._first = self._answering = True
            self._changed.notify_all()

    def _publish(self, admin: KafkaAdminClient) -> None:
        """Tells the offsets that changed. A refusal, as for want of rights, harms only lag tools: said once each."""
        changed = {p: n for p, n in dict(self._stored).items() if self._published.get(p) != n}
        if not changed:
            return None
        try:
            answers: Mapping[TopicPartition, type[KafkaError]] = admin.alter_group_offsets(
                GROUP, {p: OffsetAndMetadata(n, "", -1) for p, n in changed.items()}
            )
        except KafkaError as error:  # also the very first time, while the brokers make the topic for it
            return self._refuse(type(error).__name__)
        for partition, answer in answers.items():
            if answer is NoError:
                self._published[partition] = changed[partition]
                self._refusals = 0
            else:
                self._refuse(answer.__name__)
        return None

    def _refuse(self, why: str) -> None:
        self._refusals += 1
        if self._refusals == REFUSALS:
            log.warning("group %s: offsets for lag tools are refused: %s; trying again", GROUP, why)

    def _tell(self, trouble: str | None) -> None:
        if trouble and trouble != self._trouble:
            log.error("%s", trouble)
            self._said = True
        elif trouble is None and self._said:
            log.warning("kafka %s: answers again, all topics are there", self._kafka.bootstrap_servers)
            self._said = False
        self._trouble = trouble

    def _name_partitions(self) -> None:
        named = ((topic, number, self._incarnation(topic, number, i)) for topic, number, i in self._described)
        self._partitions = tuple(Partition(topic, str(number), name) for topic, number, name in named)
        self._known = frozenset(self._partitions)

    def _incarnation(self, topic: str, number: int, identity: str) -> str:
        cuts = self._cuts.get((topic, str(number), identity), 0)
        return f"{identity}{_TRUNCATED}{cuts}" if cuts else identity


def _said_of(topic: str, error: type[KafkaError]) -> str:
    if error.__name__ == "UnknownTopicOrPartitionError":
        return f"topic {topic} is not there: run `fleetpulse init`"
    return f"topic {topic}: {error.__name__}: {getattr(error, 'description', '')}"


def _cuts(known: Iterable[Partition]) -> dict[tuple[str, str, str], int]:
    """How often each partition was cut short, from the incarnations that the store knows."""
    found: dict[tuple[str, str, str], int] = {}
    for partition in known:
        identity, _, number = partition.incarnation.partition(_TRUNCATED)
        key = (partition.topic, partition.name, identity)
        found[key] = max(found.get(key, 0), int(number) if number.isdigit() else 0)
    return found
