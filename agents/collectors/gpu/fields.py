"""NVML fields: numbered values, any number of which are read by one call. The tables, their decoding, and the batch
reader.

Numbers, types and units are those of nvml.h in nvidia-ml-py 13.615.71. The reader makes one nvmlDeviceGetFieldValues
call per GPU and read, into one array that is reused.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collectors.gpu.refusals import RefusedCalls
from agents.collectors.gpu.values import MISSING, GpuValues


@dataclass(frozen=True, slots=True)
class NvmlField:
    """One field and the signal that it fills. scope: part of the GPU; for a link, its number."""

    signal: str
    name: str
    interval: int
    scale: float = 1.0
    scope: int = 0

    @property
    def packed(self) -> bool:
        """Whether the value is a packed bit error rate."""
        return self.name.endswith(("_BER", "_BER_V2"))


MEMORY, MODULE = 2, 1  # NVML_POWER_SCOPE_MEMORY, NVML_POWER_SCOPE_MODULE
_MILLI = 1e-3

_POWER = (
    NvmlField("gpu.power_average", "POWER_AVERAGE", 1, _MILLI),
    NvmlField("gpu.power_instant", "POWER_INSTANT", 1, _MILLI),
    NvmlField("gpu.power_memory", "POWER_AVERAGE", 5, _MILLI, MEMORY),
    NvmlField("gpu.power_module", "POWER_INSTANT", 5, _MILLI, MODULE),
    NvmlField("gpu.energy", "TOTAL_ENERGY_CONSUMPTION", 10),
    NvmlField("gpu.power_limit_requested", "POWER_REQUESTED_LIMIT", 60, _MILLI),
    NvmlField("gpu.power_limit_default", "POWER_DEFAULT_LIMIT", 60, _MILLI),
    NvmlField("gpu.power_limit_min", "POWER_MIN_LIMIT", 60, _MILLI),
    NvmlField("gpu.power_limit_max", "POWER_MAX_LIMIT", 60, _MILLI),
    NvmlField("gpu.memory_temperature", "MEMORY_TEMP", 5),
    NvmlField("gpu.shutdown_margin", "TEMPERATURE_SHUTDOWN_TLIMIT", 60),
    NvmlField("gpu.slowdown_margin", "TEMPERATURE_SLOWDOWN_TLIMIT", 60),
    NvmlField("gpu.memory_max_margin", "TEMPERATURE_MEM_MAX_TLIMIT", 60),
    NvmlField("gpu.operating_max_margin", "TEMPERATURE_GPU_MAX_TLIMIT", 60),
    NvmlField("gpu.smoothing_life", "SMOOTHING_LIFE", 3600),
)
_CLOCKS = (
    NvmlField("gpu.power_cap_time", "PERF_POLICY_POWER", 10),
    NvmlField("gpu.thermal_time", "PERF_POLICY_THERMAL", 10),
    NvmlField("gpu.sync_boost_time", "PERF_POLICY_SYNC_BOOST", 10),
    NvmlField("gpu.board_limit_time", "PERF_POLICY_BOARD_LIMIT", 10),
    NvmlField("gpu.low_utilization_time", "PERF_POLICY_LOW_UTILIZATION", 10),
    NvmlField("gpu.reliability_time", "PERF_POLICY_RELIABILITY", 10),
    NvmlField("gpu.app_clocks_time", "PERF_POLICY_TOTAL_APP_CLOCKS", 10),
    NvmlField("gpu.base_clocks_time", "PERF_POLICY_TOTAL_BASE_CLOCKS", 10),
    NvmlField("gpu.software_thermal_time", "SOFTWARE_THERMAL", 10),
    NvmlField("gpu.hardware_thermal_time", "HARDWARE_THERMAL", 10),
    NvmlField("gpu.power_brake_time", "POWER_BRAKE", 10),
)
_MEMORY = (
    NvmlField("gpu.recovery_action", "GET_GPU_RECOVERY_ACTION", 5),
    NvmlField("gpu.ecc_corrected", "ECC_SBE_VOL_TOTAL", 10),
    NvmlField("gpu.ecc_uncorrected", "ECC_DBE_VOL_TOTAL", 10),
    NvmlField("gpu.ecc_corrected_total", "ECC_SBE_AGG_TOTAL", 60),
    NvmlField("gpu.ecc_uncorrected_total", "ECC_DBE_AGG_TOTAL", 60),
    NvmlField("gpu.rows_corrected", "REMAPPED_COR", 30),
    NvmlField("gpu.rows_uncorrected", "REMAPPED_UNC", 30),
    NvmlField("gpu.rows_pending", "REMAPPED_PENDING", 30),
    NvmlField("gpu.rows_failed", "REMAPPED_FAILURE", 30),
    NvmlField("gpu.pages_corrected", "RETIRED_SBE", 300),
    NvmlField("gpu.pages_uncorrected", "RETIRED_DBE", 300),
    NvmlField("gpu.pages_pending", "RETIRED_PENDING", 300),
)
_PCIE_AND_C2C = (
    NvmlField("gpu.pcie_replays", "PCIE_REPLAY_COUNTER", 10),
    NvmlField("gpu.pcie_replay_rollovers", "PCIE_REPLAY_ROLLOVER_COUNTER", 10),
    NvmlField("gpu.pcie_recoveries", "PCIE_L0_TO_RECOVERY_COUNTER", 10),
    NvmlField("gpu.pcie_correctable", "PCIE_COUNT_CORRECTABLE_ERRORS", 10),
    NvmlField("gpu.pcie_naks_received", "PCIE_COUNT_NAKS_RECEIVED", 10),
    NvmlField("gpu.pcie_receiver_errors", "PCIE_COUNT_RECEIVER_ERROR", 10),
    NvmlField("gpu.pcie_bad_tlp", "PCIE_COUNT_BAD_TLP", 10),
    NvmlField("gpu.pcie_naks_sent", "PCIE_COUNT_NAKS_SENT", 10),
    NvmlField("gpu.pcie_bad_dllp", "PCIE_COUNT_BAD_DLLP", 10),
    NvmlField("gpu.pcie_non_fatal", "PCIE_COUNT_NON_FATAL_ERROR", 10),
    NvmlField("gpu.pcie_fatal", "PCIE_COUNT_FATAL_ERROR", 10),
    NvmlField("gpu.pcie_unsupported", "PCIE_COUNT_UNSUPPORTED_REQ", 10),
    NvmlField("gpu.pcie_lcrc_errors", "PCIE_COUNT_LCRC_ERROR", 10),
    NvmlField("gpu.pcie_lane_errors", "PCIE_COUNT_LANE_ERROR", 10),
    NvmlField("gpu.pcie_tx_bytes", "PCIE_COUNT_TX_BYTES", 10),
    NvmlField("gpu.pcie_rx_bytes", "PCIE_COUNT_RX_BYTES", 10),
    NvmlField("gpu.c2c_links", "C2C_LINK_COUNT", 30),
    NvmlField("gpu.c2c_state", "C2C_LINK_GET_STATUS", 30),
    NvmlField("gpu.c2c_bandwidth_max", "C2C_LINK_GET_MAX_BW", 30),
    NvmlField("gpu.c2c_interrupts", "C2C_LINK_ERROR_INTR", 30),
    NvmlField("gpu.c2c_replays", "C2C_LINK_ERROR_REPLAY", 30),
    NvmlField("gpu.c2c_replays_repeated", "C2C_LINK_ERROR_REPLAY_B2B", 30),
    NvmlField("gpu.c2c_power_state", "C2C_LINK_POWER_STATE", 30),
)
GPU_FIELDS: tuple[NvmlField, ...] = (*_POWER, *_CLOCKS, *_MEMORY, *_PCIE_AND_C2C)

_LINK_COUNTERS = {
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
LINK_FIELDS: tuple[NvmlField, ...] = (
    NvmlField("nvlink.state", "NVLINK_GET_STATE", 10),
    NvmlField("nvlink.speed", "NVLINK_GET_SPEED", 60, 8.0),  # MB/s
    NvmlField("nvlink.replay_errors", "NVLINK_ERROR_DL_REPLAY", 10),
    NvmlField("nvlink.recovery_errors", "NVLINK_ERROR_DL_RECOVERY", 10),
    NvmlField("nvlink.crc_errors", "NVLINK_ERROR_DL_CRC", 10),
    NvmlField("nvlink.tx_data", "NVLINK_THROUGHPUT_DATA_TX", 10),
    NvmlField("nvlink.rx_data", "NVLINK_THROUGHPUT_DATA_RX", 10),
    *(NvmlField(f"nvlink.{signal}", f"NVLINK_COUNT_{name}", 10) for signal, name in _LINK_COUNTERS.items()),
    NvmlField("nvlink.plr_blocks", "NVLINK_PLR_XMIT_BLOCKS", 10),
    NvmlField("nvlink.plr_retries", "NVLINK_PLR_XMIT_RETRY_BLOCKS", 10),
)

# NVIDIA renumbered these when it added fields before them, and reverted that: (since driver, until driver, number).
# From nvml.h in nvidia-ml-py 12.570.172, 12.575.51 to 13.580.82, 13.580.126. Between the last two the numbers are
# not published, so these fields are not read with such a driver: a wrong number would return another field's value.
_MOVED_NUMBERS: Mapping[str, tuple[tuple[tuple[int, int], tuple[int, int], int], ...]] = {
    "SMOOTHING_LIFE": (((570, 0), (575, 0), 258), ((575, 0), (580, 83), 263), ((580, 126), (9999, 0), 258)),
    "SOFTWARE_THERMAL": (((575, 0), (580, 83), 251), ((580, 126), (9999, 0), 269)),
    "HARDWARE_THERMAL": (((575, 0), (580, 83), 252), ((580, 126), (9999, 0), 270)),
    "POWER_BRAKE": (((575, 0), (580, 83), 253), ((580, 126), (9999, 0), 271)),
}


def field_number(name: str, nvml: Any, driver: str) -> int | None:
    """Returns the number of a field in this driver; None if it is not known."""
    if name not in _MOVED_NUMBERS:
        found: int | None = getattr(nvml, f"NVML_FI_DEV_{name}", None)
        return found
    parts = re.match(r"(\d+)\.(\d+)", driver)
    version = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    return next((number for since, until, number in _MOVED_NUMBERS[name] if since <= version < until), None)


# The member of the union that holds the value, by NVML_VALUE_TYPE_*.
_DOUBLE, _UINT, _ULONG, _ULONGLONG, _LONGLONG, _INT, _USHORT = range(7)


def decode_fields(raw: NDArray[np.uint64], types: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
    """Decodes raw unions by their types and returns the values as f8 and as u8. Invalid values are missing in both.

    All bits set is NVML_VALUE_NOT_AVAILABLE. The driver does not clear the unused bytes of the union.
    """
    width = np.full(types.shape, MISSING, np.uint64)
    width[types == _USHORT] = 0xFFFF
    width[(types == _UINT) | (types == _INT)] = 0xFFFFFFFF
    cut = raw & width
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


def decode_bit_error_rate(packed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Decodes bit error rates: mantissa in bits 8-11, negative exponent of ten in bits 0-7 (NVML_NVLINK_BER_*)."""
    good = (packed >= 0) & (packed < 1 << 12)
    bits = np.where(good, packed, 0).astype(np.int64)
    return np.where(good, (bits >> 8) * 10.0 ** -(bits & 0xFF).astype(np.float64), np.nan)


