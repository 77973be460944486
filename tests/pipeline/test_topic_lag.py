"""Lag by topic: from the newest reading of a message to its commit."""

from __future__ import annotations

from typing import cast

import pytest

from pipeline.ingest.messages import Item
from pipeline.ingest.topic_lag import MAX_COMMITS, SAMPLED, WINDOW, TopicLag, TopicLags
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Event
from pipeline.transport import Message, Partition
from tests.pipeline.conftest import NOW, Site


def item(lag_s: float, now: int = NOW, topic: str = TELEMETRY, incarnation: str = "i") -> Item:
    """Returns a message whose newest reading is `lag_s` old at `now`."""
    newest = now - int(lag_s * SECOND)
    message = Message(Partition(topic, "n1", incarnation), 0, b"")
    return cast(Item, Item(message, None, newest - 9 * SECOND, newest, {}, 0, 0))  # type: ignore[arg-type]


def test_ingest_measures_from_the_newest_reading_to_the_commit_by_topic(site: Site) -> None:
    site.send("n1", NOW - 8 * SECOND, ticks=3)  # the newest of three is 6 s old
    site.send("n2", NOW - 40 * SECOND)
    site.send_events("n1", Event(NOW - 2 * SECOND, "gpu:n1.0", "xid", {"xid": 79}))
    found = site.drain().lags.summarize(NOW)
    assert found == {EVENTS: TopicLag(1, 2.0, 2.0, 2.0), TELEMETRY: TopicLag(2, 6.0, 40.0, 40.0)}


def test_a_sampled_message_stands_for_its_whole_commit() -> None:
    lags = TopicLags()
    lags.record([item(1)] * 100 * SAMPLED, NOW)
    lags.record([item(50)] * SAMPLED, NOW)  # 1 % of all messages, half of the samples
    found = lags.summarize(NOW)[TELEMETRY]
    assert (found.messages, found.p50, found.longest) == (101 * SAMPLED, 1.0, 50.0)


@pytest.mark.parametrize(("age", "known"), [(0, True), (WINDOW, True), (WINDOW + 1, False), (-SECOND, False)])
def test_only_messages_of_the_window_count(age: int, known: bool) -> None:
    lags = TopicLags()
    lags.record([item(1)], NOW - age)
    assert bool(lags.summarize(NOW)) is known


def test_messages_of_a_clock_that_is_ahead_have_no_lag_and_reread_letters_do_not_count() -> None:
    lags = TopicLags()
    lags.record([item(-30), item(9000, incarnation="")], NOW)
    assert lags.summarize(NOW) == {TELEMETRY: TopicLag(1, 0.0, 0.0, 0.0)}


def test_memory_is_bounded() -> None:
    lags = TopicLags()
    for _ in range(MAX_COMMITS + 5):
        lags.record([item(1)] * 3, NOW)
    assert lags.summarize(NOW)[TELEMETRY].messages == 3 * MAX_COMMITS
