"""Names of IPMI's numbers: sensor types, and the states of each type or event/reading class.

Source: Intelligent Platform Management Interface Specification 2.0 rev. 1.1, tables 42-1 to 42-3, in our own words.
"""

from __future__ import annotations

SENSOR_TYPES = (
    *("reserved", "temperature", "voltage", "current", "fan", "chassis_intrusion", "security_violation", "processor"),
    *("power_supply", "power_unit", "cooling_device", "other_units", "memory", "drive_slot", "memory_resize"),
    *("firmware_progress", "event_logging", "watchdog_1", "system_event", "critical_interrupt", "button", "board"),
    *("microcontroller", "add_in_card", "chassis", "chip_set", "other_fru", "cable", "terminator", "boot_initiated"),
    *("boot_error", "os_boot", "os_stop", "slot", "acpi_power_state", "watchdog", "platform_alert"),
    *("entity_presence", "monitor_asic", "lan", "management_health", "battery", "session_audit", "version_change"),
    "fru_state",
)
"""Table 42-3 by number, 00h to 2Ch."""

THRESHOLD, SENSOR_SPECIFIC = 0x01, 0x6F
"""Event/reading type codes (table 42-1): compares a value with thresholds; has the states of its sensor type."""

GENERIC: dict[int, tuple[str, ...]] = {
    THRESHOLD: (
        *("below lower non-critical", "above lower non-critical", "below lower critical", "above lower critical"),
        *("below lower non-recoverable", "above lower non-recoverable", "below upper non-critical"),
        *("above upper non-critical", "below upper critical", "above upper critical"),
        *("below upper non-recoverable", "above upper non-recoverable"),
    ),
    0x02: ("idle", "active", "busy"),
    0x03: ("state deasserted", "state asserted"),
    0x04: ("no failure predicted", "failure predicted"),
    0x05: ("limit not exceeded", "limit exceeded"),
    0x06: ("performance met", "performance lags"),
    0x07: (
        *("ok", "non-critical, was ok", "critical, was less severe", "non-recoverable, was less severe"),
        *("non-critical, was more severe", "critical, was non-recoverable", "non-recoverable", "monitor"),
        "informational",
    ),
    0x08: ("device absent", "device present"),
    0x09: ("device disabled", "device enabled"),
    0x0A: (
        *("running", "in test", "power off", "on line", "off line", "off duty", "degraded", "power save"),
        "install error",
    ),
    0x0B: (
        *("fully redundant", "redundancy lost", "redundancy degraded", "not redundant, enough resources"),
        *("not redundant, enough resources again", "not redundant, too few resources"),
        *("redundancy degraded, was full", "redundancy degraded, was none"),
    ),
    0x0C: ("D0", "D1", "D2", "D3"),
}
"""Table 42-2: states by event/reading type code and offset."""

SPECIFIC: dict[str, tuple[str, ...]] = {
    "chassis_intrusion": (
        *("chassis opened", "drive bay opened", "card area opened", "processor area opened", "network cable lost"),
        *("undocked without leave", "fan area opened"),
    ),
    "processor": (
        *("internal error", "thermal trip", "self-test failed", "hang during start", "did not start"),
        *("configuration error", "uncorrectable error of the complex", "present", "disabled", "terminator present"),
        *("throttled", "uncorrectable machine check", "correctable machine check"),
    ),
    "power_supply": (
        *("present", "failure", "failure predicted", "input lost", "input lost or out of range"),
        *("input out of range", "configuration error", "standby"),
    ),
    "power_unit": (
        *("power off", "power cycle", "240 VA power down", "interlock power down", "AC lost"),
        *("soft power control failed", "failure", "failure predicted"),
    ),
    "memory": (
        *("correctable error", "uncorrectable error", "parity error", "scrub failed", "device disabled"),
        *("too many correctable errors to log", "present", "configuration error", "spare", "throttled"),
        "critical temperature",
    ),
    "drive_slot": (
        *("present", "drive fault", "failure predicted", "hot spare", "consistency check", "in critical array"),
        *("in failed array", "rebuild", "rebuild aborted"),
    ),
    "event_logging": (
        *("correctable memory errors no longer logged", "one type no longer logged", "log cleared"),
        *("nothing logged any more", "log full", "log almost full", "correctable machine checks no longer logged"),
    ),
    "critical_interrupt": (
        *("front panel NMI", "bus timeout", "I/O channel check", "software NMI", "PCI parity error"),
        *("PCI system error", "EISA timeout", "bus correctable error", "bus uncorrectable error", "fatal NMI"),
        *("bus fatal error", "bus degraded"),
    ),
    "os_stop": (
        *("stopped while loading", "stopped while running", "graceful stop", "graceful shutdown", "soft shutdown"),
        "agent does not answer",
    ),
    "watchdog": ("timer expired", "hard reset", "power down", "power cycle", "", "", "", "", "timer interrupt"),
    "management_health": (
        *("sensor access degraded", "controller access degraded", "controller off line", "controller unavailable"),
        *("sensor failed", "FRU failed"),
    ),
    "battery": ("low", "failed", "present"),
}
"""Table 42-3: states of sensor-specific events by sensor type and offset; only those that report faults."""


def sensor_type(number: int) -> str:
    """Returns the name of a sensor type; oem_c0 for a vendor's own."""
    if number < len(SENSOR_TYPES):
        return SENSOR_TYPES[number]
    return f"oem_{number:02x}" if number >= 0xC0 else f"type_{number:02x}"


def event_state(kind: int, event_type: int, offset: int) -> str:
    """Returns the meaning of a state of a sensor; `state N` if the specification or vendor defines no more."""
    names = SPECIFIC.get(sensor_type(kind), ()) if event_type == SENSOR_SPECIFIC else GENERIC.get(event_type, ())
    return (names[offset] if offset < len(names) else "") or f"state {offset}"