# nvmlFieldValue_t of nvml.h: 40 bytes, the union of the value last.
FIELD_VALUE_LAYOUT = np.dtype(
    {
        "names": ["id", "scope", "time", "latency", "type", "code", "value"],
        "formats": ["<u4", "<u4", "<i8", "<i8", "<i4", "<i4", "<u8"],
    }
)
UNREAD_CODE = 999
"""NVML_ERROR_UNKNOWN, set in every entry before a call, so that entries that the driver skips are missing."""


def field_key(number: int, scope: int) -> str:
    """Returns the key of a field in RefusedCalls."""
    return f"field {number} of {scope}"


@dataclass(frozen=True, slots=True)
class FieldRequest:
    """One field of one GPU, and where its value is stored."""

    gpu: int
    number: int
    scope: int
    interval: int
    index: tuple[bool, int]
    scale: float = 1.0
    packed: bool = False

    @property
    def key(self) -> str:
        """Its key in RefusedCalls."""
        return field_key(self.number, self.scope)


@dataclass(frozen=True, slots=True)
class _ReadPlan:
    """The fields of one interval: per GPU the number of entries and their start, and the index of each value."""

    calls: tuple[tuple[int, Any, ctypes.c_int32, slice], ...]
    entries: NDArray[np.intp]
    gpus: NDArray[np.intp]
    counters: NDArray[np.intp]
    counter_indices: NDArray[np.intp]
    gauges: NDArray[np.intp]
    gauge_indices: NDArray[np.intp]
    scales: NDArray[np.float64]
    packed: NDArray[np.intp]


