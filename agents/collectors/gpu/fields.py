"""What NVML calls fields: numbered values, of which one call reads any number. The tables, and how a value is decoded.

Numbers, types and units are those of nvml.h as nvidia-ml-py 13.615.71 carries it.

Reads all fields of all GPUs: one nvmlDeviceGetFieldValues per GPU and look, into one array that is used again.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collectors.gpu.refusals import Refusals
from agents.collectors.gpu.values import MISSING, Values


@dataclass(frozen=True, slots=True)
class Field:
    """One field and the signal it fills. scope: which part of the GPU; for a link it is the link's number."""

    signal: str
    name: str
    every: int
    scale: float = 1.0
    scope: int = 0

    @property
    def packed(self) -> bool:
        return self.name.endswith(("_BER", "_BER_V2"))


MEMORY, MODULE = 2, 1  # NVML_POWER_SCOPE_MEMORY, NVML_POWER_SCOPE_MODULE
_MILLI = 1e-3

_POWER = (
    Field("gpu.power_average", "POWER_AVERAGE", 1, _MILLI),
    Field("gpu.power_instant", "POWER_INSTANT", 1, _MILLI),
    Field("gpu.power_memory", "POWER_AVERAGE", 5, _MILLI, MEMORY),
    Field("gpu.power_module", "POWER_INSTANT", 5, _MILLI, MODULE),
    Field("gpu.energy", "TOTAL_ENERGY_CONSUMPTION", 10),
    Field("gpu.power_limit_requested", "POWER_REQUESTED_LIMIT", 60, _MILLI),
    Field("gpu.power_limit_default", "POWER_DEFAULT_LIMIT", 60, _MILLI),
    Field("gpu.power_limit_min", "POWER_MIN_LIMIT", 60, _MILLI),
    Field("gpu.power_limit_max", "POWER_MAX_LIMIT", 60, _MILLI),
    Field("gpu.memory_temperature", "MEMORY_TEMP", 5),
    Field("gpu.shutdown_margin", "TEMPERATURE_SHUTDOWN_TLIMIT", 60),
    Field("gpu.slowdown_margin", "TEMPERATURE_SLOWDOWN_TLIMIT", 60),
    Field("gpu.memory_max_margin", "TEMPERATURE_MEM_MAX_TLIMIT", 60),
    Field("gpu.operating_max_margin", "TEMPERATURE_GPU_MAX_TLIMIT", 60),
    Field("gpu.smoothing_life", "SMOOTHING_LIFE", 3600),
)
_CLOCKS = (
    Field("gpu.power_cap_time", "PERF_POLICY_POWER", 10),
    Field("gpu.thermal_time", "PERF_POLICY_THERMAL", 10),
    Field("gpu.sync_boost_time", "PERF_POLICY_SYNC_BOOST", 10),
    Field("gpu.board_limit_time", "PERF_POLICY_BOARD_LIMIT", 10),
    Field("gpu.low_utilization_time", "PERF_POLICY_LOW_UTILIZATION", 10),
    Field("gpu.reliability_time", "PERF_POLICY_RELIABILITY", 10),
    Field("gpu.app_clocks_time", "PERF_POLICY_TOTAL_APP_CLOCKS", 10),
    Field("gpu.base_clocks_time", "PERF_POLICY_TOTAL_BASE_CLOCKS", 10),
    Field("gpu.software_thermal_time", "SOFTWARE_THERMAL", 10),
    Field("gpu.hardware_thermal_time", "HARDWARE_THERMAL", 10),
    Field("gpu.power_brake_time", "POWER_BRAKE", 10),
)
_MEMORY = (
    Field("gpu.recovery_action", "GET_GPU_RECOVERY_ACTION", 5),
    Field("gpu.ecc_corrected", "ECC_SBE_VOL_TOTAL", 10),
    Field("gpu.ecc_uncorrected", "ECC_DBE_VOL_TOTAL", 10),
    Field("gpu.ecc_corrected_total", "ECC_SBE_AGG_TOTAL", 60),
    Field("gpu.ecc_uncorrected_total", "ECC_DBE_AGG_TOTAL", 60),
    Field("gpu.rows_corrected", "REMAPPED_COR", 30),
    Field("gpu.rows_uncorrected", "REMAPPED_UNC", 30),
    Field("gpu.rows_pending", "REMAPPED_PENDING", 30),
    Field("gpu.rows_failed", "REMAPPED_FAILURE", 30),
    Field("gpu.pages_corrected", "RETIRED_SBE", 300),
    Field("gpu.pages_uncorrected", "RETIRED_DBE", 300),
    Field("gpu.pages_pending", "RETIRED_PENDING", 300),
)
_LINKS_OUT = (
    Field("gpu.pcie_replays", "PCIE_REPLAY_COUNTER", 10),
    Field("gpu.pcie_replay_rollovers", "PCIE_REPLAY_ROLLOVER_COUNTER", 10),
    Field("gpu.pcie_recoveries", "PCIE_L0_TO_RECOVERY_COUNTER", 10),
    Field("gpu.pcie_correctable", "PCIE_COUNT_CORRECTABLE_ERRORS", 10),
    Field("gpu.pcie_naks_received", "PCIE_COUNT_NAKS_RECEIVED", 10),
    Field("gpu.pcie_receiver_errors", "PCIE_COUNT_RECEIVER_ERROR", 10),
    Field("gpu.pcie_bad_tlp", "PCIE_COUNT_BAD_TLP", 10),
    Field("gpu.pcie_naks_sent", "PCIE_COUNT_NAKS_SENT", 10),
    Field("gpu.pcie_bad_dllp", "PCIE_COUNT_BAD_DLLP", 10),
    Field("gpu.pcie_non_fatal", "PCIE_COUNT_NON_FATAL_ERROR", 10),
    Field("gpu.pcie_fatal", "PCIE_COUNT_FATAL_ERROR", 10),
    Field("gpu.pcie_unsupported", "PCIE_COUNT_UNSUPPORTED_REQ", 10),
    Field("gpu.pcie_lcrc_errors", "PCIE_COUNT_LCRC_ERROR", 10),
    Field("gpu.pcie_lane_errors", "PCIE_COUNT_LANE_ERROR", 10),
    Field("gpu.pcie_tx_bytes", "PCIE_COUNT_TX_BYTES", 10),
    Field("gpu.pcie_rx_bytes", "PCIE_COUNT_RX_BYTES", 10),
    Field("gpu.c2c_links", "C2C_LINK_COUNT", 30),
    Field("gpu.c2c_state", "C2C_LINK_GET_STATUS", 30),
    Field("gpu.c2c_bandwidth_max", "C2C_LINK_GET_MAX_BW", 30),
    Field("gpu.c2c_interrupts", "C2C_LINK_ERROR_INTR", 30),
    Field("gpu.c2c_replays", "C2C_LINK_ERROR_REPLAY", 30),
    Field("gpu.c2c_replays_repeated", "C2C_LINK_ERROR_REPLAY_B2B", 30),
    Field("gpu.c2c_power_state", "C2C_LINK_POWER_STATE", 30),
)
GPU_FIELDS: tuple[Field, ...] = (*_POWER, *_CLOCKS, *_MEMORY, *_LINKS_OUT)

