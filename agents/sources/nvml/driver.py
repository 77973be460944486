"""The driver's library: its start and end, its functions by name, and which of its return codes mean what."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from agents.collector import NoData

MOST_GPUS = 64
"""No machine has more; NVML_MAX_PHYSICAL_BRIDGE and the like of nvml.h go to 128. A larger count is garbage."""


class NotStarted(NoData):
    """There is no driver, or it does not start or answer. mend: what to do where there should be one."""

    def __init__(self, why: str, mend: str = "see `nvidia-smi` and `dmesg | grep NVRM`") -> None:
        super().__init__(why)
        self.mend = mend


class Driver:
    """An initialised NVML. Raises NotStarted where there is none or it does not start."""

    def __init__(self) -> None:
        try:
            import pynvml  # here, so that a node without GPUs does not pay for it
        except ImportError:
            raise NotStarted("nvidia-ml-py is not installed", "pip install 'fleetpulse[agent]'") from None
        self.nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _why(pynvml, error) from None
        self._open = True
        n = pynvml
        self.lost = frozenset((n.NVML_ERROR_GPU_IS_LOST, n.NVML_ERROR_GPU_NOT_FOUND))
        self.gone = frozenset((n.NVML_ERROR_UNINITIALIZED, n.NVML_ERROR_DRIVER_NOT_LOADED))
        self.never = (
            n.NVML_ERROR_INVALID_ARGUMENT,
            n.NVML_ERROR_NOT_SUPPORTED,
            n.NVML_ERROR_FUNCTION_NOT_FOUND,
            n.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            n.NVML_ERROR_DEPRECATED,
        )
        """What this GPU and driver will not tell, however often they are asked."""

    def function(self, name: str) -> Callable[..., int] | None:
        """A function of the library; None where this library is too old to have it."""
        try:
            found: Callable[..., int] = self.nvml._nvmlGetFunctionPointer(name)
        except self.nvml.NVMLError:
            return None
        return found

    def handles(self) -> list[Any]:
        """A handle per GPU that the driver counts, in its order; None for one that is lost."""
        try:
            count = self.nvml.nvmlDeviceGetCount()
        except self.nvml.NVMLError as error:
            raise NotStarted(f"the NVIDIA driver does not count its GPUs: {error}") from None
        if count > MOST_GPUS:
            raise NotStarted(f"the NVIDIA driver counts {count} GPUs; wanted at most {MOST_GPUS}")
        return [self._handle(index) for index in range(count)]

    def field(self, handle: Any, number: int) -> int | None:
        """One field that is a small whole number, such as how many links there are."""
        ask = self.function("nvmlDeviceGetFieldValues")
        entry = (self.nvml.c_nvmlFieldValue_t * 1)()
        entry[0].fieldId = number
        if ask is None or ask(handle, ctypes.c_int32(1), entry) != 0 or entry[0].nvmlReturn != 0:
            return None
        return int(entry[0].value.uiVal)

    def is_gone(self) -> bool:
        """Whether the driver itself, asked for no GPU, says that it is not there."""
        try:
            self.nvml.nvmlSystemGetDriverVersion()
        except self.nvml.NVMLError as error:
            return error.value in self.gone
        return False

    def close(self) -> None:
        if self._open:
            self._open = False
            try:
                self.nvml.nvmlShutdown()
            except self.nvml.NVMLError:  # the driver went away; there is nothing left to give back
                return

    def _handle(self, index: int) -> Any:
        try:
            return self.nvml.nvmlDeviceGetHandleByIndex(index)
        except self.nvml.NVMLError:
            return None


def _why(nvml: Any, error: Any) -> NotStarted:
    """What `nvidia-smi` would complain of, for a person."""
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return NotStarted("no NVIDIA driver", "install it, libnvidia-ml.so.1 included")
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        why = "no NVIDIA driver: the library is there, the kernel module is not loaded"
        return NotStarted(why, "`modprobe nvidia`, and see `dmesg | grep NVRM` if that fails")
    if error.value == nvml.NVML_ERROR_NO_PERMISSION:
        why = "the NVIDIA driver refuses us: give this user read and write access to /dev/nvidiactl and /dev/nvidia*"
        return NotStarted(why, "if the driver was loaded after the agent's service: restart the service")
    why = f"the NVIDIA driver does not start: {error}"
    if error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return NotStarted(why, "library and kernel module are of different versions: reboot, or load the module anew")
    return NotStarted(why)
