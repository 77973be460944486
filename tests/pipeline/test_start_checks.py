"""A reload is refused if the start after it would end with exit code 2, after which a unit stays down."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.commands.start_checks import check_next_start
from pipeline.config.receivers import Notify, Webhook
from pipeline.config.sections import Api, Config, Incidents, Kafka, Pipeline, Store
from pipeline.config.topology import TopologyFiles
from pipeline.model.errors import ConfigError, UsageError

ADDRESS = ("127.0.0.1", 1)


@pytest.fixture
def now(tmp_path: Path) -> Config:
    return Config(store=Store(path=tmp_path / "s.duckdb"))


def test_a_taken_port_is_refused_and_that_of_this_process_is_not(now: Config) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        fresh = replace(now, api=Api(port=other.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"\[api\] host = '127.0.0.1', port = \d+: cannot listen: .* in use"):
            check_next_start(now, fresh, ADDRESS)
        check_next_start(now, fresh, ("127.0.0.1", fresh.api.port))
        check_next_start(fresh, fresh, ADDRESS)


def test_what_a_start_reads_is_read_before(now: Config, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    login = Kafka(security_protocol="SASL_SSL", username="a", password_file=gone)
    hook = Webhook("w", "https://h.example/", token_file=gone)
    wrong = {
        "beyond loopback without tokens": replace(now, api=Api(host="0.0.0.0")),
        "token_file": replace(now, api=Api(token_file=gone)),
        "password_file": replace(now, kafka=login, pipeline=Pipeline(transport="kafka")),
        "advice_file": replace(now, incidents=Incidents(advice_file=gone)),
        "gone: cannot be read": replace(now, topology=TopologyFiles(path=gone)),
        r"w: token_file = .*gone": replace(now, notify=Notify(webhooks=(hook,))),
    }
    for said, fresh in wrong.items():
        with pytest.raises(UsageError, match=said):
            check_next_start(now, fresh, ADDRESS)
    check_next_start(now, now, ADDRESS)
