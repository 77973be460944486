"""Dead messages to receivers of alerts are sent again from the page Data quality, by people who may write."""

from __future__ import annotations

from typing import Any

import pytest

from dashboards import identity
from dashboards.identity import Person
from tests.dashboards.quality_tables import HOSTILE, quality_table, receivers_table
from tests.dashboards.test_dashboard_pages import page, shown
from tests.dashboards.test_data_quality import script


@pytest.fixture
def quality(api: Any) -> Any:
    api.answers = {"quality": quality_table(), "receivers": receivers_table()}
    return api


def test_a_form_says_what_is_sent_again_and_the_result_how_many(quality: Any) -> None:
    opened = page(script, opened="dead-messages")
    assert "2 dead messages will be sent again now" in shown(opened)
    assert "It does not accept messages now (timed out): they wait." in shown(opened)
    assert quality.posted == []
    done = opened.button(key="dead-0").click().run()
    assert quality.posted == [("notifications/replay", {"receiver": HOSTILE})]
    text = shown(done)
    assert "2 messages to " in text
    assert "are sent again." in text
    assert HOSTILE not in text
    assert [button.label for button in done.button if "again" in button.label] == []


def test_an_error_says_that_nothing_was_sent(quality: Any) -> None:
    opened = page(script, opened="dead-messages")
    quality.broken["notifications/replay"] = (503, b'{"detail": "the store is not open yet"}')
    text = shown(opened.button(key="dead-0").click().run())
    assert "Nothing was sent again." in text
    assert "2 messages to" not in text


@pytest.mark.parametrize("person", [Person("eve", "viewer"), Person("local", "operator", notes_only=True)])
def test_a_person_who_may_not_write_sees_a_disabled_button(
    quality: Any, monkeypatch: pytest.MonkeyPatch, person: Person
) -> None:
    monkeypatch.setattr(identity, "current", lambda: person)
    drawn = page(script, opened="dead-messages")
    assert drawn.button(key="disabled-dead-messages").disabled
    assert "will be sent again" not in shown(drawn)


def test_without_dead_messages_there_is_no_button(quality: Any) -> None:
    for receiver in quality.answers["receivers"]["receivers"]:
        receiver["dead"] = 0
    assert not [button for button in page(script).button if "again" in button.label]
