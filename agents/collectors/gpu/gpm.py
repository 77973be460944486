"""GPU performance monitoring (Hopper and newer): what a GPU did between two samples that are compared.

Not the profiling counters, which take one lock for the whole host and clash with a user's profiler.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from agents.collectors.gpu.refusals import Refusals
from agents.collectors.gpu.values import Values

SAMPLE_EVERY = 5
"""Seconds between two samples; the catalogue of signals gives 5 to 10."""
_PERCENT, _MEBI = 1e-2, float(1 << 20)
METRICS: dict[str, tuple[int, float]] = {
    # signal -> (NVML_GPM_METRIC_*, its unit in the signal's): percent, or MiB/s
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
ROUNDING = 0.01
"""How far above 1 a share may be told and still be 1; chosen: nvml.h gives 0 to 100 %, but busy and all cycles are not
counted at one moment (100.003 % is seen of a busy GPU). What is further off is garbage, which the range leaves out."""
_WHAT = "monitoring"
_LAYOUT = np.dtype([("id", "<u4"), ("code", "<i4"), ("value", "<f8"), ("names", "<u8", 3)])  # nvmlGpmMetric_t


class Gpm:
    """Two samples per GPU, the older and the newer, which change places at each look."""

    def __init__(self, nvml: Any, function: Any, refusals: Refusals) -> None:
        """function: finds a function of the library by name; None where it has none."""
        self._nvml, self._refusals = nvml, refusals
        names = ("SampleAlloc", "SampleFree", "SampleGet", "MetricsGet", "QueryDeviceSupport")
        self._alloc, self._free, self._get, self._compare, self._query = (function(f"nvmlGpm{n}") for n in names)
        self._there = None not in (self._alloc, self._free, self._get, self._compare, self._query)
        self._samples: dict[int, list[Any]] = {}
        self._taken: set[int] = set()
        self._asked = nvml.c_nvmlGpmMetricsGet_t()
        self._asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._asked.numMetrics = len(METRICS)
        view = np.frombuffer(self._asked, np.uint8)[nvml.c_nvmlGpmMetricsGet_t.metrics.offset :]
        self._view = view[: len(METRICS) * _LAYOUT.itemsize].view(_LAYOUT)
        self._view["id"] = [number for number, _ in METRICS.values()]
        self._scales = np.array([scale for _, scale in METRICS.values()])
        self._shares = self._scales == _PERCENT

    def read(self, gpu: int, handle: Any, values: Values) -> int:
        """Takes a sample and compares it with the one before, if there is one; returns NVML's code."""
        if not self._there or self._refusals.refused(gpu, _WHAT):
            return 0
        if gpu not in self._samples:
            code = self._begin(gpu, handle)
            if code or self._refusals.refused(gpu, _WHAT):
                return code
        older, newer = self._samples[gpu]
        code = int(self._get(handle, newer))
        if code:
            self._taken.discard(gpu)
            if code == self._nvml.NVML_ERROR_NOT_SUPPORTED:  # in MIG mode
                self._refusals.refuse(gpu, _WHAT, "nvmlGpmSampleGet")
            return code
        self._refusals.answer(gpu, _WHAT)
        self._samples[gpu] = [newer, older]
        if gpu not in self._taken:
            self._taken.add(gpu)
            return 0
        return self._store(gpu, older, newer, values)

    def drop(self, gpu: int) -> None:
        """The GPU is lost or came back: what was sampled before says nothing any more."""
        self._taken.discard(gpu)

    def close(self) -> None:
        for samples in self._samples.values():
            for sample in samples:
                self._free(sample)
        self._samples.clear()
        self._taken.clear()

    def _begin(self, gpu: int, handle: Any) -> int:
        support = self._nvml.c_nvmlGpmSupport_t()
        support.version = self._nvml.NVML_GPM_SUPPORT_VERSION
        code = int(self._query(handle, ctypes.byref(support)))
        if code == self._nvml.NVML_ERROR_NOT_SUPPORTED or (code == 0 and not support.isSupportedDevice):
            self._refusals.refuse(gpu, _WHAT, "nvmlGpmQueryDeviceSupport")
            return 0
        made: list[Any] = []
        while code == 0 and len(made) < 2:
            sample = self._nvml.c_nvmlGpmSample_t()
            code = int(self._alloc(ctypes.byref(sample)))
            if code == 0:
                made.append(sample)
        if code:
            for sample in made:
                self._free(sample)
            return code
        self._samples[gpu] = made
        return 0

    def _store(self, gpu: int, older: Any, newer: Any, values: Values) -> int:
        self._asked.sample1, self._asked.sample2 = older, newer
        self._view["code"] = self._nvml.NVML_ERROR_UNKNOWN
        code = int(self._compare(ctypes.byref(self._asked)))
        if code == 0:
            with np.errstate(all="ignore"):  # garbage overflows to infinity, which no signal's range holds
                found = self._view["value"] * self._scales
                found[self._shares & (found > 1) & (found <= 1 + ROUNDING)] = 1.0
            for signal, value, returned in zip(METRICS, found.tolist(), self._view["code"].tolist(), strict=True):
                if returned == 0:
                    values.put(values.place(signal, gpu), value)
        return code
