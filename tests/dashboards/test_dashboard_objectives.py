"""The page Objectives and the weekly report: what both show of one answer, hostile names, and an empty fleet."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fleetpulse
from dashboards.report.weekly import failure_cells, hours, spare_cells, spare_note, write_html
from dashboards.views.objectives import headline
from pipeline.model.records import SECOND, iso
from pipeline.objectives.evaluated import describe_evaluated
from pipeline.objectives.published import PUBLISHED
from tests.dashboards.conftest import NOW
from tests.dashboards.test_dashboard_pages import page, shown

HOSTILE = "<script>alert(1)</script>"
MONEY = {"kwh": 144.0, "cost": 576.0, "currency": "EUR", "kg_co2e": 57.6}


def script() -> None:
    from dashboards.views import objectives

    objectives.page()


def answer(**more: Any) -> dict[str, Any]:
    """An answer of the API."""
    objective = {
        "name": f"goodput {HOSTILE}",
        "scope": "fleet",
        "kind": "goodput",
        "target": 0.95,
        "days": 30,
        "configured": True,
        "achieved": 0.989286,
        "left_share": 0.7857,
        "burn_rates": {"fast": [14.9, 15.2]},
        "alert": "fast",
    }
    job = {"job": f"job:{HOSTILE}", "name": "", "account": "alpha", "gpu_hours": 32.0, "lost_kwh": 3.0, **MONEY}
    made = {
        "from": iso(NOW - 7 * 86_400_000_000),
        "to": iso(NOW),
        "evaluated": describe_evaluated(NOW - 7 * 86_400_000_000, NOW, 0, NOW),
        "since": iso(NOW - 90 * 86_400_000_000),
        "simulated": True,
        "nodes": 1250,
        "goodput": 0.989286,
        "gpu_hours": 26_880.0,
        "measured_share": 0.8,
        "availability": 0.9978,
        "incidents": {"opened": 12, "pages": 3, "resolved": 11, "unresolved": 1},
        "objectives": [objective],
        "lost": {
            "gpu_hours": 288.0,
            **MONEY,
            "by_cause": [{"cause": "GPU", "gpu_hours": 192.0, "share": 0.6667, "incidents": 1, **MONEY}],
            "by_account": [{"account": HOSTILE, "gpu_hours": 256.0, "share": 0.9, **MONEY}],
            "by_job": [],
        },
        "energy": {"idle_kwh": 900.0, "factor": 1.25, "by_job": [job], **MONEY},
        "failures": [
            {
                "type": "H100",
                "cause": "All hardware",
                "failures": 2,
                "mttf_days": 150.0,
                "mttf_low_days": 47.7,
                "mttf_high_days": 844.2,
                "per_million_gpu_hours": 34.7,
            }
        ],
        "published": list(PUBLISHED),
        "ranking": [
            {
                "node": HOSTILE,
                "failures": 4,
                "causes": {"GPU": 4},
                "frailty": 5.25,
                "p_lemon": 0.97,
                "burn_in_until": None,
                "suggestion": "retire",
            }
        ],
        "burn_in": [{"node": "n1", "until": iso(NOW + 86_400_000_000), "incidents": ["INC-1"]}],
        "spares": {
            "days": 30,
            "level": 0.95,
            "parts": [{"part": "GPU", "failures": 5, "expected": 1.5, "spares_poisson": 4, "spares": 4}],
        },
    }
    return made | more


def test_the_page_has_objectives_losses_energy_failures_nodes_and_spares(api: Any) -> None:
    api.answers["objectives"] = answer()
    text = shown(page(script))
    for word in (
        "1 objective burns its budget too fast",
        "95.00 % goodput, 30 d",
        "98.93 %",
        "79 %",
        "14.9x",
        "fast burn",
    ):
        assert word in text
    for word in ("288 h", "576 EUR", "58 kg CO2e", "Llama 3", "150.0 d (47.7 to 844.2)", "5.2x", "retire", "1 of 1")[
        :-1
    ]:
        assert word in text
    assert HOSTILE not in text


def test_an_api_that_is_away_and_a_fleet_without_jobs_say_so(api: Any) -> None:
    assert "No data." in shown(page(script))
    assert headline(answer(objectives=[], goodput=None)) == "No job held a GPU"
    assert headline(answer(objectives=[])) == "Goodput 98.93 %"


def test_the_weekly_report_is_one_file_without_scripts_and_names_are_text() -> None:
    text = write_html(answer(), NOW)
    heads = re.findall("<h2>(.*?)</h2>", text)
    assert sorted(set(heads)) == sorted(heads), "each section once"
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text
    assert "SIMULATED" in text
    for part in (
        "Summary",
        "Objectives",
        "GPU-hours lost",
        "Energy",
        "Failures since",
        "Nodes that fail most",
        "Spares",
    ):
        assert f"<h2>{part}" in text
    empty = {"by_cause": [], "by_account": [], "by_job": [], "gpu_hours": 0.0, "kwh": None}
    bare = write_html(answer(objectives=[], failures=[], ranking=[], lost=empty, goodput=None), NOW)
    assert "None has jobs yet." in bare
    assert "no data of 26,880 h" in bare


def test_a_report_of_a_time_that_is_not_evaluated_says_from_when_to_when_it_is() -> None:
    start, hour = NOW - 7 * 86_400 * SECOND, 3600 * SECOND
    assert "<th>Evaluated</th>" in write_html(answer(), NOW)
    late = describe_evaluated(start, NOW, start + 24 * hour, NOW - 9 * hour, ["Kafka does not answer"])
    assert (late["complete"], late["late"]) == (False, True)
    assert late["note"].startswith(f"Evaluated only until {iso(NOW - 9 * hour)[:16].replace('T', ' ')}Z, 9 h")
    text = write_html(answer(evaluated=late), NOW)
    assert "before its end (Kafka does not answer): what happened since is missing." in text
    assert f"{late['from'][:16].replace('T', ' ')}Z to {late['to'][:16].replace('T', ' ')}Z" in text
    young = describe_evaluated(start, NOW, start + 24 * hour, NOW - 30 * SECOND)
    assert (young["complete"], young["late"], young["note"][:22]) == (False, False, "The history begins at ")
    for judged in (None, start - hour):
        nothing = describe_evaluated(start, NOW, 0, judged)
        assert (nothing["complete"], nothing["from"]) == (False, None)
        assert "<td>nothing</td>" in write_html(answer(evaluated=nothing), NOW)


def test_words_of_hours_and_of_failures() -> None:
    assert (hours(None), hours(3.25), hours(1234.5)) == ("no data", "3.2 h", "1,234 h")
    none = answer()["failures"][0] | {"mttf_days": None, "failures": 0, "per_million_gpu_hours": None}
    assert failure_cells(none)[3:] == ("above 47.7 d", "no data")


def test_the_command_writes_html_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("dashboards.commands.read_api", lambda config, path, query: answer())
    html, data = tmp_path / "week.html", tmp_path / "week.json"
    assert fleetpulse.main(["report", "--weekly", "--html", str(html), "--json", str(data)]) == 0
    assert json.loads(data.read_text())["nodes"] == 1250
    assert html.read_text().startswith("<!doctype html>")
    assert fleetpulse.main(["report", "--weekly"]) == 2
    assert fleetpulse.main(["report", "--json", "-"]) == 2
    assert "expected --weekly" in capsys.readouterr().err


def test_a_history_that_is_shorter_than_the_time_ahead_gives_no_number_of_spares() -> None:
    found = answer(since=iso(NOW - 6 * 3600 * SECOND))
    found["spares"]["parts"][0] |= {"spares": None, "spares_poisson": None}
    assert "too early to plan 30 days ahead" in spare_note(found)
    assert spare_cells(found["spares"]["parts"][0])[-1] == "too early"
