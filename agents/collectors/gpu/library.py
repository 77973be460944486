"""The driver's library: its start and end, its functions by name, and which of its return codes mean what.

What a GPU is rather than how it does: names, numbers, versions and modes, for the inventory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
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


MODES = ("none", "passthrough", "vgpu", "host vgpu", "host vsga")
"""NVML_GPU_VIRTUALIZATION_MODE_*."""
HOST_MODES = ("non-sriov", "sriov")
"""NVML_HOST_VGPU_MODE_*."""

_TEXTS = (
    ("sku", "nvmlDeviceGetName"),
    ("serial", "nvmlDeviceGetSerial"),
    ("uuid", "nvmlDeviceGetUUID"),
    ("part_number", "nvmlDeviceGetBoardPartNumber"),
    ("vbios", "nvmlDeviceGetVbiosVersion"),
    ("gsp_firmware", "nvmlDeviceGetGspFirmwareVersion"),
    ("inforom", "nvmlDeviceGetInforomImageVersion"),
)


def text_of(found: bytes | str) -> str:
    """A text of the driver without what cannot be written or sent."""
    text = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
    return "".join(c for c in text if c.isprintable()).strip()


class Facts:
    """Asks the driver for attributes; what it does not tell is left out."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def of_driver(self) -> dict[str, Any]:
        driver = self._ask(self._nvml.nvmlSystemGetDriverVersion)
        return {} if driver is None else {"driver": text_of(driver)}

    def of_gpu(self, handle: Any) -> dict[str, Any]:
        found: dict[str, Any] = dict(self._texts(handle))
        mode = self._ask(self._nvml.nvmlDeviceGetMigMode, handle)
        if mode is not None:
            found["mig"] = bool(mode[0])
            if mode[1] != mode[0]:
                found["mig_pending"] = bool(mode[1])
        found |= _named("virtualization", MODES, self._ask(self._virtualization, handle))
        found |= _named("host_vgpu", HOST_MODES, self._ask(self._nvml.nvmlDeviceGetHostVgpuMode, handle))
        return found | self._platform(handle) | self._fabric(handle)

    def address(self, handle: Any) -> str | None:
        """PCI address as NVML writes it."""
        found: str | None = self._ask(lambda: text_of(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
        return found

    def _texts(self, handle: Any) -> Iterator[tuple[str, str]]:
        for key, name in _TEXTS:
            found = self._ask(getattr(self._nvml, name), handle)
            text = text_of(found) if isinstance(found, (str, bytes)) else ""
            if text:
                yield key, text

    def _virtualization(self, handle: Any) -> int:
        """Own call: the binding hands over eight bytes of which the driver writes four."""
        found = ctypes.c_uint()
        code = self._nvml._nvmlGetFunctionPointer("nvmlDeviceGetVirtualizationMode")(handle, ctypes.byref(found))
        self._nvml._nvmlCheckReturn(code)
        return found.value

    def _platform(self, handle: Any) -> dict[str, Any]:
        found = self._nvml.c_nvmlPlatformInfo_v2_t()
        if self._ask(self._nvml.nvmlDeviceGetPlatformInfo, handle, ctypes.byref(found)) is None:
            return {}
        kind = type(found)
        raw = bytes(found)  # char arrays of the binding end at the first zero, and a GUID has zeros
        numbers = {
            "slot": raw[kind.slotNumber.offset],
            "tray": raw[kind.trayIndex.offset],
            "host_id": raw[kind.hostId.offset],
            "peer_type": raw[kind.peerType.offset],
            "module_id": raw[kind.moduleId.offset],
        }
        guid = raw[kind.ibGuid.offset : kind.ibGuid.offset + kind.ibGuid.size]
        serial = text_of(raw[kind.chassisSerialNumber.offset :][: kind.chassisSerialNumber.size].partition(b"\0")[0])
        texts = {"ib_guid": guid.hex() if any(guid) else "", "chassis_serial": serial}
        return numbers | {key: text for key, text in texts.items() if text}

    def _fabric(self, handle: Any) -> dict[str, Any]:
        found = self._nvml.c_nvmlGpuFabricInfo_v2_t()
        if self._ask(self._nvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(found)) is None:
            return {}
        if found.state != self._nvml.NVML_GPU_FABRIC_STATE_COMPLETED:
            return {}
        uuid = bytes(found.clusterUuid).hex()
        whole = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
        return {"clique": found.cliqueId} | ({"cluster_uuid": whole} if any(found.clusterUuid) else {})

    def _ask(self, get: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None. A function may be missing in an old library, and a text may be no text."""
        try:
            return get(*arguments)
        except (self._nvml.NVMLError, UnicodeDecodeError):
            return None


def _named(key: str, names: tuple[str, ...], number: int | None) -> dict[str, str]:
    return {key: names[number]} if number is not None and number < len(names) else {}
