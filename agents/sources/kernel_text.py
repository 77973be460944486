"""Parsers of the kernel's text files about the server as a whole: text -> values by signal, nothing read.

Each raises one of BROKEN on a text of another shape; what a kernel does not tell has no entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

Values = dict[str, float | int]
BROKEN = (ValueError, IndexError, OverflowError)
_TAIL = re.compile(r"\nctxt (\d+)")


def load(text: str) -> Values:
    """/proc/loadavg."""
    words = text.split()
    return {"node.load1": float(words[0]), "node.load5": float(words[1])}


def processors(text: str, tick_ms: float) -> Values:
    """/proc/stat, whose times are in ticks of `tick_ms` (kernel Documentation/filesystems/proc, section 1.7)."""
    lines = text.partition("\nintr")[0].splitlines()
    ticks = [int(t) for t in lines[0].split()[1:9]] + [0] * 8
    user, nice, system, _, iowait, irq, softirq, steal = (int(t * tick_ms) for t in ticks[:8])  # user holds guests
    found: Values = {
        "node.cpu_count": len(lines) - 1,
        "node.cpu_busy_time": int(sum(ticks[:8]) * tick_ms) - int((ticks[3] + ticks[4]) * tick_ms),
        "node.cpu_idle_time": int((ticks[3] + ticks[4]) * tick_ms),
        "node.cpu_user_time": user + nice,
        "node.cpu_system_time": system,
        "node.cpu_iowait_time": iowait,
        "node.cpu_irq_time": irq + softirq,
        "node.cpu_steal_time": steal,
    }
    if switches := _TAIL.search(text):
        found["node.context_switches"] = int(switches[1])
    return found


_MEMORY = {
    # signal -> the lines of /proc/meminfo that it is the sum of; all of them must be there
    "node.memory_total": ("MemTotal",),
    "node.memory_available": ("MemAvailable",),
    "node.memory_cached": ("Cached", "Buffers"),
    "node.memory_dirty": ("Dirty", "Writeback"),
    "node.memory_kernel": ("SUnreclaim",),
    "node.memory_poisoned": ("HardwareCorrupted",),
}


def memory(text: str) -> Values:
    """/proc/meminfo: sizes in KiB; huge pages are counted in pages of `Hugepagesize`."""
    told = _lines(text)
    found: Values = {
        signal: 1024 * sum(told[line] for line in lines)
        for signal, lines in _MEMORY.items()
        if all(line in told for line in lines)
    }
    if "SwapTotal" in told and "SwapFree" in told:
        found["node.swap_used"] = (told["SwapTotal"] - told["SwapFree"]) * 1024
    if size := told.get("Hugepagesize", 0) * 1024:
        for signal, line in (("total", "HugePages_Total"), ("free", "HugePages_Free")):
            if line in told:
                found[f"node.hugepages_{signal}"] = told[line] * size
    return found


def numa_free(texts: Iterable[str]) -> Values:
    """The files /sys/devices/system/node/nodeN/meminfo; memory without processors, such as a GPU's, counts too."""
    free = [told["MemFree"] * 1024 for text in texts if "MemFree" in (told := _lines(text))]
    return {"node.numa_free_min": min(free)} if free else {}


def events(text: str) -> Values:
    """/proc/vmstat."""
    told = dict(line.split() for line in text.splitlines() if line.startswith(("numa_miss ", "oom_kill ")))
    names = {"node.numa_misses": "numa_miss", "node.oom_kills": "oom_kill"}
    return {signal: int(told[line]) for signal, line in names.items() if line in told}


def uptime(text: str) -> Values:
    """/proc/uptime."""
    return {"node.uptime": float(text.split()[0])}


def pressure(resource: str, text: str) -> Values:
    """/proc/pressure/RESOURCE: `total` is microseconds since boot (kernel Documentation/accounting/psi).

    Of the processors only `some` has a meaning for the whole system: never do all tasks wait for one.
    """
    found: Values = {}
    for line in text.splitlines():
        name = f"node.{resource}_pressure" + ("_full" if line.startswith("full ") else "")
        if "total=" in line and name != "node.cpu_pressure_full":
            found[name] = int(line.partition("total=")[2])
    return found


def _lines(text: str) -> Mapping[str, int]:
    """`[Node N] NAME: NUMBER [kB]` -> number by name."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if rest:
            found[name.rpartition(" ")[2]] = int(rest.split()[0])
    return found
