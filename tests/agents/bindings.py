"""Stand-ins for vendors' Python bindings, written as modules from recordings of calls and answers.

They have the names, enumerations, exceptions and behaviour of `amdsmi` (ROCm 6 and 7) and `pyhlml` (1.9 to 1.20), so
that the collectors import them in place of the real ones. A recording is JSON: the answer of each call for each device,
by argument if it has one; {"refused": CODE} is an exception.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

FIXTURES = Path(__file__).parent / "fixtures" / "accelerators"

_ANSWERS = """
import json, pathlib

RECORDING = json.loads(pathlib.Path(__file__).with_name("recording.json").read_text())
STARTED = []

def answer(found, *arguments):
    if isinstance(found, dict) and arguments:
        key = ", ".join(str(getattr(a, "name", a)) for a in arguments)
        found = found.get(key, {"refused": 2}) if "refused" not in found else found
    if isinstance(found, dict) and set(found) == {"refused"}:
        raise Refused(found["refused"])
    return found
"""

_AMD = (
    """
import enum

class AmdSmiException(Exception):
    pass

class AmdSmiLibraryException(AmdSmiException):
    pass

Refused = AmdSmiLibraryException
AmdSmiTemperatureType = enum.IntEnum("AmdSmiTemperatureType", ["EDGE", "HOTSPOT", "VRAM"], start=0)
AmdSmiTemperatureMetric = enum.IntEnum("AmdSmiTemperatureMetric", ["CURRENT", "MAX"], start=0)
AmdSmiClkType = enum.IntEnum("AmdSmiClkType", ["SYS", "GFX", "MEM"], start=0)
AmdSmiGpuBlock = enum.IntEnum("AmdSmiGpuBlock", {"UMC": 1, "SDMA": 2, "GFX": 4, "XGMI_WAFL": 128})
"""
    + _ANSWERS
    + """
class Handle:
    def __init__(self, calls):
        self.calls = calls

def amdsmi_init(flag=2):
    if "amdsmi_init" in RECORDING:
        answer(RECORDING["amdsmi_init"])
    STARTED.append(flag)

def amdsmi_shut_down():
    STARTED.pop()

def amdsmi_get_processor_handles():
    return [Handle(calls) for calls in RECORDING["devices"]]

def __getattr__(name):
    if not any(name in calls for calls in RECORDING["devices"]):
        raise AttributeError(name)
    return lambda handle, *arguments: answer(handle.calls.get(name, {"refused": 2}), *arguments[:1])
"""
)

_GAUDI = (
    """
import ctypes, types

class HLMLError(Exception):
    pass

Refused = HLMLError
_DEVICE = ctypes.c_void_p()  # one object for all devices, as in the real binding
"""
    + _ANSWERS
    + """
def hlmlInit():
    if "hlmlInit" in RECORDING:
        answer(RECORDING["hlmlInit"])
    STARTED.append(1)

def hlmlShutdown():
    STARTED.pop()

def hlmlDeviceGetCount():
    return len(RECORDING["devices"])

def hlmlDeviceGetHandleByIndex(index):
    _DEVICE.value = 0x1000 + index
    return _DEVICE

def hlmlGetDriverVersion():
    return RECORDING["hlmlGetDriverVersion"].encode()

def _shaped(name, found):
    if name in ("hlmlDeviceGetPCIInfo", "hlmlDeviceGetMemoryInfo"):
        return types.SimpleNamespace(**{k: v.encode() if isinstance(v, str) else v for k, v in found.items()})
    if name == "hlmlDeviceGetMacAddrInfo":
        return tuple(tuple(mask) for mask in found)
    return found.encode() if isinstance(found, str) else found

def __getattr__(name):
    if not any(name in calls for calls in RECORDING["devices"]):
        raise AttributeError(name)
    def call(handle, *arguments):
        found = RECORDING["devices"][handle.value - 0x1000].get(name, {"refused": 3})
        return _shaped(name, answer(found, *arguments))
    return call
"""
)
_SOURCES = {"amdsmi": _AMD, "pyhlml": _GAUDI}


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / name).read_text())
    return found


def install(module: str, recording: dict[str, Any], folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Makes `import MODULE` find the stand-in; returns its folder, in which the recording can be changed."""
    place = folder / "site" / module
    place.mkdir(parents=True, exist_ok=True)
    (place / "__init__.py").write_text(_SOURCES[module])
    (place / "recording.json").write_text(json.dumps(recording))
    patch.syspath_prepend(str(folder / "site"))
    patch.delitem(sys.modules, module, raising=False)
    return place


def pci(folder: Path, *devices: tuple[str, str, str]) -> Path:
    """Writes a PCI bus with devices (vendor, class, device id), from 0000:10:00.0 on."""
    root = folder / "pci"
    for number, (vendor, kind, device) in enumerate(devices):
        place = root / f"0000:{0x10 + number:02x}:00.0"
        place.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("device", device)):
            (place / name).write_text(f"{text}\n")
    root.mkdir(exist_ok=True)
    return root
