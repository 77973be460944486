"""Signals of a server, of its monitoring and of training ranks. One line per signal.

Server and parts: node, sensor, dimm, disk, filesystem, service, bmc, canary. Monitoring: agent, collector, exporter (a
scraped endpoint), custom (a series without a mapping). Training: rank, one member of a job; its durations are means if
there were several steps between two readings, and without a step the last values are repeated.
"""

from __future__ import annotations

from pipeline.model.signals.signal import Signal

NODE_SIGNALS: tuple[Signal, ...] = (
    Signal("node.load1", "1", "gauge", "node", "f4", "Runnable tasks, 1-minute mean", "/proc/loadavg", "", (0, 1e6)),
    Signal("node.load5", "1", "gauge", "node", "f4", "Runnable tasks, 5-minute mean", "/proc/loadavg", "", (0, 1e6)),
    Signal("node.cpu_count", "{cpu}", "gauge", "node", "u2", "Logical processors online", "/proc/stat", "system.cpu.logical.count"),
    Signal("node.cpu_busy_time", "ms", "counter", "node", "u8", "Processor time spent in user, system, interrupt and stolen work, all processors", "/proc/stat", "system.cpu.time"),
    Signal("node.cpu_idle_time", "ms", "counter", "node", "u8", "Processor time spent idle or waiting for I/O, all processors", "/proc/stat", "system.cpu.time"),
    Signal("node.cpu_user_time", "ms", "counter", "node", "u8", "Processor time spent in programs, niced ones too, all processors", "/proc/stat", "system.cpu.time"),
    Signal("node.cpu_system_time", "ms", "counter", "node", "u8", "Processor time spent in the kernel, all processors", "/proc/stat", "system.cpu.time", harm="up"),
    Signal("node.cpu_iowait_time", "ms", "counter", "node", "u8", "Processor time spent idle while a task waited for I/O, all processors", "/proc/stat", "system.cpu.time", harm="up"),
    Signal("node.cpu_irq_time", "ms", "counter", "node", "u8", "Processor time spent in interrupts, hard and soft, all processors", "/proc/stat", "system.cpu.time", harm="up"),
    Signal("node.cpu_steal_time", "ms", "counter", "node", "u8", "Processor time that the hypervisor gave to other guests, all processors", "/proc/stat", "system.cpu.time", harm="up"),
    Signal("node.context_switches", "{switch}", "counter", "node", "u8", "Context switches, all processors", "/proc/stat", ""),
    Signal("node.cpu_frequency_mean", "Hz", "gauge", "node", "f4", "Mean clock of the processors", "/sys/devices/system/cpu/cpufreq/policyN/scaling_cur_freq", "system.cpu.frequency", (0, 1e11), harm="down", interval=10),
    Signal("node.cpu_frequency_min", "Hz", "gauge", "node", "f4", "Clock of the slowest processor", "/sys/devices/system/cpu/cpufreq/policyN/scaling_cur_freq", "system.cpu.frequency", (0, 1e11), harm="down", interval=10),
    Signal("node.cpu_throttles", "1", "counter", "node", "u8", "Times that a processor package slowed down because it was hot", "/sys/devices/system/cpu/cpuN/thermal_throttle/package_throttle_count", "", harm="up", interval=10),
    Signal("node.memory_total", "By", "gauge", "node", "f8", "Memory fitted", "/proc/meminfo", "system.memory.limit", (0, 1e15), interval=10),
    Signal("node.memory_available", "By", "gauge", "node", "f8", "Memory available without swapping", "/proc/meminfo", "system.memory.linux.available", (0, 1e15), harm="down", interval=10),
    Signal("node.memory_cached", "By", "gauge", "node", "f8", "Page cache, which can be dropped", "/proc/meminfo: Cached + Buffers", "system.memory.usage", (0, 1e15), interval=10),
    Signal("node.memory_dirty", "By", "gauge", "node", "f8", "Memory that waits to be written to disks", "/proc/meminfo: Dirty + Writeback", "", (0, 1e15), harm="up", interval=10),
    Signal("node.memory_kernel", "By", "gauge", "node", "f8", "Memory of the kernel that cannot be dropped", "/proc/meminfo: SUnreclaim", "", (0, 1e15), harm="up", interval=10),
    Signal("node.memory_poisoned", "By", "gauge", "node", "f8", "Memory taken out of use after uncorrected errors", "/proc/meminfo: HardwareCorrupted", "", (0, 1e15), harm="up", interval=10),
    Signal("node.memory_corrected", "{error}", "counter", "node", "u8", "Corrected memory errors of all memory controllers since boot", "/sys/devices/system/edac/mc/mcN/ce_count", "hw.errors", harm="up", interval=30),
    Signal("node.memory_uncorrected", "{error}", "counter", "node", "u8", "Uncorrected memory errors of all memory controllers since boot", "/sys/devices/system/edac/mc/mcN/ue_count", "hw.errors", harm="up", interval=30),
    Signal("node.hugepages_total", "By", "gauge", "node", "f8", "Memory set aside for huge pages of the default size", "/proc/meminfo: HugePages_Total", "", (0, 1e15), interval=10),
    Signal("node.hugepages_free", "By", "gauge", "node", "f8", "Huge pages that are not in use", "/proc/meminfo: HugePages_Free", "", (0, 1e15), interval=10),
    Signal("node.swap_used", "By", "gauge", "node", "f8", "Swap in use", "/proc/meminfo", "system.paging.usage", (0, 1e15), harm="up", interval=10),
    Signal("node.numa_free_min", "By", "gauge", "node", "f8", "Free memory of the NUMA node that has least of it", "/sys/devices/system/node/nodeN/meminfo", "", (0, 1e15), harm="down", interval=10),
    Signal("node.numa_misses", "{page}", "counter", "node", "u8", "Pages allocated on another NUMA node than intended", "/proc/vmstat: numa_miss", "", harm="up", interval=10),
    Signal("node.oom_kills", "{process}", "counter", "node", "u8", "Processes killed by the kernel because memory was exhausted", "/proc/vmstat: oom_kill", "", harm="up", interval=10),
    Signal("node.cpu_pressure", "us", "counter", "node", "u8", "Time in which some task waited for a processor", "/proc/pressure/cpu", "", harm="up"),
    Signal("node.memory_pressure", "us", "counter", "node", "u8", "Time in which some task waited for memory", "/proc/pressure/memory", "", harm="up"),
    Signal("node.memory_pressure_full", "us", "counter", "node", "u8", "Time in which all tasks waited for memory", "/proc/pressure/memory", "", harm="up"),
    Signal("node.io_pressure", "us", "counter", "node", "u8", "Time in which some task waited for I/O", "/proc/pressure/io", "", harm="up"),
    Signal("node.io_pressure_full", "us", "counter", "node", "u8", "Time in which all tasks waited for I/O", "/proc/pressure/io", "", harm="up"),
    Signal("node.uptime", "s", "gauge", "node", "f8", "Time since the kernel started", "/proc/uptime", "system.uptime", (0, 1e10)),
    Signal("node.kernel_tainted", "1", "gauge", "node", "u4", "Kernel taint flags: 0x10 machine check, 0x80 oops, 0x200 warning, 0x4000 soft lockup", "/proc/sys/kernel/tainted", "", interval=60),
    Signal("node.disk_used", "By", "gauge", "node", "f8", "Space in use on the root file system", "statvfs(/)", "system.filesystem.usage", (0, 1e18), interval=30),
    Signal("node.disk_total", "By", "gauge", "node", "f8", "Size of the root file system", "statvfs(/)", "system.filesystem.limit", (0, 1e18), interval=30),
    Signal("node.disk_read", "By", "counter", "node", "u8", "Bytes read from all whole disks", "/proc/diskstats", "system.disk.io", interval=10),
    Signal("node.disk_written", "By", "counter", "node", "u8", "Bytes written to all whole disks", "/proc/diskstats", "system.disk.io", interval=10),
    Signal("node.tasks_blocked", "{task}", "gauge", "node", "u4", "Processes in uninterruptible sleep (state D) at the time of the reading", "/proc/PID/stat", "system.process.count", harm="up", interval=30),
    Signal("node.tasks_blocked_gpu", "{task}", "gauge", "node", "u4", "Blocked processes of GPU driver and training: names that match [collector.tasks] gpu", "/proc/PID/stat", "system.process.count", harm="up", interval=30),
    Signal("node.tasks_blocked_longest", "s", "gauge", "node", "f4", "Longest time that a process was in state D in every reading without using a processor", "/proc/PID/stat", "", (0, 1e10), harm="up", interval=30),
    Signal("node.training_refused", "{datagram}", "counter", "node", "u8", "Datagrams to the socket of training steps that were refused: damaged, of another user's rank, or too many", "training", interval=60),
    Signal("node.clock_offset", "s", "gauge", "node", "f8", "Remaining correction of the clock, as the NTP daemon last measured", "chronyd's tracking, else adjtimex", "", (-1e9, 1e9), interval=60),
    Signal("node.clock_error_max", "s", "gauge", "node", "f8", "Maximum error of the clock; grows while it is not synchronized", "adjtimex: maxerror", "", (0, 1e9), harm="up", interval=60),
    Signal("node.clock_synchronized", "1", "state", "node", "u1", "Whether the clock is synchronized, as the kernel reports it", "adjtimex: STA_UNSYNC", "", (0, 1), states=("not synchronized", "synchronized"), normal=("synchronized",), interval=60),
    Signal("node.clock_frequency", "ppm", "gauge", "node", "f4", "Frequency correction of the clock", "adjtimex: freq", "", (-1000, 1000), interval=60),
    Signal("node.clock_stratum", "1", "gauge", "node", "u1", "Steps from a reference clock; 0 none yet", "chronyd's tracking", "", (0, 16), harm="up", interval=60),
    Signal("node.aer_correctable", "{error}", "counter", "node", "u8", "Corrected PCIe errors of all devices since each was discovered", "/sys/bus/pci/devices/ADDRESS/aer_dev_correctable", "hw.errors", harm="up", interval=30),
    Signal("node.aer_nonfatal", "{error}", "counter", "node", "u8", "Uncorrected PCIe errors that left the link usable, all devices", "/sys/bus/pci/devices/ADDRESS/aer_dev_nonfatal", "hw.errors", harm="up", interval=30),
    Signal("node.aer_fatal", "{error}", "counter", "node", "u8", "Uncorrected PCIe errors that lost the link, all devices", "/sys/bus/pci/devices/ADDRESS/aer_dev_fatal", "hw.errors", harm="up", interval=30),
    Signal("node.gpu_pci", "{gpu}", "gauge", "node", "u2", "GPUs on the PCI bus", "/sys/bus/pci/devices/ADDRESS/{vendor,class}", "hw.status", (0, 1024), harm="down", interval=30),
    Signal("node.gpu_driver", "{gpu}", "gauge", "node", "u2", "GPUs bound to a driver", "/sys/bus/pci/devices/ADDRESS/driver", "hw.status", (0, 1024), harm="down", interval=30),
    Signal("node.gpu_expected", "{gpu}", "gauge", "node", "u2", "Expected number of GPUs: as configured, else the most seen since the agent started", "[collector.pci] gpus_expected", "", (0, 1024), interval=30),
    Signal("node.power", "W", "gauge", "node", "f4", "Power drawn by the whole server, measured by its BMC", "IPMI DCMI Get Power Reading", "hw.host.power", (0, 1e6), interval=60),
    Signal("node.chassis_faults", "1", "state", "node", "u2", "Bit mask of the chassis status, from the BMC: 0x1 power overload, 0x2 interlock, 0x4 power fault, 0x8 power control fault, 0x10 opened, 0x20 drive fault, 0x40 cooling fault", "IPMI Get Chassis Status", "hw.status", harm="up", interval=60),
)  # fmt: skip


