"""The telemetry of a real agent as a generated fixture: recorded shape (agent_stream.toml), generated values.

    python -m benchmarks.agent_stream [--seconds 120] [--linger 5] [--nodes 16] [--full]

Which signals an agent sends, at which interval and for how many entities was recorded from the agent of
benchmarks/agent.py: 8 GPUs, 9 NICs, 144 NVLinks, about 1,000 values a second. The values have the steps and the noise
of their kind of signal: counters of traffic and their scatter, power in mW, ratios with the full noise of a float,
error counters that rarely move. --full gives values to the signals too that this hardware does not have.

Printed in one run: bytes per value on the wire and CPU of encoding and decoding, of messages of one tick in wire
version 1 (what agents sent before), of one tick today, and of joined ticks.
"""

from __future__ import annotations

import argparse
import itertools
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.node.joining import TickJoiner
from pipeline.model.records import SECOND, Batch, Block, Origin
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.transport import wire
from tests.pipeline import wire_v1

SHAPE = Path(__file__).with_suffix(".toml")
START = 1_760_000_000
EPOCH = bytes(16)
_UPTIME = 10 * 86_400  # s that counters have counted; chosen
_RANGE = re.compile(r"\[(\d+),(\d+)\)")

RATES: Sequence[tuple[str, float, float]] = (
    # name of a counter, rate per second, relative scatter of one second's count
    (r"nvlink\.[rt]x_data", 2.5e7, 0.03),
    (r"nvlink\.[rt]x_bytes", 2.8e10, 0.03),
    (r"nvlink\.[rt]x_packets", 2e8, 0.03),
    (r"nvlink\.fec_0", 2e8, 1e-6),
    (r"nvlink\.(fec_1|plr_blocks)", 2e3, 0.1),
    (r"nvlink\.fec_2", 2, 1),
    (r"nic\.[rt]x_bytes", 2e10, 0.05),
    (r"nic\.[rt]x_packets", 5e6, 0.05),
    (r"nic\.phy_bits", 4.25e11, 1e-6),
    (r"nic\.(phy_corrected_bits|port_tx_wait|lane\d_errors)", 1e4, 0.2),
    (r"nic\.(ecn_marked|cnp_\w+)", 50, 0.5),
    (r"gpu\.pcie_[rt]x_bytes", 3e9, 0.1),
    (r"gpu\.energy", 6.5e5, 0.02),
    (r"gpu\.power_cap_time", 3e8, 0.3),
    (r"node\.cpu_\w+_time|disk\.(io|read|write)_time|agent\.cpu_time", 3e3, 0.3),
    (r"node\.context_switches", 6e4, 0.1),
    (r"node\.\w*pressure\w*", 5e3, 0.5),
    (r"(disk|node)\.(disk_)?(read|written)", 4e6, 0.9),
    (r"disk\.(reads|writes)", 200, 0.5),
    (r"sensor\.energy", 2e8, 0.05),
)
GAUGES: Sequence[tuple[str, float, float, float]] = (
    # name of a gauge, mean, scatter, step (0: the full noise of a float)
    (r"gpu\.power(_average|_instant)?", 650, 8, 1e-3),
    (r"gpu\.power_(memory|module)", 90, 3, 1e-3),
    (r"gpu\.(memory_)?temperature", 62, 1, 1),
    (r"gpu\.thermal_margin", 25, 1, 1),
    (r"gpu\.(memory_)?utilization", 0.97, 0.02, 0.01),
    (r"gpu\.\w+_(active|occupancy)", 0.6, 0.05, 0),
    (r"gpu\.\w+_rate", 2e10, 1e9, 0),
    (r"gpu\.sm_clock", 1755, 20, 15),
    (r"gpu\.call_latency_max|collector\.(latency|silence)|filesystem\.latency", 4e-4, 5e-5, 1e-9),
    (r"gpu\.field_latency", 1e-5, 2e-6, 1e-6),
    (r"nvlink\.raw_ber", 1e-9, 1e-10, 0),
    (r"node\.load\d", 12, 1, 0.01),
    (r"node\.memory_(available|cached|dirty)|node\.numa_free_min|filesystem\.(used|available)", 4e11, 1e7, 4096),
    (r"filesystem\.files_total", 6e7, 0, 1),
    (r"filesystem\.files_used", 1e6, 10, 1),
    (r"sensor\.temperature", 48, 1, 0.25),
    (r"agent\.(spool_bytes|memory)", 6e7, 1e5, 1),
    (r"nic\.pcie_stalled_writes", 3, 1, 1),
)
_HEALTHY = re.compile(
    r"gpu\.(throttle_reasons|recovery_action|rows_failed|\w+_pending|memory_unrepairable|sram_threshold)"
    r"|filesystem\.read_only|sensor\.alarm|node\.(kernel_tainted|tasks_blocked\w*)"
)
"""States and gauges that are 0 on a healthy node; others are 1."""
_CONSTANTS = {"MHz": 2619.0, "W": 700.0, "Cel": -8.0, "By": 8.5e10, "Mbit/s": 4e5, "GT/s": 32.0}


