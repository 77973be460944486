"""A handover: what waits comes first, what receivers do not get is muted, and a storm is one line with a count."""

from __future__ import annotations

import pytest

from pipeline.config.receivers import InhibitRule
from pipeline.incidents.handover import format_handover, read_handover
from pipeline.incidents.life import STORM
from pipeline.model.records import SECOND
from tests.pipeline.living import HOUR, LivingSite

RULE = InhibitRule(source_matchers=('detector="xid"',), target_matchers=('detector="hot"',))


@pytest.fixture
def site(tmp_path):
    made = LivingSite(tmp_path / "store.duckdb", inhibit_rules=(RULE,))
    yield made
    made.database.close()


def hand_over(site, since=None):
    return read_handover(site.database.connection, site.now - HOUR if since is None else since, site.now)


def ids(rows):
    return [row["id"] for row in rows]


def test_an_incident_that_a_rule_inhibits_is_muted_and_waits_for_nobody_until_a_person_takes_it(site):
    source, target = site.report("node:n7", detector="xid"), site.report("gpu:n0.0")
    found = hand_over(site)
    assert (ids(found["open"]), ids(found["muted"]["incidents"]), ids(found["pending"])) == (
        [source],
        [target],
        [source],
    )
    text = format_handover(found)
    assert "Silenced: 1" in text
    assert f"{target}  page    inhibited     nobody" in text
    site.people.acknowledge(target, "ann", "mine")
    found = hand_over(site)
    assert (ids(found["open"]), ids(found["muted"]["incidents"])) == ([source, target], [])
    assert set(ids(found["pending"])) == {source, target}


def test_pages_that_nobody_acknowledged_come_first_then_tickets_then_watches_the_oldest_first(site):
    made = []
    for entity, level in (
        ("gpu:n0.0", "suspect"),
        ("gpu:n1.0", "ticket"),
        ("gpu:n2.0", "page"),
        ("gpu:n3.0", "page"),
        ("gpu:n5.0", "suspect"),
        ("gpu:n6.0", "page"),
    ):
        made.append(site.report(entity, level=level))
        site.wait(1)
    watch, ticket, taken, page, late_watch, late_page = made
    site.people.acknowledge(taken, "ann", "mine")
    assert ids(hand_over(site)["open"]) == [page, late_page, taken, ticket, watch, late_watch]


@pytest.fixture
def storm(site):
    """Of 30 pages 20 are sent; ten are parts of a storm."""
    for number in range(30):
        site.report(f"host:h{number}")
        site.now += SECOND
    (found,) = [i for i in site.shown().values() if i.detector == STORM]
    return found


def parts_of(site, storm):
    return [i.id for i in site.shown().values() if storm.id in i.life.inhibited_by]


def test_a_storm_is_one_line_with_a_count_in_each_list(site, storm):
    found = hand_over(site)
    assert found["storms"] == [{"id": storm.id, "unresolved": 10, "acknowledged": 0, "changed": 10}]
    for rows in (found["open"], found["pending"], found["changed"]):
        assert len(rows) == 21
        assert set(parts_of(site, storm)).isdisjoint(ids(rows))
    assert found["muted"]["incidents"] == []
    text = format_handover(found)
    assert "Open: 31 (10 in storms)" in text
    assert "Pending: 21\n" in text
    assert text.count("Alert storm: 10 more pages, all Hot\n      10 more in it\n") == 2
    site.people.acknowledge(storm.id, "ann", "mine")
    found = hand_over(site)
    assert [row["id"] for row in found["pending"] if "ann" in row["what"]] == [storm.id]
    assert "10 more in it, 10 of them acknowledged" in format_handover(found)


def test_a_part_of_a_storm_that_a_person_has_is_listed_with_the_person(site, storm):
    first, second, third, *_ = parts_of(site, storm)
    site.people.acknowledge(first, "bob", "mine")
    site.people.assign(second, "ann", "carol", "")
    site.people.comment(third, "dora", "looks odd")
    found = hand_over(site)
    assert first in ids(found["open"])
    assert ids(found["muted"]["incidents"]) == [second]
    assert "acknowledgement of bob expires" in [p["what"] for p in found["pending"] if p["id"] == first]
    assert {second, third} <= set(ids(found["changed"]))
    (counts,) = found["storms"]
    assert (counts["unresolved"], counts["changed"]) == (8, 8)


def test_what_changed_with_a_storm_that_is_over_is_a_line_of_it(site, storm):
    parts = parts_of(site, storm)
    site.active.clear()
    site.wait(30)
    assert {site.state(one) for one in (storm.id, *parts)} == {"resolved"}
    found = hand_over(site)
    assert found["storms"] == [{"id": storm.id, "unresolved": 0, "acknowledged": 0, "changed": 10}]
    assert len(found["changed"]) == 21
    text = format_handover(found)
    assert "Open: nothing" in text
    assert "(10 in storms)" in text.split("Changed since")[1]


def test_parts_of_a_storm_that_changed_alone_are_a_line_of_their_own():
    storm = {"id": "inc-1", "unresolved": 0, "acknowledged": 0, "changed": 1200}
    muted = {"incidents": [], "silences": []}
    when = "2026-01-31T08:00:00Z"
    found = {"since": when, "now": when, "open": [], "muted": muted, "pending": [], "changed": [], "storms": [storm]}
    text = format_handover(found)
    assert text.endswith("Changed since 2026-01-31 08:00: 1,200 (1,200 in storms)\n  1,200 in storm inc-1\n")
