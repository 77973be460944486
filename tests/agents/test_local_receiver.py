"""An agent receives OTLP from programs of its node, and spools it beside its own telemetry."""

from __future__ import annotations

import io
import socket
import threading
from pathlib import Path

import pytest

from agents.gateway import gateway as gateways
from agents.gateway.gateway import LocalReceiver
from agents.gateway.http_server import OTLP_PATH
from agents.node.agent import Agent
from pipeline.config import sections
from pipeline.config.sections import Config
from pipeline.ingest.ingest import Ingest
from pipeline.model.records import EVENTS, OTLP, TELEMETRY, Origin
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport.spool import SpoolTransport
from tests.agents.test_agent import Node
from tests.agents.test_gateway import TYPE, send
from tests.pipeline.otlp_requests import T0_NS, Request, gpu_request
from tests.until import until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def start_agent(folder: Path) -> Agent:
    """An agent that listens; its test closes it."""
    settings = sections.Agent(node="n1", otlp_port=free_port(), linger=0.0)
    config = Config(agent=settings, spool=sections.Spool(folder / "spool", free_bytes=0))
    made = Agent(config, [Node()], None, io.StringIO())
    until(lambda: made.receiver is not None and made.receiver.http is not None)
    return made


def post(agent: Agent, body: bytes, path: str = OTLP_PATH) -> int:
    assert agent.receiver is not None
    assert agent.receiver.http is not None
    return send(agent.receiver.http.server_address[1], "POST", path, body, TYPE)[0]


def stored(folder: Path, query: str) -> list[tuple[object, ...]]:
    """What the pipeline has after reading all spools of a folder."""
    database, transport = Database(folder / "store.duckdb"), SpoolTransport(folder / "spool")
    ingest = Ingest(database, transport, Devices(database.connection), lambda: T0_NS // 1000)
    while ingest.step() is not None:
        pass
    assert database.connection.execute("SELECT rule, reason FROM dead_letter").fetchall() == []
    rows = database.connection.execute(query).fetchall()
    transport.close()
    database.close()
    return rows


@pytest.mark.slow
def test_what_programs_send_is_telemetry_of_this_node_whatever_they_call_it(tmp_path: Path) -> None:
    agent = start_agent(tmp_path)
    assert post(agent, Request("", service_name="vllm").gauge("queue", 3.0).encode()) == 200
    assert post(agent, Request("another", service_name="trainer").gauge("loss", 0.5).encode()) == 200
    agent.tick(T0_NS // 1000 // 1_000_000 * 1_000_000)
    agent.close()
    assert stored(tmp_path, "SELECT entity, value FROM custom ORDER BY ALL") == [
        ("custom:n1.loss{service.name=trainer}", 0.5),
        ("custom:n1.queue{service.name=vllm}", 3.0),
    ]
    homes = [path.name for path in sorted((tmp_path / "spool" / "n1").iterdir()) if path.is_dir()]
    assert homes == [EVENTS, OTLP, TELEMETRY]


@pytest.mark.slow
def test_programs_cannot_replace_what_the_agent_measures(tmp_path: Path) -> None:
    agent = start_agent(tmp_path)
    assert post(agent, gpu_request("n1")) == 200
    agent.tick(T0_NS // 1000 // 1_000_000 * 1_000_000)
    agent.close()
    stored(tmp_path, "SELECT 1")  # the agent's telemetry first, so that the node has one
    assert stored(tmp_path, "SELECT count(*) FROM custom") == [(2,)]


def test_only_otlp_is_received_and_only_from_this_node(tmp_path: Path) -> None:
    agent = start_agent(tmp_path)
    assert post(agent, b"\xff\xff") == 400
    assert post(agent, b"", "/api/v1/write") == 404
    assert agent.receiver is not None
    assert agent.receiver.http is not None
    assert agent.receiver.http.server_address[0] == "127.0.0.1"
    agent.close()


def test_a_port_that_is_taken_delays_no_agent_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "TRY_AGAIN_S", 0.02)
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = Config(agent=sections.Agent(node="n1", otlp_port=port), spool=sections.Spool(tmp_path, free_bytes=0))
        receiver = LocalReceiver(
            config, Origin("site", "n1", bytes(16)), lambda: None, lambda _, text: lines.append(text)
        )
        until(lambda: bool(lines))
        assert lines[0].startswith(f"[agent] otlp_port = {port}: ")
        assert "in use" in lines[0]
    until(lambda: receiver.http is not None)
    assert send(port, "POST", OTLP_PATH, gpu_request(), TYPE)[0] == 200
    receiver.close(20.0)


def test_a_disk_that_does_not_respond_delays_neither_start_nor_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    responds = threading.Event()

    def open_spool(config: Config, node: str) -> object:
        responds.wait(20)
        raise OSError("never")

    monkeypatch.setattr(gateways, "open_spool", open_spool)
    config = Config(agent=sections.Agent(node="n1", otlp_port=1), spool=sections.Spool(tmp_path, free_bytes=0))
    receiver = LocalReceiver(config, Origin("site", "n1", bytes(16)), lambda: None, lambda *_: None)
    receiver.close(0.05)
    assert receiver.http is None
    responds.set()


def test_without_a_port_nothing_is_loaded(tmp_path: Path) -> None:
    config = Config(agent=sections.Agent(node="n1"), spool=sections.Spool(tmp_path, free_bytes=0))
    made = Agent(config, [Node()], None, io.StringIO())
    assert made.receiver is None
    made.close()
