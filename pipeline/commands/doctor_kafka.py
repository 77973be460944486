"""Checks of `fleetpulse doctor` for Kafka: broker, credential, topics and clock.

A check that needs the result of a failed one is a warning "not checked", so that one cause gives one failure.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Container, Mapping
from contextlib import closing
from dataclasses import replace

from kafka.errors import KafkaError

from pipeline.commands.checks import Check
from pipeline.config.addresses import hide_in_text
from pipeline.config.sections import Config, Kafka
from pipeline.model.errors import ConfigError
from pipeline.transport import diagnosis, kafka_clients, kerberos, oauth_tokens, topics
from pipeline.transport import topics as topic_state
from pipeline.transport.broker_errors import MISSING, BrokerProblem, classify_error

ANSWER_S = 3.0
"""Limit for an answer of the brokers (s). Chosen: a person waits."""
CLOCK_S = 1.0
"""Clock difference that gives a warning (s): samples of one instant fall into different ticks. Above [pipeline]
lateness the check fails: late rows are stored, but not evaluated."""
WORKING = "agents keep telemetry in their spools and the pipeline waits until this is fixed"


def check_kafka(config: Config) -> list[Check]:
    """Runs all four checks in order."""
    kafka = config.kafka
    try:
        kafka_clients.client_settings(kafka, "doctor")
    except ConfigError as error:
        bad = Check("credential", "fail", hide_in_text(str(error)), WORKING, "fix that file, or the key that names it")
        return [_not_tried("broker"), bad, _not_tried("topics"), _not_tried("clock")]
    trouble = diagnosis.find_broker_problem(kafka, ANSWER_S)
    away = {} if trouble is not None else diagnosis.find_absent_brokers(kafka, ANSWER_S)
    found = [_broker(kafka, trouble, away), _credential(kafka, trouble)]
    if trouble is not None:
        return [*found, *(_not_tried(name) for name in ("topics", "clock"))]
    kafka = _without(kafka, away)
    try:
        with closing(kafka_clients.create_admin(kafka, "doctor", ANSWER_S)) as admin:
            state = topic_state.read_topics(admin, topics.configured_topics(kafka))
            found += [_topics(kafka, state), _clock(replace(config, kafka=kafka), state)]
    except KafkaError as error:
        found += [_broken(kafka, error, "topics"), _not_tried("clock")]
    return found


def _not_tried(name: str) -> Check:
    return Check(name, "warn", "not checked: the brokers cannot be used")


def _without(kafka: Kafka, away: Container[str]) -> Kafka:
    """Returns the settings without absent brokers: the client draws an address at random and may draw only those."""
    answering = [server for server in kafka_clients.broker_addresses(kafka) if server not in away]
    return replace(kafka, bootstrap_servers=",".join(answering)) if answering else kafka


def _broker(kafka: Kafka, trouble: BrokerProblem | None, away: Mapping[str, BrokerProblem]) -> Check:
    if trouble is not None and trouble.kind == "unreachable":
        return Check("broker", "fail", trouble.text, WORKING, trouble.remedy, unreachable=True)
    answering = ",".join(server for server in kafka_clients.broker_addresses(kafka) if server not in away)
    found = f"kafka: {answering or kafka.bootstrap_servers} answers"
    if not away:
        return Check("broker", "ok", found)
    found = "; ".join((found, *(trouble.text for trouble in away.values())))
    fixes = "; ".join(dict.fromkeys(trouble.remedy for trouble in away.values()))
    return Check("broker", "warn", found, "if the other addresses fail, the brokers cannot be found", fixes)


def _credential(kafka: Kafka, trouble: BrokerProblem | None) -> Check:
    """Checks that the brokers accept the credential, and that other users cannot read it."""
    if trouble is not None and trouble.kind == "unreachable":
        return _not_tried("credential")
    if trouble is not None:
        away = trouble.kind == "login server"
        return Check("credential", "fail", trouble.text, WORKING, trouble.remedy, unreachable=away)
    files = (kafka.password_file, kafka.key_file, kafka.token_file, kafka.keytab_file)
    secret = [path for path in files if path is not None]
    if exposed := [path for path in secret if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH)]:
        names = " ".join(map(str, exposed))
        return Check("credential", "warn", f"{names}: readable by all users of this host", fix=f"chmod o-rwx {names}")
    return Check("credential", "ok", f"{kafka.security_protocol}: {_describe_user(kafka)}")


def _describe_user(kafka: Kafka) -> str:
    """Returns the user and mechanism of the handshake."""
    if not kafka.security_protocol.startswith("SASL"):
        return "no user"
    if kafka.sasl_mechanism == "OAUTHBEARER":
        source = oauth_tokens.token_source(kafka)
        return f"OAUTHBEARER: token of {source.where}: {source.describe()}"
    if kafka.sasl_mechanism == "GSSAPI":
        return f"GSSAPI: {kerberos.describe_ticket(kafka)}"
    return f"user {kafka.username!r}, {kafka.sasl_mechanism}"


def _topics(kafka: Kafka, state: dict[str, topic_state.TopicState]) -> Check:
    wanted = topics.configured_topics(kafka)
    if missing := [topic.name for topic in wanted if topic.name not in state]:
        meaning = "nothing can be sent to a missing topic"
        return Check("topics", "fail", f"missing: {', '.join(missing)}", meaning, MISSING)
    if headless := [f"{name} ({s.headless} of {s.partitions})" for name, s in state.items() if s.headless]:
        found = f"partitions without a leader: {', '.join(headless)}"
        return Check("topics", "fail", found, "the brokers of these partitions are down", "start these brokers")
    if different := [(t.name, d) for t in wanted for d in topic_state.find_differences(kafka, t, state[t.name])]:
        found = "; ".join(f"{name}: {difference}" for name, difference in different)
        fixes = "; ".join(dict.fromkeys(difference.remedy for _, difference in different))
        if any(difference.loses_messages for _, difference in different):
            meaning = "larger messages are always refused: their rows are lost and counted as gaps"
            return Check("topics", "fail", found, meaning, fixes)
        return Check("topics", "warn", found, "messages are delivered, but the topics are not as configured", fixes)
    return Check("topics", "ok", f"{len(wanted)} topics are as configured")


def _clock(config: Config, state: dict[str, topic_state.TopicState]) -> Check:
    """Compares this host's clock with the broker's timestamps; the uncertainty is half the round trip."""
    if topics.PROBE not in state:
        return Check("clock", "warn", f"not checked: no topic {topics.PROBE}", fix=MISSING)
    if state[topics.PROBE].settings.get("message.timestamp.type") != "LogAppendTime":
        # the client would return our own time
        found = f"not compared: topic {topics.PROBE} does not use the broker's time"
        return Check("clock", "warn", found, fix="see the check `topics`: message.timestamp.type")
    try:
        ahead, trip = compare_clocks(config.kafka)
    except KafkaError as error:
        return _broken(config.kafka, error, "clock")
    return rate_clock(ahead, trip, config.pipeline.lateness)


def rate_clock(ahead: float, trip: float, lateness: float) -> Check:
    """Returns the check of a clock difference. ahead: our clock minus the broker's (s)."""
    least = max(0.0, abs(ahead) - trip / 2)
    side = "behind" if ahead < 0 else "ahead of"
    found = f"{abs(ahead) * 1000:.0f} ms {side} the broker's; round trip {trip * 1000:.0f} ms"
    fix = "timedatectl  # on both hosts: is the clock synchronized?"
    if least > max(lateness, CLOCK_S):
        meaning = f"rows more than [pipeline] lateness = {lateness:g} s behind the others are stored, not evaluated"
        return Check("clock", "fail", found, meaning, fix)
    if least > CLOCK_S:
        return Check("clock", "warn", found, "simultaneous events get different times", fix)
    return Check("clock", "ok", found)


