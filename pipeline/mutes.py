"""After a person's resolve: a cause and detector say nothing more until they were quiet once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Mutes:
    """(suspect, detector) -> when it was last found; bounded by the members of what persons resolve."""

    quiet: int
    last: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, suspect: str, detector: str, time: int) -> None:
        self.last[suspect, detector] = time

    def hold(self, chain: Iterable[str], detector: str, time: int) -> bool:
        """Whether a finding below these suspects is mute; it keeps the mute alive."""
        held = [(entity, detector) for entity in chain if (entity, detector) in self.last]
        self.last.update(dict.fromkeys(held, time))
        return bool(held)

    def end(self, seen: Callable[[str], bool], time: int) -> None:
        """Ends the mutes that were quiet; while a suspect sends nothing, it is not quiet."""
        for (entity, detector), last in list(self.last.items()):
            if not seen(entity):
                self.last[entity, detector] = time
            elif time - last >= self.quiet:
                del self.last[entity, detector]

    def as_json(self) -> list[tuple[str, str, int]]:
        return [(*key, last) for key, last in self.last.items()]

    def restore(self, rows: Iterable[tuple[str, str, int]]) -> None:
        self.last = {(suspect, detector): last for suspect, detector, last in rows}
