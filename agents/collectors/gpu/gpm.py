"""GPU performance monitoring (Hopper and newer): activity between two samples.

Not the profiling counters, which take a host-wide lock and conflict with a user's profiler.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from agents.collectors.gpu.refusals import RefusedCalls
from agents.collectors.gpu.values import GpuValues

SAMPLE_INTERVAL = 5
"""Seconds between two samples. The signal catalogue allows 5 to 10."""
_PERCENT, _MEBI = 1e-2, float(1 << 20)
METRICS: dict[str, tuple[int, float]] = {
    # signal -> (NVML_GPM_METRIC_*, factor to the signal's unit): percent, or MiB/s
    "gpu.sm_active": (2, _PERCENT),
    "gpu.sm_occupancy": (3, _PERCENT),
    "gpu.tensor_active": (5, _PERCENT),
    "gpu.dram_active": (10, _PERCENT),
    "gpu.fp64_active": (11, _PERCENT),
    "gpu.fp32_active": (12, _PERCENT),
    "gpu.fp16_active": (13, _PERCENT),
    "gpu.pcie_tx_rate": (20, _MEBI),
    "gpu.pcie_rx_rate": (21, _MEBI),
    "gpu.nvlink_rx_rate": (60, _MEBI),
    "gpu.nvlink_tx_rate": (61, _MEBI),
}
RATIO_TOLERANCE = 0.01
"""How far above 1 a ratio may be and still count as 1. Chosen: nvml.h specifies 0 to 100 %, but busy cycles and all
cycles are not counted at the same moment (100.003 % was seen). Larger values are garbage and are dropped by the
valid range."""
_REFUSAL_KEY = "monitoring"
_LAYOUT = np.dtype([("id", "<u4"), ("code", "<i4"), ("value", "<f8"), ("names", "<u8", 3)])  # nvmlGpmMetric_t


class GpmSampler:
    """Two samples per GPU, an older and a newer one, which swap at each read."""

    def __init__(self, nvml: Any, function: Any, refusals: RefusedCalls) -> None:
        """find_function: returns a function of the library by name, None if it has none."""
        self._nvml, self._refusals = nvml, refusals
        names = ("SampleAlloc", "SampleFree", "SampleGet", "MetricsGet", "QueryDeviceSupport")
        self._sample_alloc, self._sample_free, self._sample_get, self._metrics_get, self._query_support = (
            function(f"nvmlGpm{n}") for n in names
        )
        self._available = None not in (
            self._sample_alloc,
            self._sample_free,
            self._sample_get,
            self._metrics_get,
            self._query_support,
        )
        self._samples: dict[int, list[Any]] = {}
        self._has_baseline: set[int] = set()
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(METRICS)
        view = np.frombuffer(self._request, np.uint8)[nvml.c_nvmlGpmMetricsGet_t.metrics.offset :]
        self._view = view[: len(METRICS) * _LAYOUT.itemsize].view(_LAYOUT)
        self._view["id"] = [number for number, _ in METRICS.values()]
        self._scales = np.array([scale for _, scale in METRICS.values()])
        self._is_ratio = self._scales == _PERCENT

    def read(self, gpu: int, handle: Any, values: GpuValues) -> int:
        """Takes a sample and compares it with the previous one, if any. Returns the NVML code."""
        if not self._available or self._refusals.is_refused(gpu, _REFUSAL_KEY):
            return 0
        if gpu not in self._samples:
            code = self._allocate_samples(gpu, handle)
            if code or self._refusals.is_refused(gpu, _REFUSAL_KEY):
                return code
        older, newer = self._samples[gpu]
        code = int(self._sample_get(handle, newer))
        if code:
            self._has_baseline.discard(gpu)
            if code == self._nvml.NVML_ERROR_NOT_SUPPORTED:  # in MIG mode
                self._refusals.record_refusal(gpu, _REFUSAL_KEY, "nvmlGpmSampleGet")
            return code
        self._refusals.record_answer(gpu, _REFUSAL_KEY)
        self._samples[gpu] = [newer, older]
        if gpu not in self._has_baseline:
            self._has_baseline.add(gpu)
            return 0
        return self._compare_samples(gpu, older, newer, values)

    def discard_samples(self, gpu: int) -> None:
        """Discards the previous sample of a GPU that was lost or came back."""
        self._has_baseline.discard(gpu)

    def close(self) -> None:
        """Frees all samples."""
        for samples in self._samples.values():
            for sample in samples:
                self._sample_free(sample)
        self._samples.clear()
        self._has_baseline.clear()

    def _allocate_samples(self, gpu: int, handle: Any) -> int:
        support = self._nvml.c_nvmlGpmSupport_t()
        support.version = self._nvml.NVML_GPM_SUPPORT_VERSION
        code = int(self._query_support(handle, ctypes.byref(support)))
        if code == self._nvml.NVML_ERROR_NOT_SUPPORTED or (code == 0 and not support.isSupportedDevice):
            self._refusals.record_refusal(gpu, _REFUSAL_KEY, "nvmlGpmQueryDeviceSupport")
            return 0
        made: list[Any] = []
        while code == 0 and len(made) < 2:
            sample = self._nvml.c_nvmlGpmSample_t()
            code = int(self._sample_alloc(ctypes.byref(sample)))
            if code == 0:
                made.append(sample)
        if code:
            for sample in made:
                self._sample_free(sample)
            return code
        self._samples[gpu] = made
        return 0

    def _compare_samples(self, gpu: int, older: Any, newer: Any, values: GpuValues) -> int:
        self._request.sample1, self._request.sample2 = older, newer
        self._view["code"] = self._nvml.NVML_ERROR_UNKNOWN
        code = int(self._metrics_get(ctypes.byref(self._request)))
        if code == 0:
            with np.errstate(all="ignore"):  # garbage overflows to infinity, which no signal's range holds
                found = self._view["value"] * self._scales
                found[self._is_ratio & (found > 1) & (found <= 1 + RATIO_TOLERANCE)] = 1.0
            for signal, value, returned in zip(METRICS, found.tolist(), self._view["code"].tolist(), strict=True):
                if returned == 0:
                    values.set_value(values.index_of(signal, gpu), value)
        return code
