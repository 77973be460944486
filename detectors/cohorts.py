"""Who is compared with whom: group numbers and index maps, renewed only when topology or fleet has changed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pipeline.records import Frame

Key = tuple[int, ...]
OWN = frozenset(
    (
        *("serial", "uuid", "guid", "name", "description", "asset_tag", "location"),
        *("bmc", "path", "address", "lid", "firmware"),
    )
)
"""Attributes that name one device and do not tell what it is like; devices that differ in them alone are comparable."""


def likeness(attributes: Mapping[str, object]) -> str:
    """What devices must have in common to be comparable, as a text."""
    return str(sorted((key, value) for key, value in attributes.items() if key not in OWN))


class Cohorts:
    """Numbers a frame's entities by their nearest ancestor of the first of `kinds` that they have."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self._key: Key = ()
        self._groups = np.empty(0, np.int32)

    def of(self, frame: Frame) -> NDArray[np.int32]:
        key = (id(frame.topology), frame.topology.version, len(frame.entities))
        if key != self._key:
            self._key, self._groups = key, self._number(frame)
        return self._groups

    def _number(self, frame: Frame) -> NDArray[np.int32]:
        groups = np.full(len(frame.entities), -1, np.int32)
        for kind in self.kinds:
            found = frame.topology.groups(frame.entities, kind)
            fresh = (groups < 0) & (found >= 0)
            groups[fresh] = found[fresh] + groups.max(initial=-1) + 1
        return groups


class Index:
    """Where each entity's ancestor of one kind stands in the frame of another class."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._key: Key = ()
        self._at = np.empty(0, np.int32)

    def of(self, frame: Frame, other: Frame) -> NDArray[np.int32]:
        """(N,) position in `other`; -1 where there is none."""
        key = (id(frame.topology), frame.topology.version, len(frame.entities), len(other.entities))
        if key != self._key:
            place = {e: i for i, e in enumerate(other.entities)}
            above = (frame.topology.above_of_kind(e, self.kind) for e in frame.entities)
            self._at = np.array([place.get(a, -1) if a else -1 for a in above], np.int32)
            self._key = key
        return self._at

    def take(self, frame: Frame, other: Frame, signal: str) -> NDArray[np.float64]:
        """(N,) the ancestors' values of `signal`; NaN where there is no such ancestor."""
        at = self.of(frame, other)
        padded = np.append(other[signal], np.nan)
        return padded[at]
