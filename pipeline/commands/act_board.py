"""The board of acts of a running pipeline, with the facts of its engine and the newest telemetry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.acts.act import Act
from pipeline.acts.board import Board
from pipeline.acts.guards import Facts
from pipeline.api.heatmap import select_current
from pipeline.commands.link_soak import Soak, is_soak, judge_soak
from pipeline.commands.service import PipelineService
from pipeline.engine.act_facts import FactSource
from pipeline.engine.engine import Engine
from pipeline.model.entity_names import TITLE_LENGTH
from pipeline.model.errors import Refused
from pipeline.model.records import SECOND, Finding
from pipeline.model.signals import CATALOGUE

RECOVERY = CATALOGUE["gpu.recovery_action"]
WAIT_FOR_VALUES = 120 * SECOND
"""How long the last values of a link soak are waited for (us). Chosen: two samples of slow agents."""
RECOVERY_AGE = 86_400 * SECOND
"""Age of a recovery action beyond which it is unknown (us). Silence is no recovery, and a repaired node sends values
within seconds. Chosen: a day, so that a GPU that was removed does not block its node for long."""


class CheckedBoard(Board):
    """The board of a pipeline with telemetry: a link soak is verified by the counters of the links, not by its program.

    judge: what the counters say about a soak.
    """

    judge: Callable[[Act], Soak]

    def report(self, id_: str, state: str, who: str, result: Mapping[str, Any], comment: str = "") -> Act:
        """See `Board.report`. Raises Refused while the last values of a soak have not arrived: it is asked again."""
        act = self.find(id_)
        if state != "verified" or act.state != "verifying" or not is_soak(act):
            return super().report(id_, state, who, result, comment)
        soak, late = self.judge(act), self.clock() - act.updated > WAIT_FOR_VALUES
        if soak.waits and not late:
            raise Refused(f"act {id_}: waits for the last values of its links")
        said = {**result, "link_soak": soak.text}
        if soak.faults:
            return super().report(id_, "failed", who, {**said, "reason": f"link soak: {soak.text}"}, soak.text[:4000])
        return super().report(id_, "verified", who, said, soak.text[:4000])


def make_board(service: PipelineService, require_engine: Callable[[], Engine]) -> Board:
    """Returns the board. While the service starts, its calls raise Retryable."""

    def collect(act: Act) -> Facts:
        read = lambda names: read_recovery(service, names)  # noqa: E731
        return FactSource(require_engine(), service.config.acts, read).collect(act)

    def notify(title: str, text: str) -> None:
        engine, now = require_engine(), service.clock()
        entity = f"site:{service.config.site.name}"
        found = [Finding(now, now, entity, "acts", "ticket", 1.0, title[:TITLE_LENGTH], {"text": text})]
        engine.apply(lambda desk: desk.observe_own(now, found), [], found)

    def judge(act: Act) -> Soak:
        with contextlib.closing(service.database.cursor()) as cursor, service.database.lock:
            return judge_soak(cursor, service.topology, act)

    board = CheckedBoard(
        service.database, service.config.acts, service.clock, collect, lambda: count_nodes(service), notify=notify
    )
    board.judge = judge
    return board


def count_nodes(service: PipelineService) -> int:
    """Returns how many nodes the pipeline knows."""
    return len(service.devices.names("node"))


def read_recovery(service: PipelineService, names: tuple[str, ...]) -> Mapping[str, str]:
    """Returns what NVIDIA's driver recommends for the GPUs of nodes: the strongest action, by node."""
    devices = service.devices
    current = service.ingest.read_current("gpu", [RECOVERY.column])
    found = select_current(current, devices, RECOVERY, service.clock(), RECOVERY_AGE)
    strongest: dict[str, int] = {}
    for place, entity in enumerate(devices.names("gpu")):
        node = entity.partition(":")[2].rpartition(".")[0]
        if node in names and found.known[place]:
            strongest[node] = max(strongest.get(node, 0), _STRENGTH.get(int(found.values[place]), 0))
    return {node: RECOVERY.states[_BY_STRENGTH[strength]] for node, strength in strongest.items()}


_BY_STRENGTH = (0, 3, 1, 6, 4, 5, 2, 7)
"""Codes of the recovery action, weakest first: none, drain, resets of the GPU and bus, IMEX, reboots of the node."""
_STRENGTH: Mapping[int, int] = {code: strength for strength, code in enumerate(_BY_STRENGTH)}
