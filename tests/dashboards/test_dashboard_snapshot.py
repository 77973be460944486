"""The cache shared by viewers, and the last known state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dashboards import snapshot
from dashboards.client import API_URL, ApiError, Client
from dashboards.snapshot import AnswerCache, CachedAnswer
from dashboards.views import parts
from pipeline.model.records import SECOND


def test_all_viewers_share_one_request(api: Any) -> None:
    answers = [snapshot.fetch_fleet() for _ in range(5)]
    assert len([path for path, _ in api.asked if path == "fleet"]) == 1
    assert len({answer.fetched for answer in answers}) == 1


def test_two_apis_do_not_share_the_cache(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot.fetch_fleet().value is not None
    monkeypatch.setenv(API_URL, "http://127.0.0.1:9")
    answer = snapshot.fetch_fleet()
    assert answer.value is None
    assert "does not answer" in answer.error


def test_a_note_is_visible_in_the_next_response(api: Any) -> None:
    before = snapshot.fetch_incident("A1").value
    assert before is not None
    assert before.incident.state == "open"
    snapshot.write_note("A1", "acknowledge", "mine")
    after = snapshot.fetch_incident("A1").value
    assert after is not None
    assert after.incident.state == "acknowledged"


def test_a_refused_note_is_an_error(api: Any) -> None:
    api.broken["incidents/A1/resolve"] = (409, b'{"detail": "it is resolved already"}')
    with pytest.raises(ApiError, match="It is resolved already"):
        snapshot.write_note("A1", "resolve", "")


def test_the_last_good_response_stays_with_the_error() -> None:
    last = AnswerCache()
    last.update("q", CachedAnswer("good", 1))
    kept = last.update("q", CachedAnswer(None, 2, "refused"))
    assert kept == CachedAnswer("good", 1, "refused")


def test_an_error_without_a_good_response_is_an_error() -> None:
    assert AnswerCache().update("q", CachedAnswer(None, 2, "refused")).value is None


def test_a_404_is_a_response() -> None:
    last = AnswerCache()
    last.update("q", CachedAnswer("good", 1))
    assert last.update("q", CachedAnswer(None, 2, "no such incident", 404)).value is None
    assert last.update("q", CachedAnswer(None, 3, "refused")).value is None


def test_the_cache_is_bounded_and_drops_the_oldest() -> None:
    last = AnswerCache(most=2)
    for name in ("a", "b", "c"):
        last.update(name, CachedAnswer(name, 1))
    assert last.update("a", CachedAnswer(None, 2, "refused")).value is None
    assert last.update("c", CachedAnswer(None, 2, "refused")).value == "c"


def test_a_response_read_before_a_write_is_not_shown_after_it(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Client.fetch_incident

    def read_and_be_overtaken(client: Client, identity: str) -> Any:
        found = read(client, identity)
        if not api.posted:
            snapshot.write_note("A1", "acknowledge", "")
        return found

    monkeypatch.setattr(Client, "fetch_incident", read_and_be_overtaken)
    states = [answer.value.incident.state for _ in range(2) if (answer := snapshot.fetch_incident("A1")).value]
    assert states == ["open", "acknowledged"]


def test_the_last_good_response_stays_while_its_time_range_moves_on(api: Any) -> None:
    before = snapshot.fetch_series("rank:81.17", "rank.compute_time", 0, 60 * SECOND, "Onset")
    assert before.value is not None
    api.broken["series"] = (503, b'{"detail": "away"}')
    after = snapshot.fetch_series("rank:81.17", "rank.compute_time", 0, 70 * SECOND, "Onset")
    assert after.value == before.value
    assert "Away" in after.error
    other = snapshot.fetch_series("rank:81.17", "rank.compute_time", 0, 80 * SECOND, "7 d")
    assert other.value is None


def test_of_several_faults_the_earliest_is_since_when_a_page_is_unknown(api: Any) -> None:
    known = snapshot.fetch_fleet_of().value
    assert known is not None
    now = known.as_of + 600 * SECOND
    stalled = replace(known, stalled=True, watermark=known.as_of - 300 * SECOND)
    fresh = CachedAnswer(stalled, now)
    assert parts.unknown_since(fresh, fresh, now) == stalled.watermark
    for broken in (replace(fresh, error="no answer"), replace(fresh, fetched=now - 60 * SECOND)):
        assert parts.unknown_since(broken, broken, now) == stalled.watermark
        assert parts.unknown_since(broken, fresh, now) == stalled.watermark
    sound = CachedAnswer(replace(known, stalled=False), now)
    assert parts.unknown_since(sound, sound, now) is None
    assert parts.unknown_since(replace(sound, error="no answer"), sound, now) == now
