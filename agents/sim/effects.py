"""Effects of faults on one block: channels of factors, rates and masks that the physics reads.

A channel that no fault changes costs nothing. A new effect is a line here and one where the physics reads it.
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
    from agents.sim.schedule import Allocation

Devices = int | slice | NDArray[np.intp]
Values = float | NDArray[Any]


@dataclass(frozen=True, slots=True)
class PlannedEvent:
    """An event whose `time` is in seconds after the start of the scenario.

    sender: number of the node that sends it; None: the node that reports the entity.
    """

    time: float
    entity: str
    kind: str
    data: Mapping[str, Any]
    sender: int | None = None


@dataclass(frozen=True, slots=True)
class Defect:
    """A GPU that gives wrong results from `onset` on.

    failed_rounds[k]: whether the canary round between k and k + 1 periods later fails (agents/sim/physics/canary.py).
    """

    gpu: int
    onset: float
    failed_rounds: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FalseReading:
    """A broken instrument: `change` maps the true values of one signal of one device at the ticks of `when` to the
    reading. hold: number of a fault that freezes the instrument at its first reading. jump: (second, K) of a step up
    that the agent's edge rule detects."""

    signal: str
    device: int
    when: NDArray[np.bool_]
    change: Callable[[NDArray[Any]], Any]
    hold: int | None = None
    jump: tuple[float, float] | None = None


class EventTime(float):
    """A time in the data of an event, in seconds after the start; sent as UTC microseconds."""


@dataclass(frozen=True, slots=True)
class Collapse:
    """A loop whose flow falls within `ramp` s to the share `flow`, and recovers at `end`; `key` of the fault.
    real: the coolant stops; else only the flow meter reports it."""

    loop: int
    onset: float
    end: float
    flow: float
    ramp: float
    key: tuple[int, ...]
    real: bool = True


class Channel:
    """One quantity of a class of devices within a block: (ticks, devices), `neutral` where no fault changed it."""

    __slots__ = ("_neutral", "_shape", "_values")

    def __init__(self, ticks: int, devices: int, neutral: Any) -> None:
        self._shape, self._neutral = (ticks, devices), neutral
        self._values: NDArray[Any] | None = None

    def __bool__(self) -> bool:
        """Whether a fault changed it."""
        return self._values is not None

    @property
    def values(self) -> Any:
        """Returns the array, or only the neutral value: both broadcast."""
        return self._neutral if self._values is None else self._values

    def of_devices(self, devices: Devices) -> Any:
        """Returns the values of some devices, or only the neutral value."""
        return self._neutral if self._values is None else self._values[:, devices]

    def array(self) -> NDArray[Any]:
        """Returns the array, made if needed."""
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
        """Lowers values above `highest` to it."""
        self._apply(np.minimum, devices, highest)

    def raise_to(self, devices: Devices, lowest: Values) -> None:
        """Raises values below `lowest` to it."""
        self._apply(np.maximum, devices, lowest)

    def _apply(self, how: Callable[..., Any], devices: Devices, values: Values) -> None:
        array, given = self.array(), np.asarray(values, self._neutral.dtype)
        if given.ndim == 1 and not isinstance(devices, int | np.integer):
            given = given[:, None]
        array[:, devices] = how(array[:, devices], given)


_ONE, _ZERO, _NO, _NONE, _BITS = np.float32(1), np.float32(0), np.bool_(False), np.int64(0), np.uint64(0)


class GpuEffects:
    """Channels of GPUs. Rates are per second, counts are per tick."""

    def __init__(self, ticks: int, n: int) -> None:
        self.clock = Channel(ticks, n, _ONE)  # factor on the SM clock
        self.capped = Channel(ticks, n, _ONE)  # factor of power caps on it: the lowest applies; use lower_to
        self.reasons = Channel(ticks, n, _BITS)  # clock event reasons
        self.watts = Channel(ticks, n, np.float32(np.inf))  # power cap
        self.resistance = Channel(ticks, n, _ONE)  # factor on the thermal resistance to the coolant
        self.hot = Channel(ticks, n, _ZERO)  # share of the thermal contact that is lost
        self.compute = Channel(ticks, n, _ONE)  # factor on the rank's compute time besides the clock
        self.starved = Channel(ticks, n, _ZERO)  # share of a step's computation spent waiting for its host
        self.gone = Channel(ticks, n, _NO)  # the driver does not respond for it: no rows
        self.dram_corrected = Channel(ticks, n, _NONE)  # count
        self.sram_corrected = Channel(ticks, n, _NONE)  # count
        self.dram_uncorrected = Channel(ticks, n, _NONE)  # count
        self.sram_uncorrected = Channel(ticks, n, _NONE)  # count
        self.rows_corrected = Channel(ticks, n, _NONE)  # rows remapped for corrected errors, count
        self.rows_uncorrected = Channel(ticks, n, _NONE)  # rows remapped for uncorrected errors, count
        self.rows_pending, self.rows_failed = Channel(ticks, n, _NO), Channel(ticks, n, _NO)
        self.pcie_width = Channel(ticks, n, np.int64(16))  # use lower_to
        self.pcie_generation = Channel(ticks, n, np.int64(5))  # use lower_to
        self.pcie_replays = Channel(ticks, n, _NONE)  # count
        self.memory_heat = Channel(ticks, n, _ZERO)  # K added to the memory's temperature at full load
        self.nvlink_crc = Channel(ticks, n, _ZERO)  # rate
        self.nvlink_replays = Channel(ticks, n, _ZERO)  # rate
        self.nvlink_recoveries = Channel(ticks, n, _NONE)  # count
        self.nvlink_speed = Channel(ticks, n, _ONE)  # factor on the bandwidth between the GPUs of a node
        self.nvlink_down = Channel(ticks, n, _NO)
        self.gradient = Channel(ticks, n, _ONE)  # factor on the norm of the rank's own gradient
        self.reset = Channel(ticks, n, _NO)  # restarted in this tick, with its counters
        self.busy = Channel(ticks, n, _ZERO)  # share of load added by another program