SENSOR_SIGNALS: tuple[Signal, ...] = (
    Signal("sensor.temperature", "Cel", "gauge", "sensor", "f4", "Temperature", "hwmon tempN_input; IPMI sensor", "hw.temperature", (-100, 500), harm="up", interval=10),
    Signal("sensor.voltage", "V", "gauge", "sensor", "f4", "Voltage", "hwmon inN_input; IPMI sensor", "hw.voltage", (-1000, 100_000), interval=10),
    Signal("sensor.current", "A", "gauge", "sensor", "f4", "Current", "hwmon currN_input; IPMI sensor", "", (-1e5, 1e5), interval=10),
    Signal("sensor.power", "W", "gauge", "sensor", "f4", "Power", "hwmon powerN_input; IPMI sensor", "hw.power", (0, 1e6), interval=10),
    Signal("sensor.fan_speed", "rpm", "gauge", "sensor", "f4", "Speed of a fan", "hwmon fanN_input; IPMI sensor", "hw.fan.speed", (0, 100_000), harm="down", interval=10),
    Signal("sensor.ratio", "1", "gauge", "sensor", "f4", "A share of the whole: drive of a fan, load of a supply, relative humidity", "hwmon humidityN_input; IPMI sensor in percent", "", (0, 10), interval=10),
    Signal("sensor.energy", "uJ", "counter", "sensor", "u8", "Energy used; starts again at 0 after the sensor's attribute wraps_at", "powercap energy_uj; hwmon energyN_input", "hw.energy", interval=10, wraps=True),
    Signal("sensor.alarm", "1", "state", "sensor", "u1", "Alarm of the chip or BMC about its limits", "hwmon *_alarm, *_fault; IPMI threshold comparison", "hw.status", (0, 3), ("none", "alarm", "critical", "fault"), ("none",), "up", interval=10),
    Signal("sensor.status", "1", "state", "sensor", "u2", "Bit mask of the states that a discrete sensor reports, by its attribute type; of a power_supply: 0x1 present, 0x2 failure, 0x4 failure predicted, 0x8 input lost, 0x10 input lost or out of range, 0x20 input out of range, 0x40 configuration error", "IPMI Get Sensor Reading", "hw.status", interval=60),
)  # fmt: skip


