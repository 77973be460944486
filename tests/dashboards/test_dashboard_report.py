"""The printable report and the picture of the map: from a real API over HTTP, through the command."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from dashboards import commands
from dashboards.client import Client
from dashboards.fleet_map.answers import parse_layout, parse_map
from dashboards.report.document import MapParts, map_picture, write_report
from pipeline.config.sections import Api as ApiSection
from pipeline.config.sections import Config
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW, incident_table, map_tables
from tests.dashboards.quality_tables import receivers_table


def report(api: Any, within: str = "") -> str:
    client = Client(api.url)
    return write_report(lambda path, query: client.fetch(dict, path, query.items()), NOW, within)


def test_a_report_has_state_incidents_impact_quality_and_detectors(api: Any) -> None:
    text = report(api)
    for part in (
        "State of 2026-01-01 12:00:00Z",
        "2 of 3 nodes are SIMULATED",
        "<b>1</b> critical",
        "<h2>Unresolved incidents (1)</h2>",
        "Rank 17 of job 81 computes 0.61 s a step",
        "<h2>Impact and recommended action</h2>",
        "<th>Agents reporting</th><td>2 of 3</td>",
        "<th>Lag of the evaluation</th><td>40 s</td>",
        "data:image/png;base64,",
    ):
        assert part in text
    assert "(B2)" not in text  # resolved
    assert "<script" not in text
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []


IMPACT = {
    "gpus": 512,
    "nodes": 64,
    "ranks": 512,
    "jobs": [
        {
            "job": "job:81",
            "name": "",
            "gpus": 512,
            "ranks": 512,
            "slowdown": 0.31,
            "basis": "",
            "state": "slow",
            "lost_gpu_hours": 12.5,
            "lost_gpu_hours_per_hour": 4.0,
        }
    ],
    "job_count": 2,
    "lost_gpu_hours": 12.5,
    "lost_gpu_hours_per_hour": 4.0,
}


def test_a_report_has_the_impact_and_the_advice_of_the_incident_page(api: Any) -> None:
    api.incidents["A1"] |= {"impact": IMPACT, "runbook_url": "https://wiki.example/fans", "advice": None}
    text = report(api)
    for part in (
        "512 GPUs on 64 nodes, 512 ranks; 12.5 GPU-hours lost, 4 per hour",
        "<td>job 81 (31 % slower than before the onset), 1 more</td>",
        "<th>Recommended action</th><td>The whole job waits for",
        "<td>https://wiki.example/fans</td>",
    ):
        assert part in text


def test_an_incident_that_was_resolved_since_the_list_was_read_gives_no_order(api: Any) -> None:
    known = {**api.incidents["A1"], "advice": "Go now."}
    api.answers["incidents/A1"] = {**known, "state": "resolved", "resolved": iso(NOW)}
    text = report(api)
    said = "The advice while it was open: “Go now.”</td>"
    assert f"<th>Recommended action</th><td>Resolved since 12:00:00Z. {said}" in text


def test_an_incident_that_was_merged_since_the_list_was_read_leaves_the_advice_to_the_other(api: Any) -> None:
    known = {**api.incidents["A1"], "advice": "Go now.", "merged_into": "B2"}
    api.answers["incidents/A1"] = {**known, "state": "resolved", "resolved": iso(NOW)}
    assert "<th>Recommended action</th><td>Merged into B2, whose advice holds.</td>" in report(api)


@pytest.mark.parametrize(
    ("unlisted", "jobs", "expected"), [(0, 0, "none"), (64, 0, "not known"), (3, 0, "jobs of 3 nodes not known")]
)
def test_a_report_says_where_jobs_are_not_known(api: Any, unlisted: int, jobs: int, expected: str) -> None:
    more = {"jobs": [], "job_count": jobs, "nodes_without_job_list": unlisted}
    api.incidents["A1"] |= {"impact": {**IMPACT, **more}}
    assert f"<th>Jobs</th><td>{expected}</td>" in report(api)


@pytest.mark.parametrize(
    ("pages", "tickets", "detailed", "left"), [(0, 10, 10, ""), (3, 40, 10, "33 WARNING"), (13, 9, 13, "9 WARNING")]
)
def test_a_report_details_all_criticals_the_newest_first_and_counts_the_rest(
    api: Any, pages: int, tickets: int, detailed: int, left: str
) -> None:
    del api.incidents["A1"]
    kinds = ["page"] * pages + ["ticket"] * tickets
    for i, severity in enumerate(kinds):
        opened = iso(NOW - (100 - i) * SECOND)
        api.incidents[f"T{i}"] = incident_table(f"T{i}", severity=severity, opened=opened, summary=f"Fault {i}")
    text = report(api)
    details = text.partition("<h2>Impact and recommended action</h2>")[2].partition("<h2>")[0]
    newest = [*range(pages - 1, -1, -1), *range(pages + tickets - 1, pages - 1, -1)]
    assert re.findall(r"<h3>Fault (\d+)</h3>", details) == [str(i) for i in newest[:detailed]]
    assert ("more, not detailed here" in details) == bool(left)
    assert f"and {len(kinds) - detailed} more, not detailed here: {left}." in details or not left


def test_a_report_names_receivers_with_what_waits_and_what_is_dead(api: Any) -> None:
    api.answers["receivers"] = receivers_table()
    text = report(api)
    assert "<th>Receiver</th><th>State</th><th>Last answer</th><th>Last delivered</th><th>Waiting</th>" in text
    assert "<td>down</td><td>timed out</td><td>never</td><td>4</td><td>2</td>" in text


def test_a_part_that_cannot_be_read_says_why(api: Any) -> None:
    api.broken["detectors"] = (503, b'{"detail": "too many queries"}')
    text = report(api)
    assert "Unavailable: Too many queries (HTTP 503)" in text
    assert "<h2>Fleet state</h2>" in text


def test_names_in_a_report_are_text(api: Any) -> None:
    api.incidents["A1"]["summary"] = "<img src=x onerror=alert(1)> is wrong"
    api.fleet["nodes"][0]["rack"] = "rack:<b>"
    text = report(api)
    assert "<img src=x" not in text
    assert "&lt;img src=x" in text


def test_a_report_of_a_rack_has_only_its_incidents(api: Any) -> None:
    assert "(1)</h2>" in report(api, "rack:r1")
    assert "Unresolved incidents (0)</h2><p>None.</p>" in report(api, "rack:none")


@pytest.mark.parametrize("number", [0, 1, 64, 12_500])
@pytest.mark.parametrize("colour", ["state", "power"])
def test_the_picture_has_every_size_of_fleet(api: Any, number: int, colour: str) -> None:
    states = ("ok", "watch", "degraded", "critical", "no_data")
    nodes = [api.node(f"n{i}", states[i % 5], ["A1"] if i % 5 == 3 else []) for i in range(number)]
    nodes = [{**node, "rack": f"rack:機{i // 16}", "affected": i % 7 == 0} for i, node in enumerate(nodes)]
    table, names = map_tables({**api.fleet, "nodes": nodes, "causes": ["rack:機1"]}, "rack", colour, "")
    drawn = map_picture(MapParts(parse_map(table), parse_layout(names)))
    with Image.open(io.BytesIO(drawn)) as picture:
        assert picture.width == 1600
        assert 100 < picture.height < 1600
        colours = {colour for _, colour in picture.getcolors(1 << 20) or []}
    assert (213, 94, 0) in colours  # critical, at least in the legend
    assert len(drawn) < 400_000


@pytest.mark.parametrize(("number", "named"), [(64, True), (12_500, False)])
def test_the_picture_has_the_names_of_nodes_where_cells_have_room(
    api: Any, number: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    draw = ImageDraw.ImageDraw.text

    def text(pen: Any, place: Any, text: str, **more: Any) -> None:
        texts.append(text)
        draw(pen, place, text, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    nodes = [{**api.node(f"n{i}.hall-1.example.org", "ok", []), "rack": f"rack:{i // 16}"} for i in range(number)]
    nodes[1]["entity"] = "node:a-very-long-name-7"
    table, names = map_tables({**api.fleet, "nodes": nodes}, "rack", "state", "")
    map_picture(MapParts(parse_map(table), parse_layout(names)))
    assert ({"n0", "n63"} <= set(texts)) == named
    assert any("a-very-long-name-7".endswith(text) and len(text) > 4 for text in texts if text) == named


def config_of(api: Any) -> Config:
    port = int(api.url.rpartition(":")[2])
    return Config(api=ApiSection(port=port))


def given(**options: Any) -> argparse.Namespace:
    every = {
        "command": "report",
        "weekly": False,
        "json": None,
        "html": None,
        "png": None,
        "by": "rack",
        "colour": "state",
        "within": None,
    }
    return argparse.Namespace(**{**every, **options})


def test_the_command_writes_both_files(api: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = tmp_path / "fleet.html", tmp_path / "fleet.png"
    assert commands.run(config_of(api), given(html=str(page), png=str(picture))) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("fleetpulse: wrote")) == ("", 2)


def test_the_command_prints_no_warning_of_a_server_that_it_needs_not() -> None:
    code = (
        "import argparse, sys\n"
        "from dashboards import commands\n"
        "assert 'streamlit' not in sys.modules\n"
        "given = argparse.Namespace(command='report', weekly=False, json=None, html=None, png=None)\n"
        "try: commands.run(None, given)\n"
        "except commands.UsageError as error: print(error)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (made.returncode, made.stderr) == (0, "")
    assert "nothing to write" in made.stdout


def test_the_command_refuses_what_it_cannot_do(api: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected --html FILE or --png FILE"):
        commands.run(config_of(api), given())
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        commands.run(config_of(api), given(png=str(tmp_path / "none" / "x.png")))
