"""How long messages of a topic take from their newest reading to the store, over the last minutes; in memory only."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.ingest.messages import Item
from pipeline.model.records import SECOND

WINDOW = 300 * SECOND
"""Time over which lags are summed up (us). Chosen: a p99 of one agent at 5 s a message."""
SAMPLED = 64
"""Messages of one commit and topic whose lag is kept. Chosen: 150 commits of a window give a p99 of 10,000 values."""
MAX_COMMITS = 1000
"""Commits of one topic that are kept. Chosen: three a second for WINDOW; one is written every two seconds."""


@dataclass(frozen=True, slots=True)
class TopicLag:
    """Messages of a topic that were stored within WINDOW, and their lag (s)."""

    messages: int
    p50: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class _Commit:
    time: int
    messages: int
    lags: Sequence[int]
    longest: int


class TopicLags:
    """Lags by topic; thread-safe."""

    def __init__(self) -> None:
        self._commits: dict[str, deque[_Commit]] = {}
        self._lock = threading.Lock()

    def record(self, items: Sequence[Item], now: int) -> None:
        """Adds the messages of a commit at `now`. Those of dead letters that were read again are left out."""
        found: dict[str, list[int]] = {}
        for item in items:
            partition, newest = item.message.partition, item.newest
            if partition.incarnation:  # not a letter
                found.setdefault(partition.topic, []).append(item.time if newest is None else newest)
        with self._lock:
            for topic, times in found.items():
                lags = [max(0, now - time) for time in times[:: -(-len(times) // SAMPLED)]]
                commit = _Commit(now, len(times), lags, max(0, now - min(times)))
                self._commits.setdefault(topic, deque(maxlen=MAX_COMMITS)).append(commit)

    def summarize(self, now: int) -> dict[str, TopicLag]:
        """Returns topic -> lags of the messages of the last WINDOW; without the topics that had none."""
        with self._lock:
            kept = {t: [c for c in commits if 0 <= now - c.time <= WINDOW] for t, commits in self._commits.items()}
        return {topic: _summarize(commits) for topic, commits in sorted(kept.items()) if commits}


def _summarize(commits: Sequence[_Commit]) -> TopicLag:
    """Returns the lags of all commits; a sampled message counts for as many as its commit has of them."""
    lags = np.concatenate([np.asarray(c.lags, np.float64) for c in commits]) / SECOND
    weights = np.concatenate([np.full(len(c.lags), c.messages / len(c.lags)) for c in commits])
    order = np.argsort(lags, kind="stable")
    share = np.cumsum(weights[order]) / weights.sum()
    last = len(lags) - 1
    p50, p99 = (float(lags[order[min(last, int(np.searchsorted(share, q - 1e-9)))]]) for q in (0.5, 0.99))
    return TopicLag(sum(c.messages for c in commits), p50, p99, max(c.longest for c in commits) / SECOND)
