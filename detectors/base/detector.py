"""The base class of detectors; read this file before you write one.

A detector is a dataclass in a folder of `detectors/` and one line in `detectors/__init__.py`. The contract tests
(tests/detectors/test_contract.py) require a case with its fault in tests/detectors/cases/; `make docs` writes its page
from its docstring, which must contain `Source:`. Its ordinary fields are its configuration (`[detector.NAME]`); its
`memory()`, `notes()` and `part()` fields are its state (see detectors/base/state.py). It reports what is true now; only
the Desk keeps history.

    @dataclass
    class ColdAisle(Detector):
        # docstring: when it reports, what it compares with, its source

        name: ClassVar[str] = "cold_aisle"
        family: ClassVar[str] = "heat"
        device_class: ClassVar[str] = "sensor"
        needs: ClassVar[tuple[str, ...]] = ("sensor.temperature",)
        cannot_see: ClassVar[str] = "A rack that is warm as a whole."

        limit_k: float = 5.0
        warm_since: Any = memory(0, np.int64)
        conditions: OpenConditions = notes()

        def observe(self, frames):
            ...                                     # compare, then for each condition that holds:
            if due := due_report(self.conditions, entity, time, onset, "ticket"):
                found.append(self.finding(time, entity, due, score=k, summary=..., signals=..., clears=...))
            close_ended(self.conditions, holding)
            return found

What to use, all in detectors/base/ unless a path is given:

    peers                 cohorts.py: Cohorts (one kind of ancestor), SpanningCohorts (an ancestor of enough nodes, else
                          the whole fleet), Peers (several criteria); median of a cohort: statistics.grouped_median
    rate of a counter     the difference to the last value in a memory() field, by the seconds between the two readings;
                          counters.py for registers that can be full, and for values that fall back
    small lasting shifts  streams.py: a CUSUM against peers and own past, with a known false alarm rate
    announced maintenance gates.py; name event:maintenance_start and event:maintenance_end in `wants`
    when to report        findings.py: due_report, close_ended
    summary               pipeline/model/entity_names.py: pager_title
    budget                budget.py: override `budget` with rule_line for a rule without statistics

Values may all be NaN. Warnings are errors in the tests, also NumPy's of a median of nothing but NaN; grouped_median
returns NaN without one.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import budget_line
from detectors.base.calibration import Kinds, QuietTail
from detectors.base.cohorts import Peers
from detectors.base.findings import Comparison, build_finding
from detectors.base.state import Part, State, memory, notes, part, parts
from detectors.base.streams import Streams
from detectors.base.topology_index import members_mask
from pipeline.model.records import Event, Finding, Frame, Level
from pipeline.model.signals import Signal
from pipeline.model.topology import Topology

__all__ = ["Detector", "Part", "memory", "notes", "part", "parts"]
PER_NODE = {"gpu": 8, "rank": 8, "nic": 8, "nvlink": 8}
"""Devices of a class on a node of 8 GPUs, for the budget; one of all other classes. As in NVIDIA's DGX H100."""