_COUNTED = {
    "tx_packets": "XMIT_PACKETS",
    "tx_bytes": "XMIT_BYTES",
    "rx_packets": "RCV_PACKETS",
    "rx_bytes": "RCV_BYTES",
    "malformed_packets": "MALFORMED_PACKET_ERRORS",
    "buffer_overruns": "BUFFER_OVERRUN_ERRORS",
    "rx_errors": "RCV_ERRORS",
    "rx_remote_errors": "RCV_REMOTE_ERRORS",
    "rx_general_errors": "RCV_GENERAL_ERRORS",
    "integrity_errors": "LOCAL_LINK_INTEGRITY_ERRORS",
    "tx_discards": "XMIT_DISCARDS",
    "recoveries_succeeded": "LINK_RECOVERY_SUCCESSFUL_EVENTS",
    "recoveries_failed": "LINK_RECOVERY_FAILED_EVENTS",
    "recoveries": "LINK_RECOVERY_EVENTS",
    "effective_errors": "EFFECTIVE_ERRORS",
    "effective_ber": "EFFECTIVE_BER",
    "symbol_errors": "SYMBOL_ERRORS",
    "symbol_ber": "SYMBOL_BER",
    "raw_ber": "RAW_BER_V2",
    **{f"fec_{n}": f"FEC_HISTORY_{n}" for n in range(16)},
}
LINK_FIELDS: tuple[Field, ...] = (
    Field("nvlink.state", "NVLINK_GET_STATE", 10),
    Field("nvlink.speed", "NVLINK_GET_SPEED", 60, 8.0),  # MB/s
    Field("nvlink.replay_errors", "NVLINK_ERROR_DL_REPLAY", 10),
    Field("nvlink.recovery_errors", "NVLINK_ERROR_DL_RECOVERY", 10),
    Field("nvlink.crc_errors", "NVLINK_ERROR_DL_CRC", 10),
    Field("nvlink.tx_data", "NVLINK_THROUGHPUT_DATA_TX", 10),
    Field("nvlink.rx_data", "NVLINK_THROUGHPUT_DATA_RX", 10),
    *(Field(f"nvlink.{signal}", f"NVLINK_COUNT_{name}", 10) for signal, name in _COUNTED.items()),
    Field("nvlink.plr_blocks", "NVLINK_PLR_XMIT_BLOCKS", 10),
    Field("nvlink.plr_retries", "NVLINK_PLR_XMIT_RETRY_BLOCKS", 10),
)