DIMM_SIGNALS: tuple[Signal, ...] = (
    Signal("dimm.corrected", "{error}", "counter", "dimm", "u8", "Corrected memory errors since boot", "/sys/devices/system/edac/mc/mcN/dimmN/dimm_ce_count", "hw.errors", harm="up", interval=30),
    Signal("dimm.uncorrected", "{error}", "counter", "dimm", "u8", "Uncorrected memory errors since boot", "/sys/devices/system/edac/mc/mcN/dimmN/dimm_ue_count", "hw.errors", harm="up", interval=30),
)  # fmt: skip


DISK_SIGNALS: tuple[Signal, ...] = (
    Signal("disk.read", "By", "counter", "disk", "u8", "Bytes read since boot", "/proc/diskstats", "system.disk.io", interval=10),
    Signal("disk.written", "By", "counter", "disk", "u8", "Bytes written since boot", "/proc/diskstats", "system.disk.io", interval=10),
    Signal("disk.reads", "{operation}", "counter", "disk", "u8", "Reads completed since boot", "/proc/diskstats", "system.disk.operations", interval=10),
    Signal("disk.writes", "{operation}", "counter", "disk", "u8", "Writes completed since boot", "/proc/diskstats", "system.disk.operations", interval=10),
    Signal("disk.read_time", "ms", "counter", "disk", "u8", "Total time of reads", "/proc/diskstats", "system.disk.operation_time", harm="up", interval=10),
    Signal("disk.write_time", "ms", "counter", "disk", "u8", "Total time of writes", "/proc/diskstats", "system.disk.operation_time", harm="up", interval=10),
    Signal("disk.io_time", "ms", "counter", "disk", "u8", "Time with at least one request in progress", "/proc/diskstats", "system.disk.io_time", harm="up", interval=10),
    Signal("disk.in_flight", "{operation}", "gauge", "disk", "u4", "Requests in progress at the time of the reading", "/proc/diskstats", "", harm="up", interval=10),
    Signal("disk.state", "1", "state", "disk", "u1", "State of the NVMe controller", "/sys/class/nvme/nvmeN/state", "hw.status", (0, 6), states=("new", "live", "resetting", "connecting", "deleting", "dead", "other"), normal=("live",), interval=30),
    Signal("disk.temperature", "Cel", "gauge", "disk", "f4", "Composite temperature", "NVMe log page 02h, else hwmon", "hw.temperature", (-100, 200), harm="up", interval=600),
    Signal("disk.critical_warning", "1", "gauge", "disk", "u1", "Bit mask of warnings: 0x1 spare low, 0x2 temperature, 0x4 unreliable, 0x8 read-only, 0x10 backup of volatile memory failed, 0x20 persistent memory", "NVMe log page 02h, byte 0", "hw.physical_disk.smart", (0, 63), harm="up", interval=600),
    Signal("disk.spare", "1", "gauge", "disk", "f4", "Spare capacity left, as a share", "NVMe log page 02h, byte 3", "hw.physical_disk.smart", (0, 1), harm="down", interval=600),
    Signal("disk.spare_threshold", "1", "gauge", "disk", "f4", "Share of spare capacity below which the disk warns", "NVMe log page 02h, byte 4", "", (0, 1), interval=600),
    Signal("disk.endurance_used", "1", "gauge", "disk", "f4", "Share of the rated life that is used; may exceed 1", "NVMe log page 02h, byte 5", "hw.physical_disk.endurance_utilization", (0, 2.55), harm="up", interval=600),
    Signal("disk.media_errors", "{error}", "counter", "disk", "u8", "Reads and writes whose data could not be recovered", "NVMe log page 02h, bytes 160-175", "hw.errors", harm="up", interval=600),
    Signal("disk.error_log_entries", "{entry}", "counter", "disk", "u8", "Entries of the error log over the disk's life", "NVMe log page 02h, bytes 176-191", "hw.physical_disk.smart", harm="up", interval=600),
    Signal("disk.unsafe_shutdowns", "1", "counter", "disk", "u8", "Unsafe shutdowns over the disk's life", "NVMe log page 02h, bytes 144-159", "hw.physical_disk.smart", harm="up", interval=600),
    Signal("disk.power_on_time", "h", "counter", "disk", "u8", "Power-on hours over the disk's life", "NVMe log page 02h, bytes 128-143", "hw.physical_disk.smart", interval=600),
    Signal("disk.lifetime_read", "{unit}", "counter", "disk", "u8", "Data read over the disk's life, in units of 512,000 bytes", "NVMe log page 02h, bytes 32-47", "hw.physical_disk.smart", interval=600),
    Signal("disk.lifetime_written", "{unit}", "counter", "disk", "u8", "Data written over the disk's life, in units of 512,000 bytes", "NVMe log page 02h, bytes 48-63", "hw.physical_disk.smart", interval=600),
    Signal("disk.hot_time", "min", "counter", "disk", "u4", "Time at or above the warning temperature over the disk's life", "NVMe log page 02h, bytes 192-195", "hw.physical_disk.smart", harm="up", interval=600),
    Signal("disk.throttled_time", "s", "counter", "disk", "u8", "Time of thermal throttling over the disk's life", "NVMe log page 02h, bytes 224-231", "hw.physical_disk.smart", harm="up", interval=600),
)  # fmt: skip


