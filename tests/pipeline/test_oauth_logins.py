"""SASL/OAUTHBEARER with a real broker and its own validator: tokens are fetched, renewed, and failures name a side."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import doctor, init_kafka
from pipeline.commands.checks import Check
from pipeline.config.sections import Config, Kafka, Pipeline
from pipeline.model.errors import ConfigError, Unreachable
from pipeline.transport import kafka_clients, oauth_tokens
from pipeline.transport.oauth_tokens import LoginError, TokenSource, parse_token
from tests.conftest import need_broker
from tests.kafka_broker import Broker
from tests.kafka_clients import kafka_of, make_topics, read, untidy_refusals, write
from tests.kafka_logins import AUDIENCE, TokenEndpoint, TokenSecurity
from tests.pipeline.kafka_pipeline import VISIBLE_S, KafkaPipeline, wait_until

PipelineFactory = Callable[..., KafkaPipeline]
SECRET = "s3cret:with/odd characters"


@pytest.fixture(autouse=True)
def _no_shared_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts without tokens, and may ask again immediately after a failure."""
    monkeypatch.setattr(oauth_tokens, "_SOURCES", {})
    monkeypatch.setattr(oauth_tokens, "RETRY_S", 0.2)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[TokenEndpoint]:
    made = TokenEndpoint(tmp_path, "fleet:pulse", SECRET.replace(":", "").replace("/", "").replace(" ", ""))
    (tmp_path / "secret").write_text(made.secret + "\n")
    yield made
    made.close()


def kafka_with(endpoint: TokenEndpoint, tmp_path: Path, **more: Any) -> Kafka:
    keys = {"username": endpoint.client, "password_file": tmp_path / "secret", "token_endpoint": endpoint.url}
    return Kafka(security_protocol="SASL_PLAINTEXT", sasl_mechanism="OAUTHBEARER", **(keys | more))


# --- tokens, without a broker -----------------------------------------------------------------------------------------


