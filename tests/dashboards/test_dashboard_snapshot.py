"""What viewers share, and what stays when the API falls silent."""

from __future__ import annotations

from typing import Any

import pytest

from dashboards import snapshot
from dashboards.client import API_URL, ApiError
from dashboards.snapshot import Answer, LastGood


def test_one_question_is_put_to_the_api_once_for_all_viewers(api: Any) -> None:
    answers = [snapshot.fleet() for _ in range(5)]
    assert len([path for path, _ in api.asked if path == "fleet"]) == 1
    assert len({answer.fetched for answer in answers}) == 1


def test_two_apis_do_not_share_answers(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot.fleet().value is not None
    monkeypatch.setenv(API_URL, "http://127.0.0.1:9")
    answer = snapshot.fleet()
    assert answer.value is None
    assert "does not answer" in answer.error


def test_a_note_is_seen_by_the_next_look(api: Any) -> None:
    before = snapshot.incident("A1").value
    assert before is not None
    assert before.incident.state == "open"
    snapshot.act("A1", "acknowledge", "mine")
    after = snapshot.incident("A1").value
    assert after is not None
    assert after.incident.state == "acknowledged"


def test_a_note_that_the_api_refuses_is_an_error(api: Any) -> None:
    api.broken["incidents/A1/resolve"] = (409, b'{"detail": "it is resolved already"}')
    with pytest.raises(ApiError, match="It is resolved already"):
        snapshot.act("A1", "resolve", "")


def test_the_last_good_answer_stays_with_the_error_beside_it() -> None:
    last = LastGood()
    last.keep("q", Answer("good", 1))
    kept = last.keep("q", Answer(None, 2, "refused"))
    assert kept == Answer("good", 1, "refused")


def test_an_error_without_a_good_answer_before_is_an_error() -> None:
    assert LastGood().keep("q", Answer(None, 2, "refused")).value is None


def test_that_something_is_not_there_is_an_answer() -> None:
    last = LastGood()
    last.keep("q", Answer("good", 1))
    assert last.keep("q", Answer(None, 2, "no such incident", 404)).value is None
    assert last.keep("q", Answer(None, 3, "refused")).value is None


def test_answers_kept_are_bounded_and_the_oldest_goes_first() -> None:
    last = LastGood(most=2)
    for name in ("a", "b", "c"):
        last.keep(name, Answer(name, 1))
    assert last.keep("a", Answer(None, 2, "refused")).value is None
    assert last.keep("c", Answer(None, 2, "refused")).value == "c"