FILESYSTEM_SIGNALS: tuple[Signal, ...] = (
    Signal("filesystem.mounted", "1", "state", "filesystem", "u1", "Whether it is mounted; required only if configured", "/proc/self/mountinfo", "hw.status", (0, 1), states=("absent", "mounted"), normal=("mounted",), interval=30),
    Signal("filesystem.responds", "1", "state", "filesystem", "u1", "Whether it responds in time", "statvfs", "hw.status", (0, 2), states=("hangs", "answers", "fails"), normal=("answers",), interval=30),
    Signal("filesystem.latency", "s", "gauge", "filesystem", "f4", "Response time, or time without a response so far", "statvfs", "", (0, 1e9), harm="up", interval=30),
    Signal("filesystem.read_only", "1", "state", "filesystem", "u1", "Whether it is read-only, for example after an error", "/proc/self/mountinfo, options of the file system", "hw.status", (0, 1), states=("writable", "read-only"), normal=("writable",), interval=30),
    Signal("filesystem.used", "By", "gauge", "filesystem", "f8", "Space in use", "statvfs", "system.filesystem.usage", (0, 1e18), interval=30),
    Signal("filesystem.available", "By", "gauge", "filesystem", "f8", "Space available to unprivileged programs", "statvfs", "system.filesystem.usage", (0, 1e18), harm="down", interval=30),
    Signal("filesystem.total", "By", "gauge", "filesystem", "f8", "Size", "statvfs", "system.filesystem.limit", (0, 1e18), interval=30),
    Signal("filesystem.files_used", "{file}", "gauge", "filesystem", "f8", "Inodes in use", "statvfs", "", (0, 1e18), harm="up", interval=30),
    Signal("filesystem.files_total", "{file}", "gauge", "filesystem", "f8", "Maximum number of inodes; missing if unlimited", "statvfs", "", (0, 1e18), interval=30),
)  # fmt: skip


