"""Which ports are up, down or flapping, and which carry traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes, part
from detectors.base.streams import LEARN
from detectors.link.counters import CounterReadings, Floats, Indices
from pipeline.model.compiling import compiled
from pipeline.model.records import SECOND, Event

UNKNOWN, DOWN, UP = 0, 1, 2
UP_WORDS = frozenset({"up", "active", "1", "true"})
MAX_FLAPS_PER_S = 1.0
"""Flaps per second above which a counter of transitions does not count flaps: a link trains for seconds. Chosen."""
_POLL_GAP = 90 * SECOND  # three polls of 30 s, as fabrics are read; chosen
_MAX_FLAPS = 64  # kept per port; chosen


LEAST_LOAD = 1e-3
"""Share of the line above which a port carries the traffic of work: collectives use percents, an idle port of RDMA or
management some kB/s. Chosen."""
_DEFAULT_MBITS = 100_000.0  # line of a port without a speed; chosen


@dataclass
class PortLoads(State):
    """When each port last carried traffic. total, read: (N,) newest bytes and their time.  busy: (N,) when.

    first: (N,) when its traffic was first known; 0: it is not.
    """

    total: Floats = memory(np.nan)
    read: NDArray[np.int64] = memory(0, np.int64)
    busy: NDArray[np.int64] = memory(0, np.int64)
    first: NDArray[np.int64] = memory(0, np.int64)

    def update(self, received: Floats, sent: Floats, mbits: Floats, time: int) -> None:
        """Reads the byte counters of an instant; one of the two directions is enough. mbits: (N,) speeds, NaN."""
        n = len(received)
        self.grow(n)
        seen = self.total[:n], self.read[:n], self.busy[:n], self.first[:n]
        _update_loads(received, sent, mbits, seen, time)

    def carried(self, i: int, time: int, within: int) -> bool:
        """Returns whether a port carried traffic in the last `within` us before `time`."""
        return bool(i < len(self.busy) and self.busy[i] > 0 and self.busy[i] >= time - within)

    def is_idle(self, i: int, time: int, for_us: int) -> bool:
        """Returns whether a port is known to have carried no traffic for so long."""
        known = i < len(self.first) and 0 < self.first[i] <= time - for_us and self.read[i] >= time - for_us
        return bool(known and not self.carried(i, time, for_us))


@dataclass
class PortStates(State):
    """State, transitions and flaps of all ports."""

    state: NDArray[np.int8] = memory(UNKNOWN, np.int8)
    was_up: NDArray[np.bool_] = memory(False, np.bool_)
    down: NDArray[np.int64] = memory(0, np.int64)  # time at which it went down; 0: it is not down
    count: NDArray[np.int64] = memory(0, np.int64)  # readings, counted to LEARN + 1
    has_counter: NDArray[np.bool_] = memory(False, np.bool_)  # of transitions
    read: NDArray[np.int64] = memory(0, np.int64)  # time of the newest reading
    step: Floats = memory(0.0)  # usual s between two readings
    flapped: dict[str, list[int]] = notes()  # port -> times at which it came up again
    readings: CounterReadings = part(CounterReadings)
    changes: CounterReadings = part(CounterReadings)
    idle_flaps: dict[str, int] = notes()  # port -> its last flap, if it carried no traffic then
    returned: dict[str, int] = notes()  # port -> when it last came up again, counted as a flap or not
    leaps: dict[str, list[float]] = notes()  # port -> [transitions, s] that no link can make
    loads: PortLoads = part(PortLoads)
    work: dict[str, str] = notes()  # port that is down -> what it did before
    leaps_now: dict[int, list[float]] = field(default_factory=dict, init=False)
    """Index of a port -> the same, of this instant."""

    def update(self, state: Floats, changes: Floats, time: int, restarted: Indices) -> list[tuple[int, int]]:
        """Reads an instant; returns (port, times) of the ports that came up again since the last one."""
        self.grow(len(state))
        n = len(state)
        _count_samples(state, self.count[:n], self.read[:n], self.step[:n], time)
        at, _, _ = self.readings.find_changed(state, time)
        moving, growth, seconds = self.changes.measure_growth(changes, time, restarted)
        self.has_counter[np.flatnonzero(~self.has_counter[: len(changes)] & np.isfinite(changes))] = True
        if self.leaps_now or len(moving):
            leaps = growth > 2 * MAX_FLAPS_PER_S * np.maximum(seconds, 2.0)
            found = zip(moving[leaps].tolist(), growth[leaps].tolist(), seconds[leaps].tolist(), strict=True)
            self.leaps_now = {i: [count, passed] for i, count, passed in found}
            growth = np.where(leaps, 2.0, growth)  # one flap is all that is certain
        return [] if not len(at) and not len(moving) else self._transitions(at, state, moving, growth, time)

    def _transitions(
        self, at: Indices, state: Floats, moving: Indices, growth: Floats, time: int
    ) -> list[tuple[int, int]]:
        """Of n alternating transitions, the number of those to up follows from the first and last state."""
        grew = dict(zip(moving.tolist(), growth.tolist(), strict=True))
        found = []
        for i in sorted({*at.tolist(), *grew}):
            old = int(self.state[i])
            new = old if np.isnan(state[i]) else UP if state[i] >= 1 else DOWN
            moves = max(int(grew.get(i, 0)), int(old > 0 and new != old))
            ups = (moves + 1) // 2 if new == UP and old != UP else moves // 2
            if ups and old and self.was_up[i]:
                found.append((i, ups))
            if new == UP:
                self.down[i] = 0
            elif new == DOWN and (ups or (old and new != old)):
                self.down[i] = time
            self.state[i] = new
            self.was_up[i] |= new == UP
        return found

    def apply_event(self, i: int, event: Event) -> int:
        """Reads a transition from an event, of a port without a counter; returns how often it came up again: 0 or 1."""
        new = UP if str(event.data["state"]).lower() in UP_WORDS else DOWN
        if self.has_counter[i] or self.state[i] == new:
            return 0
        ups = int(new == UP and self.state[i] == DOWN and bool(self.was_up[i]))
        self.down[i] = event.time if new == DOWN else 0
        self.state[i] = new
        self.was_up[i] |= new == UP
        self.readings.last[i] = float(new == UP)
        return ups

    def record_return(self, i: int, port: str, time: int) -> None:
        """Notes that a port came up again, and the leap of its counter if there was one."""
        self.returned[port] = time
        if i in self.leaps_now:
            self.leaps[port] = list(self.leaps_now[i])

    def drop_old_returns(self, time: int, window: float) -> None:
        """Drops what `record_return` noted more than `window` s ago."""
        for port in [p for p, at in self.returned.items() if time - at > window * SECOND]:
            del self.returned[port]
            self.idle_flaps.pop(port, None)
            self.leaps.pop(port, None)

    def record_flap(self, port: str, times: int, time: int, idle: bool) -> None:
        """Adds flaps of a port. idle: it carried no traffic, so that they slowed no job."""
        self.idle_flaps.pop(port, None)
        if idle:
            self.idle_flaps[port] = time
        self.flapped[port] = [*self.flapped.get(port, []), *[time] * min(times, _MAX_FLAPS)][-_MAX_FLAPS:]

    def has_enough_samples(self, i: int) -> bool:
        """Returns whether a port was read more often than LEARN: the first samples may be its bring-up."""
        return bool(self.count[i] > LEARN)

    def down_ports(self) -> Indices:
        """Returns the ports that are down and were up before."""
        return np.flatnonzero((self.down > 0) & self.was_up & (self.count > LEARN))

    def recent_flaps(self, port: str, time: int, window: float, quiet: float) -> list[int]:
        """Returns the flaps of the last `window` s while the port still flaps; empty after `quiet` s without one."""
        kept = [t for t in self.flapped.get(port, []) if time - t <= window * SECOND]
        if kept:
            self.flapped[port] = kept
        else:
            self.flapped.pop(port, None)
        return kept if kept and time - kept[-1] <= quiet * SECOND else []

    def is_silent(self, i: int) -> bool:
        """Returns whether the state was not read in the newest frame."""
        return bool(self.readings.missing_since[i] != 0)

    def is_long_silent(self, i: int, time: int) -> bool:
        """Returns whether the state was not read for longer than the far ends of cables are polled apart."""
        since = int(self.readings.missing_since[i])
        return since != 0 and time - since > _POLL_GAP

    def heard_since(self, i: int, time: int) -> bool:
        """Returns whether the state was read after `time`."""
        return bool(self.read[i] > time)


@compiled
def _update_loads(
    received: Floats,
    sent: Floats,
    mbits: Floats,
    seen: tuple[Floats, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    time: int,
) -> None:
    """Adds one reading of the bytes of each port. seen: total, read, busy, first; see `PortLoads`."""
    total, read, busy, first = seen
    for i in range(len(received)):
        one, other = np.isfinite(received[i]), np.isfinite(sent[i])
        if not one and not other:
            continue
        now = (received[i] if one else 0.0) + (sent[i] if other else 0.0)
        if read[i] > 0 and time > read[i] and now >= total[i]:
            line = (mbits[i] if mbits[i] > 0 else _DEFAULT_MBITS) * 125_000
            if (now - total[i]) / ((time - read[i]) / SECOND) >= LEAST_LOAD * line:
                busy[i] = time
            if first[i] == 0:
                first[i] = time
        total[i], read[i] = now, time


@compiled
def _count_samples(state: Floats, count: NDArray[np.int64], read: NDArray[np.int64], step: Floats, time: int) -> None:
    """Counts one reading of the state of each port, and follows the interval: slowly upwards, since a gap in the
    telemetry is no longer interval."""
    for i in range(len(state)):
        if np.isfinite(state[i]):
            if count[i] <= LEARN:
                count[i] += 1
            passed = (time - read[i]) / SECOND
            if read[i] > 0 and passed > 0:
                step[i] += min(max(passed - step[i], -step[i] / 2), step[i] / 10) if step[i] > 0 else passed
            read[i] = time


def burst_onset(times: list[int], quiet: float) -> int:
    """Returns the first flap after the last gap of more than `quiet` s."""
    gap = quiet * SECOND
    return next((b for a, b in zip(times[-2::-1], times[:0:-1], strict=True) if b - a > gap), times[0])
