"""The webhook adapter at a real HTTP server: signature, repetition, and what each answer means."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.acts.act import Act
from pipeline.acts.adapters.adapter import Adapter, StillRunning
from pipeline.acts.adapters.webhook import Webhook
from pipeline.acts.executor import Executor
from pipeline.acts.scheduler import SchedulerNode
from pipeline.config.acts import Acts, WebhookAccess
from pipeline.model.errors import ConfigError, Unreachable
from pipeline.store.database import Database
from tests.pipeline.acts_world import World

KEY = b"k" * 32
ACT = Act("ACT-1", "reboot", ("node:n1",), "alice", "XID 95", 0, 1, "on", incident="INC-7", params={"level": "3"})
NODE = SchedulerNode("n1", True, "DRAIN")


class House:
    """A tool that answers with what a test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = []
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        house = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                house.asked.append((dict(self.headers), json.loads(body)))
                status, text = house.answers.pop(0) if house.answers else (200, "done")
                said = [self.headers["webhook-id"], self.headers["webhook-timestamp"], body.decode()]
                wanted = base64.b64encode(hmac.digest(KEY, ".".join(said).encode(), hashlib.sha256)).decode()
                if self.headers["webhook-signature"] != f"v1,{wanted}":
                    status, text = 401, "wrong signature"
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                """Stays quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.stop()


def make_adapter(house: House, folder: Path, key: bytes = KEY) -> Webhook:
    secret = folder / "secret"
    secret.write_text(f"whsec_{base64.b64encode(key).decode()}\n")
    secret.chmod(0o600)
    url = f"http://127.0.0.1:{house.server.server_port}/acts"
    return Webhook(replace(Acts(), webhook=WebhookAccess(url, secret, True, ("127.0.0.0/8",))))


def test_a_signed_request_names_act_verb_and_node_and_200_is_done(house: House, tmp_path: Path) -> None:
    outcome = make_adapter(house, tmp_path).carry_out(ACT, NODE)
    assert (outcome.done, outcome.output) == (True, "done")
    headers, body = house.asked[0]
    assert headers["webhook-id"] == "ACT-1.n1.reboot"
    assert (body["verb"], body["node"], body["incident"], body["params"]) == ("reboot", "n1", "INC-7", {"level": "3"})
    assert body["note"].startswith("fleetpulse:ACT-1")


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("status", [202, 408, 429, 500, 503])
def test_not_yet_is_asked_again_with_the_same_id(house: House, tmp_path: Path, status: int) -> None:
    adapter = make_adapter(house, tmp_path)
    house.answers = [(status, "later")]
    with pytest.raises((Unreachable, StillRunning), match=rf"\[acts.webhook\]: HTTP {status}"):
        adapter.carry_out(ACT, NODE)
    assert adapter.is_waiting(ACT)
    assert adapter.carry_out(ACT, NODE).done
    assert not adapter.is_waiting(ACT)
    assert len({headers["webhook-id"] for headers, _ in house.asked}) == 1


@pytest.mark.parametrize("status", [400, 404, 409])
def test_a_refusal_fails_the_act_with_the_tools_words(house: House, tmp_path: Path, status: int) -> None:
    house.answers = [(status, "n1 is not in the inventory")]
    outcome = make_adapter(house, tmp_path).carry_out(ACT, NODE)
    assert (outcome.done, outcome.output) == (False, f"HTTP {status}: n1 is not in the inventory")


@pytest.mark.slow
def test_a_wrong_secret_is_refused_by_the_tool_and_a_tool_that_is_away_is_waited_for(
    house: House, tmp_path: Path
) -> None:
    outcome = make_adapter(house, tmp_path, b"x" * 32).carry_out(ACT, NODE)
    assert (outcome.done, outcome.output) == (False, "HTTP 401: wrong signature")
    adapter = make_adapter(house, tmp_path)
    house.server.socket.close()
    with pytest.raises(Unreachable):
        adapter.carry_out(ACT, NODE)


def test_an_undo_of_a_hold_is_a_verb_of_its_own(house: House, tmp_path: Path) -> None:
    assert make_adapter(house, tmp_path).undo(replace(ACT, verb="hold"), NODE).done
    assert house.asked[0][1]["verb"] == "undo"


@pytest.mark.parametrize(
    ("out", "reason", "held"),
    [
        (True, "fleetpulse:ACT-1 INC-7 alice hot", True),
        (True, "tool: taken out", None),  # neither watched nor released here
        (True, "fleetpulse:ACT-2 bob", None),
        (False, "", None),
    ],
)
def test_a_hold_by_a_tool_is_verified_by_its_mark_at_the_scheduler(
    house: House, tmp_path: Path, out: bool, reason: str, held: bool | None
) -> None:
    node = replace(NODE, out=out, reason=reason)
    assert make_adapter(house, tmp_path).find_effect(replace(ACT, verb="hold"), node) is held


def test_without_a_secret_or_with_one_that_cannot_be_read_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs both"):
        Webhook(Acts())
    access = WebhookAccess("https://tool.example/", tmp_path / "none")
    with pytest.raises(ConfigError, match="No such file"):
        Webhook(replace(Acts(), webhook=access))


class AskedWorld(World):
    """A world whose tickets and reboots are asked of the house tool."""

    def __init__(self, database: Database, adapter: Webhook) -> None:
        self.adapter = adapter
        super().__init__(database)

    def start_executor(self) -> Executor:
        def find(verb: str) -> Adapter:
            return self.adapter if verb == "ticket" else self.scheduler

        return Executor(self.board, self.config, self.scheduler, find, lambda: self.now)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_an_act_goes_on_while_the_tool_is_at_work_also_after_a_kill(house: House, tmp_path: Path, killed: bool) -> None:
    with closing(Database(tmp_path / "store.duckdb")) as database:
        world = AskedWorld(database, make_adapter(house, tmp_path))
        act = world.propose("ticket", "n03")
        world.approve(act)
        house.answers = [(202, "later"), (202, "later")]
        world.run()
        assert world.state(act) == "executing"
        if killed:
            world.adapter = make_adapter(house, tmp_path)
            world.executor = world.start_executor()
        world.run(4)
        steps = [step["state"] for step in world.board.describe(act.id)["history"]]
        assert steps[-1] == "verified"
        assert (steps.count("executing"), steps.count("executed")) == (2 if killed else 1, 1)
        assert len({headers["webhook-id"] for headers, _ in house.asked}) == 1
