"""Memory health: corrected and uncorrected errors of GPUs and servers, replaced rows, and rows that cannot be replaced.

Everything that ECC counts, and the heat of GPU memory. It does not detect silent data corruption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import GPUS, budget_line
from detectors.base.calibration import Kinds
from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.kernel import EFFECT
from detectors.base.state import State
from detectors.base.statistics import grouped_median
from detectors.base.streams import Bools, Channel, Streams
from detectors.base.throttle import has_reason, read_reasons
from detectors.memory.error_counters import GpuErrors, LevelFilter
from detectors.memory.error_rates import (
    DAY,
    HOUR,
    LEAST_DAYS,
    LEAST_ROWS,
    ROW_FIELDS,
    GpuErrorRates,
    ServerErrors,
    count_replaced_rows,
    find_spent_rows,
    is_positive,
    update_row_history,
)
from detectors.xid.levels import UNCONTAINED, read_code, requires_reset
from pipeline.model.entity_names import pager_title, short_duration
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level, to_json

GPU_MEMORY = np.dtype(
    [
        ("lost", "<f8"),  # uncorrected errors of device memory in this life
        ("lost_at", "<i8"),
        ("lost_rows", "<f8"),  # replaced rows when the first of them came
        ("chip", "<f8"),  # uncorrected errors of caches and registers in this life
        ("chip_at", "<i8"),
        *ROW_FIELDS,
        ("heard_at", "<i8"),  # newest reading of the flags below
        ("pending_at", "<i8"),  # since when a row waits for a reset; 0: none does
        ("failed_at", "<i8"),
        ("many_at", "<i8"),  # since when corrected errors of caches are above the limit
        ("threshold_at", "<i8"),
    ]
)
"""State of the memory of each GPU."""
_MAINTENANCE_SETTLES = 60 * SECOND  # after announced maintenance: memory needs no warm-up; chosen
_XID_WITHIN = 120 * SECOND  # us between a counter's growth and its XID; counters are read every 10 s or more; chosen
_FLAGS = {
    "gpu.rows_pending": "pending_at",
    "gpu.rows_failed": "failed_at",
    "gpu.sram_corrected": "many_at",
    "gpu.sram_threshold": "threshold_at",
}
_STATES = (*_FLAGS.values(), "spent_at")
_SCORE = {"suspect": 1.0, "ticket": 2.0, "page": 3.0}
_RESET = "a GPU reset, after which its driver counts from 0"
_RESET_OR_DAY = f"{_RESET}, or a day after the first error; the cause is then still to be found"
CLEARS: Mapping[str, str] = {
    "gpu.memory_temperature": "memory that is as hot as before, compared with its core",
    "gpu.rows_failed": "replacement of the GPU",
    "gpu.sram_uncorrected": _RESET_OR_DAY,
    "gpu.sram_corrected": _RESET,
    "gpu.dram_uncorrected": _RESET_OR_DAY,
    "gpu.rows_corrected": "replacement of the GPU, or spare rows that last for two months again",
    "gpu.rows_pending": "a GPU reset, which replaces the row",
    "gpu.sram_threshold": "replacement of the GPU",
    "gpu.banks_none": "replacement of the GPU",
    "gpu.dram_corrected": "a day without a corrected error, a GPU reset, or as many errors in its past",
    "host": "the reboot after the module was replaced; else a day without corrected errors, or after uncorrected ones",
}
"""What ends a condition, by the signal of its worst trouble."""

HOTTER_K = 3.0
"""K that memory is hotter than its core, its peers and its past explain: three roundings of NVML."""
HEAT_HOLDS, HEAT_EVERY = 600 * SECOND, 26 * SECOND
"""us for which it must be, twice the longest harmless swing; us between two readings. Chosen."""
_ALIKE = 0.3  # share within which a GPU draws as much as the median of its busy peers; chosen
_SAME = 0.75  # least share of its node's GPUs: the median of a few depends on which they are; chosen
_OWN = 0.5  # share of it by which the memory itself must be hotter: else its core reads too low; chosen
_BUSY = 0.4  # share of its highest power so far from which a GPU is busy: idle memory is as cold as ever; chosen
_REPAIRED, _FORGOTTEN = 14_400 * SECOND, 3 * DAY
"""us of load at which hot memory was cold until it is repaired, and without load: pauses prove nothing. Chosen."""
THERMAL = 0x60  # clock event reasons of heat: NVML, SwThermalSlowdown and HwThermalSlowdown


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong. text: as a title; advice: what to do."""

    level: Level
    since: int
    text: str
    advice: str
    signal: str


