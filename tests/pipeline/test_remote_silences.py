"""Silences that are read back from an Alertmanager: they delay no page; one that does not answer changes nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import Alertmanager, Notify
from pipeline.model.records import SECOND, Life, iso
from pipeline.notify.delivery import Answer, Request
from pipeline.notify.receivers.alertmanager import AlertmanagerEndpoint
from pipeline.notify.remote_silences import load_resent
from tests.pipeline.notifier_harness import START, NotifierHarness
from tests.pipeline.receiver_servers import Service
from tests.pipeline.test_receivers import service
from tests.until import until

__all__ = ["service"]


@pytest.fixture
def harness(tmp_path: Path, service: Service) -> Iterator[NotifierHarness]:
    made = NotifierHarness(tmp_path, [], Notify(alertmanagers=(Alertmanager("am", (service.url,)),)))
    yield made
    made.close()


def test_reading_them_delays_no_page(
    harness: NotifierHarness, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, stop, free = threading.Event(), threading.Event(), threading.Event()

    def read_slowly(*_: Any) -> dict[str, str]:
        reads.set()
        free.wait(600)
        return {}

    monkeypatch.setattr(AlertmanagerEndpoint, "read_silences", read_slowly)

    def arrived(cause: str) -> bool:
        return any(a["labels"]["cause"] == cause for body in service.bodies("/api/v2/alerts") for a in body)

    thread = threading.Thread(target=harness.notifier.run, args=(stop,))
    thread.start()
    try:
        harness.write_change("opened")
        harness.notifier.wake()
        until(lambda: arrived("gpu:n1.0"))
        harness.now += 120 * SECOND  # it is sent again, and silences are read back
        assert reads.wait(10)
        harness.write_change("opened", "gpu:n2.0")
        harness.notifier.wake()
        until(lambda: arrived("gpu:n2.0"))
        assert not free.is_set()
    finally:
        stop.set()
        free.set()
        thread.join(10)


class Remote:
    """An Alertmanager in which all alerts are silenced, each by one silence. dead: paths that get no answer."""

    def __init__(self) -> None:
        self.dead: tuple[str, ...] = ()
        self.asked: list[str] = []

    def __call__(self, request: Request, **_: Any) -> Answer:
        path = request.target.url.split("/api/v2")[1]
        self.asked.append(path.split("?")[0])
        if path.startswith(self.dead or ("-",)):
            return Answer(0, "no answer within 15 s")
        if request.body is not None:
            return Answer(200)
        if path.startswith("/alerts"):
            status = [{"silencedBy": [f"s{i}"], "inhibitedBy": []} for i in range(9)]
            rows = [{"labels": {"incident": f"inc-gpu:n{i}.0"}, "status": status[i]} for i in range(9)]
            return Answer(200, body=json.dumps(rows).encode())
        silence = {"createdBy": "ada", "endsAt": "2026-11-29T18:00:00Z", "comment": "cables"}
        return Answer(200, body=json.dumps(silence).encode())


def read(harness: NotifierHarness, remote: Remote) -> dict[str, str]:
    """Reads once, and returns the stored rows."""
    silences = harness.notifier.silences["am"]
    silences._call = remote
    silences.read()
    assert harness.database is not None
    found = harness.database.cursor().execute("SELECT incident, text FROM notify_silences").fetchall()
    assert len(found) == silences.count
    return dict(found)


def test_one_that_does_not_answer_is_asked_once_and_changes_nothing(harness: NotifierHarness) -> None:
    for number in range(9):
        harness.write_change("opened", f"gpu:n{number}.0")
    harness.send_due(name="am")
    remote = Remote()
    whole = read(harness, remote)
    assert set(whole.values()) == {"silenced by ada until 2026-11-29T18:00:00Z: cables"}
    assert len(whole) == 9
    remote.dead, remote.asked = ("/alerts",), []
    assert read(harness, remote) == whole
    remote.dead, remote.asked = ("/silence/",), []
    assert set(read(harness, remote).values()) == {"silenced"}
    assert remote.asked == ["/alerts", "/silence/s0"]


class Forgetful:
    """An Alertmanager with a list of silences, which a test empties. gone: whether it does not list them.

    undeletable: the status of its answer to the end of a silence, if it refuses it.
    """

    def __init__(self) -> None:
        self.silences: list[dict[str, Any]] = []
        self.gone = False
        self.undeletable = 0

    def __call__(self, request: Request, **_: Any) -> Answer:
        path = request.target.url.split("/api/v2")[1]
        if request.method == "DELETE":
            return self._end(path.rsplit("/", 1)[1])
        if not path.startswith("/silences"):
            if request.body is not None:
                return Answer(200)
            active = [s["matchers"][0]["value"] for s in self.silences if s["status"]["state"] == "active"]
            rows = [{"labels": {"incident": i}, "status": {"silencedBy": ["s0"], "inhibitedBy": []}} for i in active]
            return Answer(200, body=json.dumps(rows if path.startswith("/alerts?") else {}).encode())
        if request.body is None:
            return Answer(500 if self.gone else 200, body=json.dumps(self.silences).encode())
        id_ = f"s{len(self.silences)}"
        self.silences.append({**json.loads(request.body), "id": id_, "status": {"state": "active"}})
        return Answer(200, body=json.dumps({"silenceID": id_}).encode())

    def _end(self, id_: str) -> Answer:
        if not self.undeletable:
            (one,) = [s for s in self.silences if s["id"] == id_ and s["status"]["state"] == "active"]
            one["status"] = {"state": "expired"}
        return Answer(self.undeletable or 200)

    @property
    def states(self) -> list[str]:
        return [one["status"]["state"] for one in self.silences]


@pytest.fixture
def acknowledged(tmp_path: Path) -> Iterator[tuple[NotifierHarness, Forgetful]]:
    """A page whose acknowledgement is a silence of 15 minutes at an Alertmanager."""
    push = Alertmanager("am", ("http://127.0.0.1:1",), ack_as_silence="15m", allow_http=True)
    made, remote = NotifierHarness(tmp_path, [], Notify(alertmanagers=(push,))), Forgetful()
    made.notifier._call = made.notifier.silences["am"]._call = remote  # type: ignore[assignment]
    for kind, state, by in (("opened", "open", ""), ("acknowledged", "acknowledged", "ada")):
        made.write_change(kind, state=state, life=Life(acknowledged_by=by))
        assert made.send_due(name="am") == 1
    made.notifier.silences["am"].read()
    assert len(remote.silences) == 1
    yield made, remote
    made.close()


def test_an_alertmanager_that_lost_its_disk_gets_the_rest_of_the_silence_of_an_acknowledgement(
    acknowledged: tuple[NotifierHarness, Forgetful],
) -> None:
    harness, remote = acknowledged
    (made,), remote.silences = remote.silences, []
    harness.now += 300 * SECOND
    remote.gone = True
    harness.notifier.silences["am"].read()
    assert remote.silences == []
    remote.gone = False
    for _ in range(2):
        harness.notifier.silences["am"].read()
    assert remote.silences == [{**made, "startsAt": iso(harness.now)}]
    remote.silences.clear()
    harness.now += 601 * SECOND
    harness.notifier.silences["am"].read()
    assert remote.silences == [], "its length has passed"


def test_a_silence_is_not_made_again_blindly_in_the_microsecond_in_which_it_was_made(
    acknowledged: tuple[NotifierHarness, Forgetful],
) -> None:
    harness, remote = acknowledged
    remote.silences[0]["status"] = {"state": "expired"}  # a person ended it, and the list of silences is not answered
    remote.gone = True
    harness.notifier.silences["am"].read()
    assert len(remote.silences) == 1


def test_a_silence_that_ended_there_or_whose_acknowledgement_ended_is_not_made_again(
    acknowledged: tuple[NotifierHarness, Forgetful],
) -> None:
    harness, remote = acknowledged
    remote.silences[0]["status"] = {"state": "expired"}
    harness.notifier.silences["am"].read()
    assert len(remote.silences) == 1
    remote.silences.clear()
    harness.write_change("acknowledgement_expired", state="open", life=Life())
    harness.notifier.silences["am"].read()
    assert remote.silences == []


ENDS: list[tuple[Any, dict[str, Any]]] = [
    ("worsened", {"state": "open", "life": Life()}),
    ("severity_raised", {"state": "open", "life": Life(), "severity": "page"}),
    ("acknowledgement_expired", {"state": "open", "life": Life()}),
    ("resolved", {"state": "resolved", "resolved": START}),
]


@pytest.mark.parametrize(("kind", "now"), ENDS, ids=[kind for kind, _ in ENDS])
def test_the_end_of_an_acknowledgement_ends_its_silence_and_none_of_a_person(
    tmp_path: Path, kind: Any, now: dict[str, Any]
) -> None:
    push = Alertmanager("am", ("http://127.0.0.1:1",), ack_as_silence="15m", allow_http=True)
    harness, remote = NotifierHarness(tmp_path, [], Notify(alertmanagers=(push,))), Forgetful()
    harness.notifier._call = remote  # type: ignore[assignment]
    acknowledged = {"state": "acknowledged", "life": Life(acknowledged_by="ada")}
    for change, state in (("opened", {"severity": "ticket"}), ("acknowledged", acknowledged)):
        harness.write_change(change, **state)
        assert harness.send_due(name="am") == 1
    made = {one["name"]: one["value"] for one in remote.silences[0]["matchers"]}
    assert made == {"incident": "inc-gpu:n1.0", "severity": "warning"}
    remote.silences.append({**remote.silences[0], "id": "s1", "comment": "new cables"})
    harness.write_change(kind, **now)
    remote.undeletable = 503
    assert harness.send_due(name="am") == 1
    assert harness.read_answer() == "HTTP 503: the silence of an acknowledgement was not ended"
    remote.undeletable = 0
    assert harness.send_due(1, name="am") == 1
    assert remote.states == ["expired", "active"]
    harness.close()


def test_an_escalation_of_what_is_acknowledged_keeps_its_silence_and_what_is_gone_is_no_failure(
    acknowledged: tuple[NotifierHarness, Forgetful],
) -> None:
    harness, remote = acknowledged
    harness.write_change("escalated")
    assert harness.send_due(name="am") == 1
    assert set(remote.states) == {"active"}
    remote.undeletable = 404
    harness.write_change("worsened", state="open", life=Life())
    assert harness.send_due(name="am") == 1
    assert harness.send_due(1, name="am") == 0


def test_a_resolve_whose_silence_cannot_be_ended_is_not_undone_by_the_resend(
    acknowledged: tuple[NotifierHarness, Forgetful],
) -> None:
    harness, remote = acknowledged

    def list_resent() -> list[str]:
        assert harness.database is not None
        return [str(one["status"]) for one in load_resent(harness.database, "am", harness.now)]

    remote.undeletable = 503
    harness.resolve()
    assert list_resent() == ["firing"], "it was not pushed yet"
    harness.send_due(name="am")
    assert harness.rows()[-1] == ("resolved", "pending", 1)
    assert list_resent() == ["resolved"]
    harness.write_change("reopened", resolved=None, state="open", life=Life())
    assert harness.rows()[-1] == ("firing", "pending", 0), "it waits behind the resolve"
    assert list_resent() == ["firing"]
    harness.resolve()
    assert harness.database is not None
    with harness.database.transaction() as connection:
        connection.execute("UPDATE outbox SET state = 'dead' WHERE state = 'pending' AND attempts > 0")
        connection.execute("DELETE FROM outbox WHERE state = 'pending'")
    harness.now += 7 * 3600 * SECOND
    assert list_resent() == []


@pytest.mark.parametrize(
    "row", [None, 7, {"status": None, "labels": None}, {"status": "x"}, {"status": {"silencedBy": 1}}]
)
def test_rows_of_silences_that_are_none_are_skipped(acknowledged: tuple[NotifierHarness, Forgetful], row: Any) -> None:
    harness, remote = acknowledged

    def call(request: Request, **more: Any) -> Answer:
        answer = remote(request, **more)
        if request.body is None and request.method == "GET" and b"[" in answer.body[:1]:
            return Answer(200, body=json.dumps([row, *json.loads(answer.body)]).encode())
        return answer

    harness.notifier._call = harness.notifier.silences["am"]._call = call  # type: ignore[assignment]
    harness.notifier.silences["am"].read()
    assert harness.notifier.silences["am"].count >= 1
    harness.resolve()
    harness.send_due(name="am")
    assert (harness.rows()[-1], remote.states) == (("resolved", "delivered", 1), ["expired"])
