"""What the API needs from the pipeline service: a cursor, notes and mutes of people, receivers, and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

import duckdb

from pipeline.acts.board import Board
from pipeline.incidents.audit import Outcome
from pipeline.incidents.jobs import Pulse
from pipeline.ingest.topic_lag import TopicLag
from pipeline.model.records import Caller
from pipeline.model.topology import Topology
from pipeline.store.backup import Source
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues


class Sources(TypedDict):
    """Number of known agents and of silent ones, and of gaps and dead letters so far."""

    agents: int
    silent: int
    gaps: int
    dead_letters: int


class Health(TypedDict):
    """State of the pipeline. `watermark` is in UTC us; `lag_s` is the age of the oldest unread input.

    stalled: no new telemetry is evaluated; the unready reasons say why.
    """

    watermark: int | None
    backlog: bool
    lag_s: float | None
    stalled: bool
    sources: Sources


@dataclass(frozen=True, slots=True)
class SenderStates:
    """What ingest knows of the nodes that send, without those out of service.

    arrivals: node -> arrival of its newest message (UTC us).  newest: node -> newest event time of its telemetry.
    intervals: node -> event time between its last two messages (us), 0 if unknown.
    clock_errors: node -> error of its clock (us, above 0: ahead), only wrong clocks.
    newer: nodes whose agent is newer than the pipeline, so that their messages wait in their spools.
    """

    arrivals: Mapping[str, int]
    newest: Mapping[str, int]
    intervals: Mapping[str, int]
    clock_errors: Mapping[str, int]
    newer: tuple[str, ...]


Calibrated = Literal["pin", "unpin", "rollback"]


class Backend(Protocol):
    """The pipeline service for the API; all methods are thread-safe.

    Notes and mutes raise KeyError for an unknown id and return the incident or mute in the form of its `as_json`.
    """

    @property
    def topology(self) -> Topology:
        """The topology of the evaluation: inventory and [topology] file. The API only reads `parents`."""
        ...

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Returns a new cursor on the store, which the caller closes."""
        ...

    @property
    def backups(self) -> Source:
        """The store as the source of a backup."""
        ...

    @property
    def devices(self) -> Devices:
        """The devices of the store. The API only reads names and origins, which only grow."""
        ...

    def read_current(self, device_class: str, columns: Sequence[str] | None = None) -> CurrentValues:
        """Returns the newest value of each device, from memory. columns: None: all."""
        ...

    def read_pulses(self) -> Mapping[str, Pulse]:
        """Returns the newest step of each running job that reports steps, from memory."""
        ...

    def read_revision(self) -> object:
        """Returns a value that differs after each change of the stored incidents."""
        ...

    @property
    def acts(self) -> Board:
        """The board of acts on machines."""
        ...

    def acknowledge(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        """Acknowledges an incident."""
        ...

    def comment(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        """Adds a comment to an incident."""
        ...

    def resolve(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        """Resolves an incident."""
        ...

    def mark_normal(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        """Resolves an incident that is not a fault; learning detectors accept the state as normal."""
        ...

    def act(
        self, verb: str, incident: str, user: Caller, version: int | None, said: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Does what a person asked for to an incident, and returns it with its version. said: the body.

        Raises Outdated if the version is another one."""
        ...

    def change_silence(
        self, verb: str, kind: str, id_: str, user: Caller, version: int | None, said: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Adds, edits or expires a silence or maintenance window. said: the body, with times in us."""
        ...

    def warn_unknown_scopes(self, scopes: Sequence[str]) -> str:
        """Returns a warning about unknown entities; empty if all are known."""
        ...

    def preview_silence(self, matchers: Sequence[str | Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Returns the open incidents that matchers match now."""
        ...

    def read_reservations(self) -> Mapping[str, Any]:
        """Returns the state of Slurm's maintenance reservations, in the form of `people_routes.Reservations`."""
        ...

    def record_refusal(self, user: Caller, action: str, reason: str) -> None:
        """Adds an attempt without the right to the audit."""
        ...

    def record_act(self, user: Caller, action: str, target: str, reason: str = "", outcome: Outcome = "done") -> None:
        """Adds an act that changes no incident to the audit."""
        ...

    def add_mute(self, detector: str, scope: str, seconds: float, reason: str, user: str) -> Mapping[str, Any]:
        """Adds a mute."""
        ...

    def end_mute(self, mute: str, user: str, version: int | None = None) -> Mapping[str, Any]:
        """Ends a mute now."""
        ...

    def list_decommissioned(self) -> Sequence[Mapping[str, Any]]:
        """Returns nodes that were taken out of service, also returned ones; newest first."""
        ...

    def decommission_node(self, node: str, user: str, reason: str) -> Mapping[str, Any]:
        """Takes a node out of service for good; adds `incidents`, how many it resolved. Raises UsageError."""
        ...

    def return_node(self, node: str, user: str) -> Mapping[str, Any]:
        """Puts a node back into service. Raises KeyError if it is not decommissioned."""
        ...

    def list_detectors(self) -> Sequence[Mapping[str, Any]]:
        """Returns one row per detector, in the form of `models.Detector`."""
        ...

    def read_calibration(self, other: int | None) -> Mapping[str, Any]:
        """Returns the calibration and its versions, in the form of `models.Calibration`."""
        ...

    def export_calibration(self, version: int | None) -> Mapping[str, Any]:
        """Returns a version of the calibration, or the one in force, as a document for replay."""
        ...

    def change_calibration(
        self, action: Calibrated, version: int | None, user: str, expected: int | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Pins, unpins or rolls back the calibration; returns the versions."""
        ...

    def list_budgets(self) -> Sequence[Mapping[str, Any]]:
        """Returns the page budget of each detector, in the form of `PageBudget` of the API without its pages."""
        ...

    def reset_budget(self, detector: str, user: str) -> Sequence[Mapping[str, Any]]:
        """Forgets the wrong pages of a detector until now; returns the budgets."""
        ...

    def list_receivers(self) -> Sequence[Mapping[str, Any]]:
        """Returns one row per endpoint of a receiver, in the form of `notifications.ReceiverState`."""
        ...

    def replay_notifications(self, ids: Sequence[str], receiver: str | None, user: str) -> Sequence[Mapping[str, Any]]:
        """Sends dead messages again; returns those that are."""
        ...

    def receive_pagerduty(self, name: str, signature: str, body: bytes, origin: str) -> str:
        """Applies an event of PagerDuty that came from `origin`; returns the changes. Raises KeyError,
        PermissionError, ValueError."""
        ...

    def list_modes(self) -> Sequence[Mapping[str, Any]]:
        """Returns the rules of [[modes]] in their order."""
        ...

    def read_health(self) -> Health:
        """Returns the state of the pipeline."""
        ...

    def read_senders(self) -> SenderStates:
        """Returns the state of every node that sends."""
        ...

    def read_lags(self) -> Mapping[str, TopicLag]:
        """Returns topic -> how long its messages took to the store, of the last minutes."""
        ...

    def list_unready_reasons(self) -> list[str]:
        """Returns why the pipeline is not ready; empty if it is."""
        ...

    def list_evaluation_faults(self) -> list[str]:
        """Returns why incidents may be missing: why the pipeline is not ready, apart from receivers."""
        ...

    def read_counters(self) -> Mapping[str, float]:
        """Returns Prometheus names, with labels such as `fleetpulse_rows_total{class="gpu"}`, and their values."""
        ...