SERVICE_SIGNALS: tuple[Signal, ...] = (
    Signal("service.state", "1", "state", "service", "u1", "State reported by systemd; absent: required by configuration but not installed", "systemd over D-Bus, ActiveState", "hw.status", (0, 7), states=("inactive", "active", "reloading", "failed", "activating", "deactivating", "maintenance", "absent"), normal=("active", "reloading"), interval=15),
    Signal("service.restarts", "1", "counter", "service", "u4", "Automatic restarts by systemd", "systemd over D-Bus, NRestarts", "", harm="up", interval=15),
)  # fmt: skip


BMC_SIGNALS: tuple[Signal, ...] = (
    Signal("bmc.reachable", "", "state", "bmc", "u1", "Whether the BMC responded to the last request", "any Redfish request", "", (0, 1), ("no", "yes"), ("yes",), "down", interval=10),
    Signal("bmc.latency", "s", "gauge", "bmc", "f4", "Duration of the last response", "any Redfish request, own timer", "", (0, 1e4), harm="up", interval=10),
    Signal("bmc.pending", "s", "gauge", "bmc", "f4", "How long the current request has been waiting for a response; 0 if there is none", "any Redfish request, own timer", "", (0, 1e4), harm="up", interval=10),
    Signal("bmc.requests", "{request}", "counter", "bmc", "u8", "Requests made since the collector started", "own count", interval=10),
    Signal("bmc.failures", "{failure}", "counter", "bmc", "u8", "Requests without a usable response, and unreadable parts of responses, since the collector started", "own count", interval=10),
)  # fmt: skip