@dataclass(frozen=True, slots=True)
class RecordedColumn:
    """One signal of the recording. columns: (readings, devices), one reading each `interval` seconds."""

    signal: Signal
    interval: int
    values: NDArray[Any]


class AgentStream:
    """`seconds` of telemetry of one node, which `batches` repeats for any node. Same seed, same values.

    full: signals that the recorded hardware does not have get values too.
    """

    def __init__(self, seconds: int, seed: int = 1, full: bool = False) -> None:
        rng, self.seconds = np.random.default_rng(seed), seconds
        self.entities: dict[str, tuple[str, ...]] = {}
        self._columns: dict[str, list[RecordedColumn]] = {}
        for device_class, table in tomllib.loads(SHAPE.read_text()).items():
            names = [name for text in table.pop("entities") for name in _expand(text)]
            missing = frozenset(() if full else table.pop("missing", "").split())
            ports = frozenset(table.pop("ports", "").split())
            self.entities[device_class] = tuple(names)
            self._columns[device_class] = [
                RecordedColumn(signal, int(every), values)
                for every, text in table.items()
                if every.isdecimal()
                for name in text.split()
                for signal in [CATALOGUE[f"{device_class}.{name}"]]
                for values in [_make_values(signal, int(every), seconds, len(names), rng, name in missing)]
                if not (name in ports and _set_missing(values[:, :1]))
            ]

    def joined(self, node: str = "n1", linger: float = 5.0, first: int = START) -> Iterator[Batch]:
        """Yields the batches that the agent sends: the ticks of `linger` seconds in one."""
        joiner = TickJoiner(round(linger * SECOND), SECOND)
        for batch in self.batches(node, first):
            yield from joiner.add_tick(batch)
        yield from joiner.flush()

    @property
    def slots(self) -> int:
        """Values of all ticks."""
        return sum(
            column.values.shape[1] for second in range(self.seconds) for _, c in self._due(second) for column in c
        )

    def batches(self, node: str = "n1", first: int = START) -> Iterator[Batch]:
        """Yields one batch per second, as an agent reads them; the first is at `first` (UTC s).

        The values of a node are those of the recording, its devices in another order, so that no two nodes are equal.
        """
        origin, turn = Origin("bench", node, bytes(16)), sum(node.encode())
        names = {c: tuple(e.replace("NODE", node) for e in entities) for c, entities in self.entities.items()}
        for second in range(self.seconds):
            blocks = tuple(
                Block(c, names[c], {column.signal.name: _turn(column, second, turn) for column in columns})
                for c, columns in self._due(second)
            )
            yield Batch(origin, np.array([(first + second) * SECOND]), blocks)

    def _due(self, second: int) -> Iterator[tuple[str, list[RecordedColumn]]]:
        """Yields the columns of each class that are read in a second; the slow ones are spread over the first."""
        for device_class, columns in self._columns.items():
            if due := [column for column in columns if (second + 1) % column.interval == 0]:
                yield device_class, due


