"""What persons say to a running pipeline: notes, verdicts, mutes; and who may speak there. For the API's threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.config.sections import ANY, Config
from pipeline.engine.engine import Engine, Judge
from pipeline.incidents.arrivals import LiveDesk
from pipeline.incidents.cases import Change
from pipeline.model.errors import Retryable


class Notes:
    """The part of the service that persons talk to; `engine` is None until the store has been judged."""

    engine: Engine | None
    config: Config
    judge: Judge
    clock: Callable[[], int]

    def acknowledge(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        return self._note(lambda desk: desk.acknowledge(incident, user, comment, self.clock()))

    def comment(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        return self._note(lambda desk: desk.comment(incident, user, comment, self.clock()))

    def resolve(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        return self._note(lambda desk: desk.resolve(incident, user, comment, self.clock()))

    def not_a_fault(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        """Resolves it, and those of its detectors that learn take what they see there for normal."""
        return self._ready_engine().resolve_as_not_a_fault(incident, user, comment).incident.as_json()

    def mute(self, detector: str, scope: str, seconds: float, reason: str, user: str) -> Mapping[str, Any]:
        engine = self._ready_engine()
        made = engine.mute(detector, scope, seconds, reason, user)
        return {**made.as_json(), "warning": engine.describe_unknown_scope(scope)}

    def unmute(self, mute: str, user: str) -> Mapping[str, Any]:
        return self._ready_engine().unmute(mute, user).as_json()

    def detectors(self) -> Sequence[Mapping[str, Any]]:
        """The judge's rows, each with the rules of [[modes]] that it is under."""
        modes = self.modes()
        return [
            {**row, "modes": [m for m in modes if m["detector"] in (ANY, row["name"])]} for row in self.judge.listing()
        ]

    def modes(self) -> Sequence[Mapping[str, Any]]:
        return [{"detector": r.detector, "scope": r.scope, "mode": r.mode} for r in self.config.modes]

    def _note(self, change: Callable[[LiveDesk], Change]) -> Mapping[str, Any]:
        return self._ready_engine().apply_note(change).incident.as_json()

    def _ready_engine(self) -> Engine:
        if self.engine is None:
            raise Retryable("the pipeline is still judging what was stored before; try again", after_s=2.0)
        return self.engine
