"""Which executor is at work, and what it says that its acts wait for.

In memory only: the executor says both with each poll, so that a restarted pipeline knows them immediately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.acts.act import Act
from pipeline.model.entity_names import short_duration
from pipeline.model.errors import Refused
from pipeline.model.records import SECOND

LEASE_S = 30.0
"""How long an executor that no longer asks keeps the right to act (s). Chosen: six polls."""
_PEOPLE = ("awaiting_approval", "verified", "refused", "expired", "cancelled", "failed", "rolled_back")
"""States in which an act waits for no executor."""


@dataclass
class Lease:
    """The right of one executor to act. holder: its name and process.   asked: when it last asked for work (UTC us).

    waits: what its acts wait for, by act.
    """

    holder: tuple[str, str] = ("", "")
    asked: int = 0
    waits: Mapping[str, str] = field(default_factory=dict)

    def take(self, who: str, instance: str, waits: Mapping[str, str], now: int) -> None:
        """Gives the right to an executor for `LEASE_S`. Raises Refused while another one has it."""
        if self.holder not in (("", ""), (who, instance)) and self._is_held(now):
            other = self.holder[0] if self.holder[0] != who else "another process of this name"
            raise Refused(f"executor {who}: {other} is at work, until it has been quiet for {LEASE_S:g} s")
        self.holder, self.asked, self.waits = (who, instance), now, dict(waits)

    def check(self, who: str, instance: str, now: int) -> None:
        """Prolongs the right of the executor that asked for work last. Raises Refused for one that was slow, so that
        another one has asked since, however long ago: both would see the same nodes in service, and take out more than
        the guards allow. Nothing is known of any in a pipeline that was just started: then the first one gets it.

        instance: "" of an older executor.
        """
        if self.holder == ("", ""):
            self.holder = (who, instance)
        if who != self.holder[0] or instance not in ("", self.holder[1]):
            raise Refused(f"executor {who}: another one asked for work in between; nothing was begun, it tries again")
        self.asked = now

    def keep(self, who: str, now: int) -> None:
        """Prolongs the right of the executor that is at work: it says what it does, in a round that may be long."""
        if who == self.holder[0] and (self._is_held(now) or now < self.asked):  # the clock went back
            self.asked = now

    def find_wait(self, act: Act, now: int) -> str:
        """Returns what an act waits for that the executor has to go on with; "" if nothing is known."""
        if act.state in _PEOPLE or not act.is_open:
            return ""
        if self._is_held(now):
            return self.waits.get(act.id, "")
        if not self.asked:
            return "no executor has asked for work since the pipeline started"
        quiet = short_duration(max(now - self.asked, 0) / SECOND)
        return f"executor {self.holder[0]} has not asked for work for {quiet}"

    def _is_held(self, now: int) -> bool:
        """Returns whether it asked within LEASE_S; a time ahead is from before a backward step of the clock."""
        return self.asked > 0 and 0 <= now - self.asked < LEASE_S * SECOND
