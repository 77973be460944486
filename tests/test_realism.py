"""Realism of the simulated telemetry: distances checked by hand, and the script on invented recordings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.realism import measures
from benchmarks.realism.__main__ import main
from benchmarks.realism.page import FIGURES, number
from benchmarks.realism.quantities import QUANTITIES, Compared
from benchmarks.realism.sample import (
    PERCENTILES,
    gaps,
    in_time,
    kolmogorov,
    kurtosis,
    median_phi,
    phi,
    quantum,
    sample,
    spread,
    spread_ratio,
    wasserstein,
)
from benchmarks.realism.series import coarse, rate, rolling_median

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "realism.md"
STEP_US = 1_000_000


@pytest.mark.parametrize(
    ("one", "other", "largest", "moved"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 0.0, 0.0),
        ([1, 2, 3, 4], [3, 4, 5, 6], 0.5, 2.0),
        ([0, 0, 1], [0, 1, 1], 1 / 3, 1 / 3),
        ([0, 1], [0], 0.5, 0.5),
        ([0, 1], [10, 11, 10, 11], 1.0, 10.0),
        ([0, 10], [5], 0.5, 5.0),
    ],
)
def test_distances_equal_those_computed_by_hand(one: list[int], other: list[int], largest: float, moved: float) -> None:
    for a, b in ((one, other), (other, one)):
        assert kolmogorov(sample(a), sample(b)) == pytest.approx(largest)
        assert wasserstein(sample(a), sample(b)) == pytest.approx(moved)


def test_a_shift_by_one_spread_is_a_gap_of_one_everywhere() -> None:
    real = sample(np.arange(101.0))
    assert spread(real) == 50
    assert gaps(real, sample(np.arange(101.0) + 50)) == pytest.approx(np.ones(len(PERCENTILES)))


def test_if_half_of_the_values_are_equal_the_spread_is_that_from_5_to_95_percent() -> None:
    assert spread(sample([*range(10), *[50] * 81, *range(91, 101)])) == pytest.approx(91 - 5, abs=5)
    assert np.isnan(spread(sample([3.0] * 9)))


def test_spreads_are_compared_over_the_same_range() -> None:
    even, peaked = sample(np.arange(101.0)), sample([*range(10), *[50] * 81, *range(91, 101)])
    assert spread_ratio(sample(np.arange(101.0) * 3), even) == pytest.approx(3)
    assert spread_ratio(peaked, even) == pytest.approx((95 - 5) / 90, abs=0.05)  # half of one are equal
    assert np.isnan(spread_ratio(sample([3.0] * 9), even))


def test_missing_values_are_not_counted() -> None:
    assert list(sample([2.0, np.nan, 1.0]).values) == [1.0, 2.0]
    zigzag = np.array([1.0, -1.0] * 5)
    assert phi(zigzag) == pytest.approx(-1)
    assert phi(np.insert(zigzag, 4, np.nan)) == pytest.approx(-1)
    assert np.isnan(phi(np.ones(9)))


def test_the_autocorrelation_of_an_autoregression_is_its_coefficient() -> None:
    rng, lines = np.random.default_rng(1), []
    for _ in range(9):
        line = np.zeros(4000)
        for k in range(1, len(line)):
            line[k] = 0.8 * line[k - 1] + rng.standard_normal()
        lines.append(line)
    assert median_phi(in_time(lines)) == pytest.approx(0.8, abs=0.02)


def test_kurtosis_equals_the_value_computed_by_hand() -> None:
    assert kurtosis(np.array([-1.0, 1.0] * 4)) == pytest.approx(-2)  # fourth moment 1, variance 1
    assert kurtosis(np.array([-1.0, 0.0, 0.0, 1.0])) == pytest.approx(-1)  # 0.5 / 0.25 - 3
    assert np.isnan(kurtosis(np.ones(4)))


def test_a_step_is_detected() -> None:
    rng = np.random.default_rng(2)
    assert quantum(sample(np.rint(rng.normal(1700, 60, 5000) / 15) * 15)) == pytest.approx(15)
    assert quantum(sample(np.round(np.rint(rng.normal(0, 4, 5000)) / 3, 3))) == pytest.approx(1 / 3, abs=1e-3)
    assert np.isnan(quantum(sample(rng.standard_normal(5000))))


def test_conditions_are_applied() -> None:
    found = sample([5.0, 1.0, 2.0, 3.0])
    assert list(found.above(2.0).values) == [3.0, 5.0]
    assert list(found.top(0.5).values) == [3.0, 5.0]
    assert found.share_above(2.0) == 0.5
    assert list(found.centred().values) == [-1.5, -0.5, 0.5, 2.5]


def test_a_counter_has_no_rate_across_its_reset() -> None:
    found = rate(np.array([0.0, 20.0, 5.0, 25.0]), np.array([0.0, 10.0, 20.0, 30.0]))
    assert found[[0, 2]] == pytest.approx([2.0, 2.0])
    assert np.isnan(found[1])


def test_means_use_measured_values_alone() -> None:
    found = coarse(np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 7.0]), 2)
    assert found[:2] == pytest.approx([2.0, 5.0])
    assert len(found) == 3
    assert np.isnan(found[2])


def test_a_dip_of_a_port_is_not_noise() -> None:
    rates = np.full(101, 100.0)
    rates[50], rates[60] = 0.0, 102.0
    off = measures.deviations(rates)
    assert np.isnan(off[50])
    assert off[60] == pytest.approx(0.02)
    assert np.isnan(rolling_median(rates, 31)[:15]).all()


def test_a_step_is_split_into_the_common_part_and_the_part_of_a_rank() -> None:
    usual = np.array([1.0, 1.01, 1.0, 2.0])
    times = np.array([usual, usual * np.exp(0.05), usual, usual, usual])
    times[3, 2] *= np.exp(0.03)
    assert measures.step_factor(times) == pytest.approx([0, 0.05, 0, 0, 0])
    assert measures.own_noise(times)[3] == pytest.approx([0, 0, 0.03, 0])
    stages = {"a": "s0", "b": "s0", "c": "s1", "d": "s1"}
    assert measures.neighbours(["a", "b", "c", "d"], times, stages)[0] == pytest.approx([-np.log(1.01), -np.log(2)])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.12"),
        (1.26, "1.3"),
        (12.6, "13"),
        (-0.004, "-0.004"),
        (float("nan"), "-"),
        (0.0, "0"),
        (250.4, "250"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_the_committed_page_has_every_quantity_and_every_picture() -> None:
    page = PAGE.read_text()
    assert [q.title for q in QUANTITIES if page.count(f"| {q.title} |") != 2] == []
    pictures = re.findall(r"\((images/realism-\w+\.png)\)", page)
    assert pictures == [f"images/realism-{figure}.png" for figure in FIGURES]
    assert all((PAGE.parent / picture).is_file() for picture in pictures)
    assert "{{" not in page


def test_without_real_recordings_the_script_names_the_missing_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--data" in capsys.readouterr().err
    assert main(["--data", str(tmp_path)]) == 2
    assert f"--data {tmp_path}: no acme_trace_cdfs/acme_cdfs.parquet" in capsys.readouterr().err


def test_curves_of_real_data_are_not_drawn_into_the_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recordings(tmp_path)
    assert main(["--data", str(tmp_path), "--overlay", str(ROOT / "docs")]) == 2
    assert "is inside the project" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_data_and_seed_give_the_same_page_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_recordings(tmp_path / "data")
    write_scenarios(tmp_path / "write_scenarios")
    given = ["--data", str(tmp_path / "data"), "--scenarios", str(tmp_path / "write_scenarios"), "--seed", "3"]
    written = []
    for _ in range(2):
        to = tmp_path / f"run {len(written)}"
        to.mkdir()
        assert main([*given, "--page", str(to / "page.md"), "--images", str(to / "images")]) == 0
        written.append({p.relative_to(to).as_posix(): p.read_bytes() for p in to.rglob("*") if p.is_file()})
    assert written[0] == written[1]
    assert set(written[0]) == {"page.md", *(f"images/realism-{figure}.png" for figure in FIGURES)}
    page = written[0]["page.md"].decode()
    assert all(page.count(f"| {q.title} |") == 2 for q in QUANTITIES)
    assert "{{" not in page
    assert "not simulated" not in page


def test_an_overlay_is_drawn_on_request(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.realism import plots

    plots.overlay(Compared(QUANTITIES[0], (sample([1, 2, 3.0]),), sample([2, 3, 4.0]), None), tmp_path / "seen.png")
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG")


def write_scenarios(folder: Path) -> None:
    """Writes three small scenarios."""
    folder.mkdir()
    for name, seconds, interval in (("hall", 3600, 10), ("weeks", 18_000, 60), ("second", 130, 1)):
        text = f"version = 1\nduration = {seconds}\ninterval = {interval}\n[fleet]\nnodes = 1\ngpus_per_node = 8\n"
        (folder / f"{name}.toml").write_text(text)


def write_recordings(folder: Path) -> None:
    """Writes invented recordings in the shape of the real ones."""
    rng = np.random.default_rng(5)
    curves = [(f"gpu_power_{c}", "DCGM_POWER_USAGE_W", rng.uniform(50, 420, 200)) for c in ("kalos", "seren")]
    for cluster in ("kalos", "seren"):
        curves += [(f"gpu_temp_{cluster}", m, rng.normal(50, 9, 200)) for m in ("GPU_TEMP_C", "MEMORY_TEMP_C")]
        curves += [(f"util_cpu_mem_{cluster}", m, rng.uniform(0, 90, 200)) for m in ("CPU_UTIL", "MEM_UTIL")]
    curves += [("util_gpu_kalos", m, rng.uniform(0, 100, 200)) for m in ("GPU_UTIL", "GPU_MEM")]
    curves += [
        ("ib_seren", "IB_SEND", rng.uniform(0, 9000, 200)),
        ("server_power", "GPU_server_W", rng.uniform(1e3, 6e3, 200)),
    ]
    rows = [(file, metric, float(x)) for file, metric, values in curves for x in values]
    columns = dict(zip(("file", "metric", "x"), map(list, zip(*rows, strict=True)), strict=True))
    (folder / "acme_trace_cdfs").mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "acme_trace_cdfs" / "acme_cdfs.parquet")
    ports = {f"port:p{i}": {"nic.prefec_ber_avg": 10 ** rng.normal(-5, 0.1, 60)} for i in range(4)}
    write_recording(folder / "alibaba_prefec_ber", ports, 3600)
    for name, seconds in (("smd", 60), ("asd", 300)):
        nodes = {f"node:n{i}": {f"m{k:02}": rng.standard_normal(90).cumsum() for k in range(4)} for i in range(3)}
        write_recording(folder / name, nodes, seconds)
    ranks = {
        f"rank:J.{stage}.{replica}": {
            "rank.step": np.arange(20.0),
            "rank.compute_time": rng.uniform(1, 1.1, 20) + stage,
        }
        for stage in range(2)
        for replica in range(2)
    }
    write_recording(folder / "bytedance", ranks, 1)
    lines = [f'"{name[5:]}" = ["stage:J.{name[7]}", "job:J"]' for name in ranks]
    (folder / "bytedance" / "topology.toml").write_text("version = 1\n[rank]\n" + "\n".join(lines) + "\n")
    counters = ("nic.rx_bytes", "nic.tx_bytes")
    used = {f"port:r{i}": {c: rng.uniform(9e9, 1.1e10, 120).cumsum() for c in counters} for i in range(2)}
    write_recording(folder / "cisco", used, 10)
    columns_of_loop = ("coolant.flow", "coolant.pressure", "coolant.temperature")
    write_recording(folder / "skab", {"loop:anomaly-free": {c: rng.normal(9, 1, 300) for c in columns_of_loop}}, 1)


def write_recording(folder: Path, entities: dict[str, dict[str, np.ndarray]], seconds: int) -> None:
    """Writes one folder in the replay format, with an event in the middle."""
    folder.mkdir(parents=True)
    length = len(next(iter(next(iter(entities.values())).values())))
    times = np.arange(length) * seconds * STEP_US
    names = next(iter(entities.values()))
    table = {
        "time": pa.array(np.tile(times, len(entities)), pa.timestamp("us", "UTC")),
        "entity": [entity for entity in entities for _ in range(length)],
        **{name: np.concatenate([columns[name] for columns in entities.values()]) for name in names},
    }
    pq.write_table(pa.table(table), folder / "telemetry.parquet")
    unit = {"train": ["1970-01-01T00:00:00Z", "1970-01-31T00:00:00Z"]}
    (folder / "meta.json").write_text(json.dumps({"units": dict.fromkeys(entities, unit)}))
    (folder / "truth.jsonl").write_text('{"onset": "1970-01-01T00:05:00Z"}\n')