@dataclass
class MemoryHeat(State):
    """How much hotter the memory of each GPU is than its core explains, against the other busy GPUs of its node and its
    own past; warm: the memory itself, which a core that reads too low does not change.

    since: when (us) it became so; 0: it is not.   seen: when it was so last.   cold: us of load since then in which it
    was not.   idle: when it was not busy last.   highest: power so far.   throttled: readings in a row with heat's bit.
    """

    shift: Streams = part(lambda: Streams(Channel(floor=0.7, delta=HOTTER_K, phi=0.6)))
    warm: Streams = part(lambda: Streams(Channel(floor=0.7, delta=HOTTER_K, phi=0.6)))
    since: NDArray[np.int64] = memory(0, np.int64)
    seen: NDArray[np.int64] = memory(0, np.int64)
    cold: NDArray[np.int64] = memory(0, np.int64)
    idle: NDArray[np.int64] = memory(0, np.int64)
    highest: NDArray[np.float64] = memory(0.0)
    throttled: NDArray[np.int8] = memory(0, np.int8)
    newest: int = notes(int)
    _peers: Peers = field(default_factory=lambda: Peers(("node",), ("rack",), least=4), init=False, repr=False)

    def find_hot(self, frame: Frame, gate: Bools, kinds: Kinds) -> Bools:
        """Adds a frame; returns (N,) GPUs whose memory has been hotter for HEAT_HOLDS. gate: False in maintenance."""
        self.grow(n := len(frame.entities))
        heat, power = frame["gpu.memory_temperature"], frame["gpu.power"]
        if frame.time - self.newest >= HEAT_EVERY and np.isfinite(heat).any():
            passed, self.newest = min(frame.time - self.newest, 4 * HEAT_EVERY), frame.time
            groups = self._peers.groups(frame)
            np.fmax(self.highest[:n], power, out=self.highest[:n])
            seen, since, idle = self.seen[:n], self.since[:n], self.idle[:n]
            np.copyto(idle, frame.time, where=~(power > _BUSY * self.highest[:n]) | (idle > frame.time))
            power = np.where(frame.time - idle >= HEAT_HOLDS, power, np.nan)  # memory warms up later than cores
            compared = gate & np.isfinite(heat) & (np.abs(power - grouped_median(power, groups)[0]) <= _ALIKE * power)
            shares = np.bincount(groups + 1, compared) / np.maximum(np.bincount(groups + 1), 1)
            compared &= shares[groups + 1] >= _SAME
            step = self.shift.step(heat - frame["gpu.temperature"], groups, frame.time, compared, kinds)
            warm = self.warm.step(heat, groups, frame.time, compared, kinds)
            on = step.on | ((since > 0) & step.measured & (step.effect >= HOTTER_K))
            on &= ~step.moved & (warm.effect >= _OWN * step.effect)
            began = np.maximum(frame.time - step.held.astype(np.int64) * SECOND, 1)
            seen[on] = frame.time
            since[on] = np.where(since[on] > 0, np.minimum(since[on], began[on]), began[on])
            self.cold[:n] = np.where(on, 0, self.cold[:n] + passed * step.measured)
            over = (self.cold[:n] > _REPAIRED) | (np.abs(frame.time - seen) > _FORGOTTEN)
            since[over | (~on & (seen - since < HEAT_HOLDS)) | ~gate] = 0
            slowed = on & has_reason(read_reasons(frame["gpu.throttle_reasons"])[0], THERMAL)
            self.throttled[:n] = np.where(slowed, np.minimum(self.throttled[:n] + 1, 2), 0)
        self.newest = min(self.newest, frame.time)  # the clock may have been set back
        return np.asarray(self.is_hot[:n])

    @property
    def is_hot(self) -> Bools:
        """(N,) GPUs whose memory has been hotter for HEAT_HOLDS, or was of late."""
        return np.asarray((self.since > 0) & (self.seen - self.since >= HEAT_HOLDS))


