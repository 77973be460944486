"""Real Alertmanagers, Debian's 0.25 and 0.34: they show, group, silence and resolve alerts that we push."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import Alertmanager as AlertmanagerConfig
from pipeline.config.receivers import Notify, Webhook
from pipeline.config.sections import Config
from pipeline.model.records import SECOND, Life, iso
from pipeline.notify.alertmanager import compute_fingerprint
from pipeline.notify.receivers import Message
from pipeline.notify.receivers.webhook import make_version_4
from tests.alertmanager import Alertmanager, find_programs
from tests.parts import do_without
from tests.pipeline.notifier_harness import NotifierHarness
from tests.until import until

pytestmark = pytest.mark.alertmanager
GROUPS = """
route:
  receiver: hook
  group_by: [alertname]
  group_wait: 100ms
  group_interval: 300ms
receivers:
- name: hook
  webhook_configs:
  - url: %s
"""


class Hook(http.server.ThreadingHTTPServer):
    """Keeps the bodies that Alertmanager posts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HookHandler)
        self.bodies: list[dict[str, Any]] = []


class HookHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["distribution", "built"])
def real(request: pytest.FixtureRequest, tmp_path: Path, hook: Hook) -> Iterator[Alertmanager]:
    """A running Alertmanager that posts to the hook."""
    program = find_programs().get(request.param)
    if program is None:
        do_without("alertmanager", f"no Alertmanager ({request.param}): run 'make parts'")
    one = Alertmanager(program, tmp_path, GROUPS % f"http://127.0.0.1:{hook.server_port}/")
    one.start()
    yield one
    one.kill()


