"""The page Data quality with a real API, without a browser."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dashboards import snapshot
from dashboards.data_quality import explain, markup
from dashboards.data_quality.answers import Sight, parse_quality
from tests.dashboards.quality_tables import (
    HOSTILE,
    empty_quality,
    members_table,
    problem,
    quality_table,
    receivers_table,
)
from tests.dashboards.test_dashboard_pages import page, shown


def script() -> None:
    from dashboards.data_quality.page import page

    page()


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([("thermal", "gpu", 152), ("power", "gpu", 1)], "at least 152 GPUs not judged"),
        ([("thermal", "gpu", 1), ("coolant", "cdu", 1), ("xid", "gpu", 0)], "1 GPU, 1 CDU not judged"),
        ([("coolant", "cdu", 0)], "disabled or failing, see below"),
    ],
)
def test_a_device_that_two_detectors_miss_is_counted_once(seen: list[tuple[str, str, int]], said: str) -> None:
    assert markup.not_judged([Sight(name, kind, 512, blind, "", (), 0) for name, kind, blind in seen]) == said


@pytest.fixture
def quality(api: Any) -> Any:
    api.answers = {"quality": quality_table(), "quality/aa01": members_table(240), "receivers": receivers_table()}
    return api


def title_of(**changes: Any) -> str:
    table = quality_table(problems=[problem("x", **changes)])
    return explain.title(parse_quality(table).problems[0])


def test_a_rack_of_silent_agents_is_one_row_with_cause_blindness_and_advice(quality: Any) -> None:
    text = shown(page(script))
    assert "19 of 64 agents not reporting, 6 other sources fail" in text
    assert "18 agents silent, all in rack r12<span>since" in text
    assert "cannot judge 144 GPUs. Missing: power, temperature." in text
    assert 'href="incident?id=A1"' in text
    assert "<code>systemctl status fleetpulse-agent</code>" in text
    assert 'href="data?group=aa01"' in text


def test_reasons_are_shown_verbatim_and_explained_and_never_as_markup(quality: Any) -> None:
    text = shown(page(script))
    assert "certificate verify failed</code> The TLS certificate is not accepted." in text
    assert "connection refused</code> Nothing listens on that address." in text
    assert "<b>x</b>" not in text
    assert "&lt;b&gt;x&lt;/b&gt;" in text


def test_collectors_without_hardware_are_folded_and_not_failures(quality: Any) -> None:
    text = shown(page(script))
    assert "1 collector has nothing to read on some nodes, as expected" in text
    assert text.index("as expected") > text.index("<details")


def test_losses_late_rows_rejections_versions_and_receivers_are_listed(quality: Any) -> None:
    text = shown(page(script))
    for part in (
        "spool full",
        "320",
        "bounds 220",
        "1.3.2",
        "DIFFERS",
        "The same everywhere: nvidia driver",
        "timed out",
    ):
        assert part in text
    assert "at most 30 in one hour" in text


@pytest.mark.slow
def test_all_sources_of_a_row_are_on_pages(quality: Any) -> None:
    text = shown(page(script, group="aa01"))
    assert "1 to 100 of 240" in text
    assert 'href="data?group=aa01&amp;page=2"' in text
    assert ["0"] in [query.get("offset") for path, query in quality.asked if path == "quality/aa01"]
    page(script, group="aa01", page="3")
    assert ["200"] in [query.get("offset") for path, query in quality.asked if path == "quality/aa01"]
    assert "This problem is over" in shown(page(script, group="gone"))


def test_an_empty_site_says_what_to_do_next(api: Any) -> None:
    api.answers = {"quality": empty_quality(), "receivers": {"receivers": []}}
    text = shown(page(script))
    assert "No agent has sent data yet" in text
    assert "systemctl enable --now fleetpulse-agent" in text


@pytest.mark.slow
def test_a_site_without_problems_says_so_only_while_the_api_answers(quality: Any) -> None:
    quality.answers["quality"] = quality_table(problems=[], agents={**quality_table()["agents"], "silent": 0})
    assert "All 64 agents report, no source fails" in shown(page(script))
    quality.broken["quality"] = (503, b"{}")
    snapshot._fetch_cached.clear()  # the time of the cache is over
    text = shown(page(script))
    assert "Last known: all 64 agents report" in text
    assert "Showing the last known state." in text


def test_without_any_answer_nothing_is_called_healthy(api: Any) -> None:
    api.broken["quality"] = (503, b'{"detail": "starting"}')
    text = shown(page(script))
    assert "Data quality unknown" in text
    assert "Starting" in text
    assert "report, no source fails" not in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": "agent", "state": "silent"}, "Agent n003 silent"),
        ({"kind": "bmc", "state": "does not respond"}, "BMC n003 does not respond"),
        ({"kind": "clock", "state": "ahead", "reason": "8 s", "examples": ["node:n1"]}, "Clock of node n1 8 s ahead"),
        ({"kind": "clock", "state": "ahead", "count": 4, "racks": 2}, "4 clocks ahead in 2 racks"),
        (
            {"kind": "collector", "state": "hung", "part": "nvml", "examples": ["collector:n1.nvml"]},
            "Collector nvml hangs on node n1",
        ),
        ({"kind": "collector", "state": "fault", "part": "nvml", "nodes": 3}, "Collector nvml fails on 3 nodes"),
        (
            {"kind": "tool", "state": "failing", "part": "iblinkinfo", "nodes": 2},
            "Fabric tool iblinkinfo fails on 2 nodes",
        ),
        ({"kind": "driver", "state": "refuses calls", "examples": ["gpu:n1.0"]}, "GPU 0 of n1 refuses calls"),
    ],
)
def test_the_title_of_a_row_says_what_and_where(changes: dict[str, Any], expected: str) -> None:
    assert title_of(**changes) == expected


def test_every_kind_of_problem_has_advice() -> None:
    for row in quality_table()["problems"]:
        (one,) = parse_quality(quality_table(problems=[row])).problems
        assert explain.advice(one)
        assert markup.problem(one, one.since or 0)
    assert HOSTILE in explain.title(parse_quality(quality_table()).problems[4])


@pytest.mark.parametrize(
    ("free", "tile", "fact"),
    [
        (412, ('fp-tile-none" href="#waiting"><b>392 GB</b>', "of a disk of 960 GB"), "after at least 392.0 GB more"),
        (50, ('fp-tile-degraded" href="#waiting"><b>30 GB</b>', "of a disk of 960 GB"), "after at least 30.0 GB more"),
        (
            20,
            ('fp-tile-critical" href="#waiting"><b>0 GB</b>', "of a disk of 960 GB"),
            "only events are stored, if at all",
        ),
    ],
)
def test_the_space_of_the_store_is_counted_down_to_where_telemetry_is_no_longer_stored(
    quality: Any, free: int, tile: tuple[str, str], fact: str
) -> None:
    disk = {"free": free * 10**9, "total": 960 * 10**9, "minimum": 20 * 10**9}
    quality.answers["quality"] = quality_table(disk=disk)
    text = shown(page(script))
    assert all(part in text for part in (*tile, fact))


GROWING = {"free": 412 * 10**9, "total": 960 * 10**9, "minimum": 20 * 10**9, "per_day": 8 * 10**10, "full_s": 423_360}


def test_the_space_of_a_disk_names_the_time_until_it_is_full(quality: Any) -> None:
    quality.answers["quality"] = quality_table(disk=GROWING)
    text = shown(page(script))
    assert 'fp-tile-degraded" href="#waiting"><b>392 GB</b>' in text
    assert "of a disk of 960 GB; full in 4 d 21 h" in text
    assert "only events are stored in about 4 d 21 h, at 80.0 GB a day of history" in text


def test_a_disk_that_the_retention_keeps_from_filling_is_not_said_to_be_full_soon(quality: Any) -> None:
    quality.answers["quality"] = quality_table(disk={**GROWING, "full_s": None})
    text = shown(page(script))
    assert "history of 80.0 GB a day fits for [store] telemetry_days" in text
    assert "full in" not in text


def test_the_space_of_a_disk_that_cannot_be_read_is_unknown(quality: Any) -> None:
    quality.answers["quality"] = quality_table(disk=None)
    assert "its disk cannot be read" in shown(page(script))


def test_the_lag_of_each_topic_has_its_median_p99_and_number_of_messages(quality: Any) -> None:
    text = shown(page(script))
    table = text[text.index("<caption>Lag by topic") :].partition("</table>")[0]
    row = table[table.index(">telemetry.v1<") :].partition("</tr>")[0]
    assert re.findall(r"<span>([^<]*)</span>", row) == ["3,840", "5.6 s", "74 s", "131 s"]
    assert "messages of the last 5 min" in text


@pytest.mark.parametrize(
    ("lags", "said"), [([], "No message was stored in the last 5 min."), (None, "does not measure the lag of topics")]
)
def test_a_topic_without_messages_has_no_lag_of_zero(quality: Any, lags: Any, said: str) -> None:
    quality.answers["quality"] = quality_table(lags=lags)
    assert said in shown(page(script))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (17, "17 messages arrived again since the start; each is stored once."),
        (0, "No message arrived again since the start."),
    ],
)
def test_duplicates_are_counted(quality: Any, number: int, said: str) -> None:
    quality.answers["quality"] = quality_table(duplicates=number)
    assert said in shown(page(script))