class PortEffects:
    """Channels of network ports; numbered like the GPUs."""

    def __init__(self, ticks: int, n: int) -> None:
        self.symbols = Channel(ticks, n, _ZERO)  # rate of errors that the FEC could not correct
        self.crc = Channel(ticks, n, _ZERO)  # rate
        self.raw_ber = Channel(
            ticks, n, np.float32(-99)
        )  # log10 of the raw bit error rate that faults add; use raise_to
        self.rx_power = Channel(ticks, n, _ZERO)  # dB added to the received optical power
        self.module_temperature = Channel(ticks, n, _ZERO)  # K added
        self.down = Channel(ticks, n, _NO)
        self.flips = Channel(ticks, n, _NONE)  # carrier changes, count
        self.drops = Channel(ticks, n, _NONE)  # link downs, count
        self.recoveries = Channel(ticks, n, _ZERO)  # rate of link recoveries without a link down
        self.goodput = Channel(ticks, n, _ONE)  # factor on goodput
        self.wait = Channel(ticks, n, _ZERO)  # share of the time in which data waits for credits
        self.pause = Channel(ticks, n, _ZERO)  # rate of PFC pause frames that it sends besides the usual
        self.cnp = Channel(ticks, n, _ZERO)  # rate of congestion notification packets
        self.timeouts = Channel(ticks, n, _ZERO)  # rate of local acknowledgement timeouts
        self.cqe = Channel(ticks, n, _ZERO)  # rate of requests that completed with an error
        self.reset = Channel(ticks, n, _NO)  # restarted in this tick, with its counters
        self.stalled = Channel(ticks, n, _NO)  # sends and receives nothing although the link is up
        self.narrow = Channel(ticks, n, _NONE)  # initial value of its 32-bit packet counters; 0: 64 bits
        self.saturated = Channel(ticks, n, _NO)  # its symbol errors are at the maximum of 16 bits
        self.sentinel = Channel(ticks, n, _NO)  # its module and error counters read as all bits set


class NodeEffects:
    """Channels of nodes."""

    def __init__(self, ticks: int, n: int) -> None:
        self.dead = Channel(ticks, n, _NO)  # without power or crashed: no GPU works, nothing is sent
        self.cpu = Channel(ticks, n, _ZERO)  # share of the processors used by other programs
        self.pressure = Channel(ticks, n, _ZERO)  # share of the time in which tasks wait for a processor
        self.io_pressure = Channel(ticks, n, _ZERO)  # share of the time in which tasks wait for storage
        self.corrected = Channel(ticks, n, _ZERO)  # rate of corrected errors of host memory
        self.uncorrected = Channel(ticks, n, _NONE)  # count
        self.inlet = Channel(ticks, n, _ZERO)  # K added to the air inlet
        self.fans = Channel(ticks, n, _ONE)  # factor on the fans' speed
        self.flow = Channel(ticks, n, _ONE)  # factor on the coolant through the node
        self.reset = Channel(ticks, n, _NO)  # booted in this tick: its counters restart
        self.clock_offset = Channel(ticks, n, _ZERO)  # s by which its clock is ahead
        self.silent = Channel(ticks, n, _NO)  # the agent sends nothing; the node works
        self.late = Channel(ticks, n, _ZERO)  # s added to the time of its samples
        self.memory = Channel(ticks, n, _ZERO)  # share of the memory used by a leak
        self.disk_wear = Channel(ticks, n, _ZERO)  # share of its disk's rated life used by a fault
        self.disk_spare = Channel(ticks, n, _ZERO)  # share of its disk's spare blocks that are lost
        self.bmc_silent = Channel(ticks, n, _NO)  # its BMC does not respond


