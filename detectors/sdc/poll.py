"""How many devices answered what of late: exact for a small fleet, an even sample of a large one."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from detectors.sdc.places import places

MOST = 512
"""Devices remembered: a share of a half is then known to within 5 %, whatever the size of the fleet. Chosen."""


class Poll:
    """The newest answer of each device, or of an even share of them where they are more than MOST.

    The share is drawn by the devices' names, not by who told last: so those who tell often, or late, weigh no more.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.halvings: int = state["halvings"] if state else 0
        self.of: dict[str, list[Any]] = {e: list(told) for e, told in state["of"].items()} if state else {}

    def tell(self, entity: str, time: int, answer: object) -> None:
        """Enters an answer in place of the device's one before."""
        if _drawn(entity, self.halvings):
            self.of[entity] = [time, answer]
            while len(self.of) > MOST:
                self.halvings += 1
                self.of = {e: told for e, told in self.of.items() if _drawn(e, self.halvings)}

    def forget(self, horizon: int) -> None:
        """Lets answers from before `horizon` go."""
        self.of = {e: told for e, told in self.of.items() if told[0] >= horizon}

    def count(self) -> dict[Any, int]:
        """Devices by answer."""
        found: dict[Any, int] = {}
        for _, answer in self.of.values():
            found[answer] = found.get(answer, 0) + 1
        return found

    def newest(self) -> int:
        return max((time for time, _ in self.of.values()), default=0)

    def snapshot(self) -> dict[str, Any]:
        return {"halvings": self.halvings, "of": {e: list(told) for e, told in self.of.items()}}


class Known(Poll):
    """Who gave the known answer of late (True), and who failed to within a day (False), whatever he did since."""

    def right(self, entity: str, time: int, lately: int) -> None:
        """lately: before then a wrong answer counts no more."""
        before = self.of.get(entity)
        if before is None or before[1] or before[0] < lately:
            self.tell(entity, time, True)

    def state(self, same: int) -> tuple[int, int, bool]:
        """Wrong and right devices, and whether the program is broken: more fail it than not, and in several places."""
        wrong = [e for e, (_, right) in self.of.items() if not right]
        right = len(self.of) - len(wrong)
        return len(wrong), right, len(wrong) > right and places(wrong) >= same


def _drawn(entity: str, halvings: int) -> bool:
    if not halvings:
        return True
    mixed = zlib.crc32(entity.encode()) * 0x9E3779B1 >> 12  # the multiplication parts names that differ in one place
    return not mixed & ((1 << halvings) - 1)
