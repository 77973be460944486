"""The BMC's system event log: what was added since the last look, decoded.

Source of all layouts: IPMI 2.0 rev. 1.1, sections 31 (commands) and 32 (records).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agents.collectors.bmc.ipmi_codes import THRESHOLD, sensor_type, state
from agents.collectors.bmc.ipmi_device import Bmc, Refused, Silent

_STORAGE = 0x0A  # network function; commands of table G-1
_GET_INFO, _GET_ENTRY, _GET_TIME = 0x40, 0x43, 0x48
_FIRST, _LAST = 0x0000, 0xFFFF  # ids of Get SEL Entry; _LAST as the next id says that there is none
_SYSTEM_EVENT, _OEM_TIMED, _OEM = 0x02, 0xC0, 0xE0  # record types (table 32-1)
_CLOCK_SET = 0x2000_0000  # timestamps below count from the BMC's own start (section 37)
_BMC = 0x20  # its own address
_READING_AND_THRESHOLD = 0b0101  # upper half of event data 1: what data 2 and 3 hold (table 29-6)
_SIZE = 16  # bytes of every record
MAX_ENTRIES = 32
"""Most entries of one look; chosen: the rest of a burst comes with the next looks, in order."""
LOOK_BACK_S = 3600
"""How old an entry may be at the first look; chosen: longer than a collector is ever restarted for."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of the log. timestamp: seconds of the BMC's clock; 0 where the record has none.

    sensor: (lun, number), if the BMC wrote it of a sensor of its own. readings: raw reading and threshold, if told.
    """

    record: int
    timestamp: int
    sensor: tuple[int, int] | None
    facts: dict[str, Any]
    readings: tuple[int, int] | None = None


class Log:
    """What was read of the log so far. A log that is cleared is read from its start."""

    def __init__(self) -> None:
        self._after: int | None = None
        self._seen = b""

    def news(self, bmc: Bmc) -> tuple[list[Entry], int]:
        """Entries that were added since the last call, at most MAX_ENTRIES, and the BMC's clock.

        The first call gives those of the last hour. What was read before the BMC fell silent is given.
        """
        info = bmc.request(_STORAGE, _GET_INFO)
        stamp, count = info[:13], int.from_bytes(info[1:3], "little")
        if stamp == self._seen:
            return [], 0
        now = clock(bmc)
        if self._after is None:
            found, drained = self._begin(bmc, count, now), True
        else:
            if stamp[9:13] != self._seen[9:13] and self._seen:  # erased since
                self._after = _FIRST
            found, drained = self._follow(bmc) if count else ([], True)
        if drained:
            self._seen = stamp
        return found, now

    def _begin(self, bmc: Bmc, count: int, now: int) -> list[Entry]:
        """The entries of the last hour before the newest one, as far as their ids are in a row."""
        if not count:
            self._after = _FIRST
            return []
        newest = _entry(bmc, _LAST)[1]
        if newest is None:
            return []
        found = [newest]
        while len(found) < MAX_ENTRIES and found[-1].record > 1:
            before = _entry(bmc, found[-1].record - 1)[1]
            if before is None or before.record != found[-1].record - 1:
                break
            found.append(before)
        self._after = newest.record
        return [e for e in reversed(found) if e.timestamp >= _CLOCK_SET and 0 <= now - e.timestamp <= LOOK_BACK_S]

    def _follow(self, bmc: Bmc) -> tuple[list[Entry], bool]:
        """Entries after the last known one, and whether that is all."""
        following, known = _entry(bmc, self._after) if self._after else (_FIRST, None)
        if known is None:  # it is gone, or there was none: the log was cleared or turned over
            following = _FIRST
        found: list[Entry] = []
        while following != _LAST and len(found) < MAX_ENTRIES:
            try:
                following, entry = _entry(bmc, following)
            except (Refused, Silent):  # the rest comes with the next look
                return found, False
            if entry is None or entry.record == self._after:
                return found, True
            found.append(entry)
            self._after = entry.record
        return found, following == _LAST


def clock(bmc: Bmc) -> int:
    """The BMC's clock in seconds; it may be set to local time, or not at all. 0 where it is not told."""
    try:
        return int.from_bytes(bmc.request(_STORAGE, _GET_TIME)[:4], "little")
    except Refused:
        return 0


def _entry(bmc: Bmc, record: int) -> tuple[int, Entry | None]:
    """(id of the next one, the entry); (_LAST, None) where there is none of that id. Raises Refused if it is busy."""
    try:
        answer = bmc.request(_STORAGE, _GET_ENTRY, b"\0\0" + record.to_bytes(2, "little") + b"\0\xff")
    except Refused as refusal:
        if refusal.busy:
            raise
        return _LAST, None
    return (int.from_bytes(answer[:2], "little"), decode(answer[2:])) if len(answer) >= 2 else (_LAST, None)


def decode(record: bytes) -> Entry | None:
    """One record of 16 bytes; None for anything else."""
    if len(record) != _SIZE:
        return None
    number, kind = int.from_bytes(record[:2], "little"), record[2]
    timestamp = int.from_bytes(record[3:7], "little") if kind < _OEM else 0
    facts: dict[str, Any] = {"record": number, "timestamp": timestamp, "raw": record.hex()}
    if kind != _SYSTEM_EVENT:
        label = "oem" if kind >= _OEM_TIMED else "unknown"
        return Entry(number, timestamp, None, {**facts, "type": label, "event": f"record type {kind:02x}"})
    event_type, offset, told = record[12] & 0x7F, record[13] & 0x0F, record[13] >> 4
    facts |= {"type": sensor_type(record[10]), "event": state(record[10], event_type, offset)}
    facts |= {"asserted": record[12] & 0x80 == 0}
    by_bmc = record[7] == _BMC  # generator: the BMC itself, whose sensors its repository names
    exact = event_type == THRESHOLD and told == _READING_AND_THRESHOLD
    return Entry(
        *(number, timestamp, (record[8] & 3, record[11]) if by_bmc else None, facts),
        readings=(record[14], record[15]) if exact else None,
    )


def event_time(entry: Entry, bmc_now: int, now: int) -> int:
    """UTC us at which an entry was written, by its age on the BMC's own clock; now where that says nothing."""
    age = bmc_now - entry.timestamp
    return now - age * 1_000_000 if entry.timestamp >= _CLOCK_SET and 0 <= age <= 24 * 3600 else now
