"""What the ports of jobs tell each minute: bytes sent, and waits, marks and errors for them, against their own past."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.statistics import grouped_median
from pipeline.records import SECOND, Frame

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
SENT = "nic.tx_bytes"
WAITS = ("nic.port_tx_wait", "nic.rx_pause_duration")
MARKS = ("nic.cnp_sent", "nic.cnp_handled", "nic.ecn_marked")
ERRORS = ("nic.symbol_errors", "nic.crc_errors", "nic.ack_timeouts")
KINDS = (("wait for credits or under pause", WAITS), ("see congestion marks", MARKS))
"""What shows that a network is slow, in words, and the signals that tell it."""
_READ = (SENT, *WAITS, *MARKS, *ERRORS)
_ROWS = (slice(1, 1 + len(WAITS)), slice(1 + len(WAITS), 1 + len(WAITS) + len(MARKS)))
_FLOORS = (2e-6, 2e-10)
"""Waits and marks for a byte below which nothing waits: at a tenth of 400 Gb/s 1e4 ticks a second, which is less than a
percent of the time at every length of tick that is known, and one packet marked a second. Chosen."""
QUIET = 50e6
"""Bytes/s of a port, a thousandth of 400 Gb/s, that keep-alives and storage may send: its job makes no step. Chosen."""
DOUBLED = float(np.log(2.0))  # as link_congestion counts a port in excess
LEARN = 20  # looks before a port is judged: the replay contract
_GAIN, _SMOOTH = 1 / 240, 0.3  # memory of four hours of what is normal, and of about 3 looks of what is now; chosen
_LONGEST = 300.0  # s between two looks beyond which growth is an average of too much; chosen
_ARRAYS = ("last", "normal", "excess", "errs", "sent", "job", "count")


class Ports:
    """Arrays by port of the frame. excess: (2, N) of waits and marks, logarithm above the own past, smoothed.

    sent: bytes/s in the last look.   errs: 0 to 1, share of the last looks in which it erred.   job: slot, -1 none.
    """

    def __init__(self) -> None:
        self.last, self.normal, self.excess = np.empty((len(_READ), 0)), np.empty((2, 0)), np.empty((2, 0))
        self.errs, self.sent = np.empty(0), np.empty(0)
        self.job, self.count = np.empty(0, np.int64), np.empty(0, np.int64)
        self.time = 0

    def look(self, frame: Frame, job: NDArray[np.int64], calm: Bools) -> None:
        """Takes all counters. job: (N,) slot of each port's job, -1 none; calm: (slots,) jobs that are as ever."""
        n, seconds = len(frame.entities), (frame.time - self.time) / SECOND
        self._grow(n)
        self.count[:n][job != self.job[:n]] = 0  # what is normal for one job is not for another
        self.job[:n] = job
        now = np.stack([frame[name] for name in _READ])
        growth = np.where(now >= self.last[:, :n], now - self.last[:, :n], np.nan)
        self.last[:, :n] = now
        first, self.time = not self.time, frame.time
        if first or not 0 < seconds <= _LONGEST:
            self.sent[:n] = np.nan
            return
        rate = growth / seconds
        self.sent[:n] = rate[0]
        erred = (growth[_ROWS[1].stop :] > 0).any(axis=0)  # NaN: no
        self.errs[:n] += _SMOOTH * (erred - self.errs[:n])
        self._judge(rate, np.append(calm, True)[job])

    def _judge(self, rate: Floats, calm: Bools) -> None:
        """Waits and marks for each byte, against what is normal; nothing is learnt of a job that is slow."""
        n, count = rate.shape[1], self.count[: rate.shape[1]]
        sends = rate[0] >= QUIET
        for row, (rows, floor) in enumerate(zip(_ROWS, _FLOORS, strict=True)):
            amounts = rate[rows]
            known = np.isfinite(amounts)
            told = known.any(axis=0) & sends
            level = np.log(
                np.where(told, np.where(known, amounts, 0).sum(axis=0) / np.where(sends, rate[0], 1), 0) + floor
            )
            normal, excess = self.normal[row, :n], self.excess[row, :n]
            above = level - normal
            now = np.where(told & (count >= LEARN), above, 0.0)
            excess += _SMOOTH * (now - excess)
            learns = told & calm & ((count < LEARN) | (above < DOUBLED / 2))
            normal += np.where(learns, np.maximum(1 / (count + 1), _GAIN) * above, 0.0)
        count += sends

    def of_jobs(self, at: NDArray[np.int64], jobs: int) -> Floats:
        """(jobs,) bytes/s of a port of each job: the median of its nodes, each the mean of its ports; NaN of none.

        at: (N,) number of each port's node.
        """
        sent = self.sent[: len(at)]
        known = np.flatnonzero((self.job[: len(at)] >= 0) & (at >= 0) & np.isfinite(sent))
        total, size = np.bincount(at[known], sent[known]), np.bincount(at[known])
        job = np.full(len(size), -1, np.int32)
        job[at[known]] = self.job[known]
        return median_by_job(total / np.where(size > 0, size, np.nan), job, jobs)

    def _grow(self, size: int) -> None:
        if (more := size - len(self.job)) > 0:
            wide = {"last": np.nan, "normal": 0.0, "excess": 0.0}
            for name, fill in wide.items():
                cells = getattr(self, name)
                setattr(self, name, np.concatenate([cells, np.full((len(cells), more), fill)], axis=1))
            self.errs, self.sent = np.append(self.errs, np.zeros(more)), np.append(self.sent, np.full(more, np.nan))
            self.job = np.append(self.job, np.full(more, -1, np.int64))
            self.count = np.append(self.count, np.zeros(more, np.int64))

    def snapshot(self) -> dict[str, Any]:
        return {"time": self.time, **{name: getattr(self, name).copy() for name in _ARRAYS}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.time = int(state["time"])
        for name in _ARRAYS:
            setattr(self, name, np.array(state[name]))


def median_by_job(values: Floats, job: NDArray[np.int32], jobs: int) -> Floats:
    """(jobs,) median of what each job's members show; NaN where nothing is known. job: -1 none."""
    median, _ = grouped_median(values, job)
    out, mine = np.full(jobs, np.nan), job >= 0
    out[job[mine]] = median[mine]
    return out
