"""While an inhibition holds alerts and nothing changes, the threads of receivers read and decide nothing again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import InhibitRule, Notify, Route, Webhook
from pipeline.model.records import Life
from pipeline.notify import held_rows
from tests.pipeline.notifier_harness import NotifierHarness, Receiver

SOURCE, PAGES = "cdu:c1", [f"gpu:n{n}.0" for n in range(5)]
NAMES = ("r0", "r1", "r2")


@pytest.fixture
def harness(tmp_path: Path, receiver: Receiver) -> Iterator[NotifierHarness]:
    rule = InhibitRule((f'cause="{SOURCE}"',), ('cause=~"gpu:.*"',))
    hooks = tuple(Webhook(name, f"http://127.0.0.1:{receiver.server_port}/") for name in NAMES)
    made = NotifierHarness(tmp_path, [], Notify(webhooks=hooks, inhibit_rules=(rule,)))
    made.write_change("opened", SOURCE)
    for page in PAGES:
        made.write_change("opened", page)
    yield made
    made.close()


def count_reads(harness: NotifierHarness, rounds: int = 1) -> dict[str, int]:
    """How often the rounds of all receivers read the open incidents, and decided about held messages."""
    counts = Counter[str]()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*given: Any) -> Any:
            counts[name] += 1
            return real(*given)

        setattr(owner, name, counted)

    count(harness.notifier._inhibitor, "find_all")
    for held in harness.notifier._held.values():
        count(held, "_decide_and_flush")
    for _ in range(rounds):
        for name in NAMES:
            harness.send_due(0.5, name)
    del harness.notifier._inhibitor.find_all
    for held in harness.notifier._held.values():
        del held._decide_and_flush
    return dict(counts)


def test_receivers_read_what_is_held_once_and_the_open_incidents_once_for_all_of_them(harness: NotifierHarness) -> None:
    assert count_reads(harness, 3) == {"find_all": 1, "_decide_and_flush": 3}
    assert count_reads(harness, 20) == {}


def test_every_change_that_decides_about_held_messages_is_noticed(harness: NotifierHarness, receiver: Receiver) -> None:
    count_reads(harness, 3)
    harness.write_change("acknowledged", PAGES[0], state="acknowledged", life=Life(acknowledged_by="ann"))
    assert count_reads(harness, 3) == {"find_all": 1}
    harness.write_change("opened", "gpu:n9.0")
    assert count_reads(harness, 3) == {"find_all": 1, "_decide_and_flush": 3}
    harness.write_change("opened", "cdu:c2")
    assert count_reads(harness, 3) == {"find_all": 1, "_decide_and_flush": 3}
    harness.write_change("silenced", PAGES[1], life=Life(silenced_by=("s1",)))
    assert count_reads(harness, 3)["_decide_and_flush"] >= 3
    assert harness.database is not None
    harness.database.connection.execute("UPDATE outbox SET attempts = attempts + 1")
    assert count_reads(harness, 3) == {}
    sent = len(receiver.posts)
    harness.resolve(SOURCE)
    assert count_reads(harness, 3)["find_all"] == 1
    assert len(receiver.posts) == sent + 3 * 6, "the end of the source, four pages that waited, and the new one"


def test_all_that_is_held_is_decided_about_after_a_change_also_if_it_is_read_in_parts(
    harness: NotifierHarness, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.notify.held_messages.MOST", 2)
    assert count_reads(harness, 8)["_decide_and_flush"] >= 9
    assert count_reads(harness, 3) == {}
    harness.resolve(SOURCE)
    count_reads(harness, 8)
    causes = Counter(a["labels"]["cause"] for _, b in receiver.posts for a in b["alerts"])
    assert causes == {SOURCE: 6, **dict.fromkeys(PAGES, 3)}
    assert count_reads(harness, 3) == {}


def test_a_page_that_waits_for_its_end_elsewhere_to_arrive_is_decided_about_again_only_then(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    page = PAGES[0]
    harness.resolve(SOURCE)
    count_reads(harness, 3)
    receiver.statuses = [503] * 1000
    harness.resolve(page)
    assert harness.notify is not None
    harness.notify = replace(harness.notify, route=Route("r0", group_by=("cause",), group_wait="0s"))
    count_reads(harness, 10)
    harness.restart()
    harness.write_change("reopened", page, resolved=None, state="open")
    count_reads(harness, 10)
    assert harness.notifier.health["r0"].is_down
    assert count_reads(harness, 20).get("_decide_and_flush", 0) == 0
    sent, receiver.statuses = len(receiver.posts), []
    count_reads(harness, 20)
    keys = [body["groupKey"] for _, body in receiver.posts[sent:] if body["status"] == "firing"]
    assert [status for status, cause in receiver.alerts[sent:] if cause == page][-1] == "firing"
    assert [key for key in keys if page in key] == [f'{{}}:{{cause="{page}"}}']
    assert count_reads(harness, 3) == {}


@pytest.mark.parametrize(("matcher", "is_repeated"), [('cause=~"gpu.*"', True), ('cause=~"cdu.*"', False)])
def test_a_group_is_repeated_while_a_route_leads_its_alert_to_its_receiver(
    harness: NotifierHarness, receiver: Receiver, matcher: str, is_repeated: bool
) -> None:
    def use(matcher: str) -> None:
        below = {"receiver": "r0", "matchers": [matcher], "group_wait": "0s"}
        route = Route("r1", group_by=("cause",), group_interval="30s", repeat_interval="10m", routes=(below,))
        assert harness.notify is not None
        harness.notify = replace(harness.notify, route=route, inhibit_rules=())
        harness.restart()

    use('cause=~"gpu:.*"')
    harness.write_change("opened", "gpu:n9.0")
    count_reads(harness, 3)
    use(matcher)
    for _ in range(50):
        harness.send_due(30, "r0")
    found = [body for _, body in receiver.posts if body["groupLabels"].get("cause") == "gpu:n9.0"]
    assert {body["receiver"] for body in found} == {"r0"}
    assert len(found) == (3 if is_repeated else 1)


def test_a_store_that_fails_in_a_round_is_tried_again(harness: NotifierHarness, receiver: Receiver) -> None:
    held = harness.notifier._held["r0"]
    real = held._write

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    held._write = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(OSError, match="no space"):
        harness.send_due(0.5)
    held._write = real  # type: ignore[method-assign]
    harness.send_due(0.5)
    harness.resolve(SOURCE)
    harness.send_due(0.5)
    harness.send_due(0.5)
    assert {cause for _, cause in receiver.alerts} == {SOURCE, *PAGES}


def test_a_page_is_held_whose_source_is_written_with_it_in_the_middle_of_a_round(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = InhibitRule((f'cause="{SOURCE}"',), ('cause=~"gpu:.*"',))
    hook = Webhook("r0", f"http://127.0.0.1:{receiver.server_port}/")
    made = NotifierHarness(tmp_path, [], Notify(webhooks=(hook,), inhibit_rules=(rule,)))
    made.write_change("opened", PAGES[0])
    real = held_rows.load_rows

    def read(*given: Any) -> Any:
        monkeypatch.undo()
        made.write_change("opened", SOURCE)
        made.write_change("opened", PAGES[1])
        return real(*given)

    monkeypatch.setattr(held_rows, "load_rows", read)
    for _ in range(4):
        made.send_due(0.5, "r0")
    assert SOURCE in {a["labels"]["cause"] for _, body in receiver.posts for a in body["alerts"]}
    assert PAGES[1] not in {a["labels"]["cause"] for _, body in receiver.posts for a in body["alerts"]}
    made.close()