class SiteEffects:
    """Channels of coolant loops, racks, PDUs, power supplies and jobs."""

    def __init__(self, ticks: int, layout: Layout, jobs: int) -> None:
        loops, pdus, racks = len(layout.entities["coolant"]), len(layout.entities["power"]), layout.racks
        self.flow = Channel(ticks, loops, _ONE)  # factor on a loop's coolant flow
        self.pressure = Channel(ticks, loops, _ONE)  # factor on a loop's pressure besides the effect of flow
        self.supply = Channel(ticks, loops, _ZERO)  # K added to a loop's supply
        self.level = Channel(ticks, loops, _ONE)  # factor on the level of a loop's reservoir
        self.leak = Channel(ticks, racks, _NO)  # a rack's leak rope is wet
        supplies = len(layout.entities["psu"])
        self.psu_lost = Channel(ticks, supplies, _NO)  # a power supply has no output
        self.psu_unfed = Channel(ticks, supplies, _NO)  # a power supply has no input
        self.volts = Channel(ticks, pdus, _ONE)  # factor on a unit's voltage
        self.network = Channel(ticks, jobs, _ONE)  # factor on the time a job spends in collectives
        self.step = Channel(ticks, jobs, _ONE)  # factor on a job's whole step, from longer collectives
        self.stalled = Channel(ticks, jobs, _NO)  # a job waits for data
        self.hung = Channel(ticks, jobs, _NO)  # a job hangs in a collective
        self.evaluating = Channel(ticks, jobs, _NO)  # a job evaluates: other load, no gradient
        self.loss = Channel(ticks, jobs, _ONE)  # factor on a job's loss and gradient, equal on all ranks


class Effects:
    """One block of ticks: the channels and the events.

    time:       (ticks,) seconds after the start.   since: the tick before the block; events lie in (since, until].
    job_of_gpu: (ticks, GPUs) number of the job that runs there, -1 for none.
    allocations: those that overlap the block.   reporting: of them, those whose ranks report.
    start:      UTC us of second 0.
    """

    def __init__(
        self,
        time: NDArray[np.float64],
        since: float,
        layout: Layout,
        jobs: int,
        running: Any,
        allocations: Sequence[Allocation] = (),
        start: int = 0,
    ) -> None:
        ticks = len(time)
        self.time, self.since, self.until = time, since, float(time[-1])
        self.layout, self.allocations, self.start = layout, allocations, start
        self.reporting = [one for one in allocations if one.job.hooked]
        self.job_of_gpu: NDArray[np.int32] = running
        self.gpu, self.port = GpuEffects(ticks, layout.gpus), PortEffects(ticks, layout.gpus)
        self.node, self.site = NodeEffects(ticks, layout.nodes), SiteEffects(ticks, layout, jobs)
        self.defects: list[Defect] = []
        self.false_readings: list[FalseReading] = []
        self.collapses: list[Collapse] = []
        self.events: list[PlannedEvent] = []

    def ramp(self, onset: float, end: float, rise: float) -> Floats:
        """Returns (ticks,): 0 before `onset`, rising to 1 within `rise` seconds, 0 from `end` on."""
        share = np.clip((self.time - onset) / rise, 0.0, 1.0) if rise > 0 else (self.time >= onset).astype(float)
        share[self.time >= end] = 0.0
        return share.astype(np.float32)

    def active(self, onset: float, end: float) -> NDArray[np.bool_]:
        """Returns (ticks,): whether the tick is in [onset, end)."""
        return (self.time >= onset) & (self.time < end)

    def contains(self, moment: float) -> bool:
        """Returns whether a time is in this block, so that its events are sent now."""
        return self.since < moment <= self.until

    def impulse(self, moment: float) -> NDArray[np.int64]:
        """Returns (ticks,): 1 in the first tick at or after `moment`, else 0."""
        out = np.zeros(len(self.time), np.int64)
        if self.contains(moment):
            out[np.searchsorted(self.time, moment)] = 1
        return out

    def add_event(self, moment: float, entity: str, kind: str, sender: int | None = None, /, **data: object) -> None:
        """Adds an event if its time is in this block."""
        if self.contains(moment):
            self.events.append(PlannedEvent(float(moment), entity, kind, data, sender))

    def slow_job(self, gpus: Sequence[int] | NDArray[np.intp], factor: Values) -> None:
        """Stretches the collectives of every job that runs on one of the GPUs; `factor` a number or (ticks,)."""
        self._on_jobs(self.site.network, gpus, factor)

    def lengthen_steps(self, gpus: Sequence[int] | NDArray[np.intp], share: Floats) -> None:
        """Adds (ticks,) `share` of a step to the collectives of every job that runs on one of the GPUs."""
        self._on_jobs(self.site.step, gpus, 1 + share)

    def _on_jobs(self, channel: Channel, gpus: Sequence[int] | NDArray[np.intp], factor: Values) -> None:
        running = self.job_of_gpu[:, np.atleast_1d(gpus)]
        local = {one.job.number for one in self.allocations if not one.job.networked}  # these send nothing
        for job in set(running[running >= 0].tolist()) - local:
            channel.scale(int(job), np.where((running == job).any(axis=1), factor, 1.0))
