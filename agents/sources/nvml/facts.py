"""What a GPU is rather than how it does: names, numbers, versions and modes, for the inventory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

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