CANARY_SIGNALS: tuple[Signal, ...] = (
    Signal("canary.runs", "{run}", "counter", "canary", "u8", "Test problems with known answers that this core computed", "own count", interval=3600),
    Signal("canary.mismatches", "{run}", "counter", "canary", "u8", "Rounds of test problems with a wrong answer", "own count", harm="up", interval=3600),
    Signal("canary.yields", "{run}", "counter", "canary", "u8", "Rounds aborted because other tasks needed the core", "own count", interval=3600),
    Signal("canary.busy_time", "ms", "counter", "canary", "u8", "Processor time of the test problems", "getrusage(2)", interval=3600),
)  # fmt: skip


AGENT_SIGNALS: tuple[Signal, ...] = (
    Signal("agent.cpu_time", "ms", "counter", "agent", "u8", "Processor time of all its processes", "/proc/PID/stat", "process.cpu.time", interval=10),
    Signal("agent.memory", "By", "gauge", "agent", "f8", "Proportional set size of all its processes", "/proc/PID/smaps_rollup", "process.memory.usage", (0, 1e12), harm="up", interval=60),
    Signal("agent.spool_bytes", "By", "gauge", "agent", "f8", "Bytes of the spools on disk", "agent", "", (0, 1e15), interval=10),
    Signal("agent.spool_wait", "s", "gauge", "agent", "f4", "Longest time that a message waited for the disk of the spool, in the last 10 s", "agent", "", (0, 1e6), harm="up", interval=10),
    Signal("agent.dropped", "{message}", "counter", "agent", "u8", "Messages that the spools dropped or refused", "agent", "", harm="up", interval=10),
    Signal("agent.unsent", "{message}", "gauge", "agent", "f8", "Messages spooled and not yet acknowledged by Kafka", "agent", "", (0, 1e15), harm="up", interval=10),
)  # fmt: skip


