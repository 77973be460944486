"""The scorer on files: input, output, and errors of bad input."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detectors.scoring.inputs import Meta
from detectors.scoring.placement import Placement
from detectors.scoring.score import (
    COLUMNS,
    as_alerts,
    as_truth,
    format_score,
    merge_scores,
    score,
    score_run,
    summary_text,
    table_rows,
)
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, Finding, Incident, iso
from pipeline.model.topology import Topology
from tests.examples import examples

T0 = 1_790_000_000 * SECOND
TOPOLOGY = '[rank]\n"7.0" = ["stage:7.0", "job:7", "gpu:n0.0"]\n[gpu]\n"n0.0" = ["node:n0"]\n'


def time_at(seconds):
    return iso(T0 + int(seconds * SECOND))


FAULT = {
    "id": "1",
    "kind": "straggler",
    "entity": "gpu:n0.0",
    "onset": time_at(0),
    "end": time_at(3600),
    "class": "soft",
}
MORE = {"attribution": "gpu", "severity": 0.5, "effect": 0.2, "effect_unit": "time"}
META = {"nodes": 10, "start": time_at(0), "end": time_at(86_400), "gpus": 80, "cpu_seconds": 4.0, "samples": 2_000_000}


def finding(seconds, entity, level="page", onset=10, detector="straggler"):
    return {"time": time_at(seconds), "onset": time_at(onset), "entity": entity, "detector": detector, "level": level}


def incident(name, cause, opened, members, **more):
    plain = {"id": name, "cause": cause, "opened": time_at(opened), "resolved": None, "severity": "page"}
    return {**plain, "members": members, "detector": "straggler", "entity": members[0], **more}


@pytest.fixture
def files(tmp_path):
    """One straggler, found; one page without a fault."""
    texts = {
        "findings": [
            finding(20, "rank:7.0", "suspect"),
            finding(60, "rank:7.0"),
            finding(120, "rank:7.0"),
            finding(9000, "rank:9.9"),
        ],
        "incidents": [
            incident("a", "gpu:n0.0", 20, ["rank:7.0"], resolved=time_at(2000)),
            incident("b", "gpu:n9.9", 9000, ["rank:9.9"]),
            incident("c", "gpu:n8.8", 9000, ["rank:8.8"], severity="watch"),
        ],
        "truth": [{**FAULT, "parameters": MORE}],
    }
    for name, lines in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "meta.json").write_text(json.dumps(META))
    (tmp_path / "topology.toml").write_text("version = 1\n" + TOPOLOGY)
    return {n: tmp_path / f for n, f in (("topology", "topology.toml"), ("meta", "meta.json"))} | {
        n: tmp_path / f"{n}.jsonl" for n in texts
    }


def test_files_are_scored_by_incident_and_written_as_json(files, tmp_path):
    result = score(**files, json_file=tmp_path / "s.json")
    assert (result["found"], result["false"], result["pages"], result["node_days"]) == (1, 1, 2, 10.0)
    assert (result["delay_median_s"], result["cpu_s_per_million_samples"]) == (60.0, 2.0)
    assert (result["incidents"], result["compression"], result["pages_in_no_incident"]) == (2, 1.0, 0)
    assert (list(result["severity"]), result["scales"][0]["gpus"]) == (["0.5-0.6"], 80.0)
    assert result["attribution"]["NODE"]["NODE"] == 1
    assert json.loads((tmp_path / "s.json").read_text()) == json.loads(json.dumps(result))


def test_results_read_from_files_are_merged_like_those_in_memory(files, tmp_path):
    result = score(**files, json_file=tmp_path / "s.json")
    written = json.loads((tmp_path / "s.json").read_text())
    assert merge_scores([written, result]) == merge_scores([result, result])
    assert merge_scores([written, written])["events"] == 2


def test_records_of_another_version_are_refused():
    with pytest.raises(UsageError, match="score again"):
        merge_scores([{"records": {"events": [{"colour": "red"}], "false": [], "runs": []}}])


def test_without_incidents_each_condition_is_an_alert(files):
    result = score(files["findings"], files["truth"], topology=files["topology"])
    assert (result["pages"], result["found"], result["node_days"], result["compression"]) == (2, 1, None, None)


def test_conditions_per_incident_count_all_levels_and_pages_without_an_incident_are_listed(files):
    with files["findings"].open("a") as file:
        for line in (finding(70, "rank:7.0", "suspect", 65, "link"), finding(9999, "rank:1.1")):
            file.write(json.dumps(line) + "\n")
    result = score(**files)
    assert (result["compression"], result["compression_of_pages"], result["pages_in_no_incident"]) == (1.5, 1.0, 1)
    assert "1.5 conditions (1.0 pages) per incident; 2 CPU s per 1M samples; 1 pages in no incident" in summary_text(
        result
    )


def test_conditions_after_an_incident_was_resolved_do_not_belong_to_it(files):
    with files["findings"].open("a") as file:
        file.write(json.dumps(finding(2500, "rank:7.0", onset=2400)) + "\n")
    result = score(**files)
    assert (result["pages"], result["compression"], result["pages_in_no_incident"]) == (2, 1.0, 1)


def test_an_incident_of_suspects_alone_alerts_with_the_second_suspect(files):
    """Two suspects that corroborate each other are a ticket: it is an answer only where a ticket is enough."""
    slow = {**FAULT, "kind": "cold_plate"}
    findings = [finding(20, "rank:7.0", "suspect"), finding(80, "gpu:n0.0", "suspect", detector="thermal")]
    case = incident("a", "gpu:n0.0", 20, ["rank:7.0", "gpu:n0.0"], severity="ticket")
    for name, lines in (("findings", findings), ("incidents", [case]), ("truth", [slow])):
        files[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = score(**files)
    assert (result["found"], result["delay_median_s"], result["pages"]) == (1, 80.0, 0)
    assert result["tickets"]["right"] == 1


def test_data_in_memory_and_files_give_the_same_result(files):
    findings = [Finding(T0 + 60 * SECOND, T0, "rank:7.0", "straggler", "page", 1.0, "slow")]
    opened = T0 + 60 * SECOND
    case = Incident("a", "gpu:n0.0", opened, T0, "page", "slow", "straggler", "rank:7.0", ("rank:7.0",))
    world = Placement(Topology({"rank:7.0": ["gpu:n0.0"]}))
    result = score_run(as_truth([FAULT]), as_alerts(findings, [case]), world, Meta(1.0))
    assert (result["found"], result["false"], result["delay_median_s"]) == (1, 0, 60.0)
    assert score_run(as_truth([FAULT]), as_alerts(findings, None), world, Meta(1.0))["found"] == 1


def test_a_run_without_alerts_and_events_has_a_score(files):
    for name in ("findings", "incidents", "truth"):
        files[name].write_text("")
    result = score(**files)
    assert (result["events"], result["pages"], result["recall"], result["precision"]) == (0, 0, None, None)
    assert result["false_pages_per_1000_node_days"]["value"] == 0.0
    assert [row["kind"] for row in table_rows(result)] == ["all"]
    assert "page precision -" in summary_text(result)


def test_the_table_has_a_row_per_kind_and_one_for_all_and_fits_a_hundred_columns(files):
    from pipeline.commands.output import render_rows

    result = score(**files)
    table = list(table_rows(result))
    assert [row["kind"] for row in table] == ["straggler", "all"]
    assert all(set(row) == set(COLUMNS) for row in table)
    assert "1 false of 2" in summary_text(result)
    text = render_rows(*format_score(result, "table")[:2], "table") + format_score(result, "table")[2]
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
def test_programs_get_numbers_only(files, form):
    from pipeline.commands.output import render_rows

    lines, columns, more = format_score(score(**files), form)
    assert more == ""
    text = render_rows(lines, columns, form)
    if form == "json":
        assert json.loads(text)[-1]["recall"] == 1.0
    assert len(text.splitlines()) >= 2


def clean(tmp_path, **more):
    quiet = {"findings": "", "truth": "", **more}
    paths = {name: tmp_path / f"clean-{name}.jsonl" for name in quiet}
    for name, path in paths.items():
        path.write_text(quiet[name])
    meta = tmp_path / "clean-meta.json"
    meta.write_text(json.dumps(META))
    score(**paths, meta=meta, json_file=tmp_path / "clean.json")
    return tmp_path / "clean.json"


def test_clean_runs_give_the_precision_at_field_rates(files, tmp_path):
    path = clean(tmp_path)
    result = score(**files, clean=[path, path])
    field = result["precision_at_field_rates"]
    assert (field["node_days"], field["false_pages"], len(field["precision"])) == (20.0, 0, 2)
    assert "precision at 6.5 faults per 1,000 node-days: 1.000 (0.034 to 1.000)" in summary_text(result)


def test_a_run_with_faults_is_not_a_clean_run(files, tmp_path):
    path = clean(tmp_path, truth=json.dumps(FAULT))
    with pytest.raises(UsageError, match=r"clean\.json: has 1 faults; expected a run with harmless events only"):
        score(**files, clean=[path])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", "was it cut off"), ("[]", "found list"), ("{}", "false, node_days, events, records missing")],
)
def test_a_file_that_is_not_a_clean_run_is_named(files, tmp_path, text, wanted):
    (tmp_path / "clean.json").write_text(text)
    with pytest.raises(UsageError, match=rf"clean\.json.*{wanted}"):
        score(**files, clean=[tmp_path / "clean.json"])


def test_a_clean_run_without_its_length_is_refused(files, tmp_path):
    score(files["findings"], clean(tmp_path).with_name("clean-truth.jsonl"), json_file=tmp_path / "c.json")
    with pytest.raises(UsageError, match="score the clean run with --meta"):
        score(**files, clean=[tmp_path / "c.json"])


def swapped(row, *keys):
    return json.dumps({**row, keys[0]: row[keys[1]], keys[1]: row[keys[0]]})


CASE = incident("z", "gpu:n0.0", 60, ["rank:7.0"], resolved=time_at(90))
BAD = [
    ("findings", "{", "line 5: is not JSON.*cut off"),
    ("findings", json.dumps(finding(60, "rank:7.0"))[:-9], "line 5: is not JSON"),
    ("findings", '{"time": "soon"}', "line 5: onset, entity, detector, level missing"),
    (
        "findings",
        json.dumps({**finding(60, "gpu:a"), "time": "soon"}),
        "line 5: time: .*soon.*expected a time like 2026",
    ),
    ("findings", json.dumps({**finding(60, "gpu:a"), "time": 5}), "line 5: time: found '5'"),
    ("findings", json.dumps({**finding(60, "gpu:a"), "entity": None}), "line 5: entity: found 'None'"),
    (
        "findings",
        json.dumps(finding(60, "gpu:a", "alarm")),
        "line 5: level 'alarm'; expected one of suspect, ticket, page",
    ),
    ("findings", swapped(finding(60, "gpu:a"), "time", "onset"), "line 5: onset .* is after time .*swapped"),
    ("findings", "[" * 100_000, "line 5: is not JSON"),
    ("findings", '{"time": 1' + "0" * 5000 + "}", "line 5: is not JSON"),
    ("truth", '{"id": "x"}', "line 2: kind, entity, onset, end missing"),
    ("truth", json.dumps(FAULT), "line 2: id '1' is that of line 1; expected each id once"),
    ("truth", swapped({**FAULT, "id": "2"}, "onset", "end"), "line 2: end .* is before onset .*swapped"),
    (
        "truth",
        json.dumps({**FAULT, "id": "2", "kind": "stragler"}),
        "line 2: kind 'stragler'.*did you mean 'straggler'",
    ),
    ("truth", json.dumps({**FAULT, "id": "2", "class": "odd"}), "line 2: class 'odd'; expected one of hard, soft"),
    ("truth", json.dumps({**FAULT, "id": "2", "parameters": []}) + "\n", None),
    ("truth", json.dumps({**FAULT, "id": "2", "parameters": [1]}), "line 2: parameters must be an object"),
    ("truth", json.dumps({**FAULT, "id": "2", "entities": "gpu:a"}), "line 2: .*entities a list"),
    ("truth", json.dumps({**FAULT, "id": "2", "parameters": {"severity": 7}}), "line 2: severity: found 7; .*0 and 1"),
    ("truth", json.dumps({**FAULT, "id": "2", "parameters": {"effect": 1e999}}), "line 2: effect: found inf; .*finite"),
    (
        "truth",
        json.dumps({**FAULT, "id": "2", "parameters": {"effect": 10**400}}),
        "line 2: effect: found 1000000.*fini",
    ),
    ("truth", json.dumps({**FAULT, "id": "2", "parameters": {"effect": "much"}}), "line 2: effect: found 'much'"),
    (
        "truth",
        json.dumps({**FAULT, "id": "2", "parameters": {"detectable": "?"}}),
        "line 2: detectable: .*expected a time",
    ),
    ("truth", json.dumps({**FAULT, "id": "2", "end": "99999-01-01T00:00:00Z"}), "line 2: end: .*expected a time"),
    ("incidents", "[]", "line 4: found list"),
    ("incidents", json.dumps({**CASE, "id": "a"}), "line 4: id 'a' is that of line 1"),
    ("incidents", json.dumps({**CASE, "severity": "loud"}), "line 4: severity 'loud'; expected one of page"),
    ("incidents", json.dumps({**CASE, "members": [1]}), "line 4: members: found .*expected a list of entities"),
    ("incidents", swapped(CASE, "opened", "resolved"), "line 4: resolved .* is before opened .*swapped"),
    ("incidents", json.dumps({**CASE, "onset": time_at(91)}), "line 4: resolved .* is before onset .*swapped"),
]


@pytest.mark.parametrize(("name", "line", "wanted"), BAD)
def test_a_bad_line_is_reported_with_file_line_and_expectation(files, tmp_path, name, line, wanted):
    kept = tmp_path / "score.json"
    kept.write_text("of yesterday")
    with files[name].open("a") as file:
        file.write(line)
    if wanted is None:
        assert score(**files)["events"] == 2
        return
    with pytest.raises(UsageError, match=rf"{name}\.jsonl: {wanted}"):
        score(**files, json_file=kept)
    assert kept.read_text() == "of yesterday"


def test_an_incident_may_be_over_before_it_is_opened(files):
    line = json.dumps({**CASE, "onset": time_at(30), "opened": time_at(200), "resolved": time_at(90)})
    files["incidents"].write_text(line + "\n")
    result = score(**files)
    assert (result["found"], result["false"], result["pages"]) == (1, 0, 1)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just("2026-01-01T00:00:00Z"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=9), inner, max_size=2),
    max_leaves=3,
)
WHOLE = {
    "findings": finding(60, "rank:7.0"),
    "incidents": CASE,
    "truth": {**FAULT, "entities": ["gpu:n0.0"], "parameters": {**MORE, "detectable": time_at(9)}},
    "meta": META,
}
FIELDS = [(name, key) for name, row in WHOLE.items() for key in row] + [("truth", f"parameters {key}") for key in MORE]


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_any_value_of_a_field_is_scored_or_refused_with_its_line(files, name, field, data):
    row = json.loads(json.dumps(WHOLE[name]))
    part, _, key = field.partition(" ")
    (row[part] if key else row)[key or part] = data.draw(ANY_JSON)
    files[name].write_text(json.dumps(row) + "\n")
    refused = ""
    try:
        json.dumps(score(**files))
    except UsageError as error:
        refused = str(error)
    assert not refused or refused.startswith(f"{files[name]}: " + ("" if name == "meta" else "line 1: "))


def test_blank_lines_a_byte_order_mark_and_unusual_line_ends_are_read(files):
    lines = files["findings"].read_text().splitlines()
    odd = json.dumps({**finding(70, "rank:7.0"), "summary": "one\u2028two"}, ensure_ascii=False)
    files["findings"].write_text("\ufeff" + "\r\n\r\n".join([*lines, odd]) + "\r\n\r\n")
    result = score(**files)
    assert (result["found"], result["false"]) == (1, 1)


@pytest.mark.parametrize("cls", ["hard", "soft", "benign", None])
def test_an_event_without_faulty_entities_is_benign(files, cls):
    files["truth"].write_text(json.dumps({**FAULT, "class": cls, "entities": []}))
    result = score(**files)
    assert (result["events"], result["false_by_benign"]["straggler"]["pages"]) == (0, 1)


def test_an_own_kind_is_answered_by_any_page_on_the_faulty_entity(files):
    files["truth"].write_text(json.dumps({**FAULT, "kind": "mouse in the rack"}))
    assert score(**files)["found"] == 1


@pytest.mark.parametrize(
    ("meta", "wanted"),
    [
        ("", r"is not JSON.*cut off"),
        ("{}", "nodes is missing"),
        ("7", "found int"),
        (json.dumps({**META, "nodes": "many"}), "nodes: found 'many'"),
        (json.dumps({**META, "nodes": True}), "nodes: found True"),
        (json.dumps({**META, "nodes": -1}), "nodes: found -1"),
        (json.dumps({**META, "nodes": 1e999}), "nodes: found inf"),
        (json.dumps({**META, "nodes": None}), "nodes is missing"),
        (json.dumps({**META, "gpus": 10**400}), "gpus: found 1000"),
        (json.dumps({**META, "end": "never"}), "end: .*expected a time"),
        (json.dumps({**META, "end": META["start"], "start": META["end"]}), "end .* is before start.*swapped"),
    ],
)
def test_a_bad_meta_file_is_named(files, meta, wanted):
    files["meta"].write_text(meta)
    with pytest.raises(UsageError, match=rf"meta\.json: {wanted}"):
        score(**files)


@pytest.mark.parametrize("name", ["findings", "incidents", "truth", "meta"])
def test_a_file_that_cannot_be_read_is_named(files, name):
    files[name].write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=rf"{name}\.json.*cannot be read"):
        score(**files)
    files[name].unlink()
    with pytest.raises(UsageError, match=rf"{name}\.json.*cannot be read"):
        score(**files)


def test_an_output_that_cannot_be_written_is_named(files, tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        score(**files, json_file=tmp_path / "nowhere" / "s.json")