class FieldReader:
    """The array of all fields, one part per GPU, sorted by interval, so that each interval reads a prefix of a part."""

    def __init__(
        self,
        function: Callable[..., int],
        value_type: Any,
        wanted: Iterable[FieldRequest],
        never: Sequence[int],
        refusals: RefusedCalls,
    ) -> None:
        self._function, self._entry_type, self._unsupported, self._refusals = function, value_type, never, refusals
        self._requests = tuple(sorted(wanted, key=lambda w: (w.gpu, w.interval)))
        self.rebuild()

    def read_gpu(self, gpu: int, handle: Any, due: int) -> int | None:
        """Reads the fields of one GPU without decoding. Returns the NVML code; None if there is nothing to read."""
        span = self._plan_for(due).calls[gpu] if gpu < self._gpus else None
        if span is None or span[0] == 0:
            return None
        _, pointer, count, part = span
        self._code[part] = UNREAD_CODE
        code = self._function(handle, count, pointer)
        if code:
            self._code[part] = UNREAD_CODE
        elif self._code[part].any():
            self._ask_again(handle, part)
        return code

    def _ask_again(self, handle: Any, part: slice) -> None:
        """Asks in a second call for the fields that failed beside refused ones.

        On an H100 (driver 580.159.04) the counters of a link to a CPU, which it lacks, make eleven others fail.
        """
        refused = np.isin(self._code[part], self._unsupported)
        failed = part.start + np.flatnonzero((self._code[part] != 0) & ~refused)
        if not failed.size or not refused.any():
            return
        entries = self._entries[failed]
        array = (self._entry_type * failed.size).from_buffer(entries.view(np.uint8))
        if self._function(handle, ctypes.c_int32(failed.size), array) == 0:
            self._entries[failed] = entries

    def decode_into(self, due: int, requested: Iterable[int], values: GpuValues, latency: NDArray[np.float64]) -> None:
        """Decodes the fields of the GPUs `asked` and stores them in `values`."""
        beat = self._plan_for(due)
        if not beat.entries.size:
            return
        code = self._code[beat.entries]
        answered = np.zeros(self._gpus, np.bool_)
        answered[[gpu for gpu in requested if gpu < self._gpus]] = True
        good = (code == 0) & answered[beat.gpus]
        floats, counters = decode_fields(self._value[beat.entries], self._type[beat.entries])
        floats[beat.packed] = decode_bit_error_rate(floats[beat.packed])
        with np.errstate(all="ignore"):  # garbage overflows to infinity, which is outside every valid range
            floats *= beat.scales
        chosen = good[beat.gauges]
        values.gauges[beat.gauge_indices[chosen]] = floats[beat.gauges[chosen]]
        chosen = good[beat.counters]
        values.counters[beat.counter_indices[chosen]] = counters[beat.counters[chosen]]
        np.fmax.at(latency, beat.gpus[good], self._latency[beat.entries[good]] * 1e-6)
        self._record_outcomes(beat.entries[good], beat.entries[np.isin(code, self._unsupported) & answered[beat.gpus]])

    def _record_outcomes(self, reported: NDArray[np.intp], refused: NDArray[np.intp]) -> None:
        """Records which entries changed their outcome: answered for the first time, or refused."""
        for i in reported[~self._was_steady[reported]]:
            self._refusals.record_answer(self._active[i].gpu, self._active[i].key)
        self._was_steady[reported] = True
        for i in refused:
            wanted = self._active[i]
            self._refusals.record_refusal(wanted.gpu, wanted.key, f"field {wanted.number}")
        if refused.size:
            self.rebuild()

    def _plan_for(self, due: int) -> _ReadPlan:
        if due not in self._plans:
            self._plans[due] = self._make_plan(due)
        return self._plans[due]

    def rebuild(self) -> None:
        """Builds the array from all requests that are not refused."""
        refusals = self._refusals
        self._active = tuple(w for w in self._requests if not refusals.is_refused(w.gpu, w.key))
        self._was_steady = np.array([refusals.is_steady(w.gpu, w.key) for w in self._active], np.bool_)
        self._gpus = 1 + max((w.gpu for w in self._active), default=-1)
        self._array = (self._entry_type * max(len(self._active), 1))()
        view = np.frombuffer(self._array, FIELD_VALUE_LAYOUT)
        view["id"][: len(self._active)] = [w.number for w in self._active]
        view["scope"][: len(self._active)] = [w.scope for w in self._active]
        self._entries = view
        self._code, self._type, self._value, self._latency = (view[n] for n in ("code", "type", "value", "latency"))
        self._plans: dict[int, _ReadPlan] = {}

    def _make_plan(self, due: int) -> _ReadPlan:
        entries = [i for i, w in enumerate(self._active) if w.interval <= due]
        spans = []
        for gpu in range(self._gpus):
            mine = [i for i in entries if self._active[i].gpu == gpu]
            start = mine[0] if mine else 0
            pointer = ctypes.byref(self._array, start * FIELD_VALUE_LAYOUT.itemsize)
            spans.append((len(mine), pointer, ctypes.c_int32(len(mine)), slice(start, start + len(mine))))
        requested = [self._active[i] for i in entries]
        counters = [i for i, w in enumerate(requested) if w.index[0]]
        gauges = [i for i, w in enumerate(requested) if not w.index[0]]
        return _ReadPlan(
            tuple(spans),
            _index_array(entries),
            _index_array([w.gpu for w in requested]),
            _index_array(counters),
            _index_array([requested[i].index[1] for i in counters]),
            _index_array(gauges),
            _index_array([requested[i].index[1] for i in gauges]),
            np.array([w.scale for w in requested]),
            _index_array([i for i, w in enumerate(requested) if w.packed]),
        )


def _index_array(found: Sequence[int]) -> NDArray[np.intp]:
    return np.array(found, np.intp)
