"""Signals of the class filesystem: one mounted file system. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("filesystem.mounted", "1", "state", "filesystem", "u1", "Whether it is mounted; it need not be unless configuration requires it", "/proc/self/mountinfo", "hw.status", (0, 1), states=("absent", "mounted"), normal=("mounted",), interval=30),
    Signal("filesystem.responds", "1", "state", "filesystem", "u1", "Whether it answers in time", "statvfs", "hw.status", (0, 2), states=("hangs", "answers", "fails"), normal=("answers",), interval=30),
    Signal("filesystem.latency", "s", "gauge", "filesystem", "f4", "How long it took to answer, or has not answered yet", "statvfs", "", (0, 1e9), harm="up", interval=30),
    Signal("filesystem.read_only", "1", "state", "filesystem", "u1", "Whether the kernel refuses to write to it, as after an error", "/proc/self/mountinfo, options of the file system", "hw.status", (0, 1), states=("writable", "read-only"), normal=("writable",), interval=30),
    Signal("filesystem.used", "By", "gauge", "filesystem", "f8", "Space in use", "statvfs", "system.filesystem.usage", (0, 1e18), interval=30),
    Signal("filesystem.available", "By", "gauge", "filesystem", "f8", "Space that programs without privilege can still use", "statvfs", "system.filesystem.usage", (0, 1e18), harm="down", interval=30),
    Signal("filesystem.total", "By", "gauge", "filesystem", "f8", "Size", "statvfs", "system.filesystem.limit", (0, 1e18), interval=30),
    Signal("filesystem.files_used", "{file}", "gauge", "filesystem", "f8", "Inodes in use", "statvfs", "", (0, 1e18), harm="up", interval=30),
    Signal("filesystem.files_total", "{file}", "gauge", "filesystem", "f8", "Inodes that there can be; missing where there is no such bound", "statvfs", "", (0, 1e18), interval=30),
)  # fmt: skip
