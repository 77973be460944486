"""Watches the brokers from its own thread: which partitions exist, whether the brokers respond, and why not.

A dead or frozen broker blocks its callers; here it blocks nothing else. The stored offsets are also published from
here, as offsets of the group GROUP, so that lag tools work; they are never read back.
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
from pipeline.model.records import OTLP
from pipeline.transport import Partition, diagnosis, kafka_clients

log = logging.getLogger("fleetpulse.kafka")

GROUP = "fleetpulse"
"""Consumer group under which stored offsets are published."""
CHECK_EVERY_S = 5.0
"""Seconds between two checks; chosen: with RESPONSE_S well below 30 s, within which a problem must be visible."""
RESPONSE_S = 5.0
"""Seconds that a broker has to respond."""
OVERDUE_S = 2 * (CHECK_EVERY_S + RESPONSE_S)
"""A check that takes longer counts as no response: the client's TLS handshake ignores timeouts."""
STUCK_S = 60.0
"""After this time a new thread with a new client takes over. Chosen: three times OVERDUE_S."""
REFUSALS = 6
"""Consecutive refusals of offsets before a warning; chosen: new brokers refuse the first while they create a topic."""
SHOWN = 5
"""Partitions named in a message; chosen."""
_TRUNCATED = "~"  # separates a topic's id from the number of truncations of the partition