COLLECTOR_SIGNALS: tuple[Signal, ...] = (
    Signal("collector.state", "1", "state", "collector", "u1", "Result of its last reading", "agent", "hw.status", (0, 4), states=("starting", "ok", "no data", "fault", "hung"), normal=("starting", "ok", "no data"), interval=10),
    Signal("collector.latency", "s", "gauge", "collector", "f4", "Duration of its last reading", "agent", "", (0, 1e6), harm="up", interval=10),
    Signal("collector.silence", "s", "gauge", "collector", "f4", "Time since its last successful reading", "agent", "", (0, 1e9), harm="up", interval=10),
    Signal("collector.restarts", "1", "counter", "collector", "u4", "Restarts after a timeout since the agent started", "agent", "", harm="up", interval=10),
)  # fmt: skip


EXPORTER_SIGNALS: tuple[Signal, ...] = (
    Signal("exporter.up", "1", "state", "exporter", "u1", "Whether the endpoint returned a page", "own scrape", "", (0, 1), states=("down", "up"), normal=("up",), harm="down", interval=15.0),
    Signal("exporter.scrape_time", "s", "gauge", "exporter", "f4", "Duration of the scrape, including mapping", "own timer", "", (0, 1e4), harm="up", interval=15.0),
    Signal("exporter.series", "{series}", "gauge", "exporter", "u4", "Series on the page", "own count", "", interval=15.0),
    Signal("exporter.mapped", "{series}", "gauge", "exporter", "u4", "Series mapped to signals of the catalogue", "own count", "", harm="down", interval=15.0),
    Signal("exporter.unmapped", "{series}", "gauge", "exporter", "u4", "Series without a mapping", "own count", "", interval=15.0),
    Signal("exporter.dropped", "{series}", "gauge", "exporter", "u4", "Unmapped series that were not kept: above the limit, or histogram buckets", "own count", "", harm="up", interval=15.0),
    Signal("exporter.bad_lines", "{line}", "gauge", "exporter", "u4", "Lines of the page that are not valid samples", "own count", "", harm="up", interval=15.0),
)  # fmt: skip


CUSTOM_SIGNALS: tuple[Signal, ...] = (
    Signal("custom.value", "", "gauge", "custom", "f8", "Value of the series as exported; its name, labels and type are attributes", "OpenMetrics", "", interval=15.0),
)  # fmt: skip


RANK_SIGNALS: tuple[Signal, ...] = (
    Signal("rank.step", "{step}", "counter", "rank", "u8", "Training steps finished", "training"),
    Signal("rank.step_time", "s", "gauge", "rank", "f4", "Duration of the last step, including waiting for other ranks; the mean if there were several since the previous reading", "training", "", (0, 1e6), harm="up"),
    Signal("rank.compute_time", "s", "gauge", "rank", "f4", "Forward and backward computation of the last step, before any collective; the mean if there were several since the previous reading", "training", "", (0, 1e6), harm="up"),
    Signal("rank.communication_time", "s", "gauge", "rank", "f4", "Time in collectives of the last step, including waiting; the mean if there were several since the previous reading", "training", "", (0, 1e6)),
    Signal("rank.step_time_longest", "s", "gauge", "rank", "f4", "Longest step since the previous reading", "training", "", (0, 1e6)),
    Signal("rank.compute_time_longest", "s", "gauge", "rank", "f4", "Longest computation of a step since the previous reading", "training", "", (0, 1e6)),
    Signal("rank.tokens", "{token}", "counter", "rank", "u8", "Tokens that this rank processed since its script started", "training"),
    Signal("rank.loss", "1", "gauge", "rank", "f4", "Loss of the last step that reported one; missing if it was NaN or infinite", "training", "", (-3.4e38, 3.4e38)),
    Signal("rank.gradient_norm", "1", "gauge", "rank", "f4", "Largest gradient norm since the previous reading; missing if it was NaN or infinite", "training", "", (0, 3.4e38)),
    Signal("rank.nonfinite", "{value}", "counter", "rank", "u8", "Losses and gradient norms that were NaN or infinite", "training", harm="up"),
    Signal("rank.drops", "{datagram}", "counter", "rank", "u8", "Reports of the script that the agent could not accept immediately", "training"),
    Signal("rank.refused", "{value}", "counter", "rank", "u8", "Invalid values from the script, such as wrong types and negative durations", "training"),
)  # fmt: skip