# NVIDIA moved these when it added fields before them, and moved them back: (since driver, until driver, number).
# From nvml.h as nvidia-ml-py carries it: 12.570.172, 12.575.51 to 13.580.82, 13.580.126. Between the last two nobody
# outside knows, so a driver of that span is not asked: the wrong number would give another field's value.
_MOVED: Mapping[str, tuple[tuple[tuple[int, int], tuple[int, int], int], ...]] = {
    "SMOOTHING_LIFE": (((570, 0), (575, 0), 258), ((575, 0), (580, 83), 263), ((580, 126), (9999, 0), 258)),
    "SOFTWARE_THERMAL": (((575, 0), (580, 83), 251), ((580, 126), (9999, 0), 269)),
    "HARDWARE_THERMAL": (((575, 0), (580, 83), 252), ((580, 126), (9999, 0), 270)),
    "POWER_BRAKE": (((575, 0), (580, 83), 253), ((580, 126), (9999, 0), 271)),
}


def number_of(name: str, nvml: Any, driver: str) -> int | None:
    """The number under which this driver knows a field; None if that is not known."""
    if name not in _MOVED:
        found: int | None = getattr(nvml, f"NVML_FI_DEV_{name}", None)
        return found
    parts = re.match(r"(\d+)\.(\d+)", driver)
    version = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    return next((number for since, until, number in _MOVED[name] if since <= version < until), None)


# The member of the union that holds the value, by NVML_VALUE_TYPE_*.
_DOUBLE, _UINT, _ULONG, _ULONGLONG, _LONGLONG, _INT, _USHORT = range(7)


