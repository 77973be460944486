"""Text on the pages."""

from __future__ import annotations

import pytest

import detectors
from dashboards import words
from dashboards.words import recommended_action
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND, from_iso

NOON = from_iso("2026-01-01T12:00:00Z")


@pytest.mark.parametrize(
    ("entity", "name"),
    [
        ("gpu:n042.3", "GPU 3 of n042"),
        ("port:n042.mlx5_0", "port mlx5_0 of n042"),
        ("rank:81.17", "rank 17 of job 81"),
        ("cdu:c1", "CDU c1"),
        ("node:n042", "node n042"),
        ("nvlink:n042.3.17", "NVLink 3.17 of n042"),
        ("filesystem:n042./data/x.y", "file system /data/x.y of n042"),
        ("service:n042.nvidia-fabricmanager", "service nvidia-fabricmanager of n042"),
        ("quark:q1", "quark:q1"),
        ("gpu:", "gpu:"),
        ("", ""),
    ],
)
def test_entities_have_names_and_unknown_kinds_stay_unchanged(entity: str, name: str) -> None:
    assert entity_name(entity) == name


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (7500, "2 h 05 min"), (86_399, "23 h 59 min"), (273_600, "3 d 4 h")],
)
def test_an_age_has_at_most_two_units_and_is_never_negative(seconds: float, said: str) -> None:
    assert words.age(seconds) == said


def test_a_time_has_a_date_unless_it_is_today() -> None:
    assert words.clock(NOON, NOON + 3600 * SECOND) == "12:00:00Z"
    assert words.clock(NOON, NOON + 13 * 3600 * SECOND) == "2026-01-01 12:00:00Z"


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (412.2, "L/min", "412 L/min"),
        (33.94, "Cel", "33.9 °C"),
        (41_233, "{error}", "41,233"),
        (8.6e10, "By", "86 GB"),
        (0.611, "s", "0.611 s"),
        (-3.76e-05, "s", "-37.6 µs"),
        (41.0, "{error}/s", "41 error/s"),
        (float("nan"), "W", "not measured"),
    ],
)
def test_a_quantity_has_three_digits_and_a_common_unit(value: float, unit: str, said: str) -> None:
    assert words.quantity(value, unit) == said


def test_a_summary_has_entity_names_and_units() -> None:
    assert words.plain("gpu:n042.5 is at 71 Cel") == "GPU 5 of n042 is at 71 °C"
    assert words.plain("cdu:c2: flow is low") == "CDU c2: flow is low"
    assert words.plain("filesystem:n1./data is full") == "File system /data of n1 is full"
    assert words.plain("n055 runs warm") == "n055 runs warm"
    errors = "port:n034.mlx5_2: 5070 symbol errors in 10 min"
    assert words.plain(errors) == "Port mlx5_2 of n034: 5,070 symbol errors in 10 min"
    assert words.plain("site:all: 1200 of 12500 nodes silent") == "Whole site: 1,200 of 12,500 nodes silent"
    assert words.plain("rank 4711 of job 20260101 is slow") == "Rank 4711 of job 20260101 is slow"
    assert words.plain("") == ""


def test_evidence_values_are_written_in_words() -> None:
    assert words.fact(None) == "not measured"
    assert words.fact(True) == "yes"
    assert words.fact(["gpu:n1.0", "gpu:n1.1"]) == "GPU 0 of n1, GPU 1 of n1"
    assert words.fact(list(range(10))).endswith("and 2 more")
    assert words.fact("2026-01-01T12:00:00.000000Z") == "2026-01-01 12:00:00Z"
    assert words.fact("x" * 27) == "x" * 27


def test_labels_keep_acronyms_and_drop_the_unit_in_the_name() -> None:
    assert words.label("sm_clock_below_peers") == "SM clock below peers"
    assert words.label("lag_s") == "Lag"
    assert words.label("nic.crc_errors") == "NIC CRC errors"


def test_every_detector_has_a_recommended_action() -> None:
    families = {d.name.partition("_")[0] for d in detectors.configured({}, "")}
    texts = {recommended_action(name, "gpu:n1.0") for name in (*families, "novel")}
    assert len(texts) == len(families) + 1, "a family has no separate action"
    assert all("GPU 0 of n1" in text for text in texts if "This is an unusual change" not in text)


def test_lists_are_joined_in_words() -> None:
    assert [words.joined(p) for p in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_a_mapping_is_written_in_words_and_an_empty_one_is_none() -> None:
    assert words.fact({"times": 20, "name": "fallen off the bus", "then": ""}) == "times 20, name fallen off the bus"
    assert words.fact("") == words.fact({}) == "none"
    assert entity_name("psu:n1.2") == "power supply 2 of n1"


@pytest.mark.parametrize(
    ("value", "signal", "said"),
    [
        (0.391, "gpu.utilization", "39.1 %"),
        (1.0, "gpu.utilization", "100 %"),
        (1.07, "power.load", "107 %"),
        (1.5e-12, "nvlink.effective_ber", "1.5e-12"),
        (16.8, "node.load1", "16.8"),
        (33.9, "gpu.temperature", "33.9 °C"),
    ],
)
def test_a_share_is_in_percent_and_an_error_rate_is_none(value: float, signal: str, said: str) -> None:
    assert words.reading(value, signal, words.CATALOGUE[signal].unit) == said
