"""Health of memory: corrected and uncorrected errors of GPUs and servers, rows replaced and rows that cannot be.

This is memory health and says nothing about silent corruption: what ECC counts was seen.

What is remembered of the memory of each GPU.

What is wrong with a memory, in words: troubles, what ends them, and how long spare rows will last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.streams import Bools
from detectors.memory.error_counters import Errors, Standing
from detectors.memory.error_rates import (
    HOUR,
    LEAST_DAYS,
    LEAST_ROWS,
    ROW_FIELDS,
    Host,
    Rates,
    count_replaced_rows,
    find_spent,
    positive,
    update_row_history,
)
from detectors.xid.levels import UNCONTAINED, number, resets
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level, to_json

MEM = np.dtype(
    [
        ("lost", "<f8"),  # uncorrected errors of device memory in this life
        ("lost_at", "<i8"),
        ("lost_rows", "<f8"),  # rows replaced when the first came
        ("chip", "<f8"),  # uncorrected errors of caches and registers in this life
        ("chip_at", "<i8"),
        *ROW_FIELDS,
        ("heard_at", "<i8"),  # the newest reading of what follows
        ("pending_at", "<i8"),  # since when a row waits for a reset; 0: none does
        ("failed_at", "<i8"),
        ("many_at", "<i8"),  # since when corrected errors of caches are above the limit
        ("threshold_at", "<i8"),
    ]
)


_RESET = "a reset of the GPU, after which its driver counts anew"
_RESET_OR_DAY = f"{_RESET}, or a day after the first of them; what broke then is still to be looked for"
CLEARS: Mapping[str, str] = {
    "gpu.rows_failed": "the exchange of the GPU",
    "gpu.sram_uncorrected": _RESET_OR_DAY,
    "gpu.sram_corrected": _RESET,
    "gpu.dram_uncorrected": _RESET_OR_DAY,
    "gpu.rows_corrected": "the exchange of the GPU, or spare rows that last for two months again",
    "gpu.rows_pending": "a reset of the GPU, which replaces the row",
    "gpu.sram_threshold": "the exchange of the GPU",
    "gpu.banks_none": "the exchange of the GPU",
    "gpu.dram_corrected": "a day without a corrected error, or a reset of the GPU",
    "host": "the reboot after the module was exchanged; else a day without corrected errors, or after uncorrected ones",
}
"""By the signal that is worst."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong."""

    level: Level
    since: int
    text: str
    signal: str


def worst(troubles: Sequence[Trouble]) -> Trouble:
    """The loudest; of equals the first."""
    return max(troubles, key=lambda trouble: LEVELS.index(trouble.level))


def within(hours: float) -> str:
    """`20 min`, `2.5 h`."""
    return f"{max(hours * 60, 1):.0f} min" if hours < 1 else f"{hours:.1f} h"


def counted(errors: float, what: str) -> str:
    """`1 corrected error`, `2 corrected errors`."""
    return f"{errors:.0f} {what} error{'' if errors == 1 else 's'}"


def budget(rows: float, first: float, days: float, limit: float) -> str:
    """How many rows were replaced, and when none can be any more at the rate of the last `days`."""
    if math.isnan(rows):
        return "cannot tell: replaced rows are not told"
    used = f"{rows:.0f} rows replaced, {limit:.0f} fail the GPU"
    grown = rows - first
    if grown < LEAST_ROWS or days < LEAST_DAYS:
        return f"{used}; cannot tell for how long the rest lasts: {grown:.0f} in the last {days:.1f} days"
    left = max(limit - rows, 0.0) / (grown / days)
    return f"{used}; at {grown / days:.2g} a day the rest lasts {left:,.0f} days, less where all are of one bank"


def of_host(cell: Any, host: Host, time: int) -> Trouble:
    """What is wrong with a server's memory, or with one of its modules."""
    what = "memory" if host.device_class == "node" else "module"
    if cell["lost"]:
        text = f"{counted(cell['lost'], 'uncorrected')} of its {what}: drain, find and exchange the module"
        return Trouble("page", int(cell["lost_at"]), text, host.uncorrected)
    text = f"more than {host.limit:.0f} corrected errors of its {what} a day: plan to exchange the module"
    return Trouble("ticket", int(cell["since"]), text, host.corrected)


_STEADY = 60 * SECOND  # after announced work: memory needs no warm-up; chosen
_DAY = 24 * 3600 * SECOND
_SAID = 120 * SECOND  # between a counter's growth and the XID of it; counters are read every 10 s or more; chosen
_FLAGS = {
    "gpu.rows_pending": "pending_at",
    "gpu.rows_failed": "failed_at",
    "gpu.sram_corrected": "many_at",
    "gpu.sram_threshold": "threshold_at",
}
_STATES = (*_FLAGS.values(), "spent_at")
_SCORE = {"suspect": 1.0, "ticket": 2.0, "page": 3.0}


