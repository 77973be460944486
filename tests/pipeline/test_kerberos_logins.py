"""SASL/GSSAPI with a real KDC and a real broker: keytabs renew themselves, and failures name the side that is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import doctor, init_kafka
from pipeline.commands.checks import Check
from pipeline.config.sections import Config, Kafka, Pipeline
from pipeline.model.errors import ConfigError
from pipeline.transport import kafka_clients
from tests.conftest import need_broker
from tests.kafka_broker import Broker
from tests.kafka_clients import kafka_of, make_topics, read, untidy_refusals, write
from tests.kafka_logins import CLIENT, REALM, KerberosSecurity, missing_kerberos
from tests.parts import do_without
from tests.pipeline.kafka_pipeline import VISIBLE_S, KafkaPipeline, wait_until

PipelineFactory = Callable[..., KafkaPipeline]


def test_without_the_python_package_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.transport.kerberos.find_spec", lambda _: None)
    kafka = Kafka(security_protocol="SASL_SSL", sasl_mechanism="GSSAPI")
    with pytest.raises(ConfigError, match=r"gssapi is not installed; expected it: pip install"):
        kafka_clients.client_settings(kafka, "agent")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"keytab_file": Path("/nowhere/k"), "username": "u"}, "keytab_file = '/nowhere/k': No such file"),
        ({"keytab_file": Path("/dev/null")}, "keytab_file without username"),
    ],
)
def test_unusable_keys_are_reported(keys: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.transport.kerberos.find_spec", lambda _: True)
    kafka = Kafka(security_protocol="SASL_SSL", sasl_mechanism="GSSAPI", **keys)
    with pytest.raises(ConfigError, match=words):
        kafka_clients.client_settings(kafka, "agent")


def test_loading_the_client_needs_no_kerberos() -> None:
    import pipeline.transport.kerberos  # noqa: F401 - loads without gssapi

    assert "gssapi" not in vars(sys.modules["pipeline.transport.kerberos"])


@pytest.fixture
def kerberos_kafka(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A broker that accepts only Kerberos tickets; `security.kdc` issues them."""
    need_broker()
    if lacking := missing_kerberos():
        do_without("kerberos", f"{lacking}: run 'make parts'")
    security = KerberosSecurity(tmp_path / "security")
    monkeypatch.setenv("KRB5_CONFIG", security.kdc.environ["KRB5_CONFIG"])
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path / 'cache'}")
    with Broker(tmp_path / "broker", security=security) as broker:
        yield broker
    security.close()


def security_of(broker: Broker) -> KerberosSecurity:
    assert isinstance(broker.security, KerberosSecurity)
    return broker.security


def credential_of(kafka: Kafka) -> Check:
    config = Config(kafka=kafka, pipeline=Pipeline(transport="kafka"))
    with untidy_refusals():
        return {check.name: check for check in doctor.run_checks(config, [doctor.transport])}["credential"]


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.refusals
def test_init_doctor_agent_and_pipeline_log_in_with_a_keytab_and_each_failure_names_its_side(
    kerberos_kafka: Broker, tmp_path: Path
) -> None:
    security, kdc = security_of(kerberos_kafka), security_of(kerberos_kafka).kdc
    kafka = kafka_of(kerberos_kafka)
    init_kafka.create_topics(kafka, lambda _: None)
    found = credential_of(kafka)
    assert found.state == "ok"
    assert f"GSSAPI: principal {CLIENT}@{REALM}, ticket valid for 3" in found.found
    write(kerberos_kafka, "telemetry.v1", [b"a", b"b"])
    assert [record.value for record in read(kerberos_kafka, "telemetry.v1")] == [b"a", b"b"]

    refused = credential_of(kafka_of(kerberos_kafka, username="nobody"))
    assert "the keytab has no key of our principal" in refused.found
    kdc.add("changed", tmp_path / "old.keytab")
    kdc.change_key("changed")
    refused = credential_of(kafka_of(kerberos_kafka, username="changed", keytab_file=tmp_path / "old.keytab"))
    assert "the KDC refuses our key" in refused.found
    assert "keytab_file" in refused.fix
    refused = credential_of(kafka_of(kerberos_kafka, kerberos_service="broker"))
    assert "the KDC does not know the brokers' principal" in refused.found
    assert "service broker/127.0.0.1" in refused.found
    kdc.add("broker/127.0.0.1")  # known to the KDC, but the broker has the key of another principal
    refused = credential_of(kafka_of(kerberos_kafka, kerberos_service="broker"))
    assert "the broker refuses our Kerberos ticket" in refused.found
    kdc.add("stranger", tmp_path / "stranger.keytab")
    refused = credential_of(kafka_of(kerberos_kafka, username="stranger", keytab_file=tmp_path / "stranger.keytab"))
    assert "has no user for it (principal stranger@" in refused.found
    assert "principal.to.local.rules" in refused.fix
    no_keytab = kafka_of(kerberos_kafka, username="", keytab_file=None)
    refused = credential_of(no_keytab)
    assert "kinit" in refused.fix
    kdc.kinit(security.keytab_file, CLIENT, tmp_path / "cache")
    assert credential_of(no_keytab).state == "ok"
    kdc.stop()
    kdc.add("late", tmp_path / "late.keytab")
    away = credential_of(kafka_of(kerberos_kafka, username="late", keytab_file=tmp_path / "late.keytab"))
    assert "no KDC of the realm responds" in away.found
    assert away.unreachable


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.refusals
@pytest.mark.usefixtures("fast_broker_checks")
def test_short_tickets_are_renewed_from_the_keytab_while_all_runs(
    kerberos_kafka: Broker, new_pipeline: PipelineFactory, tmp_path: Path
) -> None:
    kdc = security_of(kerberos_kafka).kdc
    kdc.add("short", tmp_path / "short.keytab", life="6s")
    make_topics(kerberos_kafka)
    kafka = kafka_of(kerberos_kafka, username="short", keytab_file=tmp_path / "short.keytab")
    pipeline = new_pipeline(kafka).start()
    pipeline.wait_until_healthy()
    wait_until(lambda: kdc.count_requests("short") >= 3, VISIBLE_S, "tickets are renewed")
    pipeline.wait_until_healthy()
    kdc.stop()
    visible = pipeline.wait_for_trouble("no KDC of the realm responds", "no KDC of the realm responds")
    kdc.start()
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    pipeline.log_result("KDC away until the last ticket expired", visible, recovered, counts)
