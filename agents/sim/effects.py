"""What the faults of one block do to the fleet: channels of factors, rates and masks that the physics takes in.

One that no fault touches costs nothing. A new way to be broken is a line below and one where the physics reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.layout import Layout
from agents.sim.physics.noise import Floats

if TYPE_CHECKING:
    from agents.sim.schedule import Stay

Devices = int | slice | NDArray[np.intp]
Values = float | NDArray[Any]


@dataclass(frozen=True, slots=True)
class PlannedEvent:
    """An event before the fleet has a calendar: `time` in seconds after the start of the scenario.

    shipper: number of the node that tells it; None: the one to which the entity belongs.
    """

    time: float
    entity: str
    kind: str
    data: Mapping[str, Any]
    shipper: int | None = None


@dataclass(frozen=True, slots=True)
class Defect:
    """A GPU that computes wrongly from `onset` on: misses[k] says whether the canary round errs that lies between
    k and k + 1 periods later (agents/sim/physics/canary.py)."""

    gpu: int
    onset: float
    misses: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FalseReading:
    """What a broken instrument says instead of the truth: `change` gets the true values of one signal of one device at
    the ticks of `when` and gives what is read. hold: number of a fault that makes the instrument stand still: its first
    reading is told for as long as the fault lasts. jump: (second, K) of a step up that the agent's edge rule sees."""

    signal: str
    device: int
    when: NDArray[np.bool_]
    change: Callable[[NDArray[Any]], Any]
    hold: int | None = None
    jump: tuple[float, float] | None = None


class EventTime(float):
    """Seconds after the start that stand in the data of an event; told as UTC microseconds."""


@dataclass(frozen=True, slots=True)
class Collapse:
    """A loop whose flow falls within `ramp` s to `flow` of what it was, and is back at `end`; `key` of the fault.
    real: the coolant stands still; else only the flow meter says so."""

    loop: int
    onset: float
    end: float
    flow: float
    ramp: float
    key: tuple[int, ...]
    real: bool = True


class Channel:
    """One quantity of a row of devices within a block: (ticks, devices), `neutral` where nobody touched it."""

    __slots__ = ("_neutral", "_shape", "_values")

    def __init__(self, ticks: int, devices: int, neutral: Any) -> None:
        self._shape, self._neutral = (ticks, devices), neutral
        self._values: NDArray[Any] | None = None

    def __bool__(self) -> bool:
        """Whether a fault touched it."""
        return self._values is not None

    @property
    def values(self) -> Any:
        """The array, or the neutral value alone: both broadcast."""
        return self._neutral if self._values is None else self._values

    def of_devices(self, devices: Devices) -> Any:
        """The values of some devices, or the neutral value alone."""
        return self._neutral if self._values is None else self._values[:, devices]

    def array(self) -> NDArray[Any]:
        """The array in any case."""
        if self._values is None:
            self._values = np.full(self._shape, self._neutral)
        return self._values

    def scale(self, devices: Devices, by: Values) -> None:
        """Multiplies; `by` is a number, (ticks,) or (ticks, devices)."""
        self._apply(np.multiply, devices, by)

    def add(self, devices: Devices, amount: Values) -> None:
        """Adds; for masks and bits: or."""
        self._apply(np.add if self._neutral.dtype.kind in "fi" else np.bitwise_or, devices, amount)

    def lower_to(self, devices: Devices, highest: Values) -> None:
        """Lowers to `highest` what is above."""
        self._apply(np.minimum, devices, highest)

    def raise_to(self, devices: Devices, lowest: Values) -> None:
        """Raises to `lowest` what is below."""
        self._apply(np.maximum, devices, lowest)

    def _apply(self, how: Callable[..., Any], devices: Devices, values: Values) -> None:
        array, given = self.array(), np.asarray(values, self._neutral.dtype)
        if given.ndim == 1 and not isinstance(devices, int | np.integer):
            given = given[:, None]
        array[:, devices] = how(array[:, devices], given)


_ONE, _ZERO, _NO, _NONE, _BITS = np.float32(1), np.float32(0), np.bool_(False), np.int64(0), np.uint64(0)