@dataclass
class Memory(Detector):
    """Memory errors by ECC. Page: a row that cannot be replaced, an uncorrected error in caches or registers, one of
    device memory that was neither contained nor had its row replaced within `wait` s, `sram_limit` corrected errors
    of caches, an uncorrected error of a server's memory. Ticket: a contained uncorrected error, a row that waits for a
    reset, a rate of corrected errors of device memory that is too high for its cohort, a bank without spare rows,
    `row_limit` replaced rows or less than a month to it, the maker's threshold for caches, too many corrected errors of
    a server or a module.

    The rate is judged by a CUSUM of negative binomial counts (variance mean (1 + `overdispersion` mean) an hour) for
    `ratio` times the usual rate, learnt from the cohort (GPUs of one SKU) and from the GPU's own past; exp(`limit`)
    GPU-hours lie between false alarms.

    Source: any uncorrected and 10,000 corrected errors of SRAM fail a node, 512 replaced rows too
    (Azure/azurehpc-health-checks; DCGM); replacing rows: NVIDIA, GPU memory error management; 100 corrected errors a
    day of a processor and 10 of a module: mcelog's defaults. Rates: chosen, nobody publishes a limit.
    """

    name: ClassVar[str] = "memory"
    family: ClassVar[str] = "memory health"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ()
    any_of: ClassVar[tuple[str, ...]] = ("gpu.ecc_corrected", "node.memory_corrected", "dimm.corrected")
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.ecc_uncorrected", "gpu.dram_corrected", "gpu.dram_uncorrected", "gpu.sram_corrected"),
        *("gpu.sram_uncorrected", "gpu.sram_threshold", "gpu.rows_corrected", "gpu.rows_uncorrected"),
        *("gpu.rows_pending", "gpu.rows_failed", "gpu.banks_low", "gpu.banks_none", "gpu.generation"),
        *("node.memory_uncorrected", "node.generation", "dimm.uncorrected", "dimm.generation", "event:xid"),
    )
    cannot_see: ClassVar[str] = (
        "Errors that ECC does not see, a weak cell before its first error, which bank a replaced row was of, a rate "
        "that rises from a few errors a week, and of a GPU that tells only totals which errors were of its caches."
    )

    ratio: float = 10.0
    limit: float = 12.0
    overdispersion: float = 2.0
    wait: float = 60.0
    sram_limit: float = 10_000.0
    row_limit: float = 512.0
    server_limit: float = 100.0
    module_limit: float = 10.0

    cells: NDArray[Any] = memory(0, MEM)
    said: dict[str, list[Any]] = notes()
    conditions: OpenConditions = notes()
    gates: Gates = part(Gates)
    growth: Errors = part(Errors)
    standing: Standing = part(Standing)
    rates: Rates = part(Rates)
    servers: Host = part(lambda: Host("node", "node.memory_corrected", "node.memory_uncorrected", 100.0))
    modules: Host = part(lambda: Host("dimm", "dimm.corrected", "dimm.uncorrected", 10.0))
    _peers: Peers = field(default_factory=lambda: Peers(("@sku",), least=2), init=False, repr=False)

    def __post_init__(self) -> None:
        self.rates.ratio, self.rates.limit, self.rates.a = self.ratio, self.limit, self.overdispersion
        self.servers.limit, self.modules.limit = self.server_limit, self.module_limit

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        self.gates.update(frames)
        found, holding = list[Finding](), set[str]()
        if (gpus := frames.get("gpu")) is not None and len(gpus.entities):
            self._hear(gpus)
            found += self._of_gpus(self.standing.read(gpus), holding)
        else:
            holding |= {e for e in self.conditions if e.startswith("gpu:")}
        for kind, host in (("node", self.servers), ("dimm", self.modules)):
            frame = frames.get(kind)
            if frame is None or host.corrected not in frame.values:
                holding |= {e for e in self.conditions if e.startswith(f"{kind}:")}
                continue
            gate = ~self.gates.maintenance_mask(frame, _STEADY)
            host.step(frame, gate)
            found += self._of_host(frame, host, gate, holding)
        close_ended(self.conditions, holding)
        return found

    def _hear(self, frame: Frame) -> None:
        """Which GPUs' errors were contained and which were not, as XIDs tell."""
        for event in frame.events:
            code = number(event.data, "xid") if event.kind == "xid" else None
            if code in UNCONTAINED or (code == 94 and resets(event)):
                self.said[event.entity] = [event.time, "uncontained"]
            elif code == 94:
                at, known = self.said.get(event.entity, [0, ""])
                if known != "uncontained" or event.time - at > _SAID:
                    self.said[event.entity] = [event.time, "contained"]
        for gpu in [g for g, (at, _) in self.said.items() if frame.time - at > _DAY]:
            del self.said[gpu]

    def budget(self) -> list[str]:
        return [
            f"rate of corrected errors: {self.rates.budget()}",
            f"servers and modules: a rule of {self.server_limit:g} and {self.module_limit:g} corrected errors a day",
            "uncorrected errors, rows and banks: a rule on logged facts, no statistical alarm rate",
        ]

    # --- GPUs --------------------------------------------------------------------------------------------------------

    def _of_gpus(self, frame: Frame, holding: set[str]) -> list[Finding]:
        self.grow(len(frame.entities))
        gate = ~self.gates.maintenance_mask(frame, _STEADY)
        bad = self._counted(frame, gate) | self._flagged(frame) | positive(frame["gpu.banks_none"])
        found = []
        for i in np.flatnonzero(bad & gate).tolist():
            if troubles := self._troubles(frame, i):
                holding.add(frame.entities[i])
                found.append(self._finding(frame, i, troubles))
        return [finding for finding in found if finding is not None]

    def _counted(self, frame: Frame, gate: Bools) -> Bools:
        """(N,) whose counters tell of trouble."""
        grown, anew, watched = self.growth.look(frame)
        n, cells, replaced = len(frame.entities), self.cells[: len(frame.entities)], count_replaced_rows(frame)
        update_row_history(cells, replaced, frame.time)
        watched = np.where(gate, watched, 0.0)
        bursts = self.rates.step(None if grown is None else grown[0], watched, self._peers.groups(frame), frame.time)
        if anew is not None:
            self.rates.end(n, anew)
        for name, errors in (("lost", 1), ("chip", 2)):
            at = cells[f"{name}_at"]
            if at.any():
                over = (at > 0) & (frame.time - at > _DAY)
                over = over if anew is None else over | anew
                cells[name][over], at[over] = 0.0, 0
            if grown is None:
                continue
            struck = (grown[errors] > 0) & gate
            first = struck & (at == 0)
            cells[name][struck] += grown[errors][struck]
            at[first] = frame.time
            if errors == 1:
                cells["lost_rows"][first] = np.nan_to_num(replaced[first], nan=-1.0)
        return np.asarray(bursts | (cells["lost"] > 0) | (cells["chip"] > 0))

    def _flagged(self, frame: Frame) -> Bools:
        """(N,) of whom a state, or a limit, tells of trouble."""
        cells = self.cells[: len(frame.entities)]
        replaced = count_replaced_rows(frame)
        bad = find_spent(cells, replaced, frame.time, self.row_limit)
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
        heard = np.isfinite(replaced)
        for signal in _FLAGS:
            heard |= np.isfinite(frame[signal])
        cells["heard_at"] = np.where(heard, frame.time, np.minimum(cells["heard_at"], frame.time))
        gone = bad & (frame.time - cells["heard_at"] > _DAY)
        for name in _STATES if gone.any() else ():
            cells[name][gone] = 0
        return bad & ~gone

    def _troubles(self, frame: Frame, i: int) -> list[Trouble]:
        cell, time = self.cells[i], frame.time
        found = []
        if cell["failed_at"]:
            text = "a row of its memory could not be replaced: exchange the GPU (RMA)"
            found.append(Trouble("page", int(cell["failed_at"]), text, "gpu.rows_failed"))
        if cell["chip"]:
            text = f"{counted(cell['chip'], 'uncorrected')} in its caches or registers: drain, then reset GPU"
            found.append(Trouble("page", int(cell["chip_at"]), text, "gpu.sram_uncorrected"))
        if cell["many_at"]:
            text = f"more than {self.sram_limit:,.0f} corrected errors in its caches: drain, run field diagnostics"
            found.append(Trouble("page", int(cell["many_at"]), text, "gpu.sram_corrected"))
        if cell["lost"] and (trouble := self._lost(frame, i, time)):
            found.append(trouble)
        if cell["pending_at"]:
            text = "a row of its memory waits to be replaced: drain when its job ends, then reset GPU"
            found.append(Trouble("ticket", int(cell["pending_at"]), text, "gpu.rows_pending"))
        if cell["threshold_at"]:
            text = "errors of its caches passed the maker's threshold: run field diagnostics (RMA)"
            found.append(Trouble("ticket", int(cell["threshold_at"]), text, "gpu.sram_threshold"))
        if cell["spent_at"]:
            text = f"spare rows of its memory run out ({self._rows_left(frame, i)}): plan an exchange"
            found.append(Trouble("ticket", int(cell["spent_at"]), text, "gpu.rows_corrected"))
        if positive(frame["gpu.banks_none"][i]):
            text = f"{frame['gpu.banks_none'][i]:.0f} banks of its memory have no spare row left: plan an exchange"
            found.append(Trouble("ticket", time, text, "gpu.banks_none"))
        burst = self.rates.cells[i]
        if burst["on"]:
            hours = max((time - int(burst["since"])) / SECOND / HOUR, 1 / 60)
            text = f"{counted(burst['total'], 'corrected')} of its memory in {within(hours)}, usual are "
            text += f"{self.rates.usual[i]:.3f} an hour: drain when its job ends, watch for uncorrected ones"
            found.append(Trouble("ticket", int(burst["since"]), text, "gpu.dram_corrected"))
        return found

    def _lost(self, frame: Frame, i: int, time: int) -> Trouble | None:
        """Uncorrected errors of device memory: contained, or not, or not known yet."""
        cell = self.cells[i]
        at, said = self.said.get(frame.entities[i], [0, ""])
        said = said if abs(at - int(cell["lost_at"])) <= _SAID or at > cell["lost_at"] else ""
        replaced = cell["pending_at"] > 0 or count_replaced_rows(frame)[i] > cell["lost_rows"] >= 0
        what = f"{counted(cell['lost'], 'uncorrected')} of its memory"
        since, signal = int(cell["lost_at"]), "gpu.dram_uncorrected"
        if said == "uncontained":
            return Trouble("page", since, f"{what}, not contained: what ran on it is suspect, reset GPU now", signal)
        if said == "contained" or replaced:
            return Trouble("ticket", since, f"{what}, contained: drain when its job ends, then reset GPU", signal)
        if time - since < self.wait * SECOND:
            return None
        return Trouble("page", since, f"{what}, and no row was replaced: drain, then reset GPU", signal)

    def _rows_left(self, frame: Frame, i: int) -> str:
        days = (frame.time - int(self.cells[i]["rows_at"])) / _DAY
        return budget(float(count_replaced_rows(frame)[i]), float(self.cells[i]["rows"]), days, self.row_limit)

    def _finding(self, frame: Frame, i: int, troubles: list[Trouble]) -> Finding | None:
        entity, lead = frame.entities[i], worst(troubles)
        due = due_report(self.conditions, entity, frame.time, min(t.since for t in troubles), lead.level)
        if due is None:
            return None
        burst = self.rates.cells[i]
        compared = None
        if burst["on"]:
            hours = max((frame.time - int(burst["since"])) / SECOND / HOUR, 1 / 60)
            rate, usual = float(burst["total"]) / hours, float(self.rates.usual[i])
            size = int(np.count_nonzero(self._peers.groups(frame) == self._peers.groups(frame)[i])) - 1
            name = self._peers.cohort_name(frame, i)
            compared = Comparison(rate, usual, None, name, size, rate / usual, "corrected errors an hour")
        told = make_evidence(
            CLEARS[lead.signal],
            compared,
            troubles=[t.text for t in troubles],
            spare_rows=self._rows_left(frame, i),
            banks_without_spare=to_json(frame["gpu.banks_none"][i]),
            banks_low=to_json(frame["gpu.banks_low"][i]),
        )
        signals = tuple(dict.fromkeys(t.signal for t in [lead, *troubles]))
        summary = f"{entity}: {lead.text}"
        return Finding(frame.time, due[0], entity, self.name, due[1], _SCORE[lead.level], summary, told, signals)

    # --- servers -----------------------------------------------------------------------------------------------------

    def _of_host(self, frame: Frame, host: Host, gate: NDArray[np.bool_], holding: set[str]) -> list[Finding]:
        found = []
        for i, cell in host.bad_ones(frame):
            if not gate[i]:
                continue
            entity, trouble = frame.entities[i], of_host(cell, host, frame.time)
            holding.add(entity)
            if due := due_report(self.conditions, entity, frame.time, trouble.since, trouble.level):
                told = make_evidence(
                    CLEARS["host"], corrected_a_day=float(cell["bucket"]), uncorrected=float(cell["lost"])
                )
                score, summary = _SCORE[trouble.level], f"{entity}: {trouble.text}"
                finding = (due[1], score, summary, told, (trouble.signal,))
                found.append(Finding(frame.time, due[0], entity, self.name, *finding))
        return found