@dataclass
class Memory(Detector):
    """Memory errors by ECC. Page: a row that cannot be replaced, an uncorrected error in caches or registers, one of
    device memory that was neither contained nor had its row replaced within `wait` s, `sram_limit` corrected errors
    of caches, an uncorrected error of a server's memory. Ticket: a contained uncorrected error, a row that waits for a
    reset, a rate of corrected errors of device memory too high for cohort and own past, a bank without spare rows,
    `row_limit` replaced rows or less than a month to it, the maker's threshold for caches, too many corrected errors of
    a server or a module, memory that is 3 K hotter than core and peers explain for ten minutes; a page if heat slows
    that GPU.

    The rate is judged by a CUSUM of negative binomial counts (variance mean (1 + `overdispersion` mean) an hour) for
    `ratio` times the usual rate, learned from the cohort (GPUs of one SKU) and from the GPU's own past; exp(`limit`)
    GPU-hours pass between false alarms. A GPU whose own past explains it is a suspect; its rate becomes its usual one.

    Source: any uncorrected and 10,000 corrected errors of SRAM fail a node, 512 replaced rows too
    (Azure/azurehpc-health-checks; DCGM); replacing rows: NVIDIA, GPU memory error management; 100 corrected errors a
    day of a processor and 10 of a module: mcelog's defaults. Rates: chosen, no published limit exists.
    """

    name: ClassVar[str] = "memory"
    family: ClassVar[str] = "memory health"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ()
    any_of: ClassVar[tuple[str, ...]] = ("gpu.ecc_corrected", "node.memory_corrected", "dimm.corrected")
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.ecc_uncorrected", "gpu.dram_corrected", "gpu.dram_uncorrected", "gpu.sram_corrected"),
        *("gpu.sram_uncorrected", "gpu.sram_threshold", "gpu.rows_corrected", "gpu.rows_uncorrected"),
        *("gpu.memory_temperature", "gpu.temperature", "gpu.power", "gpu.throttle_reasons"),
        *("gpu.rows_pending", "gpu.rows_failed", "gpu.banks_low", "gpu.banks_none", "gpu.generation"),
        *("node.memory_uncorrected", "node.generation", "dimm.uncorrected", "dimm.generation", "event:xid"),
    )
    cannot_see: ClassVar[str] = (
        "Errors that ECC does not see; a weak cell before its first error; the bank of a replaced row; a rate that "
        "rises from a few errors a week, or rose before the GPU was watched for long; of a GPU that reports only "
        "totals, which errors were of its caches; heat of memory where jobs use under three quarters of a node's GPUs."
    )

    ratio: float = 10.0
    limit: float = 12.0
    overdispersion: float = 2.0
    wait: float = 60.0
    sram_limit: float = 10_000.0
    row_limit: float = 512.0
    server_limit: float = 100.0
    module_limit: float = 10.0

    cells: NDArray[Any] = memory(0, GPU_MEMORY)
    containment: dict[str, list[Any]] = notes()  # GPU -> [time, "contained" or "uncontained"], from XIDs
    conditions: OpenConditions = notes()
    gates: Gates = part(Gates)
    errors: GpuErrors = part(GpuErrors, kept=True)
    levels: LevelFilter = part(LevelFilter, kept=True)
    rates: GpuErrorRates = part(GpuErrorRates, kept=True)
    heat: MemoryHeat = part(MemoryHeat)
    servers: ServerErrors = part(
        lambda: ServerErrors("node", "node.memory_corrected", "node.memory_uncorrected", 100.0), of="node", kept=True
    )
    modules: ServerErrors = part(
        lambda: ServerErrors("dimm", "dimm.corrected", "dimm.uncorrected", 10.0), of="dimm", kept=True
    )
    _peers: Peers = field(default_factory=lambda: Peers(("@sku",), least=2), init=False, repr=False)

    def __post_init__(self) -> None:
        self.rates.ratio, self.rates.limit, self.rates.a = self.ratio, self.limit, self.overdispersion
        self.servers.limit, self.modules.limit = self.server_limit, self.module_limit

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on memory errors of GPUs, servers and modules."""
        if not frames:
            return []
        self.gates.update(frames)
        found, holding = list[Finding](), set[str]()
        if (gpus := frames.get("gpu")) is not None and len(gpus.entities):
            self._record_xids(gpus)
            found += self._judge_gpus(self.levels.clean(gpus), holding)
        else:
            holding |= {e for e in self.conditions if e.startswith("gpu:")}
        for kind, servers in (("node", self.servers), ("dimm", self.modules)):
            frame = frames.get(kind)
            if frame is None or servers.corrected not in frame.values:
                holding |= {e for e in self.conditions if e.startswith(f"{kind}:")}
                continue
            gate = ~self.gates.maintenance_mask(frame, _MAINTENANCE_SETTLES)
            servers.update(frame, gate)
            found += self._judge_servers(frame, servers, gate, holding)
        close_ended(self.conditions, holding)
        return found

    def _record_xids(self, frame: Frame) -> None:
        """Records from XIDs whether the errors of a GPU were contained."""
        for event in frame.events:
            code = read_code(event.data, "xid") if event.kind == "xid" else None
            if code in UNCONTAINED or (code == 94 and requires_reset(event)):
                self.containment[event.entity] = [event.time, "uncontained"]
            elif code == 94:
                at, known = self.containment.get(event.entity, [0, ""])
                if known != "uncontained" or event.time - at > _XID_WITHIN:
                    self.containment[event.entity] = [event.time, "contained"]
        for gpu in [g for g, (at, _) in self.containment.items() if frame.time - at > DAY]:
            del self.containment[gpu]

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests and rules."""
        return [
            f"rate of corrected errors: {self.rates.budget()}",
            f"servers and modules: a rule of {self.server_limit:g} and {self.module_limit:g} corrected errors a day",
            "uncorrected errors, rows and banks: a rule on logged facts, no statistical alarm rate",
            f"heat of memory: {budget_line(self.heat.shift.channel, GPUS, HEAT_EVERY / SECOND)}",
        ]

    # --- GPUs --------------------------------------------------------------------------------------------------------

    def _judge_gpus(self, frame: Frame, holding: set[str]) -> list[Finding]:
        self.grow(len(frame.entities))
        gate = ~self.gates.maintenance_mask(frame, _MAINTENANCE_SETTLES)
        bad = self._find_errors(frame, gate) | self._find_flags(frame) | is_positive(frame["gpu.banks_none"])
        bad |= self.heat.find_hot(frame, gate, self.kinds(frame))
        found = []
        for i in np.flatnonzero(bad & gate).tolist():
            if troubles := self._list_troubles(frame, i):
                holding.add(frame.entities[i])
                found.append(self._gpu_finding(frame, i, troubles))
        return [finding for finding in found if finding is not None]

    def _find_errors(self, frame: Frame, gate: Bools) -> Bools:
        """Returns (N,) GPUs with a burst of corrected errors, or uncorrected ones of the last day."""
        grown, reborn, watched = self.errors.update(frame)
        cells, replaced = self.cells[: len(frame.entities)], count_replaced_rows(frame)
        update_row_history(cells, replaced, frame.time)
        watched = np.where(gate, watched, 0.0)
        groups = self._peers.groups(frame)
        bursts = self.rates.update(None if grown is None else grown[0], watched, groups, frame.time)
        if reborn is not None:
            self.rates.end_bursts(reborn)
        for name, row in (("lost", 1), ("chip", 2)):
            at = cells[f"{name}_at"]
            if at.any():
                over = (at > 0) & (frame.time - at > DAY)
                over = over if reborn is None else over | reborn
                cells[name][over], at[over] = 0.0, 0
            if grown is None:
                continue
            erred = (grown[row] > 0) & gate
            first = erred & (at == 0)
            cells[name][erred] += grown[row][erred]
            at[first] = frame.time
            if row == 1:
                cells["lost_rows"][first] = np.nan_to_num(replaced[first], nan=-1.0)
        return np.asarray(bursts | (cells["lost"] > 0) | (cells["chip"] > 0))

    def _find_flags(self, frame: Frame) -> Bools:
        """Returns (N,) GPUs with a flag that is set, or a count above its limit."""
        cells = self.cells[: len(frame.entities)]
        replaced = count_replaced_rows(frame)
        bad = find_spent_rows(cells, replaced, frame.time, self.row_limit)
        for signal, name in _FLAGS.items():
            limit = self.sram_limit if name == "many_at" else 0.0
            reading, since = frame[signal], cells[name]
            state = (reading > limit) & (reading < np.inf)
            if state.any() or since.any():
                since[state & (since == 0)] = frame.time
                since[np.isfinite(reading) & ~state] = 0
                bad |= since > 0
        if not bad.any():
            return bad
        read = np.isfinite(replaced)
        for signal in _FLAGS:
            read |= np.isfinite(frame[signal])
        cells["heard_at"] = np.where(read, frame.time, np.minimum(cells["heard_at"], frame.time))
        gone = bad & (frame.time - cells["heard_at"] > DAY)
        for name in _STATES if gone.any() else ():
            cells[name][gone] = 0
        return bad & ~gone

    def _list_troubles(self, frame: Frame, i: int) -> list[Trouble]:
        cell, time = self.cells[i], frame.time
        found = []
        if cell["failed_at"]:
            text, advice = "memory row remap failed", "replace the GPU (RMA)"
            found.append(Trouble("page", int(cell["failed_at"]), text, advice, "gpu.rows_failed"))
        if cell["chip"]:
            text, advice = f"{_errors(cell['chip'], 'uncorrected')} in caches or registers", "drain, then reset the GPU"
            found.append(Trouble("page", int(cell["chip_at"]), text, advice, "gpu.sram_uncorrected"))
        if cell["many_at"]:
            text, advice = f"over {self.sram_limit:,.0f} corrected errors in caches", "drain, run field diagnostics"
            found.append(Trouble("page", int(cell["many_at"]), text, advice, "gpu.sram_corrected"))
        if cell["lost"] and (trouble := self._judge_lost(frame, i, time)):
            found.append(trouble)
        if cell["pending_at"]:
            text, advice = "memory row remap pending", "drain when its job ends, then reset the GPU"
            found.append(Trouble("ticket", int(cell["pending_at"]), text, advice, "gpu.rows_pending"))
        if cell["threshold_at"]:
            text, advice = "cache errors above the maker's threshold", "run field diagnostics (RMA)"
            found.append(Trouble("ticket", int(cell["threshold_at"]), text, advice, "gpu.sram_threshold"))
        if cell["spent_at"]:
            rows = float(count_replaced_rows(frame)[i])
            used = "" if math.isnan(rows) else f", {rows:.0f} of {self.row_limit:.0f} used"
            text, advice = f"spare memory rows run out{used}", f"plan a replacement ({self._describe_rows(frame, i)})"
            found.append(Trouble("ticket", int(cell["spent_at"]), text, advice, "gpu.rows_corrected"))
        if is_positive(frame["gpu.banks_none"][i]):
            text, advice = f"{frame['gpu.banks_none'][i]:.0f} memory banks without spare rows", "plan a replacement"
            found.append(Trouble("ticket", time, text, advice, "gpu.banks_none"))
        if self.heat.is_hot[i]:
            found.append(self._describe_heat(frame, i))
        burst = self.rates.cells[i]
        if burst["on"]:
            hours = max((time - int(burst["since"])) / SECOND / HOUR, 1 / 30)
            text = f"{_errors(burst['total'], 'corrected memory')} in {short_duration(3600 * hours)}"
            text += f", usual {self.rates.usual[i]:.2g}/h"
            level: Level = "ticket" if burst["risen"] else "suspect"
            advice = "drain when its job ends, watch for uncorrected ones" if burst["risen"] else "watch for a rise"
            found.append(Trouble(level, int(burst["since"]), text, advice, "gpu.dram_corrected"))
        return found

    def _describe_heat(self, frame: Frame, i: int) -> Trouble:
        kelvin, slowed = float(self.heat.shift.cells[EFFECT, i]), self.heat.throttled[i] >= 2
        text = f"memory {kelvin:.0f} K hotter than its core explains{', heat slows the GPU' if slowed else ''}"
        advice = "check the contact of its memory to the cold plate or heat sink"
        return Trouble("page" if slowed else "ticket", int(self.heat.since[i]), text, advice, "gpu.memory_temperature")

    def _judge_lost(self, frame: Frame, i: int, time: int) -> Trouble | None:
        """Returns uncorrected errors of device memory: contained or not; None while that is not known yet."""
        cell = self.cells[i]
        at, known = self.containment.get(frame.entities[i], [0, ""])
        known = known if abs(at - int(cell["lost_at"])) <= _XID_WITHIN or at > cell["lost_at"] else ""
        replaced = cell["pending_at"] > 0 or count_replaced_rows(frame)[i] > cell["lost_rows"] >= 0
        what = _errors(cell["lost"], "uncorrected memory")
        since, signal = int(cell["lost_at"]), "gpu.dram_uncorrected"
        if known == "uncontained":
            advice = "results of its jobs are suspect, reset the GPU now"
            return Trouble("page", since, f"{what}, not contained", advice, signal)
        if known == "contained" or replaced:
            advice = "drain when its job ends, then reset the GPU"
            return Trouble("ticket", since, f"{what}, contained", advice, signal)
        if time - since < self.wait * SECOND:
            return None
        return Trouble("page", since, f"{what}, no row replaced", "drain, then reset the GPU", signal)

    def _describe_rows(self, frame: Frame, i: int) -> str:
        days = (frame.time - int(self.cells[i]["rows_at"])) / DAY
        rows = float(count_replaced_rows(frame)[i])
        return describe_spare_rows(rows, float(self.cells[i]["rows"]), days, self.row_limit)

    def _gpu_finding(self, frame: Frame, i: int, troubles: list[Trouble]) -> Finding | None:
        entity, worst = frame.entities[i], find_worst(troubles)
        due = due_report(self.conditions, entity, frame.time, min(t.since for t in troubles), worst.level)
        if due is None:
            return None
        return self.finding(
            frame.time,
            entity,
            due,
            score=_SCORE[worst.level],
            summary=pager_title(entity, worst.text),
            signals=tuple(dict.fromkeys(t.signal for t in [worst, *troubles])),
            clears=CLEARS[worst.signal],
            compared=self._compare_rate(frame, i),
            troubles=[f"{t.text}: {t.advice}" for t in troubles],
            spare_rows=self._describe_rows(frame, i),
            banks_without_spare=to_json(frame["gpu.banks_none"][i]),
            banks_low=to_json(frame["gpu.banks_low"][i]),
        )

    def _compare_rate(self, frame: Frame, i: int) -> Comparison | None:
        """Returns the rate of a burst beside the usual one; None without a burst."""
        burst = self.rates.cells[i]
        if not burst["on"]:
            return None
        hours = max((frame.time - int(burst["since"])) / SECOND / HOUR, 1 / 60)
        rate, usual = float(burst["total"]) / hours, float(self.rates.usual[i])
        groups = self._peers.groups(frame)
        peers = int(np.count_nonzero(groups == groups[i])) - 1
        name = self._peers.cohort_name(frame, i)
        return Comparison(rate, usual, None, name, peers, rate / usual, "corrected errors an hour")

    # --- servers -----------------------------------------------------------------------------------------------------

    def _judge_servers(
        self, frame: Frame, servers: ServerErrors, gate: NDArray[np.bool_], holding: set[str]
    ) -> list[Finding]:
        found = []
        for i, cell in servers.find_bad(frame):
            if not gate[i]:
                continue
            entity, trouble = frame.entities[i], judge_server(cell, servers)
            holding.add(entity)
            if due := due_report(self.conditions, entity, frame.time, trouble.since, trouble.level):
                finding = self.finding(
                    frame.time,
                    entity,
                    due,
                    score=_SCORE[trouble.level],
                    summary=pager_title(entity, trouble.text),
                    signals=(trouble.signal,),
                    clears=CLEARS["host"],
                    corrected_a_day=float(cell["bucket"]),
                    uncorrected=float(cell["lost"]),
                )
                found.append(finding)
        return found


