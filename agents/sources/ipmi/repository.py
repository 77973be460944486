"""The BMC's repository of sensor data records, read record by record, so that a slow BMC is read over many looks."""

from __future__ import annotations

from agents.sources.ipmi.device import Bmc, Refused
from agents.sources.ipmi.records import Sensor, sensors_of

_STORAGE = 0x0A  # network function; commands of IPMI 2.0 table G-1
_GET_INFO, _RESERVE, _GET_SDR = 0x20, 0x22, 0x23
_END = 0xFFFF  # record id: there is none after this
_RESERVATION_LOST = 0xC5  # completion codes of table 5-2
_TOO_LONG = (0xC6, 0xC7, 0xC8, 0xCA, 0xFF)  # whole records are not given; some BMCs say only "unspecified"
_HEADER = 5  # bytes; the last one says how many follow
_CHUNK = 16  # bytes in one answer; 22 is the least that a BMC must give (section 33.12), and others ask for 16 too
_TRIES = 4  # of one record; chosen: a reservation is lost when somebody else reads the repository
MAX_RECORDS = 2048
"""Most records that are followed; chosen: large servers have some 500, and a looping list must end."""


def stamp(bmc: Bmc) -> bytes:
    """When records were last added and erased: it changes with the repository. Raises Refused or Silent."""
    return bmc.request(_STORAGE, _GET_INFO)[5:13]


class Walk:
    """A reading of the whole repository, one record a step."""

    def __init__(self) -> None:
        self.sensors: list[Sensor] = []
        self._reservation = b"\0\0"
        self._next = 0
        self._steps = 0
        self._whole = True

    def done(self) -> bool:
        """Whether all records were read."""
        return self._next == _END

    def step(self, bmc: Bmc) -> bool:
        """Reads one record; False if the BMC is busy. Raises Silent; the same record is read again then."""
        try:
            following, record = self._record(bmc)
        except Refused as refusal:
            if refusal.busy:
                return False
            following, record = _END, b""  # a repository that ends in an error: keep what was found before it
        self.sensors += sensors_of(record)
        self._steps += 1
        self._next = following if self._steps < MAX_RECORDS else _END
        return True

    def _record(self, bmc: Bmc) -> tuple[int, bytes]:
        for left in range(_TRIES, 0, -1):
            try:
                return self._fetch(bmc)
            except Refused as refusal:
                if left == 1:
                    raise
                if refusal.code == _RESERVATION_LOST:
                    self._reservation = bmc.request(_STORAGE, _RESERVE)[:2].ljust(2, b"\0")
                elif self._whole and refusal.code in _TOO_LONG:
                    self._whole = False
                else:
                    raise
        return _END, b""

    def _fetch(self, bmc: Bmc) -> tuple[int, bytes]:
        """The id of the next record, and this one; in pieces if the BMC does not give it at once."""
        if self._whole:
            following, record = self._piece(bmc, 0, 0xFF)
            if len(record) >= _HEADER and len(record) >= _HEADER + record[4]:
                return following, record
            self._whole = False  # it was cut short without a word
        following, record = self._piece(bmc, 0, _HEADER)
        size = _HEADER + record[4] if len(record) >= _HEADER else 0
        while len(record) < size:
            _, piece = self._piece(bmc, len(record), min(_CHUNK, size - len(record)))
            if not piece:
                break
            record += piece
        return following, record[:size]

    def _piece(self, bmc: Bmc, offset: int, count: int) -> tuple[int, bytes]:
        order = self._reservation + self._next.to_bytes(2, "little") + bytes((offset, count))
        answer = bmc.request(_STORAGE, _GET_SDR, order)
        return (int.from_bytes(answer[:2], "little"), answer[2:]) if len(answer) >= 2 else (_END, b"")
