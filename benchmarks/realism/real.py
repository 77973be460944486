"""The real recordings, read from the folder given with --data, as samples.

Each quantity comes as one sample or as two halves (two clusters, or every other device): how far two halves of the
real thing lie apart is the yardstick for how far the simulator lies from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.realism import measures
from benchmarks.realism.sample import Floats, Sample, in_time, sample
from benchmarks.realism.series import SECONDS, read, stages
from pipeline.model.errors import UsageError
from pipeline.model.records import from_iso

A100_W, RATED_W, PORT = 400.0, 6500.0, 25_000.0
"""Board limit of an A100 SXM and maximum power of a DGX A100 (NVIDIA data sheets); MB/s of a 200 Gb/s port."""
CLOSE_TO_EVENT_S = 300.0  # beside an operator's action a port's rate is not noise; chosen
LINE_RATE = 12.5e9  # bytes/s of a 100 Gb/s port
ACME = "acme_trace_cdfs/acme_cdfs.parquet"
FOLDERS = ("alibaba_prefec_ber", "asd", "bytedance", "cisco", "skab", "smd")
Halves = tuple[Sample, ...]


class Real:
    """Samples of the real recordings in `directory`. Raises UsageError if files are missing."""

    def __init__(self, directory: Path) -> None:
        wanted = (ACME, *(f"{folder}/telemetry.parquet" for folder in FOLDERS))
        missing = [name for name in wanted if not (directory / name).is_file()]
        if missing:
            raise UsageError(
                f"--data {directory}: no {', no '.join(missing)}; expected the folder of real recordings "
                "that docs/realism.md describes under 'The real data'"
            )
        self.directory = directory

    def acme(self, *curves: tuple[str, str]) -> Halves:
        """Published distribution functions, one sample per (file, metric)."""
        return tuple(self._curves[curve] for curve in curves)

    @cached_property
    def _curves(self) -> Mapping[tuple[str, str], Sample]:
        table = pq.read_table(self.directory / ACME)
        found = {}
        for file, metric in sorted(set(zip(table["file"].to_pylist(), table["metric"].to_pylist(), strict=True))):
            mine = pc.and_(pc.equal(table["file"], file), pc.equal(table["metric"], metric))
            found[file, metric] = sample(table.filter(mine)["x"].to_numpy())  # quantiles at even steps of probability
        return found

    def power(self) -> Halves:
        """Of GPUs, as a share of the board's limit."""
        found = self.acme(("gpu_power_kalos", "DCGM_POWER_USAGE_W"), ("gpu_power_seren", "DCGM_POWER_USAGE_W"))
        return tuple(half.scaled(1 / A100_W) for half in found)

    def temperature(self, metric: str) -> Halves:
        return self.acme(("gpu_temp_kalos", metric), ("gpu_temp_seren", metric))

    def hottest(self, metric: str, limit: float) -> Halves:
        """As many of the hottest readings as there are GPUs that draw more than `limit` of the board's limit."""
        pairs = zip(self.temperature(metric), self.power(), strict=True)
        return tuple(heat.top(power.share_above(limit)) for heat, power in pairs)

    def traffic(self) -> Halves:
        """Sent, as a share of the line rate."""
        return tuple(half.scaled(1 / PORT) for half in self.acme(("ib_seren", "IB_SEND")))

    def server_power(self) -> Halves:
        return tuple(half.scaled(1 / RATED_W) for half in self.acme(("server_power", "GPU_server_W")))

    def host(self, metric: str) -> Halves:
        found = self.acme(("util_cpu_mem_kalos", metric), ("util_cpu_mem_seren", metric))
        return tuple(half.scaled(0.01) for half in found)

    @cached_property
    def decades(self) -> tuple[Floats, ...]:
        """log10 of the hourly pre-FEC error rate of each port."""
        ports = read(self.directory / "alibaba_prefec_ber" / "telemetry.parquet", ["nic.prefec_ber_avg"])
        return tuple(measures.ber(columns["nic.prefec_ber_avg"]) for columns in ports.values())

    def ports(self, measure: Callable[[tuple[Floats, ...]], Sample]) -> Halves:
        """A measure of the optical ports, of every other one and of the rest."""
        return measure(self.decades[::2]), measure(self.decades[1::2])

    @cached_property
    def steps(self) -> tuple[list[str], Any, Mapping[str, str]]:
        """(ranks, compute times (steps, ranks), rank -> stage) of the one real job."""
        folder = self.directory / "bytedance"
        ranks = read(folder / "telemetry.parquet", ["rank.step", "rank.compute_time"])
        [(names, times)] = measures.job_steps(ranks)
        return names, times, stages(folder / "topology.toml")

    def rate_noise(self) -> Halves:
        """Of the router's ports, away from what its operators did."""
        folder = self.directory / "cisco"
        ports = read(folder / "telemetry.parquet", ["nic.rx_bytes", "nic.tx_bytes"])
        events = [json.loads(line) for line in (folder / "truth.jsonl").read_text().splitlines()]
        moments = [from_iso(event["onset"]) / 1e6 for event in events]
        found = list(measures.port_noise(ports, LINE_RATE, moments, CLOSE_TO_EVENT_S).values())
        return measures.merged(found[::2]), measures.merged(found[1::2])

    def servers(self, folder: str) -> tuple[list[Floats], list[Floats]]:
        """Metrics of the servers in their training period: of every other metric, and the rest."""
        path = self.directory / folder
        units = json.loads((path / "meta.json").read_text())["units"]
        found = []
        for node, columns in read(path / "telemetry.parquet").items():
            learning = columns[SECONDS] <= from_iso(units[node]["train"][1]) / 1e6
            found += measures.moving(line[learning] for name, line in columns.items() if name != SECONDS)
        return found[::2], found[1::2]

    def loop(self, column: str) -> Halves:
        """Noise of the water loop in the run without a fault: its first and second half."""
        loop = read(self.directory / "skab" / "telemetry.parquet", [column])["loop:anomaly-free"]
        [line] = measures.loop_noise({"loop": loop}, column).series
        return in_time([line[: len(line) // 2]]), in_time([line[len(line) // 2 :]])


def halves(values: Floats) -> Halves:
    """Every other column and the rest, as samples."""
    return sample(values[:, ::2]), sample(values[:, 1::2])