def find_worst(troubles: Sequence[Trouble]) -> Trouble:
    """Returns the trouble of the highest level; the first of equals."""
    return max(troubles, key=lambda trouble: LEVELS.index(trouble.level))


def judge_server(cell: Any, servers: ServerErrors) -> Trouble:
    """Returns the fault of a server's memory, or of one of its modules."""
    if cell["lost"]:
        text, advice = _errors(cell["lost"], "uncorrected memory"), "drain, find and replace the module"
        return Trouble("page", int(cell["lost_at"]), text, advice, servers.uncorrected)
    text, advice = f"over {servers.limit:.0f} corrected memory errors a day", "plan to replace the module"
    return Trouble("ticket", int(cell["since"]), text, advice, servers.corrected)


def describe_spare_rows(rows: float, before: float, days: float, limit: float) -> str:
    """Returns how many rows were replaced, and how long the spare ones last at the rate of the last `days`.

    rows, before: replaced rows now, and `days` ago.   limit: replaced rows that fail the GPU.
    """
    if math.isnan(rows):
        return "unknown: replaced rows are not reported"
    used = f"{rows:.0f} rows replaced, {limit:.0f} fail the GPU"
    grown = rows - before
    if grown < LEAST_ROWS or days < LEAST_DAYS:
        return f"{used}; time left unknown: {grown:.0f} in the last {days:.1f} days"
    left = max(limit - rows, 0.0) / (grown / days)
    return f"{used}; at {grown / days:.2g} a day they last {left:,.0f} days, less if all are in one bank"


def _errors(count: float, what: str) -> str:
    return f"{count:.0f} {what} error{'' if count == 1 else 's'}"