@pytest.fixture
def harness(tmp_path: Path, real: Alertmanager) -> Iterator[NotifierHarness]:
    push = AlertmanagerConfig("am", (real.url,), ack_as_silence="15m")
    made = NotifierHarness(tmp_path, [], Notify(alertmanagers=(push,)), time.time_ns() // 1000)
    yield made
    made.close()


def alerts(real: Alertmanager, query: str = "") -> dict[str, Any]:
    """Returns incident -> alert."""
    return {row["labels"]["incident"]: row for row in real.get(f"/alerts{query}")}


def test_alerts_are_shown_grouped_and_resolved(harness: NotifierHarness, real: Alertmanager, hook: Hook) -> None:
    for cause in ("gpu:n1.0", "gpu:n2.0"):
        harness.write_change("opened", cause)
    assert harness.send_due(name="am") == 2
    shown = alerts(real)
    assert set(shown) == {"inc-gpu:n1.0", "inc-gpu:n2.0"}
    one = shown["inc-gpu:n1.0"]
    assert one["fingerprint"] == compute_fingerprint(one["labels"])
    assert one["status"]["state"] in ("active", "unprocessed")
    until(lambda: any(len(body["alerts"]) == 2 and body["status"] == "firing" for body in hook.bodies))
    assert hook.bodies[-1]["groupLabels"] == {"alertname": "SilentDataCorruption"}
    check_body(harness, hook.bodies[-1])
    harness.now = (
        time.time_ns() // 1000
    )  # an end in Alertmanager's future would lose against the one three minutes ahead
    harness.resolve("gpu:n1.0")
    harness.send_due(name="am")
    until(lambda: any(a["status"] == "resolved" for body in hook.bodies for a in body["alerts"]))
    ended = [a["labels"]["incident"] for body in hook.bodies for a in body["alerts"] if a["status"] == "resolved"]
    assert set(ended) == {"inc-gpu:n1.0"}


def check_body(harness: NotifierHarness, real: dict[str, Any]) -> None:
    """Our own webhook's body has exactly the fields of the newest Alertmanager's, and all of an older one's."""
    assert harness.database is not None
    text = harness.database.cursor().execute("SELECT payload FROM outbox LIMIT 1").fetchall()[0][0]
    message = Message("m", "inc-gpu:n1.0", "firing", json.loads(text))
    ours = make_version_4(message, "am", 0)
    assert set(real) <= set(ours)
    assert "routeLabels" not in real or set(real) == set(ours)
    assert set(real["alerts"][0]) == set(ours["alerts"][0])
    theirs = next(a for a in real["alerts"] if a["labels"]["incident"] == "inc-gpu:n1.0")
    for field in ("labels", "annotations", "fingerprint", "status"):
        assert theirs[field] == ours["alerts"][0][field]
    assert theirs["endsAt"] == ours["alerts"][0]["endsAt"] == "0001-01-01T00:00:00Z"
    assert {name: type(value) for name, value in real.items()} == {name: type(ours[name]) for name in real}


def test_a_silence_there_is_read_back_with_its_author(harness: NotifierHarness, real: Alertmanager) -> None:
    harness.write_change("opened")
    harness.send_due(name="am")
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    silence = {
        "matchers": [{"name": "detector", "value": "sdc", "isRegex": False, "isEqual": True}],
        "startsAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "endsAt": ends,
        "createdBy": "ada",
        "comment": "new cables",
    }
    assert real.post("/silences", silence)[0] == 200
    until(lambda: alerts(real)["inc-gpu:n1.0"]["status"]["state"] == "suppressed")
    harness.notifier.silences["am"].read()
    assert harness.database is not None
    rows = harness.database.cursor().execute("SELECT receiver, incident, text FROM notify_silences").fetchall()
    assert rows == [("am", "inc-gpu:n1.0", f"silenced by ada until {ends[:19]}Z: new cables")]


def test_an_acknowledgement_is_a_silence_there_once(harness: NotifierHarness, real: Alertmanager) -> None:
    harness.write_change("opened")
    harness.send_due(name="am")
    harness.actor, harness.comment = "ada", "on it"
    harness.write_change("acknowledged", state="acknowledged")
    assert harness.send_due(name="am") == 1
    assert harness.database is not None
    with harness.database.transaction() as connection:  # as after a crash before the answer was stored
        connection.execute("UPDATE outbox SET state = 'pending' WHERE kind = 'update'")
    assert harness.send_due(name="am") == 1
    (silence,) = real.get("/silences")
    assert (silence["createdBy"], silence["status"]["state"]) == ("ada", "active")
    assert silence["comment"].startswith("Acknowledged in Fleetpulse: on it")
    until(lambda: alerts(real)["inc-gpu:n1.0"]["status"]["state"] == "suppressed")


def test_what_is_acknowledged_already_is_shown_there_under_a_silence_that_begins_before_it(
    harness: NotifierHarness, real: Alertmanager, hook: Hook
) -> None:
    """As for a part that was split from what a person acknowledged. The silence ends with the acknowledgement."""
    ends = harness.now + 300 * SECOND
    life = Life(acknowledged_by="ada", acknowledged_until=ends)
    harness.write_change("opened", state="acknowledged", life=life)
    assert harness.send_due(name="am") == 1
    (silence,) = real.get("/silences")
    assert (silence["createdBy"], silence["status"]["state"]) == ("ada", "active")
    assert silence["endsAt"][:19] == iso(ends)[:19]
    until(lambda: alerts(real)["inc-gpu:n1.0"]["status"]["state"] == "suppressed")
    harness.write_change("opened", "gpu:n2.0")
    harness.send_due(name="am")
    until(lambda: [a["labels"]["cause"] for body in hook.bodies for a in body["alerts"]] == ["gpu:n2.0"])


def test_what_becomes_a_page_after_its_acknowledgement_pages_and_its_end_leaves_no_silence(
    harness: NotifierHarness, real: Alertmanager, hook: Hook
) -> None:
    harness.write_change("opened", severity="ticket")
    harness.send_due(name="am")
    harness.write_change("acknowledged", state="acknowledged", life=Life(acknowledged_by="ada"))
    harness.send_due(name="am")
    until(lambda: alerts(real)["inc-gpu:n1.0"]["status"]["state"] == "suppressed")
    harness.now = time.time_ns() // 1000
    harness.write_change("severity_raised", severity="page", state="open", life=Life())
    assert harness.send_due(name="am") == 1
    until(lambda: alerts(real)["inc-gpu:n1.0"]["status"]["state"] == "active")
    until(lambda: any(a["labels"]["severity"] == "critical" for body in hook.bodies for a in body["alerts"]))
    assert [one["status"]["state"] for one in real.get("/silences")] == ["expired"]
    harness.write_change("acknowledged", state="acknowledged", life=Life(acknowledged_by="ada"))
    harness.send_due(name="am")
    harness.now = time.time_ns() // 1000
    harness.resolve()
    harness.send_due(name="am")
    assert {one["status"]["state"] for one in real.get("/silences")} == {"expired"}
    until(lambda: any(a["status"] == "resolved" for a in hook.bodies[-1]["alerts"]))


def test_one_that_forgot_everything_gets_all_alerts_and_the_watchdog_when_it_is_back(
    harness: NotifierHarness, real: Alertmanager
) -> None:
    for cause in ("gpu:n1.0", "gpu:n2.0"):
        harness.write_change("opened", cause)
    harness.send_due(name="am")
    harness.notifier.send_watchdog("am")
    assert set(alerts(real)) == {"inc-gpu:n1.0", "inc-gpu:n2.0", "watchdog"}
    real.kill()
    harness.write_change("opened", "gpu:n3.0")
    for _ in range(4):
        harness.send_due(6, "am")
    assert harness.notifier.health["am"].is_down
    real.start()
    seconds = 0
    while set(alerts(real)) != {"inc-gpu:n1.0", "inc-gpu:n2.0", "inc-gpu:n3.0", "watchdog"}:
        seconds += 1
        assert seconds <= 5
        harness.send_due(1, "am")
        harness.notifier.send_watchdog("am")


def test_a_bad_alert_among_many_does_not_keep_the_others_out(harness: NotifierHarness, real: Alertmanager) -> None:
    good = {"alertname": "A", "severity": "info", "entity": "e", "cause": "e", "detector": "d", "incident": "i"}
    rows = [
        {
            "status": "firing",
            "labels": {**good, "incident": f"i{i}"},
            "annotations": {},
            "startsAt": "not a time" if i == 7 else "2026-01-01T00:00:00Z",
            "endsAt": "0001-01-01T00:00:00Z",
        }
        for i in range(20)
    ]
    endpoint = harness.notifier.receivers["am"]
    call = harness.notifier._call
    assert endpoint.resend(rows, harness.now, call).outcome == "delivered"
    assert len(alerts(real)) == 19


def test_its_own_health_check_tells_it_from_another_server(
    harness: NotifierHarness, real: Alertmanager, hook: Hook, tmp_path: Path
) -> None:
    from pipeline.commands.notify import check_receivers, run_test

    assert harness.notifier.receivers["am"].probe(harness.notifier._call) is not None
    wrong = Webhook("wrong", f"{real.url}/api/v2/alerts")
    config = Config(notify=Notify(webhooks=(wrong,), alertmanagers=(AlertmanagerConfig("am", (real.url,)),)))
    checks = check_receivers(config)
    assert isinstance(checks, list)
    assert [(c.name, c.state) for c in checks] == [("receiver wrong", "info"), ("receiver am", "ok")]
    rows, _, code = run_test(config, "wrong", "info", lambda line: None)
    assert (code, rows[0]["status"]) == (1, 400)
    said: list[str] = []
    rows, _, code = run_test(config, "am", "info", said.append)
    assert (code, [row["status"] for row in rows]) == (0, [200, 200])
