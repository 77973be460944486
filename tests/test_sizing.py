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
    number(r"\| ([\d.]+) bytes per sample, of 2 nodes \|\n\| sealed", SIZING),
    number(r"rollups .* \| ([\d.]+) bytes", SIZING),
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
    rates = re.findall(r"([\d.]+) M samples per CPU-second, 0\.42|/ ([\d.]+) M, 0\.13", FIGURES)
    best, worst = float(rates[0][0]) * 1e6, float(rates[1][1]) * 1e6
    low, high = re.findall(r"CPU: ingest \| ([\d.]+) to ([\d.]+) ms", SIZING)[0]
    assert (float(low), float(high)) == (round(SAMPLES / best * 1e3, 2), round(SAMPLES / worst * 1e3, 1))
    seconds = number(r"81 M samples, 5 faults \| evaluated in (\d+) s of one core", FIGURES)
    assert number(r"CPU: detection \| ([\d.]+) ms", SIZING) == round(SAMPLES / (81e6 / seconds) * 1e3, 2)


ROWS = re.findall(
    r"^\| ([\d,]+) \| (?:below )?([\d.]+) cores? .*\| ([\d.]+ [GT]B) \| ([\d.]+ [GT]B) \| (\d+) \|", SIZING, re.M
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_server_is_nodes_times_one_node(row: tuple[str, ...]) -> None:
    nodes = float(row[0].replace(",", ""))
    cores = [nodes * (ingest + 0.13 + seal) / 1e3 for ingest, seal in ((0.03, 0.2), (0.1, 0.65))]
    assert cores[0] * 0.8 <= max(float(row[1]), cores[0]) <= cores[1]
    assert read_bytes(row[2]) == pytest.approx(nodes * HOT * PER_DAY, rel=0.15)
    assert read_bytes(row[3]) == pytest.approx(nodes * (SEALED + ROLLUP) * PER_DAY * MONTH, rel=0.05)


def test_all_sizes_of_the_table_were_checked() -> None:
    assert [row[0] for row in ROWS] == ["16", "100", "1,000", "12,500"]


@pytest.mark.parametrize("row", re.findall(r"^\| ([\d,]+) \| ([\d.]+) MB/s \| (\d+) \| ([\d.]+ [GT]B) \|", KAFKA, re.M))
def test_kafkas_disk_is_72_hours_of_all_nodes_on_each_of_three_brokers(row: tuple[str, ...]) -> None:
    nodes = float(row[0].replace(",", ""))
    assert float(row[1]) == pytest.approx(nodes * WIRE / 1e6, rel=0.05)
    assert read_bytes(row[3]) == pytest.approx(nodes * WIRE * 72 * 3600, rel=0.02)
    assert row[2] == next(r[4] for r in ROWS if r[0] == row[0])


def test_the_spool_and_the_default_limit_last_as_long_as_the_page_says() -> None:
    days = (1 << 30) / (WIRE * DAY)
    assert days == pytest.approx(number(r"(\d+) days of a node without a broker", SIZING), abs=0.5)
    per_day = (SEALED + ROLLUP) * PER_DAY
    assert (100 << 30) / (1000 * per_day) == pytest.approx(1, abs=0.15)
    assert (100 << 30) / (50 * per_day) == pytest.approx(number(r"of 50 nodes\s+for (\d+)", SIZING), abs=1)