def _turn(column: RecordedColumn, second: int, turn: int) -> NDArray[Any]:
    values: NDArray[Any] = column.values[(second + 1) // column.interval - 1 : (second + 1) // column.interval]
    return np.roll(values, turn % values.shape[1], axis=1)


def _expand(text: str) -> Iterator[str]:
    """Yields the entities of a text with ranges, the last range fastest."""
    ranges = [range(int(low), int(high)) for low, high in _RANGE.findall(text)]
    for numbers in itertools.product(*ranges):
        found = iter(numbers)
        yield _RANGE.sub(lambda _, found=found: str(next(found)), text)


def _set_missing(values: NDArray[Any]) -> bool:
    values[...] = np.nan if values.dtype.kind == "f" else np.iinfo(values.dtype).max
    return False


def _make_values(
    signal: Signal, every: int, seconds: int, devices: int, rng: np.random.Generator, missing: bool
) -> NDArray[Any]:
    """Returns (readings, devices) of one signal in its wire type."""
    shape = (max(1, seconds // every), devices)
    values = np.zeros(shape, signal.type)
    if missing:
        _set_missing(values)
    elif signal.kind == "counter":
        values[...] = _count(signal, every, shape, rng)
    elif gauge := next((row for row in GAUGES if re.fullmatch(row[0], signal.name)), None):
        _, mean, scatter, step = gauge
        noise = rng.normal(0, scatter, shape) + rng.normal(0, scatter, devices) + mean
        values[...] = np.round(noise / step) * step if step else noise
    elif signal.name.endswith(".generation"):
        values[...] = START - _UPTIME
    elif signal.name == "node.uptime":
        values[...] = _UPTIME + every * np.arange(len(values))[:, None]
    else:
        values[...] = 0 if _HEALTHY.fullmatch(signal.name) else _CONSTANTS.get(signal.unit, 1.0)
    return values


def _count(signal: Signal, every: int, shape: tuple[int, int], rng: np.random.Generator) -> NDArray[np.uint64]:
    """Returns the values of a counter: of traffic with its rate, else of rare errors."""
    rate = next((row for row in RATES if re.fullmatch(row[0], signal.name)), None)
    if rate is None:
        start = np.where(rng.random(shape[1]) < 0.1, rng.integers(0, 20, shape[1]), 0)
        return (start + np.cumsum(rng.random(shape) < 1e-4, axis=0)).astype(np.uint64)
    _, per_second, scatter = rate
    added = np.maximum(0, rng.normal(per_second * every, scatter * per_second * every**0.5, shape))
    start = per_second * _UPTIME * (1 + 0.01 * rng.normal(size=shape[1]))
    return (start.round().astype(np.uint64) + np.cumsum(added.round().astype(np.uint64), axis=0)).astype(np.uint64)


def measure(title: str, stream: AgentStream, nodes: int, linger: float, encode: Callable[[], Callable[[Batch], bytes]]):
    """Prints bytes and CPU per value of one way to send the stream of `nodes` nodes. encode: made for each node."""
    batches, messages, used = 0, [], 0.0
    for number in range(nodes):
        write, whole = encode(), list(stream.batches(f"n{number:04d}"))
        joiner, start = TickJoiner(round(linger * SECOND), SECOND), time.process_time()
        bodies = [write(done) for batch in whole for done in joiner.add_tick(batch)]
        bodies += [write(done) for done in joiner.flush()]
        used, batches = used + time.process_time() - start, batches + len(bodies)
        messages += [wire_v1.seal(body, version=1 if write is wire_v1.encode else 2) for body in bodies]
    values, size = nodes * stream.slots, sum(map(len, messages))
    for _ in range(2):  # the second time with parsed layouts, as in a pipeline that runs
        start, opened = time.process_time(), 0.0
        for first in range(0, len(messages), 10 * nodes):
            found = [wire.open_telemetry(message) for message in messages[first : first + 10 * nodes]]
            opened += sum(len(group.times) for group in wire.decode_together(found))
        decoded = time.process_time() - start
    print(
        f"{title:28s} {size / values:6.2f} B {1e9 * used / values:8.1f} ns {1e9 * decoded / values:8.1f} ns "
        f"{1e3 * used / nodes / stream.seconds:8.3f} ms {1e3 * decoded / nodes / stream.seconds:8.3f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--linger", type=float, default=5.0)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--full", action="store_true", help="values for signals that the recorded hardware lacks too")
    options = parser.parse_args()
    stream = AgentStream(options.seconds, full=options.full)
    print(f"{stream.slots / stream.seconds:.0f} values a second and node, {options.nodes} nodes")
    print(f"{'':28s} {'per value':>8s} {'encode':>11s} {'decode':>11s} {'encode/s':>11s} {'decode/s and node':>11s}")
    measure("version 1, one tick", stream, options.nodes, 0, lambda: wire_v1.encode)
    measure("version 2, one tick", stream, options.nodes, 0, lambda: wire.Encoder().encode)
    measure(f"version 2, {options.linger:g} s", stream, options.nodes, options.linger, lambda: wire.Encoder().encode)


if __name__ == "__main__":
    main()