def compare_clocks(kafka: Kafka, now: Callable[[], float] = time.time) -> tuple[float, float]:
    """Returns (our clock minus the broker's, round trip), in s."""
    limit = round(ANSWER_S * 1000)
    limits = {"max_block_ms": limit, "delivery_timeout_ms": limit, "request_timeout_ms": limit}
    producer = kafka_clients.create_producer(kafka, "doctor", **limits)
    try:
        # the first record includes the time to connect
        producer.send(topics.PROBE, b"fleetpulse doctor: connects", partition=0).get(ANSWER_S)
        begun, clock = now(), time.perf_counter()
        stored = producer.send(topics.PROBE, b"fleetpulse doctor: clock", partition=0).get(ANSWER_S)
        trip = time.perf_counter() - clock
    finally:
        producer.shut_down(ANSWER_S)
    return begun + trip / 2 - stored.timestamp / 1000, trip


def _broken(kafka: Kafka, error: KafkaError, name: str) -> Check:
    """Returns the check of a client error; without the right to write to the probe topic it is a warning."""
    trouble = classify_error(kafka, error) or BrokerProblem(
        "unreachable", f"kafka {kafka.bootstrap_servers}: {error}", "try again"
    )
    if name == "clock" and trouble.kind == "forbidden":
        return Check(name, "warn", trouble.text, "the clocks cannot be compared", trouble.remedy)
    return Check(name, "fail", trouble.text, WORKING, trouble.remedy, unreachable=trouble.kind == "unreachable")