@dataclass
class Detector(State, ABC):
    """Judges frames. Deterministic: the same frames give the same findings, whatever their batches.

    name:         in findings, configuration and labels. Its text before the first underscore decides which shared
                  causes explain its findings: `link` for `link_stall`; see FACTOR_KINDS in
                  pipeline/incidents/factors.py.
    family:       what kind of fault, in words for operators, shown in lists; equal for the detectors of one subject.
    device_class: class of the entities that the memory() arrays are about.
    needs:        signals without which it is off; `event:KIND` means events of that kind.
    any_of:       signals of which at least one must be present, or it is off.
    wants:        signals that only corroborate.
    cannot_see:   one sentence: what it cannot detect.
    on_arrival:   kinds of events that are a finding by themselves: judge_event gets them as they arrive.
    takes_unused_signals: it judges the signals that no other detector uses, and so chooses after them.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    device_class: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    any_of: ClassVar[tuple[str, ...]] = ()
    wants: ClassVar[tuple[str, ...]] = ()
    cannot_see: ClassVar[str]
    takes_unused_signals: ClassVar[bool] = False
    on_arrival: ClassVar[tuple[str, ...]] = ()

    def choose_signals(
        self, used: Collection[str], available: Collection[str] | None, catalogue: Mapping[str, Signal]
    ) -> list[str]:
        """Chooses its signals; returns those that it needs and the input lacks.

        used: signals of the other detectors.   available: signals of the input; None: all, as in a running pipeline,
        which must lead to the same choice as a recording of it.
        """
        return [] if available is None else self.missing_inputs(lambda name: name in available)

    def deciding_signals(self) -> tuple[str, ...]:
        """Returns the signals that decide whether it is off."""
        return (*self.needs, *self.any_of)

    def missing_inputs(self, present: Callable[[str], bool]) -> list[str]:
        """Returns the signals without which it is off; empty if it is on. present: whether the input has a signal."""
        missing = [name for name in self.needs if not present(name)]
        return missing if not self.any_of or any(map(present, self.any_of)) else [*missing, " or ".join(self.any_of)]

    def input_signals(self) -> tuple[str, ...]:
        """Returns the signals, and `event:KIND`, that its frames must have."""
        return (*self.needs, *self.any_of, *self.wants)

    @abstractmethod
    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns the findings that are due at this instant. frames: by device class, absent without samples or events.

        A condition is reported when it begins, when its level rises, and every minute while it holds, always with
        the onset of its first report (see `due_report`). Frames are read-only.
        """

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """Returns the finding that one event of `on_arrival` is by itself, before its frame is closed, or None.

        The finding depends on the event alone, and no state changes. It may be None for announced maintenance, or where
        the condition is reported already. `observe` gets the event with its frame and reports the same condition with
        the same onset; the Runner drops findings that were reported before.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Returns its name, inputs, settings and documentation as plain data."""
        return {
            "name": self.name,
            "family": self.family,
            "class": self.device_class,
            "needs": self.missing_inputs(lambda _: False),
            "wants": list(self.wants),
            "blind": self.cannot_see,
            "settings": {f.name: getattr(self, f.name) for f in fields(self) if f.init},
            "budget": self.budget(),
            "about": inspect.getdoc(self) or "",
        }

    def budget(self) -> list[str]:
        """Returns the false alarms that its statistical streams cost: a line for each metric, from its threshold."""
        count = PER_NODE.get(self.device_class, 1)
        channels = {name: s.channel for field, piece in self.declared_parts() for name, s in _streams(field, piece)}
        return [f"{name}: {budget_line(c, count)}" for name, c in channels.items()]

    def kinds(self, frame: Frame) -> Kinds:
        """Returns the kind of each device, its product, for `Streams.step`: kinds differ in how quiet they are."""
        peers: Peers = self.__dict__.setdefault("_kinds_of_devices", Peers(("@sku",), ("@model",), least=1))
        return peers.kinds(frame)

    def tails(self) -> dict[str, QuietTail]:
        """Returns its quiet tails by the name of the statistic, as `cores` or `shared.flow`."""
        found = ((path, piece) for path, piece in self.pieces() if isinstance(piece, QuietTail))
        return {path.removesuffix(".quiet"): tail for path, tail in found}

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Resets its parts for an entity, after a person said that its findings are not faults.

        A group (`rack:r1`, `job:7`, `fleet:gpu`, `site:all`) means its members. Parts declared `of` another device
        class are reset for the members of that class. Override it, and call it, where memory() or notes() of the
        detector itself must be reset too.
        """
        masks: dict[str, NDArray[np.bool_]] = {}
        for device_class, piece in self.parts_by_class(self.device_class):
            if device_class in frames and device_class not in masks:
                masks[device_class] = members_mask((entity,), frames[device_class])
            if device_class in masks and masks[device_class].any():
                piece.reset(masks[device_class])

    def drop_ranks(self, kept: NDArray[np.bool_]) -> None:
        """Forgets ranks that ended: frames of ranks lose their columns. kept: (N,) whether a column stays.

        Called after `restore` and before the next `observe`. Override it where cells are columns of ranks, which alone
        come and go with every job; call `State.keep_cells` there.
        """

    def finding(
        self,
        time: int,
        entity: str,
        due: tuple[int, Level],
        *,
        score: float,
        summary: str,
        signals: tuple[str, ...],
        clears: str,
        compared: Comparison | None = None,
        **evidence: Any,
    ) -> Finding:
        """Returns its finding of a condition that is due; see `build_finding`."""
        return build_finding(
            *(self.name, time, entity, due),
            score=score,
            summary=summary,
            signals=signals,
            clears=clears,
            compared=compared,
            **evidence,
        )


def _streams(name: str, piece: object) -> list[tuple[str, Streams]]:
    """Streams by name: a piece that is one, and those that it holds, one by one or by key."""
    if isinstance(piece, Streams):
        return [(name.strip("_"), piece)]
    held = piece if isinstance(piece, dict) else getattr(piece, "__dict__", {})
    return [
        (f"{name.strip('_')}.{key}", streams)
        for inner, value in held.items()
        if isinstance(value, (Streams, dict))
        for key, streams in _streams(str(inner), value)
    ]
