"""Three brokers, replication 3, min.insync.replicas 2: nodes that die, move, stay away or restart lose nothing.

"One broker away for ten minutes" is shortened to SHORT_AWAY_S: every timeout that takes part has then passed several
times (delivery 2 s in these tests, broker session 3 s, replica lag 5 s); ten minutes only make more bytes to copy.
`python -m benchmarks.outage` runs the real ten minutes, with a single broker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from kafka.admin import ConfigResource, ConfigResourceType

from pipeline.commands import init_kafka
from pipeline.config.sections import Kafka
from pipeline.ingest import ingest
from pipeline.model.errors import Offline, Retryable
from pipeline.model.records import SECOND, TELEMETRY
from pipeline.transport.kafka import KafkaTransport
from tests.conftest import need_broker
from tests.kafka_clients import delete_topics, make_topics, untidy_refusals
from tests.kafka_cluster import Cluster
from tests.pipeline.kafka_pipeline import VISIBLE_S, KafkaPipeline, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.refusals, pytest.mark.usefixtures("fast_broker_checks")]
PipelineFactory = Callable[..., KafkaPipeline]
log = logging.getLogger("tests.failures")
SHORT_AWAY_S = 15.0
LONG_S = 60.0
"""For what needs elections and copies of replicas: 4 s alone, several times that beside other tests."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_broker()
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The cluster with all nodes running; what a test killed is started again."""
    yield started
    for node in started.nodes.values():
        if node.running():
            node.thaw()
    started.start()


@pytest.fixture
def replicated(cluster: Cluster) -> Kafka:
    return make_topics(cluster, replication_factor=3)


def check_complete(pipeline: KafkaPipeline, failure: str, visible: float | None, recovered: float | None) -> None:
    """Waits until all is stored; nothing may be lost, doubled or in a gap."""
    counts = pipeline.finish(LONG_S)
    assert not counts.gaps
    pipeline.log_result(failure, visible, recovered, counts)
    log.info("the agent's log: %s", pipeline.messages)


def test_a_killed_leader_is_replaced_and_nothing_is_lost(
    cluster: Cluster, replicated: Kafka, new_pipeline: PipelineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = new_pipeline(replicated).start()
    pipeline.wait_until_healthy(LONG_S)
    for killed in (1, 2):
        leading = [p["partition_index"] for p in cluster.partitions(TELEMETRY) if p["leader_id"] == killed]
        assert leading
        cluster.nodes[killed].kill()
        recovered = pipeline.wait_until_healthy(LONG_S)
        assert killed not in {p["leader_id"] for p in cluster.partitions(TELEMETRY)}
        cluster.start()
        cluster.wait_for_replicas(TELEMETRY)
    check_complete(pipeline, "leader killed (kill -9), twice", None, recovered)
    assert not [record for record in caplog.records if record.exc_info and record.name.startswith("fleetpulse")]


def test_leaders_that_move_lose_nothing_and_are_no_trouble(
    cluster: Cluster, replicated: Kafka, new_pipeline: PipelineFactory
) -> None:
    pipeline = new_pipeline(replicated).start()
    pipeline.wait_until_healthy(LONG_S)
    troubles = set[str]()
    for _ in range(3):
        before = {p["partition_index"]: p["leader_id"] for p in cluster.partitions(TELEMETRY)}
        after = cluster.move_leaders(TELEMETRY)
        assert all(after[number] != before[number] for number in after)
        recovered = pipeline.wait_until_healthy(LONG_S)
        troubles.update(pipeline.reasons)
    assert troubles == set()
    check_complete(pipeline, "preferred leader of every partition moved, three times", None, recovered)


def test_a_broker_that_is_away_for_long_and_returns_is_no_trouble_for_agents_and_pipeline(
    cluster: Cluster, replicated: Kafka, new_pipeline: PipelineFactory
) -> None:
    pipeline = new_pipeline(replicated).start()
    pipeline.wait_until_healthy(LONG_S)
    cluster.nodes[3].kill()
    recovered = pipeline.wait_until_healthy(LONG_S)
    begin, troubles = time.monotonic(), set[str]()
    wait_until(
        lambda: (troubles.update(pipeline.reasons), time.monotonic() - begin > SHORT_AWAY_S)[1], LONG_S, "it is away"
    )
    assert troubles == set()
    assert {len(p["isr_nodes"]) for p in cluster.partitions(TELEMETRY)} == {2}
    cluster.start()
    cluster.wait_for_replicas(TELEMETRY)
    pipeline.wait_until_healthy(LONG_S)
    check_complete(pipeline, f"one broker of three away for {SHORT_AWAY_S:g} s", None, recovered)


def test_a_frozen_leader_is_replaced_and_nothing_is_lost(
    cluster: Cluster, replicated: Kafka, new_pipeline: PipelineFactory
) -> None:
    pipeline = new_pipeline(replicated).start()
    pipeline.wait_until_healthy(LONG_S)
    cluster.nodes[2].freeze()
    recovered = pipeline.wait_until_healthy(LONG_S)
    cluster.nodes[2].thaw()
    cluster.wait_for_replicas(TELEMETRY)
    check_complete(pipeline, "leader frozen (SIGSTOP), thawed", None, recovered)


def test_too_few_replicas_stop_sending_and_the_agent_names_the_setting(
    cluster: Cluster, replicated: Kafka, new_pipeline: PipelineFactory
) -> None:
    pipeline = new_pipeline(replicated).start()
    pipeline.wait_until_healthy(LONG_S)
    with cluster.admin() as admin:
        limit = ConfigResource(ConfigResourceType.TOPIC, TELEMETRY, configs={"min.insync.replicas": "3"})
        admin.alter_configs([limit])
    cluster.nodes[1].kill()
    visible = pipeline.wait_for_trouble(agent="min.insync.replicas", seconds=LONG_S)
    cluster.start()
    cluster.wait_for_replicas(TELEMETRY)
    recovered = pipeline.wait_until_healthy(LONG_S)
    check_complete(pipeline, "fewer replicas in sync than min.insync.replicas", visible, recovered)


def test_a_topic_deleted_and_created_again_is_read_from_its_start(
    cluster: Cluster, replicated: Kafka, new_pipeline: PipelineFactory
) -> None:
    pipeline = new_pipeline(replicated).start()
    pipeline.wait_until_healthy(LONG_S)
    delete_topics(cluster, [TELEMETRY])
    visible = pipeline.wait_for_trouble(f"topic {TELEMETRY} does not exist", "a topic is missing")
    init_kafka.create_topics(replicated, pipeline.messages.append)
    recovered = pipeline.wait_until_healthy(LONG_S)
    counts = pipeline.finish(LONG_S)
    assert len(pipeline.rows("SELECT DISTINCT incarnation, 0 FROM ingest_commit WHERE topic = 'telemetry.v1'")) == 2
    pipeline.log_result("topic deleted, created again by `fleetpulse init`", visible, recovered, counts)


def test_partitions_added_under_load_lose_nothing(
    cluster: Cluster, replicated: Kafka, new_pipeline: PipelineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agents.node.uplink import client

    settings = client._settings  # the client looks for new partitions every five minutes
    monkeypatch.setattr(client, "_settings", lambda times: {**settings(times), "metadata_max_age_ms": 500})
    pipeline = new_pipeline(replicated, nodes=[f"n{i}" for i in range(8)]).start()
    pipeline.wait_until_healthy(LONG_S)
    with cluster.admin() as admin:
        admin.create_partitions({TELEMETRY: 8})
    moved = "SELECT 'messages', count(*) FROM ingest_commit WHERE topic = 'telemetry.v1' AND partition::INT >= 4"
    visible = wait_until(lambda: pipeline.rows(moved)[0][1], LONG_S, "messages come through new partitions")
    recovered = pipeline.wait_until_healthy(LONG_S)
    check_complete(pipeline, "partitions raised from 4 to 8 while sending", visible, recovered)


def test_brokers_restarted_one_after_the_other_under_load_lose_nothing(
    cluster: Cluster, replicated: Kafka, new_pipeline: PipelineFactory
) -> None:
    pipeline = new_pipeline(replicated).start()
    pipeline.wait_until_healthy(LONG_S)
    for node in cluster.nodes.values():
        node.stop()
        cluster.start()
        cluster.wait_for_replicas(TELEMETRY)
    recovered = pipeline.wait_until_healthy(LONG_S)
    check_complete(pipeline, "rolling restart of all three brokers", None, recovered)


# --- a partition without a leader -------------------------------------------------------------------------------------


def test_a_partition_without_a_leader_is_known_at_once_and_the_others_are_read_without_a_wait(cluster: Cluster) -> None:
    """The transport alone, with its real consumer, on topics with one replica."""
    kafka = make_topics(cluster, replication_factor=1)
    gone = cluster.leader_of(TELEMETRY, 0)
    with untidy_refusals():
        transport = KafkaTransport(kafka)
        wait_until(transport.partitions, LONG_S, "the first answer")
        partitions = transport.partitions()
        cluster.nodes[gone].kill()
        offline = [p for p in cluster.partitions(TELEMETRY) if p["leader_id"] in (gone, -1)]
        numbers = {str(p["partition_index"]) for p in offline}

        def states() -> dict[str, str]:
            found = {}
            for partition in partitions:
                if partition.topic == TELEMETRY:
                    try:
                        found[partition.name] = "end" if not transport.read(partition, 0, 10, 1000) else "messages"
                    except Offline:
                        found[partition.name] = "offline"
                    except Retryable:
                        found[partition.name] = "unknown"
            return found

        expected = {name: "offline" if name in numbers else "end" for name in ("0", "1", "2", "3")}
        wait_until(lambda: states() == expected, LONG_S, f"{expected}, not {states()}")
        begin = time.monotonic()
        for _ in range(10):
            states()
        for partition in partitions:
            if partition.topic == TELEMETRY and partition.name in numbers:
                with suppress(Retryable):
                    transport.bounds(partition)
        assert time.monotonic() - begin < 2.0  # a wait for a leader would take 0.5 s each
        assert (
            f"topic {TELEMETRY}: {len(numbers)} of 4 partitions ({', '.join(sorted(numbers))}) have no leader"
            in str(transport.find_problem())
        )
        transport.close()


def test_a_partition_without_a_leader_does_not_hold_up_judging_of_the_others(
    cluster: Cluster, new_pipeline: PipelineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pipeline = new_pipeline(make_topics(cluster, replication_factor=1), nodes=[f"n{i}" for i in range(8)]).start()
    pipeline.wait_until_healthy(LONG_S)
    service = pipeline.service
    assert service is not None
    gone = cluster.leader_of(TELEMETRY, 0)
    cluster.nodes[gone].kill()
    visible = pipeline.wait_for_trouble("have no leader", seconds=LONG_S)
    held = service.compute_watermark()
    assert held is not None
    hold = wait_until(
        lambda: (service.compute_watermark() or 0) > held + 2 * SECOND,
        ingest.MAX_OFFLINE / SECOND + VISIBLE_S,
        "judging of the others goes on",
    )
    assert hold < ingest.MAX_UNANSWERED / SECOND / 5
    cluster.start()
    recovered = pipeline.wait_until_healthy(LONG_S)
    check_complete(pipeline, "partitions with one replica: their broker killed, started again", visible, recovered)
    assert any("have no leader" in record.getMessage() for record in caplog.records)