class Clock:
    """UTC seconds that a test moves."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


def test_one_token_serves_all_clients_until_three_quarters_of_its_life(endpoint: TokenEndpoint, tmp_path: Path) -> None:
    endpoint.client = "fleetpulse"
    clock = Clock()
    source = TokenSource(kafka_with(endpoint, tmp_path), clock)
    first = source.token()
    clock.ahead = 0.7 * endpoint.life
    assert source.token() == first
    clock.ahead = endpoint.skew = 0.8 * endpoint.life
    assert source.token() != first
    assert endpoint.issued == 2
    kafka = kafka_with(endpoint, tmp_path)
    assert oauth_tokens.token_source(kafka) is oauth_tokens.token_source(kafka)


def test_id_and_secret_with_special_characters_reach_the_endpoint(tmp_path: Path) -> None:
    endpoint = TokenEndpoint(tmp_path, "fleet%3Apulse%2Fa", "x%3A+%25y")
    try:
        (tmp_path / "secret").write_text("x: %y\n")
        assert TokenSource(kafka_with(endpoint, tmp_path, username="fleet:pulse/a")).token()
    finally:
        endpoint.close()


def test_a_valid_token_is_used_while_the_endpoint_is_away_and_the_log_says_so_once(
    endpoint: TokenEndpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.client = "fleetpulse"
    clock = Clock()
    source = TokenSource(kafka_with(endpoint, tmp_path), clock)
    first = source.token()
    endpoint.broken = "fails"
    clock.ahead = 0.9 * endpoint.life
    assert [source.token() for _ in range(3)] == [first] * 3
    clock.ahead = 1.1 * endpoint.life
    with pytest.raises(LoginError, match="temporarily_unavailable"):
        source.token()
    endpoint.broken, endpoint.skew = "", clock.ahead
    wait_until(lambda: _token_or_none(source), VISIBLE_S, "a token again")
    texts = [record.getMessage() for record in caplog.records if record.name == "fleetpulse.kafka"]
    assert ["cannot be renewed" in text for text in texts] == [True, False]
    assert "issues tokens again" in texts[1]
    assert first not in caplog.text


def _token_or_none(source: TokenSource) -> str | None:
    try:
        return source.token()
    except LoginError:
        return None


@pytest.mark.slow
def test_an_endpoint_that_hangs_blocks_a_client_only_until_the_limit(
    endpoint: TokenEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oauth_tokens, "FETCH_S", 0.3)
    endpoint.broken = "hangs"
    source = TokenSource(kafka_with(endpoint, tmp_path))
    begin = time.monotonic()
    with pytest.raises(LoginError, match="does not respond") as refused:
        source.token()
    assert time.monotonic() - begin < 3
    assert refused.value.problem.kind == "login server"


@pytest.mark.parametrize(
    ("broken", "change", "kind", "words"),
    [
        ("", {"username": "other"}, "credential", "refuses client 'other': invalid_client"),
        ("", {"token_scope": "none"}, "credential", "invalid_scope: unknown scope"),
        ("html", {}, "login server", "no access_token"),
        ("fails", {}, "login server", "fails: temporarily_unavailable"),
    ],
)
def test_a_failed_fetch_names_the_endpoint_and_the_reason(
    endpoint: TokenEndpoint, tmp_path: Path, broken: str, change: dict[str, Any], kind: str, words: str
) -> None:
    endpoint.client, endpoint.broken = "fleetpulse", broken
    source = TokenSource(kafka_with(endpoint, tmp_path, **change))
    with pytest.raises(LoginError, match=words) as refused:
        source.token()
    assert refused.value.problem.kind == kind
    assert endpoint.url in str(refused.value)
    assert endpoint.secret not in str(refused.value)


def test_an_endpoint_that_is_away_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/token"
        keys = {"username": "u", "password_file": tmp_path / "secret", "token_endpoint": url}
        source = TokenSource(Kafka(sasl_mechanism="OAUTHBEARER", **keys))
        with pytest.raises(LoginError, match="connection refused") as refused:
            source.token()
    assert refused.value.problem.kind == "login server"


def test_a_token_that_is_expired_at_once_means_different_clocks_and_the_difference_is_named(
    endpoint: TokenEndpoint, tmp_path: Path
) -> None:
    endpoint.client = "fleetpulse"
    clock = Clock()
    clock.ahead = 3600.0
    with pytest.raises(LoginError, match=r"expired 33\d\d s ago; this host's clock is 3\d\d\d s ahead") as refused:
        TokenSource(kafka_with(endpoint, tmp_path), clock).token()
    assert "timedatectl" in refused.value.problem.remedy


def test_an_opaque_token_lives_as_long_as_its_response_says() -> None:
    token = parse_token("abc", 1000.0, 60.0)
    assert (token.expires, token.is_due(1044.0), token.is_due(1046.0)) == (1060.0, False, True)
    assert parse_token("a.!!.c", 1000.0).expires is None
    assert "abc" not in token.describe(1000.0) + repr(token)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "expected either token_endpoint or token_file"),
        ({"token_endpoint": "https://a/t", "token_file": Path("/nowhere")}, "expected either"),
        ({"token_endpoint": "https://a/t"}, "expected username and password_file"),
        ({"token_file": Path("/nowhere/t")}, "token_file = '/nowhere/t': No such file"),
        ({"token_file": Path("/dev/null")}, "is empty; expected the token"),
    ],
)
def test_unusable_keys_are_reported(keys: dict[str, Any], words: str) -> None:
    kafka = Kafka(security_protocol="SASL_SSL", sasl_mechanism="OAUTHBEARER", **keys)
    with pytest.raises(ConfigError, match=words):
        kafka_clients.client_settings(kafka, "agent")


# --- with a broker ----------------------------------------------------------------------------------------------------


@pytest.fixture
def token_kafka(tmp_path: Path) -> Iterator[Broker]:
    """A broker that accepts only tokens; `security.endpoint` issues them."""
    need_broker()
    security = TokenSecurity(tmp_path / "security")
    with Broker(tmp_path / "broker", security=security) as broker:
        yield broker
    security.close()


def endpoint_of(broker: Broker) -> TokenEndpoint:
    assert isinstance(broker.security, TokenSecurity)
    return broker.security.endpoint


def run_doctor(kafka: Kafka) -> dict[str, Check]:
    config = Config(kafka=kafka, pipeline=Pipeline(transport="kafka"))
    with untidy_refusals():
        return {check.name: check for check in doctor.run_checks(config, [doctor.transport])}


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.refusals
def test_init_doctor_agent_and_pipeline_log_in_with_tokens_and_each_failure_names_its_side(
    token_kafka: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG")
    endpoint, kafka = endpoint_of(token_kafka), kafka_of(token_kafka)
    init_kafka.create_topics(kafka, lambda _: None)
    found = run_doctor(kafka)
    assert [check.state for check in found.values()] == ["ok"] * 4
    text = found["credential"].found
    assert f"token of token endpoint {endpoint.url}: issuer https://login.example, audience kafka" in text
    assert "expires in" in text
    write(token_kafka, "telemetry.v1", [b"a", b"b"])
    assert [record.value for record in read(token_kafka, "telemetry.v1")] == [b"a", b"b"]

    def credential(**change: Any) -> Check:
        monkeypatch.setattr(oauth_tokens, "_SOURCES", {})
        found = run_doctor(kafka_of(token_kafka, **change))
        assert [found[name].state for name in ("broker", "credential", "topics")] == ["ok", "fail", "warn"]
        return found["credential"]

    (tmp_path / "wrong").write_text("wrong")
    refused = credential(password_file=tmp_path / "wrong")
    assert "refuses client 'fleetpulse': invalid_client" in refused.found
    assert "username and password_file" in refused.fix
    endpoint.audience = "other"
    refused = credential()
    assert "the broker refuses our token (issuer https://login.example, audience other" in refused.found
    assert "audience" in refused.fix
    endpoint.audience, endpoint.skew = AUDIENCE, 120.0  # the endpoint's clock is ahead of the broker's
    assert "the broker refuses our token" in credential().found
    endpoint.skew = 0.0
    expired = tmp_path / "token"
    endpoint.life = -5.0
    expired.write_text(endpoint.sign("fleetpulse"))
    endpoint.life = 300.0
    refused = credential(token_endpoint="", token_file=expired)
    assert "expired" in refused.found
    assert str(expired) in refused.found
    expired.write_text(endpoint.sign("fleetpulse"))
    monkeypatch.setattr(oauth_tokens, "_SOURCES", {})
    assert run_doctor(kafka_of(token_kafka, token_endpoint="", token_file=expired))["credential"].state == "warn"
    os.chmod(expired, 0o600)
    assert run_doctor(kafka_of(token_kafka, token_endpoint="", token_file=expired))["credential"].state == "ok"
    endpoint.broken = "fails"
    away = credential()
    assert away.unreachable
    with pytest.raises(Unreachable, match="temporarily_unavailable"):
        init_kafka.create_topics(kafka, lambda _: None)
    assert endpoint.secret not in caplog.text
    assert "eyJ" not in caplog.text  # how a JWT begins


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.refusals
@pytest.mark.usefixtures("fast_broker_checks")
def test_tokens_are_renewed_while_all_runs_and_an_absent_endpoint_is_reported_when_the_last_one_expires(
    token_kafka: Broker, new_pipeline: PipelineFactory
) -> None:
    endpoint = endpoint_of(token_kafka)
    kafka = make_topics(token_kafka)
    endpoint.life = 10.0  # brokers close a connection that logs in twice within a second
    oauth_tokens._SOURCES.clear()
    pipeline = new_pipeline(kafka).start()
    pipeline.wait_until_healthy()
    enough = endpoint.issued + 2
    troubles = set[str]()
    wait_until(
        lambda: (troubles.update(pipeline.reasons, [pipeline.sender.problem() or ""]), endpoint.issued >= enough)[1],
        VISIBLE_S,
        "tokens are renewed",
    )
    pipeline.wait_until_healthy()
    assert not [text for text in troubles if "token" in text or "refuse" in text]
    endpoint.broken = "fails"
    visible = pipeline.wait_for_trouble("temporarily_unavailable", "temporarily_unavailable")
    endpoint.broken = ""
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    pipeline.log_result("token endpoint away until the last token expired", visible, recovered, counts)
