"""The arithmetic of docs/sizing.md and of the table of docs/kafka.md: from the figures of docs/figures.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
FIGURES, SIZING, KAFKA = ((DOCS / name).read_text() for name in ("figures.md", "sizing.md", "kafka.md"))
DAY, MONTH = 86_400, 30
UNITS = {"GB": 1e9, "TB": 1e12, "MB": 1e6}


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, pattern
    return float(found[1].replace(",", ""))


def read_bytes(text: str) -> float:
    value, unit = text.split()
    return float(value.replace(",", "")) * UNITS[unit]


VALUES, SAMPLES = number(r"stream of (\d+) values/s", FIGURES), number(r"not missing; |of which (\d+)\n", SIZING)
PER_DAY = SAMPLES * DAY
WIRE = VALUES * number(r"\| (1\.\d+) with `\[agent\] linger` 5 s", FIGURES)
HOT, ROLLUP = (
    number(r"([\d.]+) bytes per sample, [\d.]+ \(", FIGURES),
    number(r"bytes per sample, ([\d.]+) \(", FIGURES),
)
SEALED = number(r"merge \| (1\.\d+) and", FIGURES)


@pytest.mark.parametrize(
    ("row", "computed", "unit"),
    [
        ("on the wire", WIRE / 1e3, "kB/s"),
        ("on the wire", WIRE * DAY / 1e6, "MB a day"),
        ("hot store", HOT * PER_DAY / 1e6, "MB a day"),
        ("sealed history", SEALED * PER_DAY / 1e6, "MB a day"),
        ("rollups", ROLLUP * PER_DAY / 1e6, "MB a day"),
    ],
)
def test_a_nodes_bytes_are_its_values_times_the_measured_bytes(row: str, computed: float, unit: str) -> None:
    shown = number(rf"\| {row}.* ([\d.]+) {unit}", SIZING)
    assert shown == pytest.approx(computed, rel=0.01)


def test_a_nodes_cpu_is_that_of_the_measured_rates() -> None:
    kafka = r"\| ingest from Kafka.*?\| ([\d.]+) M samples per CPU-second.*? / ([\d.]+) to [\d.]+ M, "
    best, worst = (float(rate) * 1e6 for rate in re.findall(kafka, FIGURES)[0])
    low, high = re.findall(r"CPU: ingest \| ([\d.]+) to ([\d.]+) ms", SIZING)[0]
    assert (float(low), float(high)) == (round(SAMPLES / best * 1e3, 2), round(SAMPLES / worst * 1e3, 1))
    seconds = number(r"81 M samples, 5 faults \| evaluated in (\d+) s of one core", FIGURES)
    assert number(r"CPU: detection \| ([\d.]+) ms", SIZING) == round(SAMPLES / (81e6 / seconds) * 1e3, 2)


def test_a_nodes_sealing_is_that_of_the_measured_seconds_per_node_and_hour() -> None:
    low_s, high_s = re.findall(r"earlier runs ([\d.]+) s, and ([\d.]+) s on a busy machine", FIGURES)[0]
    low, high = re.findall(r"CPU: sealing and rollups \| ([\d.]+) to ([\d.]+) ms", SIZING)[0]
    assert (float(low), float(high)) == pytest.approx((float(low_s) / 3.6, float(high_s) / 3.6), rel=0.05)
    assert re.findall(r"\| ([\d.]+) s per node and hour, ([\d.]+) s", SIZING) == [(low_s, high_s)]


def test_an_agents_cost_is_the_range_of_the_measured_figures() -> None:
    alone = re.findall(r"all collectors of a node \| ([\d.]+) % of a core, (\d+) MiB", FIGURES)[0]
    beside = re.findall(r"([\d.]+) % beside the training .*?; (\d+) MiB", FIGURES)[0]
    found = re.findall(r"agent \| ([\d.]+) to ([\d.]+) % of a core, (\d+) to (\d+) MiB", SIZING)[0]
    assert [*map(float, found)] == [*map(float, (alone[0], beside[0], alone[1], beside[1]))]


ROWS = re.findall(
    r"^\| ([\d,]+) \| ([\d.]+) to ([\d.]+) \| (\d+|not one) .*"
    r"\| ([\d.]+ [GT]B) \| ([\d.]+ [GT]B) \| (\d+), ([\d.]+ [GT]B) \|",
    SIZING,
    re.M,
)
CPU = [
    (float(low), float(high or low))
    for low, high in re.findall(r"CPU: .*? \| ([\d.]+)(?: to ([\d.]+))? ms per second \|", SIZING)
]
LOW, HIGH = (sum(ends) for ends in zip(*CPU, strict=True))
ALWAYS = number(r"whatever the number of nodes \| (\d+) ms", SIZING)


def test_what_a_pipeline_always_takes_is_the_line_through_the_live_figures_of_8_and_256_nodes() -> None:
    shown = re.findall(r"at 8 / 64 / 256 nodes \| [\d.]+ to ([\d.]+) / [\d.]+ / ([\d.]+) ms", FIGURES)[0]
    few, many = 8 * float(shown[0]), 256 * float(shown[1])
    assert pytest.approx(few - 8 * (many - few) / 248, rel=0.15) == ALWAYS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_server_is_nodes_times_one_node_and_plans_with_the_upper_end(row: tuple[str, ...]) -> None:
    nodes = float(row[0].replace(",", ""))
    assert (float(row[1]), float(row[2])) == pytest.approx(
        ((ALWAYS + nodes * LOW) / 1e3, (ALWAYS + nodes * HIGH) / 1e3), rel=0.12
    )
    assert row[3] == "not one" or int(row[3]) >= 3 * (ALWAYS + nodes * HIGH) / 1e3 + 1
    assert read_bytes(row[4]) == pytest.approx(nodes * HOT * PER_DAY, rel=0.15)
    assert read_bytes(row[5]) == pytest.approx(nodes * (SEALED + ROLLUP) * PER_DAY * MONTH, rel=0.01)
    assert read_bytes(row[7]) == pytest.approx(nodes * WIRE * 72 * 3600, rel=0.02)


def test_all_sizes_of_the_table_were_checked() -> None:
    assert [row[0] for row in ROWS] == ["16", "100", "1,000", "12,500"]


@pytest.mark.parametrize("row", re.findall(r"^\| ([\d,]+) \| ([\d.]+) MB/s \| (\d+) \| ([\d.]+ [GT]B) \|", KAFKA, re.M))
def test_kafkas_disk_is_72_hours_of_all_nodes_on_each_of_three_brokers(row: tuple[str, ...]) -> None:
    nodes = float(row[0].replace(",", ""))
    assert float(row[1]) == pytest.approx(nodes * WIRE / 1e6, rel=0.05)
    assert read_bytes(row[3]) == pytest.approx(nodes * WIRE * 72 * 3600, rel=0.02)
    assert row[2] == next(r[6] for r in ROWS if r[0] == row[0])


def test_the_spool_and_the_default_limit_last_as_long_as_the_page_says() -> None:
    days = (1 << 30) / (WIRE * DAY)
    assert days == pytest.approx(number(r"(\d+) days of a node without a broker", SIZING), abs=0.5)
    assert number(r"Beyond about ([\d,]+) nodes", SIZING) == pytest.approx(1e3 / HIGH, rel=0.05)
    per_day = (SEALED + ROLLUP) * PER_DAY
    assert (100 << 30) / (1000 * per_day) == pytest.approx(1, abs=0.15)
    assert (100 << 30) / (50 * per_day) == pytest.approx(number(r"of 50 nodes\s+for (\d+)", SIZING), abs=1)
