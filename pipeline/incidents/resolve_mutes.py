"""Mutes after a person resolved an incident: its cause and detectors stay muted until they clear once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.model.records import LEVELS, Level


@dataclass(slots=True)
class ResolveMutes:
    """(suspect, detector) -> time of the last finding, and the level up to which findings are muted.

    Bounded by the members of resolved incidents. A finding of a higher level is not muted.
    """

    quiet: int
    entries: dict[tuple[str, str], tuple[int, Level]] = field(default_factory=dict)

    def add(self, suspect: str, detector: str, level: Level, time: int) -> None:
        """Adds a mute. Of several conditions of a detector below one suspect the highest level counts."""
        _, before = self.entries.get((suspect, detector), (0, level))
        self.entries[suspect, detector] = time, max(before, level, key=LEVELS.index)

    def suppresses(self, chain: Sequence[str], detector: str, level: Level, time: int) -> bool:
        """Returns whether a finding is muted by its suspect, the first in the chain, or by anything above.

        It extends only the mute of its suspect, not those above: otherwise one bad port would mute its leaf for ever.
        """
        muting = [
            (entity, detector)
            for entity in chain
            if (entity, detector) in self.entries
            and LEVELS.index(level) <= LEVELS.index(self.entries[entity, detector][1])
        ]
        self.entries.update({key: (time, self.entries[key][1]) for key in muting if key[0] == chain[0]})
        return bool(muting)

    def expire(self, sends_telemetry: Callable[[str], bool], time: int) -> None:
        """Ends mutes after the quiet period; a suspect without telemetry is not quiet."""
        for (entity, detector), (last, level) in list(self.entries.items()):
            if not sends_telemetry(entity):
                self.entries[entity, detector] = time, level
            elif time - last >= self.quiet:
                del self.entries[entity, detector]

    def as_json(self) -> list[tuple[str, str, int, Level]]:
        """Returns the mutes as plain rows."""
        return [(*key, last, level) for key, (last, level) in self.entries.items()]

    def restore(self, rows: Iterable[Any]) -> None:
        """Restores rows of `as_json`. A row of an older version has no level: it mutes all levels."""
        self.entries = {(row[0], row[1]): (row[2], row[3] if len(row) > 3 else LEVELS[-1]) for row in rows}