class BrokerWatch:
    """State of our topics on the brokers. `known`: partitions in the store, with their incarnations."""

    def __init__(self, kafka: Kafka, known: Iterable[Partition], read: Sequence[str]) -> None:
        self._kafka, self._client_errors, self._read = kafka, diagnosis.ClientErrors(), read
        self._truncations = _count_truncations(known)
        self._described: tuple[tuple[str, int, str], ...] = ()
        self._partitions: tuple[Partition, ...] = ()
        self._known: frozenset[Partition] = frozenset()
        self._offline: frozenset[TopicPartition] = frozenset()
        self._answering = False
        self._stored: dict[TopicPartition, int] = {}
        self._published: dict[TopicPartition, int] = {}
        self._problem: str | None = f"kafka {kafka.bootstrap_servers}: no response yet"
        self._changed, self._wake = threading.Condition(), threading.Event()
        self._has_answer = self._closed = self._reported = False
        self._refusals = 0
        self._client_errors.attach()
        self._start_thread()

    # --- for the reader ----------------------------------------------------------------------------------------------

    def partitions(self, wait: float) -> tuple[Partition, ...]:
        """All partitions of the topics that we read; waits up to `wait` seconds for the first response only."""
        if time.monotonic() - self._checked_at > STUCK_S:
            self._start_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._has_answer, wait)
            return self._partitions

    def has_partition(self, partition: Partition) -> bool:
        """Whether the partition exists, in this incarnation."""
        return partition in self._known

    def is_offline(self, partition: TopicPartition) -> bool:
        """Whether the partition had no leader at the last check."""
        return partition in self._offline

    def mark_truncated(self, partition: Partition) -> None:
        """Restarts a partition as a new incarnation: its log ends before the stored offset, so messages were lost."""
        identity, _, number = partition.incarnation.partition(_TRUNCATED)
        with self._changed:
            self._truncations[partition.topic, partition.name, identity] = int(number or 0) + 1
            self._update_partitions()
        log.error(
            "%s/%s: the log ends before the stored offset: the brokers lost messages; reading it again from its "
            "start, skipping messages that are already stored",
            partition.topic,
            partition.name,
        )

    def set_stored(self, partition: Partition, next_offset: int) -> None:
        """Records that everything before `next_offset` is durable in the store."""
        self._stored[TopicPartition(partition.topic, int(partition.name))] = next_offset

    @property
    def is_answering(self) -> bool:
        """Whether the last check got a response and is recent."""
        return self._answering and time.monotonic() - self._checked_at < OVERDUE_S

    def current_problem(self) -> str | None:
        """Describes why the brokers cannot be used; None if they can. For any thread."""
        if self._problem is None and time.monotonic() - self._checked_at >= OVERDUE_S:
            return f"kafka {self._kafka.bootstrap_servers}: no response for {OVERDUE_S:g} s"
        return self._problem

    def close(self) -> None:
        """Publishes the stored offsets, if a broker responds immediately, and stops; may be called twice."""
        self._closed = True
        self._wake.set()
        self._thread.join(1.0)  # an absent broker holds the thread longer: it is a daemon and holds nothing
        self._client_errors.detach()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        """Starts the thread; replaces one that is stuck in the client, which ends when it returns."""
        self._checked_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kafka-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        admin: KafkaAdminClient | None = None
        while not self._closed and self._thread is threading.current_thread():
            try:
                admin = self._check_brokers(admin)
            except Exception as error:  # noqa: BLE001 - any error must be visible and must not end the checks
                admin, self._answering = None, False
                self._report_problem(
                    f"kafka {self._kafka.bootstrap_servers}: {type(error).__name__}: {error}; retrying"
                )
            self._checked_at = time.monotonic()
            self._wake.wait(CHECK_EVERY_S)
        if admin is not None:
            self._publish(admin)
            admin.close()

    def _check_brokers(self, admin: KafkaAdminClient | None) -> KafkaAdminClient | None:
        """Runs one check; returns the client for the next. None after an error: the brokers may have new addresses."""
        try:
            admin = admin or kafka_clients.create_admin(self._kafka, "watch", RESPONSE_S)
            self._check_topics(admin)
            self._publish(admin)
        except (KafkaError, ConfigError, OSError) as error:
            if admin is not None:
                admin.close()
            self._answering = False
            mine = isinstance(error, ConfigError)
            self._report_problem(
                str(error if mine else diagnosis.explain_failure(self._kafka, self._client_errors, error))
            )
            return None
        return admin

    def _check_topics(self, admin: KafkaAdminClient) -> None:
        answers = {topic["name"]: topic for topic in admin.describe_topics(list(self._read))}
        self._client_errors.clear()
        described, bad, offline = [], [], list[TopicPartition]()
        for name in self._read:
            answer = answers.get(name, {"error_code": 3})
            if answer["error_code"]:
                if name == OTLP:  # an installation without other senders' telemetry needs neither topic nor right
                    continue
                bad.append(_describe_topic_error(name, for_code(answer["error_code"])))
                continue
            leaderless = [p["partition_index"] for p in answer["partitions"] if p["leader_id"] < 0]
            if leaderless:
                bad.append(_describe_leaderless(name, leaderless, len(answer["partitions"])))
                offline += [TopicPartition(name, number) for number in leaderless]
            described += [(name, p["partition_index"], str(answer["topic_id"])) for p in answer["partitions"]]
        self._report_problem(f"kafka {self._kafka.bootstrap_servers}: {'; '.join(bad)}" if bad else None)
        with self._changed:
            self._described, self._offline = tuple(sorted(described)), frozenset(offline)
            self._update_partitions()
            self._has_answer = self._answering = True
            self._changed.notify_all()

    def _publish(self, admin: KafkaAdminClient) -> None:
        """Publishes changed offsets. A refusal, such as a missing right, affects only lag tools; warned about once."""
        changed = {p: n for p, n in dict(self._stored).items() if self._published.get(p) != n}
        if not changed:
            return None
        try:
            answers: Mapping[TopicPartition, type[KafkaError]] = admin.alter_group_offsets(
                GROUP, {p: OffsetAndMetadata(n, "", -1) for p, n in changed.items()}
            )
        except KafkaError as error:  # also the first time, while the brokers create the offsets topic
            return self._count_refusal(type(error).__name__)
        for partition, answer in answers.items():
            if answer is NoError:
                self._published[partition] = changed[partition]
                self._refusals = 0
            else:
                self._count_refusal(answer.__name__)
        return None

    def _count_refusal(self, why: str) -> None:
        self._refusals += 1
        if self._refusals == REFUSALS:
            log.warning("group %s: offsets for lag tools are refused: %s; retrying", GROUP, why)

    def _report_problem(self, trouble: str | None) -> None:
        if trouble and trouble != self._problem:
            log.error("%s", trouble)
            self._reported = True
        elif trouble is None and self._reported:
            log.warning("kafka %s: responds again, all topics exist", self._kafka.bootstrap_servers)
            self._reported = False
        self._problem = trouble

    def _update_partitions(self) -> None:
        named = ((topic, number, self._incarnation(topic, number, i)) for topic, number, i in self._described)
        self._partitions = tuple(Partition(topic, str(number), name) for topic, number, name in named)
        self._known = frozenset(self._partitions)

    def _incarnation(self, topic: str, number: int, identity: str) -> str:
        cuts = self._truncations.get((topic, str(number), identity), 0)
        return f"{identity}{_TRUNCATED}{cuts}" if cuts else identity


def _describe_leaderless(topic: str, numbers: Sequence[int], total: int) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
    count = f"{len(numbers)} of {total} partitions ({shown})"
    return f"topic {topic}: {count} have no leader: start the brokers that hold them; nodes in them look silent"


def _describe_topic_error(topic: str, error: type[KafkaError]) -> str:
    if error.__name__ == "UnknownTopicOrPartitionError":
        return f"topic {topic} does not exist: run `fleetpulse init`"
    return f"topic {topic}: {error.__name__}: {getattr(error, 'description', '')}"


def _count_truncations(known: Iterable[Partition]) -> dict[tuple[str, str, str], int]:
    """Number of truncations of each partition, from the incarnations in the store."""
    found: dict[tuple[str, str, str], int] = {}
    for partition in known:
        identity, _, number = partition.incarnation.partition(_TRUNCATED)
        key = (partition.topic, partition.name, identity)
        found[key] = max(found.get(key, 0), int(number) if number.isdigit() else 0)
    return found
