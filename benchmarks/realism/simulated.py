"""The simulator's side: three scenarios as `fleetpulse simulate` writes them, as samples of the same quantities."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from agents.sim.physics.jobs import WARM_UP
from benchmarks.realism import measures
from benchmarks.realism.sample import Floats, Sample, in_time, sample
from benchmarks.realism.series import SECONDS, first_parents, rate, read, stages
from pipeline.model.errors import UsageError
from pipeline.model.signals import CATALOGUE

ROOT = Path(__file__).parents[2]
SCENARIOS = ("hall", "weeks", "second")
BOARD_W, SERVER_W = 700.0, 10_200.0
"""Board limit of an H100 SXM and maximum power of a DGX H100 (NVIDIA data sheets)."""
BUSY = 0.25
"""Share of its board limit above which a GPU counts as working; chosen: twice what idle ones draw."""
FULL = 0.7
"""Likewise for one that works as hard as large training does; chosen: between the two humps of the real curve."""
HOUR_S = 3600.0


def simulate(scenarios: Path, seed: int, to: Path) -> None:
    """Writes the recordings of all three scenarios under `to`, with the same command that a user has."""
    for name in SCENARIOS:
        order = ["--scenario", str(scenarios / f"{name}.toml"), "--seed", str(seed), "--output", str(to / name)]
        ran = subprocess.run([sys.executable, "-m", "fleetpulse", "simulate", *order], cwd=ROOT, check=False)
        if ran.returncode != 0:
            raise UsageError(f"fleetpulse simulate {' '.join(order)}: ended with {ran.returncode}; expected 0")


class Simulated:
    """Samples of the recordings under `directory`; None where the simulator has no such signal."""

    def __init__(self, directory: Path) -> None:
        self._hall, self._weeks, self._second = (directory / name for name in SCENARIOS)

    def _gpu(self, *columns: str) -> list[Floats]:
        """(GPUs, readings) flattened, one array per column; none of them if one is missing."""
        gpus = read(self._hall / "telemetry-gpu.parquet", columns)
        return [np.concatenate([lines[name] for lines in gpus.values()]) for name in columns] if gpus else []

    def power(self) -> Sample | None:
        found = self._gpu("gpu.power")
        return sample(found[0] / BOARD_W) if found else None

    def temperature(self, signal: str) -> Sample | None:
        found = self._gpu(signal)
        return sample(found[0]) if found else None

    def hottest(self, signal: str, limit: float) -> Sample | None:
        """As many of the hottest readings as there are GPUs that draw more than `limit` of the board's limit."""
        heat, power = self.temperature(signal), self.power()
        return heat.top(power.share_above(limit)) if heat and power else None

    def share(self, signal: str, whole: str | None = None) -> Sample | None:
        """Of a GPU: a ratio, or a part of a whole."""
        found = self._gpu(signal, *([whole] if whole else []))
        return sample(found[0] / found[1] if whole else found[0]) if found else None

    @cached_property
    def _ports(self) -> measures.Lines:
        return read(self._hall / "telemetry-nic.parquet", ["nic.rx_bytes", "nic.tx_bytes", "nic.speed"])

    def _line_rate(self) -> float:
        """Bytes per second of the fleet's ports."""
        return float(np.nanmax([np.nanmax(port["nic.speed"]) for port in self._ports.values()])) * 1e6 / 8

    def traffic(self) -> Sample:
        """Sent, as a share of the line rate."""
        lines = [rate(port["nic.tx_bytes"], port[SECONDS]) for port in self._ports.values()]
        return in_time([line / self._line_rate() for line in lines])

    def rate_noise(self) -> Sample:
        return measures.merged(list(measures.port_noise(self._ports, self._line_rate()).values()))

    def server_power(self) -> Sample | None:
        """Output of all supplies of a server, as a share of the greatest; at times that all of them report."""
        found: dict[str, list[Mapping[str, Floats]]] = {}
        parents = first_parents(self._hall / "topology.toml", "psu")
        for name, line in read(self._hall / "telemetry-psu.parquet", ["psu.output_power"]).items():
            found.setdefault(parents[name], []).append(line)
        lines = []
        for supplies in found.values():
            times, counts = np.unique(np.concatenate([line[SECONDS] for line in supplies]), return_counts=True)
            shared = times[counts == len(supplies)]
            outputs = [line["psu.output_power"][np.isin(line[SECONDS], shared)] for line in supplies]
            lines.append(np.sum(outputs, axis=0))
        return sample(np.concatenate(lines) / SERVER_W) if lines else None

    def processors(self) -> Sample | None:
        """Share of the processors that work."""
        names = ("node.cpu_busy_time", "node.cpu_idle_time")
        nodes = read(self._hall / "telemetry-node.parquet", names)
        pairs = [tuple(rate(line[name], line[SECONDS]) for name in names) for line in nodes.values()]
        return sample(np.concatenate([busy / (busy + idle) for busy, idle in pairs])) if pairs else None

    def memory(self) -> Sample | None:
        """Share of a host's memory in use."""
        nodes = read(self._hall / "telemetry-node.parquet", ["node.memory_available", "node.memory_total"])
        lines = [1 - line["node.memory_available"] / line["node.memory_total"] for line in nodes.values()]
        return sample(np.concatenate(lines)) if lines else None

    def metrics(self, seconds: float) -> list[Floats]:
        """All metrics of all nodes as means over `seconds`."""
        nodes = read(self._hall / "telemetry-node.parquet")
        first = next(iter(nodes.values()))
        interval = float(np.median(np.diff(first[SECONDS])))
        known = {name: CATALOGUE[name].kind for name in first if name in CATALOGUE}
        counters = {name for name, kind in known.items() if kind == "counter"}
        judged = {SECONDS, *(name for name, kind in known.items() if kind != "state")}
        kept = {node: {n: v for n, v in line.items() if n in judged} for node, line in nodes.items()}
        return measures.metrics(kept, counters, max(1, round(seconds / interval)))

    @cached_property
    def decades(self) -> tuple[Floats, ...]:
        """log10 of each port's pre-FEC error rate, hour by hour; none if the simulator does not count the bits."""
        names = ("nic.phy_corrected_bits", "nic.phy_bits")
        ports = read(self._weeks / "telemetry-nic.parquet", names)
        return tuple(_hourly(port[names[0]], port[names[1]], port[SECONDS]) for port in ports.values())

    @cached_property
    def steps(self) -> list[tuple[list[str], Any, Mapping[str, str]]]:
        """(ranks, compute times (steps, ranks), rank -> stage) of each job, as the real one once it is warm."""
        ranks = read(self._hall / "telemetry-rank.parquet", ["rank.step", "rank.compute_time"])
        ranks = {name: measures.since(line, "rank.step", WARM_UP) for name, line in ranks.items()}
        known = stages(self._hall / "topology.toml")
        return [(names, times, known) for names, times in measures.job_steps(ranks)]

    def loop(self, column: str) -> Sample | None:
        loops = read(self._second / "telemetry-coolant.parquet", [column])
        return measures.loop_noise(loops, column) if loops else None


def _hourly(corrected: Floats, bits: Floats, seconds: Floats) -> Floats:
    """Corrected bits per bit in each whole hour, in decades."""
    marks = np.searchsorted(seconds, np.arange(seconds[0], seconds[-1] + 1, HOUR_S))
    wrong, all_bits = np.diff(corrected[marks]), np.diff(bits[marks])
    with np.errstate(divide="ignore", invalid="ignore"):
        return measures.ber(np.where(all_bits > 0, wrong / all_bits, np.nan))