class GpuEffects:
    """Of each GPU. Rates are per second, counts are what a tick adds."""

    def __init__(self, ticks: int, n: int) -> None:
        self.clock = Channel(ticks, n, _ONE)  # factor on the SM clock
        self.capped = Channel(ticks, n, _ONE)  # factor on it by power caps: the lowest holds; cap it
        self.reasons = Channel(ticks, n, _BITS)  # clock event reasons that are set
        self.watts = Channel(ticks, n, np.float32(np.inf))  # power cap
        self.resistance = Channel(ticks, n, _ONE)  # factor on the thermal resistance to the coolant
        self.hot = Channel(ticks, n, _ZERO)  # share of the thermal contact that is lost
        self.compute = Channel(ticks, n, _ONE)  # factor on the rank's compute time that no clock explains
        self.starved = Channel(ticks, n, _ZERO)  # share of a step's computation in which it waits for its host
        self.gone = Channel(ticks, n, _NO)  # the driver does not answer for it: it has no rows
        self.dram_corrected = Channel(ticks, n, _NONE)  # count
        self.sram_corrected = Channel(ticks, n, _NONE)  # count
        self.dram_uncorrected = Channel(ticks, n, _NONE)  # count
        self.sram_uncorrected = Channel(ticks, n, _NONE)  # count
        self.rows_corrected = Channel(ticks, n, _NONE)  # rows remapped for corrected errors, count
        self.rows_uncorrected = Channel(ticks, n, _NONE)  # rows remapped for uncorrected errors, count
        self.rows_pending, self.rows_failed = Channel(ticks, n, _NO), Channel(ticks, n, _NO)
        self.pcie_width = Channel(ticks, n, np.int64(16))  # cap it
        self.pcie_generation = Channel(ticks, n, np.int64(5))  # cap it
        self.pcie_replays = Channel(ticks, n, _NONE)  # count
        self.nvlink_crc = Channel(ticks, n, _ZERO)  # rate
        self.nvlink_replays = Channel(ticks, n, _ZERO)  # rate
        self.nvlink_recoveries = Channel(ticks, n, _NONE)  # count
        self.nvlink_speed = Channel(ticks, n, _ONE)  # factor on the bandwidth between the GPUs of a node
        self.nvlink_down = Channel(ticks, n, _NO)
        self.gradient = Channel(ticks, n, _ONE)  # factor on the norm of the rank's own gradient
        self.reset = Channel(ticks, n, _NO)  # began anew in this tick, and its counters with it
        self.busy = Channel(ticks, n, _ZERO)  # share of load that somebody else adds


class PortEffects:
    """Of each port of a node; they are numbered as the GPUs."""

    def __init__(self, ticks: int, n: int) -> None:
        self.symbols = Channel(ticks, n, _ZERO)  # rate of errors that the FEC could not correct
        self.crc = Channel(ticks, n, _ZERO)  # rate
        self.raw_ber = Channel(ticks, n, np.float32(-99))  # log10 of the raw bit error rate that faults add; lift it
        self.rx_power = Channel(ticks, n, _ZERO)  # dB added to the received optical power
        self.module_temperature = Channel(ticks, n, _ZERO)  # K added
        self.down = Channel(ticks, n, _NO)
        self.flips = Channel(ticks, n, _NONE)  # carrier changes, count
        self.drops = Channel(ticks, n, _NONE)  # times that the link went down, count
        self.recoveries = Channel(ticks, n, _ZERO)  # rate at which the link recovers without going down
        self.goodput = Channel(ticks, n, _ONE)  # factor on what gets through
        self.wait = Channel(ticks, n, _ZERO)  # share of the time in which data waits for credits
        self.cnp = Channel(ticks, n, _ZERO)  # rate of congestion notification packets
        self.timeouts = Channel(ticks, n, _ZERO)  # rate of local acknowledgement timeouts
        self.cqe = Channel(ticks, n, _ZERO)  # rate of requests that completed with an error
        self.reset = Channel(ticks, n, _NO)  # began anew in this tick, and its counters with it
        self.stalled = Channel(ticks, n, _NO)  # sends and receives nothing, though the link is up
        self.narrow = Channel(ticks, n, _NONE)  # where its packet counters stand in 32 bits when it begins; 0: 64 bits
        self.saturated = Channel(ticks, n, _NO)  # its symbol errors stand at the top of 16 bits
        self.sentinel = Channel(ticks, n, _NO)  # its module and error counters answer with all bits set


class NodeEffects:
    """Of each node."""

    def __init__(self, ticks: int, n: int) -> None:
        self.dead = Channel(ticks, n, _NO)  # without power or crashed: no GPU works, nothing is sent
        self.cpu = Channel(ticks, n, _ZERO)  # share of the processors that something else takes
        self.pressure = Channel(ticks, n, _ZERO)  # share of the time in which tasks wait for a processor
        self.io_pressure = Channel(ticks, n, _ZERO)  # share of the time in which tasks wait for storage
        self.corrected = Channel(ticks, n, _ZERO)  # rate of corrected errors of host memory
        self.uncorrected = Channel(ticks, n, _NONE)  # count
        self.inlet = Channel(ticks, n, _ZERO)  # K added to the air inlet
        self.fans = Channel(ticks, n, _ONE)  # factor on the fans' speed
        self.flow = Channel(ticks, n, _ONE)  # factor on the coolant through the node
        self.reset = Channel(ticks, n, _NO)  # booted in this tick: its counters begin anew
        self.clock_offset = Channel(ticks, n, _ZERO)  # s by which its clock is ahead
        self.silent = Channel(ticks, n, _NO)  # the agent sends nothing; the node works on
        self.late = Channel(ticks, n, _ZERO)  # s by which its samples are dated later