def decode(raw: NDArray[np.uint64], types: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
    """Raw unions and their types -> the same values as f8 and as u8; what is not a value is missing in both.

    All bits set is NVML_VALUE_NOT_AVAILABLE. The driver does not clear the bytes of the union that it does not use.
    """
    width = np.where(types == _USHORT, 0xFFFF, np.where((types == _UINT) | (types == _INT), 0xFFFFFFFF, MISSING))
    cut = raw & width.astype(np.uint64)
    signed = np.where(types == _INT, cut.astype(np.uint32).view(np.int32).astype(np.int64), cut.view(np.int64))
    has_sign = (types == _INT) | (types == _LONGLONG)
    floats = np.where(has_sign, signed.astype(np.float64), cut.astype(np.float64))
    doubles = types == _DOUBLE
    floats[doubles] = raw[doubles].view(np.float64)
    known = (types >= _DOUBLE) & (types <= _USHORT) & (has_sign | doubles | (cut != width)) & np.isfinite(floats)
    floats[~known] = np.nan
    counters = np.full(raw.shape, MISSING, np.uint64)
    whole = known & ~doubles & (~has_sign | (signed >= 0))
    counters[whole] = cut[whole]
    rounded = known & doubles & (floats >= 0) & (floats < MISSING)
    counters[rounded] = floats[rounded].astype(np.uint64)
    return floats, counters


def unpack_rate(packed: NDArray[np.float64]) -> NDArray[np.float64]:
    """A bit error rate: mantissa in bits 8-11, negative power of ten in bits 0-7 (NVML_NVLINK_BER_* of nvml.h)."""
    good = (packed >= 0) & (packed < 1 << 12)
    bits = np.where(good, packed, 0).astype(np.int64)
    return np.where(good, (bits >> 8) * 10.0 ** -(bits & 0xFF).astype(np.float64), np.nan)


# nvmlFieldValue_t of nvml.h: 40 bytes, the union of the value last.
LAYOUT = np.dtype(
    {
        "names": ["id", "scope", "time", "latency", "type", "code", "value"],
        "formats": ["<u4", "<u4", "<i8", "<i8", "<i4", "<i4", "<u8"],
    }
)
UNREAD = 999
"""NVML_ERROR_UNKNOWN stands in every entry before a call, so that what the driver leaves out is missing."""


def refusal_key(number: int, scope: int) -> str:
    """A field among what may be refused."""
    return f"field {number} of {scope}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One field of one GPU and where its value goes."""

    gpu: int
    number: int
    scope: int
    every: int
    place: tuple[bool, int]
    scale: float = 1.0
    packed: bool = False

    @property
    def what(self) -> str:
        """What it is called among refusals."""
        return refusal_key(self.number, self.scope)


@dataclass(frozen=True, slots=True)
class _Beat:
    """What one rhythm reads: per GPU how many entries from where, and the index of each value's place."""

    spans: tuple[tuple[int, Any, ctypes.c_int32, slice], ...]
    entries: NDArray[np.intp]
    owner: NDArray[np.intp]
    counters: NDArray[np.intp]
    counter_places: NDArray[np.intp]
    gauges: NDArray[np.intp]
    gauge_places: NDArray[np.intp]
    scales: NDArray[np.float64]
    packed: NDArray[np.intp]


class FieldReader:
    """The array, cut into a part per GPU in which the fastest fields come first, so that each rhythm is a prefix."""

    def __init__(
        self,
        function: Callable[..., int],
        value_type: Any,
        wanted: Iterable[Wanted],
        never: Sequence[int],
        refusals: Refusals,
    ) -> None:
        self._function, self._type, self._never, self._refusals = function, value_type, never, refusals
        self._all = tuple(sorted(wanted, key=lambda w: (w.gpu, w.every)))
        self.lay_out()

    def call(self, gpu: int, handle: Any, due: int) -> int | None:
        """The driver's answer for one GPU, still raw; its return code, None where there is nothing to ask for."""
        span = self._beat(due).spans[gpu] if gpu < self._gpus else None
        if span is None or span[0] == 0:
            return None
        _, pointer, count, part = span
        self._code[part] = UNREAD
        code = self._function(handle, count, pointer)
        if code:
            self._code[part] = UNREAD
        return code

    def take(self, due: int, asked: Iterable[int], values: Values, latency: NDArray[np.float64]) -> None:
        """Decodes what `call` brought for the GPUs `asked` and puts it in its places."""
        beat = self._beat(due)
        if not beat.entries.size:
            return
        code = self._code[beat.entries]
        answered = np.zeros(self._gpus, np.bool_)
        answered[[gpu for gpu in asked if gpu < self._gpus]] = True
        good = (code == 0) & answered[beat.owner]
        floats, counters = decode(self._value[beat.entries], self._kind[beat.entries])
        floats[beat.packed] = unpack_rate(floats[beat.packed])
        with np.errstate(all="ignore"):  # garbage overflows to infinity, which no signal's range holds
            floats *= beat.scales
        chosen = good[beat.gauges]
        values.gauges[beat.gauge_places[chosen]] = floats[beat.gauges[chosen]]
        chosen = good[beat.counters]
        values.counters[beat.counter_places[chosen]] = counters[beat.counters[chosen]]
        np.fmax.at(latency, beat.owner[good], self._latency[beat.entries[good]] * 1e-6)
        self._keep(beat.entries[good], beat.entries[np.isin(code, self._never) & answered[beat.owner]])

    def _keep(self, told: NDArray[np.intp], refused: NDArray[np.intp]) -> None:
        """Remembers which entries are news: told for the first time, or refused."""
        for i in told[~self._steady[told]]:
            self._refusals.answer(self._asked[i].gpu, self._asked[i].what)
        self._steady[told] = True
        for i in refused:
            wanted = self._asked[i]
            self._refusals.refuse(wanted.gpu, wanted.what, f"field {wanted.number}")
        if refused.size:
            self.lay_out()

    def _beat(self, due: int) -> _Beat:
        if due not in self._beats:
            self._beats[due] = self._prepare(due)
        return self._beats[due]

    def lay_out(self) -> None:
        """Makes the array of what is not refused."""
        refusals = self._refusals
        self._asked = tuple(w for w in self._all if not refusals.refused(w.gpu, w.what))
        self._steady = np.array([refusals.steady(w.gpu, w.what) for w in self._asked], np.bool_)
        self._gpus = 1 + max((w.gpu for w in self._asked), default=-1)
        self._array = (self._type * max(len(self._asked), 1))()
        view = np.frombuffer(self._array, LAYOUT)
        view["id"][: len(self._asked)] = [w.number for w in self._asked]
        view["scope"][: len(self._asked)] = [w.scope for w in self._asked]
        self._code, self._kind, self._value, self._latency = (view[n] for n in ("code", "type", "value", "latency"))
        self._beats: dict[int, _Beat] = {}

    def _prepare(self, due: int) -> _Beat:
        entries = [i for i, w in enumerate(self._asked) if w.every <= due]
        spans = []
        for gpu in range(self._gpus):
            mine = [i for i in entries if self._asked[i].gpu == gpu]
            start = mine[0] if mine else 0
            pointer = ctypes.byref(self._array, start * LAYOUT.itemsize)
            spans.append((len(mine), pointer, ctypes.c_int32(len(mine)), slice(start, start + len(mine))))
        asked = [self._asked[i] for i in entries]
        counters = [i for i, w in enumerate(asked) if w.place[0]]
        gauges = [i for i, w in enumerate(asked) if not w.place[0]]
        return _Beat(
            tuple(spans),
            _indices(entries),
            _indices([w.gpu for w in asked]),
            _indices(counters),
            _indices([asked[i].place[1] for i in counters]),
            _indices(gauges),
            _indices([asked[i].place[1] for i in gauges]),
            np.array([w.scale for w in asked]),
            _indices([i for i, w in enumerate(asked) if w.packed]),
        )


def _indices(found: Sequence[int]) -> NDArray[np.intp]:
    return np.array(found, np.intp)
