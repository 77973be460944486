"""The NVML library: start and end, functions by name, meaning of return codes, and the attributes of GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agents.collector import NoData

MAX_GPUS = 64
"""No machine has more; NVML_MAX_PHYSICAL_BRIDGE and similar limits of nvml.h go to 128. A larger count is garbage."""


class NvmlUnavailable(NoData):
    """There is no driver, or it does not start or respond. fix: what to do if there should be one."""

    def __init__(self, why: str, fix: str = "see `nvidia-smi` and `dmesg | grep NVRM`") -> None:
        super().__init__(why)
        self.fix = fix


class NvmlLibrary:
    """An initialised NVML. Raises NvmlUnavailable if there is no driver or it does not start."""

    def __init__(self) -> None:
        try:
            import pynvml  # imported here: not needed on a node without GPUs
        except ImportError:
            raise NvmlUnavailable("nvidia-ml-py is not installed", "pip install 'fleetpulse[agent]'") from None
        self.nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _unavailable(pynvml, error) from None
        self._open = True
        n = pynvml
        self.lost_codes = frozenset((n.NVML_ERROR_GPU_IS_LOST, n.NVML_ERROR_GPU_NOT_FOUND))
        self.driver_gone_codes = frozenset((n.NVML_ERROR_UNINITIALIZED, n.NVML_ERROR_DRIVER_NOT_LOADED))
        self.unsupported_codes = (
            n.NVML_ERROR_INVALID_ARGUMENT,
            n.NVML_ERROR_NOT_SUPPORTED,
            n.NVML_ERROR_FUNCTION_NOT_FOUND,
            n.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            n.NVML_ERROR_DEPRECATED,
        )
        """Codes of calls that this GPU and driver do not support."""

    def find_function(self, name: str) -> Callable[..., int] | None:
        """Returns a function of the library; None if the library is too old to have it."""
        try:
            found: Callable[..., int] = self.nvml._nvmlGetFunctionPointer(name)
        except self.nvml.NVMLError:
            return None
        return found

    def gpu_handles(self) -> list[Any]:
        """Returns a handle per GPU that the driver counts, in its order; None for a lost GPU."""
        try:
            count = self.nvml.nvmlDeviceGetCount()
        except self.nvml.NVMLError as error:
            raise NvmlUnavailable(f"the NVIDIA driver reports no number of GPUs: {error}") from None
        if count > MAX_GPUS:
            raise NvmlUnavailable(f"the NVIDIA driver reports {count} GPUs; expected at most {MAX_GPUS}")
        return [self._handle(index) for index in range(count)]

    def read_field(self, handle: Any, number: int) -> int | None:
        """Returns one field that is a small whole number, such as the number of links; None if it is not available."""
        ask = self.find_function("nvmlDeviceGetFieldValues")
        entry = (self.nvml.c_nvmlFieldValue_t * 1)()
        entry[0].fieldId = number
        if ask is None or ask(handle, ctypes.c_int32(1), entry) != 0 or entry[0].nvmlReturn != 0:
            return None
        return int(entry[0].value.uiVal)

    def driver_is_gone(self) -> bool:
        """Returns whether the driver itself, in a call without a GPU, reports that it is not there."""
        try:
            self.nvml.nvmlSystemGetDriverVersion()
        except self.nvml.NVMLError as error:
            return error.value in self.driver_gone_codes
        return False

    def close(self) -> None:
        """Shuts NVML down."""
        if self._open:
            self._open = False
            try:
                self.nvml.nvmlShutdown()
            except self.nvml.NVMLError:  # the driver disappeared; nothing is left to release
                return

    def _handle(self, index: int) -> Any:
        try:
            return self.nvml.nvmlDeviceGetHandleByIndex(index)
        except self.nvml.NVMLError:
            return None


def _unavailable(nvml: Any, error: Any) -> NvmlUnavailable:
    """Returns the reason why NVML does not start, with the fix."""
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return NvmlUnavailable("no NVIDIA driver", "install it, libnvidia-ml.so.1 included")
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        why = "no NVIDIA driver: the library is there, the kernel module is not loaded"
        return NvmlUnavailable(why, "`modprobe nvidia`, and see `dmesg | grep NVRM` if that fails")
    if error.value == nvml.NVML_ERROR_NO_PERMISSION:
        why = "NVIDIA driver: no permission: give this user read and write access to /dev/nvidiactl and /dev/nvidia*"
        return NvmlUnavailable(why, "if the driver was loaded after the agent's service: restart the service")
    why = f"the NVIDIA driver does not start: {error}"
    if error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return NvmlUnavailable(why, "library and kernel module have different versions: reboot, or reload the module")
    return NvmlUnavailable(why)


VIRTUALIZATION_MODES = ("none", "passthrough", "vgpu", "host vgpu", "host vsga")
"""NVML_GPU_VIRTUALIZATION_MODE_*."""
HOST_VGPU_MODES = ("non-sriov", "sriov")
"""NVML_HOST_VGPU_MODE_*."""

_TEXT_FUNCTIONS = (
    ("sku", "nvmlDeviceGetName"),
    ("serial", "nvmlDeviceGetSerial"),
    ("uuid", "nvmlDeviceGetUUID"),
    ("part_number", "nvmlDeviceGetBoardPartNumber"),
    ("vbios", "nvmlDeviceGetVbiosVersion"),
    ("gsp_firmware", "nvmlDeviceGetGspFirmwareVersion"),
    ("inforom", "nvmlDeviceGetInforomImageVersion"),
)


def printable_text(found: bytes | str) -> str:
    """Returns a text of the driver without characters that cannot be printed."""
    text = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
    return "".join(c for c in text if c.isprintable()).strip()


class GpuAttributes:
    """Reads attributes of GPUs from the driver: names, serial numbers, versions, modes.

    Unsupported ones are left out.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def driver_attributes(self) -> dict[str, Any]:
        """Returns the attributes of the driver."""
        driver = self._call(self._nvml.nvmlSystemGetDriverVersion)
        return {} if driver is None else {"driver": printable_text(driver)}

    def gpu_attributes(self, handle: Any) -> dict[str, Any]:
        """Returns the attributes of one GPU."""
        found: dict[str, Any] = dict(self._text_attributes(handle))
        mode = self._call(self._nvml.nvmlDeviceGetMigMode, handle)
        if mode is not None:
            found["mig"] = bool(mode[0])
            if mode[1] != mode[0]:
                found["mig_pending"] = bool(mode[1])
        found |= _named_value("virtualization", VIRTUALIZATION_MODES, self._call(self._virtualization, handle))
        found |= _named_value("host_vgpu", HOST_VGPU_MODES, self._call(self._nvml.nvmlDeviceGetHostVgpuMode, handle))
        return found | self._platform_attributes(handle) | self._fabric_attributes(handle)

    def pci_address(self, handle: Any) -> str | None:
        """Returns the PCI address of a GPU as NVML writes it."""
        found: str | None = self._call(lambda: printable_text(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
        return found

    def _text_attributes(self, handle: Any) -> Iterator[tuple[str, str]]:
        for key, name in _TEXT_FUNCTIONS:
            found = self._call(getattr(self._nvml, name), handle)
            text = printable_text(found) if isinstance(found, (str, bytes)) else ""
            if text:
                yield key, text

    def _virtualization(self, handle: Any) -> int:
        """Reads the virtualization mode directly: the binding passes eight bytes, of which the driver writes four."""
        found = ctypes.c_uint()
        code = self._nvml._nvmlGetFunctionPointer("nvmlDeviceGetVirtualizationMode")(handle, ctypes.byref(found))
        self._nvml._nvmlCheckReturn(code)
        return found.value

    def _platform_attributes(self, handle: Any) -> dict[str, Any]:
        found = self._nvml.c_nvmlPlatformInfo_v2_t()
        if self._call(self._nvml.nvmlDeviceGetPlatformInfo, handle, ctypes.byref(found)) is None:
            return {}
        kind = type(found)
        raw = bytes(found)  # char arrays of the binding end at the first zero, and a GUID contains zeros
        guid = raw[kind.ibGuid.offset : kind.ibGuid.offset + kind.ibGuid.size]
        serial = printable_text(
            raw[kind.chassisSerialNumber.offset :][: kind.chassisSerialNumber.size].partition(b"\0")[0]
        )
        texts = {"ib_guid": guid.hex() if any(guid) else "", "chassis_serial": serial}
        module = {"module_id": raw[kind.moduleId.offset]}
        if not any(texts.values()):  # outside of a known chassis the other numbers mean nothing; nvidia-smi omits them
            return module
        numbers = {
            "slot": raw[kind.slotNumber.offset],
            "tray": raw[kind.trayIndex.offset],
            "host_id": raw[kind.hostId.offset],
            "peer_type": raw[kind.peerType.offset],
        }
        return numbers | module | {key: text for key, text in texts.items() if text}

    def _fabric_attributes(self, handle: Any) -> dict[str, Any]:
        found = self._nvml.c_nvmlGpuFabricInfo_v2_t()
        if self._call(self._nvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(found)) is None:
            return {}
        if found.state != self._nvml.NVML_GPU_FABRIC_STATE_COMPLETED:
            return {}
        uuid = bytes(found.clusterUuid).hex()
        whole = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
        return {"clique": found.cliqueId} | ({"cluster_uuid": whole} if any(found.clusterUuid) else {})

    def _call(self, get: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of a call, or None. An old library may lack the function, and a text may not be valid
        text.
        """
        try:
            return get(*arguments)
        except (self._nvml.NVMLError, UnicodeDecodeError):
            return None


def platform_parents(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the NVLink clique and the chassis that the attributes of a GPU name.

    A clique is named as the Kubernetes label `nvidia.com/gpu.clique` names it: UUID of the NVLink domain, clique.
    """
    domain, clique = attributes.get("cluster_uuid"), attributes.get("clique")
    serial = str(attributes.get("chassis_serial") or "").strip()
    known = () if domain is None or clique is None else (f"clique:{domain}.{clique}",)
    return (*known, f"chassis:{serial}") if serial else known


def _named_value(key: str, names: tuple[str, ...], number: int | None) -> dict[str, str]:
    return {key: names[number]} if number is not None and number < len(names) else {}
