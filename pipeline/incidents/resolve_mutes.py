"""After a person's resolve: a cause and detector say nothing more, unless louder, until they were quiet once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.model.records import LEVELS, Level


@dataclass(slots=True)
class Mutes:
    """(suspect, detector) -> when it was last found, and the level up to which it is mute.

    Bounded by the members of what persons resolve. A louder finding is news: who closed a suspect has seen no page.
    """

    quiet: int
    last: dict[tuple[str, str], tuple[int, Level]] = field(default_factory=dict)

    def add(self, suspect: str, detector: str, level: Level, time: int) -> None:
        """Of several conditions of a detector below one suspect the loudest counts."""
        _, before = self.last.get((suspect, detector), (0, level))
        self.last[suspect, detector] = time, max(before, level, key=LEVELS.index)

    def hold(self, chain: Sequence[str], detector: str, level: Level, time: int) -> bool:
        """Whether a finding is mute: its suspect, first in the chain, or what is above that.

        It keeps the mute of its own suspect alive, none above: else one bad port would mute its whole leaf for ever.
        """
        held = [
            (entity, detector)
            for entity in chain
            if (entity, detector) in self.last and LEVELS.index(level) <= LEVELS.index(self.last[entity, detector][1])
        ]
        self.last.update({key: (time, self.last[key][1]) for key in held if key[0] == chain[0]})
        return bool(held)

    def end(self, seen: Callable[[str], bool], time: int) -> None:
        """Ends the mutes that were quiet; while a suspect sends nothing, it is not quiet."""
        for (entity, detector), (last, level) in list(self.last.items()):
            if not seen(entity):
                self.last[entity, detector] = time, level
            elif time - last >= self.quiet:
                del self.last[entity, detector]

    def as_json(self) -> list[tuple[str, str, int, Level]]:
        return [(*key, last, level) for key, (last, level) in self.last.items()]

    def restore(self, rows: Iterable[Any]) -> None:
        """A row of an older version has no level: it holds everything, as it did."""
        self.last = {(row[0], row[1]): (row[2], row[3] if len(row) > 3 else LEVELS[-1]) for row in rows}
