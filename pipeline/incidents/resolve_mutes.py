"""What stays muted after a person resolved an incident whose condition goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.judging.mutes import MAX_MUTE_US
from pipeline.model.records import LEVELS, Level


@dataclass(slots=True)
class ResolveMutes:
    """(suspect, detector) -> time of the last finding, the level up to which findings are muted, and since when.

    Bounded by the members of resolved incidents, and by MAX_MUTE_US. A finding of a higher level is not muted.
    """

    quiet: int
    entries: dict[tuple[str, str], tuple[int, Level, int]] = field(default_factory=dict)

    def add(self, suspect: str, detector: str, level: Level, time: int) -> None:
        """Adds a mute. Of several conditions of a detector below one suspect the highest level counts."""
        before = self.entries.get((suspect, detector), (0, level, 0))[1]
        self.entries[suspect, detector] = time, max(before, level, key=LEVELS.index), time

    def end(self, detector: str, suspects: Iterable[str]) -> None:
        """Ends the mutes of a detector on suspects."""
        for suspect in suspects:
            self.entries.pop((suspect, detector), None)

    def suppresses(self, chain: Sequence[str], detector: str, level: Level, time: int) -> bool:
        """Returns whether a finding is muted by its suspect, the first in the chain, or by anything above.

        It extends only the mute of its suspect, not those above: otherwise one bad port would mute its leaf forever.
        """
        muting = [
            (entity, detector)
            for entity in chain
            if (entity, detector) in self.entries
            and LEVELS.index(level) <= LEVELS.index(self.entries[entity, detector][1])
        ]
        self.entries.update({key: (time, *self.entries[key][1:]) for key in muting if key[0] == chain[0]})
        return bool(muting)

    def expire(self, sends_telemetry: Callable[[str], bool], time: int) -> None:
        """Ends mutes after the quiet period, in which the suspect must send telemetry, and the longest ones."""
        for (entity, detector), (last, level, since) in list(self.entries.items()):
            if time - since >= MAX_MUTE_US:
                del self.entries[entity, detector]
            elif not sends_telemetry(entity):
                self.entries[entity, detector] = time, level, since
            elif time - last >= self.quiet:
                del self.entries[entity, detector]

    def as_json(self) -> list[tuple[str, str, int, Level, int]]:
        """Returns the mutes as plain rows."""
        return [(*key, *entry) for key, entry in self.entries.items()]

    def restore(self, rows: Iterable[Any]) -> None:
        """Restores rows of `as_json`. A row of an older version has no level: it mutes all levels; or no start:
        it starts with its last finding."""
        self.entries = {
            (row[0], row[1]): (row[2], row[3] if len(row) > 3 else LEVELS[-1], row[4] if len(row) > 4 else row[2])
            for row in rows
        }