class SiteEffects:
    """Of coolant loops, racks, power distribution units, power supplies and jobs."""

    def __init__(self, ticks: int, layout: Layout, jobs: int) -> None:
        loops, pdus, racks = len(layout.entities["coolant"]), len(layout.entities["power"]), layout.racks
        self.flow = Channel(ticks, loops, _ONE)  # factor on a loop's coolant flow
        self.pressure = Channel(ticks, loops, _ONE)  # factor on a loop's pressure beside what the flow does
        self.supply = Channel(ticks, loops, _ZERO)  # K added to a loop's supply
        self.level = Channel(ticks, loops, _ONE)  # factor on the level of a loop's reservoir
        self.leak = Channel(ticks, racks, _NO)  # a rack's leak rope is wet
        supplies = len(layout.entities["psu"])
        self.psu_lost = Channel(ticks, supplies, _NO)  # a power supply gives nothing
        self.psu_unfed = Channel(ticks, supplies, _NO)  # a power supply has no input
        self.volts = Channel(ticks, pdus, _ONE)  # factor on a unit's voltage
        self.network = Channel(ticks, jobs, _ONE)  # factor on the time a job spends in collectives
        self.step = Channel(ticks, jobs, _ONE)  # factor on a job's whole step, by what its collectives take longer
        self.stalled = Channel(ticks, jobs, _NO)  # a job waits for data
        self.hung = Channel(ticks, jobs, _NO)  # a job waits in a collective that never ends
        self.evaluating = Channel(ticks, jobs, _NO)  # a job evaluates: other load, no gradient
        self.loss = Channel(ticks, jobs, _ONE)  # factor on a job's loss and gradient, on all ranks alike


class Effects:
    """One block of ticks: the channels, and what is told.

    time:       (ticks,) seconds after the start.   since: the tick before the block; events lie in (since, until].
    job_of_gpu: (ticks, GPUs) number of the job that runs there, -1 for none.   stays: of jobs that touch the block.
    start:      UTC us of second 0.
    """

    def __init__(
        self,
        time: NDArray[np.float64],
        since: float,
        layout: Layout,
        jobs: int,
        running: Any,
        stays: Sequence[Stay] = (),
        start: int = 0,
    ) -> None:
        ticks = len(time)
        self.time, self.since, self.until = time, since, float(time[-1])
        self.layout, self.stays, self.start = layout, stays, start
        self.job_of_gpu: NDArray[np.int32] = running
        self.gpu, self.port = GpuEffects(ticks, layout.gpus), PortEffects(ticks, layout.gpus)
        self.node, self.site = NodeEffects(ticks, layout.nodes), SiteEffects(ticks, layout, jobs)
        self.defects: list[Defect] = []
        self.tampers: list[FalseReading] = []
        self.collapses: list[Collapse] = []
        self.events: list[PlannedEvent] = []

    def ramp(self, onset: float, end: float, rise: float) -> Floats:
        """(ticks,) 0 before `onset`, grows to 1 within `rise` seconds, 0 again from `end` on."""
        share = np.clip((self.time - onset) / rise, 0.0, 1.0) if rise > 0 else (self.time >= onset).astype(float)
        share[self.time >= end] = 0.0
        return share.astype(np.float32)

    def active(self, onset: float, end: float) -> NDArray[np.bool_]:
        """(ticks,) whether the tick lies in [onset, end)."""
        return (self.time >= onset) & (self.time < end)

    def contains(self, moment: float) -> bool:
        """Whether a moment falls into the block: its events are told now."""
        return self.since < moment <= self.until

    def impulse(self, moment: float) -> NDArray[np.int64]:
        """(ticks,) 1 in the tick that first sees `moment`, else 0."""
        out = np.zeros(len(self.time), np.int64)
        if self.contains(moment):
            out[np.searchsorted(self.time, moment)] = 1
        return out

    def add_event(self, moment: float, entity: str, kind: str, shipper: int | None = None, /, **data: object) -> None:
        """An event, if its moment falls into the block."""
        if self.contains(moment):
            self.events.append(PlannedEvent(float(moment), entity, kind, data, shipper))

    def slow_job(self, gpus: Sequence[int] | NDArray[np.intp], factor: Values) -> None:
        """Stretches the collectives of every job that runs on one of the GPUs; `factor` a number or (ticks,)."""
        self._on_jobs(self.site.network, gpus, factor)

    def lengthen_steps(self, gpus: Sequence[int] | NDArray[np.intp], share: Floats) -> None:
        """Adds (ticks,) `share` of a step to the collectives of every job that runs on one of the GPUs."""
        self._on_jobs(self.site.step, gpus, 1 + share)

    def _on_jobs(self, channel: Channel, gpus: Sequence[int] | NDArray[np.intp], factor: Values) -> None:
        running = self.job_of_gpu[:, np.atleast_1d(gpus)]
        for job in np.unique(running[running >= 0]).tolist():
            channel.scale(int(job), np.where((running == job).any(axis=1), factor, 1.0))
