"""The BMC's system event log (SEL): reads and decodes entries added since the last read.

Source of all layouts: IPMI 2.0 rev. 1.1, sections 31 (commands) and 32 (records).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agents.collectors.bmc.ipmi_codes import THRESHOLD, event_state, sensor_type
from agents.collectors.bmc.ipmi_device import IpmiError, IpmiTimeout, IpmiTransport

_STORAGE = 0x0A  # network function; commands of table G-1
_GET_INFO, _GET_ENTRY, _GET_TIME = 0x40, 0x43, 0x48
_FIRST, _LAST = 0x0000, 0xFFFF  # ids of Get SEL Entry; _LAST as the next id means that there is none
_SYSTEM_EVENT, _OEM_TIMED, _OEM = 0x02, 0xC0, 0xE0  # record types (table 32-1)
_CLOCK_SET = 0x2000_0000  # timestamps below count from the BMC's own start (section 37)
_BMC = 0x20  # its own address
_READING_AND_THRESHOLD = 0b0101  # upper half of event data 1: what data 2 and 3 hold (table 29-6)
_SIZE = 16  # bytes of every record
MAX_ENTRIES = 32
"""Most entries of one read. Chosen: the rest of a burst follows at the next reads, in order."""
LOOK_BACK_S = 3600
"""Age of the oldest entry at the first read. Chosen: longer than a restart of a collector takes."""


@dataclass(frozen=True, slots=True)
class SelEntry:
    """One record of the log. timestamp: seconds of the BMC's clock; 0 if the record has none.

    sensor: (lun, number), if the BMC wrote it about its own sensor. readings: raw reading and threshold, if present.
    """

    record: int
    timestamp: int
    sensor: tuple[int, int] | None
    facts: dict[str, Any]
    readings: tuple[int, int] | None = None


class SelReader:
    """Position in the log. A log that was cleared is read from its start."""

    def __init__(self) -> None:
        self._last_record: int | None = None
        self._last_info = b""

    def read_new(self, bmc: IpmiTransport) -> tuple[list[SelEntry], int]:
        """Returns the entries added since the last call, at most MAX_ENTRIES, and the BMC's clock.

        The first call returns those of the last hour. If the BMC stops responding, returns what was read before.
        """
        info = bmc.request(_STORAGE, _GET_INFO)
        stamp, count = info[:13], int.from_bytes(info[1:3], "little")
        if stamp == self._last_info:
            return [], 0
        now = read_clock(bmc)
        if self._last_record is None:
            found, drained = self._read_recent(bmc, count, now), True
        else:
            if stamp[9:13] != self._last_info[9:13] and self._last_info:  # cleared since
                self._last_record = _FIRST
            found, drained = self._read_after(bmc) if count else ([], True)
        if drained:
            self._last_info = stamp
        return found, now

    def _read_recent(self, bmc: IpmiTransport, count: int, now: int) -> list[SelEntry]:
        """Returns the entries of the last hour before the newest one, as far as their ids are consecutive."""
        if not count:
            self._last_record = _FIRST
            return []
        newest = _read_entry(bmc, _LAST)[1]
        if newest is None:
            return []
        found = [newest]
        while len(found) < MAX_ENTRIES and found[-1].record > 1:
            before = _read_entry(bmc, found[-1].record - 1)[1]
            if before is None or before.record != found[-1].record - 1:
                break
            found.append(before)
        self._last_record = newest.record
        return [e for e in reversed(found) if e.timestamp >= _CLOCK_SET and 0 <= now - e.timestamp <= LOOK_BACK_S]

    def _read_after(self, bmc: IpmiTransport) -> tuple[list[SelEntry], bool]:
        """Returns entries after the last known one, and whether these are all."""
        following, known = _read_entry(bmc, self._last_record) if self._last_record else (_FIRST, None)
        if known is None:  # it no longer exists, or there was none: the log was cleared or wrapped
            following = _FIRST
        found: list[SelEntry] = []
        while following != _LAST and len(found) < MAX_ENTRIES:
            try:
                following, entry = _read_entry(bmc, following)
            except (IpmiError, IpmiTimeout):  # the rest follows at the next read
                return found, False
            if entry is None or entry.record == self._last_record:
                return found, True
            found.append(entry)
            self._last_record = entry.record
        return found, following == _LAST


def read_clock(bmc: IpmiTransport) -> int:
    """Returns the BMC's clock in seconds; it may be local time, or not set. 0 if the BMC does not provide it."""
    try:
        return int.from_bytes(bmc.request(_STORAGE, _GET_TIME)[:4], "little")
    except IpmiError:
        return 0


def _read_entry(bmc: IpmiTransport, record: int) -> tuple[int, SelEntry | None]:
    """Returns (id of the next entry, the entry); (_LAST, None) if there is none with that id. Raises IpmiError if the
    BMC is busy.
    """
    try:
        answer = bmc.request(_STORAGE, _GET_ENTRY, b"\0\0" + record.to_bytes(2, "little") + b"\0\xff")
    except IpmiError as refusal:
        if refusal.is_busy:
            raise
        return _LAST, None
    return (int.from_bytes(answer[:2], "little"), decode_entry(answer[2:])) if len(answer) >= 2 else (_LAST, None)


def decode_entry(record: bytes) -> SelEntry | None:
    """Decodes one record of 16 bytes; None for anything else."""
    if len(record) != _SIZE:
        return None
    number, kind = int.from_bytes(record[:2], "little"), record[2]
    timestamp = int.from_bytes(record[3:7], "little") if kind < _OEM else 0
    facts: dict[str, Any] = {"record": number, "timestamp": timestamp, "raw": record.hex()}
    if kind != _SYSTEM_EVENT:
        label = "oem" if kind >= _OEM_TIMED else "unknown"
        return SelEntry(number, timestamp, None, {**facts, "type": label, "event": f"record type {kind:02x}"})
    event_type, offset, reported = record[12] & 0x7F, record[13] & 0x0F, record[13] >> 4
    facts |= {"type": sensor_type(record[10]), "event": event_state(record[10], event_type, offset)}
    facts |= {"asserted": record[12] & 0x80 == 0}
    by_bmc = record[7] == _BMC  # generator: the BMC itself, whose sensors are in its repository
    exact = event_type == THRESHOLD and reported == _READING_AND_THRESHOLD
    return SelEntry(
        *(number, timestamp, (record[8] & 3, record[11]) if by_bmc else None, facts),
        readings=(record[14], record[15]) if exact else None,
    )


def event_time(entry: SelEntry, bmc_now: int, now: int) -> int:
    """Returns the UTC time in us at which an entry was written, from its age by the BMC's clock; `now` if the age is
    not usable.
    """
    age = bmc_now - entry.timestamp
    return now - age * 1_000_000 if entry.timestamp >= _CLOCK_SET and 0 <= age <= 24 * 3600 else now
