"""Signals of the class disk: one disk. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("disk.read", "By", "counter", "disk", "u8", "Bytes read since boot", "/proc/diskstats", "system.disk.io", interval=10),
    Signal("disk.written", "By", "counter", "disk", "u8", "Bytes written since boot", "/proc/diskstats", "system.disk.io", interval=10),
    Signal("disk.reads", "{operation}", "counter", "disk", "u8", "Reads completed since boot", "/proc/diskstats", "system.disk.operations", interval=10),
    Signal("disk.writes", "{operation}", "counter", "disk", "u8", "Writes completed since boot", "/proc/diskstats", "system.disk.operations", interval=10),
    Signal("disk.read_time", "ms", "counter", "disk", "u8", "Time that reads took, added up", "/proc/diskstats", "system.disk.operation_time", harm="up", interval=10),
    Signal("disk.write_time", "ms", "counter", "disk", "u8", "Time that writes took, added up", "/proc/diskstats", "system.disk.operation_time", harm="up", interval=10),
    Signal("disk.io_time", "ms", "counter", "disk", "u8", "Time in which at least one request was under way", "/proc/diskstats", "system.disk.io_time", harm="up", interval=10),
    Signal("disk.in_flight", "{operation}", "gauge", "disk", "u4", "Requests under way at the look", "/proc/diskstats", "", harm="up", interval=10),
    Signal("disk.state", "1", "state", "disk", "u1", "State of the NVMe controller", "/sys/class/nvme/nvmeN/state", "hw.status", (0, 6), states=("new", "live", "resetting", "connecting", "deleting", "dead", "other"), normal=("live",), interval=30),
    Signal("disk.temperature", "Cel", "gauge", "disk", "f4", "Composite temperature", "NVMe log page 02h, else hwmon", "hw.temperature", (-100, 200), harm="up", interval=600),
    Signal("disk.critical_warning", "1", "gauge", "disk", "u1", "Bit mask of warnings: 0x1 spare low, 0x2 temperature, 0x4 unreliable, 0x8 read-only, 0x10 backup of volatile memory failed, 0x20 persistent memory", "NVMe log page 02h, byte 0", "hw.physical_disk.smart", (0, 63), harm="up", interval=600),
    Signal("disk.spare", "1", "gauge", "disk", "f4", "Spare capacity left, as a share", "NVMe log page 02h, byte 3", "hw.physical_disk.smart", (0, 1), harm="down", interval=600),
    Signal("disk.spare_threshold", "1", "gauge", "disk", "f4", "Share of spare capacity below which the disk warns", "NVMe log page 02h, byte 4", "", (0, 1), interval=600),
    Signal("disk.endurance_used", "1", "gauge", "disk", "f4", "Share of the rated life that is used up; may pass 1", "NVMe log page 02h, byte 5", "hw.physical_disk.endurance_utilization", (0, 2.55), harm="up", interval=600),
    Signal("disk.media_errors", "{error}", "counter", "disk", "u8", "Reads and writes whose data could not be recovered", "NVMe log page 02h, bytes 160-175", "hw.errors", harm="up", interval=600),
    Signal("disk.error_log_entries", "{entry}", "counter", "disk", "u8", "Entries of the error log over the disk's life", "NVMe log page 02h, bytes 176-191", "hw.physical_disk.smart", harm="up", interval=600),
    Signal("disk.unsafe_shutdowns", "1", "counter", "disk", "u8", "Losses of power without notice over the disk's life", "NVMe log page 02h, bytes 144-159", "hw.physical_disk.smart", harm="up", interval=600),
    Signal("disk.power_on_time", "h", "counter", "disk", "u8", "Hours under power over the disk's life", "NVMe log page 02h, bytes 128-143", "hw.physical_disk.smart", interval=600),
    Signal("disk.lifetime_read", "{unit}", "counter", "disk", "u8", "Data read over the disk's life, in units of 512,000 bytes", "NVMe log page 02h, bytes 32-47", "hw.physical_disk.smart", interval=600),
    Signal("disk.lifetime_written", "{unit}", "counter", "disk", "u8", "Data written over the disk's life, in units of 512,000 bytes", "NVMe log page 02h, bytes 48-63", "hw.physical_disk.smart", interval=600),
    Signal("disk.hot_time", "min", "counter", "disk", "u4", "Time at or above the warning temperature over the disk's life", "NVMe log page 02h, bytes 192-195", "hw.physical_disk.smart", harm="up", interval=600),
    Signal("disk.throttled_time", "s", "counter", "disk", "u8", "Time in which the disk slowed down because it was hot, over its life", "NVMe log page 02h, bytes 224-231", "hw.physical_disk.smart", harm="up", interval=600),
)  # fmt: skip
