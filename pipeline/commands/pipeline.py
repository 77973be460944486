"""`fleetpulse pipeline`: runs the service with API and notifier; the backend of the API."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from pipeline.api.backend import Health, SenderStates, Sources
from pipeline.commands.act_board import make_board
from pipeline.commands.newer_agents import SILENCE_LIMIT
from pipeline.commands.reservations import ReservationWatch
from pipeline.commands.service import COMMIT_LIMIT, PipelineService
from pipeline.config.sections import ANY
from pipeline.engine import decommission
from pipeline.engine.act_policies import PolicyProposer
from pipeline.engine.engine import Engine
from pipeline.engine.people import Calibrated, People
from pipeline.incidents import calibrations, ledger
from pipeline.incidents.audit import AuditEntry, Outcome, write_audit
from pipeline.incidents.jobs import Pulse
from pipeline.incidents.matchers import parse_matchers
from pipeline.ingest.admission import RULES
from pipeline.ingest.topic_lag import TopicLag
from pipeline.model.errors import Retryable, UsageError
from pipeline.model.plain_text import make_printable, strip_codes
from pipeline.model.records import SECOND, Caller, Event
from pipeline.model.topology import Topology
from pipeline.notify import held_rows
from pipeline.notify.dead_messages import replay_payloads
from pipeline.notify.groups import GROUP_PREFIX
from pipeline.notify.receivers import InboundEvent
from pipeline.store.backup import Source
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues
from pipeline.store.retention import count_losses

log = logging.getLogger("fleetpulse.pipeline")
MOST_REPLAYED = 5000
"""Messages among which those that are sent again are shown. Chosen: more than a receiver is refused in a day."""


class PipelineBackend:
    """What the API reads from a running service, and the notes and mutes that people write. See
    `api.backend.Backend`."""

    def __init__(self, service: PipelineService) -> None:
        self._service = service
        self.reservations = ReservationWatch(service.config.incidents.slurm_seconds)
        self._losses: tuple[object, tuple[int, int]] = (None, (0, 0))  # gaps and dead letters, and since when
        self.acts = make_board(service, self._require_engine)
        self.propose_acts = PolicyProposer(self.acts, lambda: service.engine).run

    @property
    def topology(self) -> Topology:
        """See `Backend.topology`."""
        return self._service.topology

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """See `Backend.cursor`."""
        return self._service.database.cursor()

    @property
    def backups(self) -> Source:
        """See `Backend.backups`."""
        return self._service.backups

    @property
    def devices(self) -> Devices:
        """See `Backend.devices`."""
        return self._service.devices

    def read_current(self, device_class: str, columns: Sequence[str] | None = None) -> CurrentValues:
        """See `Backend.read_current`."""
        return self._service.ingest.read_current(device_class, columns)

    def read_pulses(self) -> Mapping[str, Pulse]:
        """See `Backend.read_pulses`."""
        engine = self._service.engine
        return {} if engine is None else engine.impact.jobs.pulses

    def read_revision(self) -> object:
        """See `Backend.read_revision`."""
        engine = self._service.engine
        return engine, 0 if engine is None else engine.visible_revision, self._service.retention_at

    # --- notes and mutes ----------------------------------------------------------------------------

    def acknowledge(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        """See `Desk.acknowledge`."""
        return self.people.acknowledge(incident, user, comment).as_json()

    def comment(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        """See `Desk.comment`."""
        return self.people.comment(incident, user, comment).as_json()

    def resolve(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        """See `Desk.resolve`."""
        return self.people.resolve(incident, user, comment).as_json()

    def mark_normal(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        """Resolves an incident; its learning detectors accept the state as normal."""
        return self.people.mark_normal(incident, user, comment).as_json()

    def add_mute(self, detector: str, scope: str, seconds: float, reason: str, user: str) -> Mapping[str, Any]:
        """Adds a mute. Raises UsageError if it is invalid."""
        made = self.people.mute(detector, scope, seconds, reason, user)
        return {**made.as_json(), "warning": self.people.describe_unknown_scopes((scope,))}

    def end_mute(self, mute: str, user: str, version: int | None = None) -> Mapping[str, Any]:
        """Ends a mute now. Raises KeyError if it is not active."""
        return self.people.unmute(mute, user, version).as_json()

    # --- nodes --------------------------------------------------------------------------------------

    def list_decommissioned(self) -> Sequence[Mapping[str, Any]]:
        """See `Backend.list_decommissioned`."""
        with contextlib.closing(self.cursor()) as cursor:
            return [row.as_json() for row in decommission.list_decommissions(cursor)]

    def decommission_node(self, node: str, user: str, reason: str) -> Mapping[str, Any]:
        """Takes a node out of service and resolves its incidents. If it was, resolves what a kill left open."""
        engine, now = self._require_engine(), self._service.clock()
        with engine.lock:
            known = engine.decommissioned
            if node not in known.nodes:
                decommission.check_node(node, reason, engine.devices.has_device, len(known.nodes))
                row = decommission.Decommission(node, now, user, reason.strip())
                write = _audited(decommission.add_row(row), AuditEntry(user, "decommission node", node, reason), now)
                engine.change_service(row, decommission.announce(row, now), write)
            why = f"node {node} decommissioned: {known.nodes[node].reason}"
            self._service.site_silence.forget(node)
            concerned = known.find_concerned(engine.life.shown.values(), self._service.site_silence.list_retired())
            for incident in concerned:
                self.people.resolve(incident, user, why)
        return {**known.nodes[node].as_json(), "incidents": len(concerned)}

    def return_node(self, node: str, user: str) -> Mapping[str, Any]:
        """See `Backend.return_node`."""
        engine, now = self._require_engine(), self._service.clock()
        with engine.lock:
            row = decommission.end(engine.decommissioned.nodes[node], now, user)
            over = Event(now, f"node:{node}", "maintenance_end", {"reason": f"returned by {user}"})
            entry = AuditEntry(user, "return node", node)
            engine.change_service(row, over, _audited(decommission.end_row(row), entry, now))
        return {**row.as_json(), "incidents": 0}

    def act(
        self, verb: str, incident: str, user: Caller, version: int | None, said: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """See `Backend.act`."""
        made = self.people.act(verb, incident, user, version, said)
        return {**made.as_json(), "version": self.people.read_version(made.id)}

    def change_silence(
        self, verb: str, kind: str, id_: str, user: Caller, version: int | None, said: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """See `Backend.change_silence`."""
        made = self.people.change_silence(verb, kind, id_, user, version, said)
        return made.as_json(self._service.clock())

    def warn_unknown_scopes(self, scopes: Sequence[str]) -> str:
        """See `Backend.warn_unknown_scopes`."""
        return self.people.describe_unknown_scopes(scopes) if scopes else ""

    def preview_silence(self, matchers: Sequence[str | Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """See `Backend.preview_silence`."""
        return [i.as_json() for i in self.people.preview_silence(parse_matchers(matchers))]

    def read_reservations(self) -> Mapping[str, Any]:
        """See `Backend.read_reservations`."""
        return self.reservations.as_json()

    def record_refusal(self, user: Caller, action: str, reason: str) -> None:
        """See `Backend.record_refusal`. While the service starts, the log has it."""
        if self._service.engine is not None:
            self.people.record_audit(user, action, "", reason, "refused")

    def record_act(self, user: Caller, action: str, target: str, reason: str = "", outcome: Outcome = "done") -> None:
        """See `Backend.record_act`. Raises Retryable while the service starts."""
        self.people.record_audit(user, action, target, reason, outcome)

    @property
    def people(self) -> People:
        """What people do to incidents, silences and settings. Raises Retryable while the service starts."""
        return People(self._require_engine())

    def _require_engine(self) -> Engine:
        """Returns the engine. Raises Retryable while the service starts."""
        engine = self._service.engine
        if engine is None:
            raise Retryable(
                "the pipeline is starting: detectors are compiled, then stored data is evaluated; try again",
                after_s=2.0,
            )
        return engine

    # --- state --------------------------------------------------------------------------------------

    def list_detectors(self) -> Sequence[Mapping[str, Any]]:
        """Returns one row per detector, with the rules of [[modes]] that apply to it."""
        modes = self.list_modes()
        rows = self._service.judge.listing()
        return [{**row, "modes": [m for m in modes if m["detector"] in (ANY, row["name"])]} for row in rows]

    def read_calibration(self, other: int | None) -> Mapping[str, Any]:
        """Returns the calibration as rows with the pages of a week, beside those of version `other`; and versions."""
        week_ago = self._service.clock() - 7 * 86_400 * SECOND
        with contextlib.closing(self.cursor()) as cursor:
            compared = None if other is None else calibrations.load_calibration(cursor, other)
            versions, pages = calibrations.list_calibrations(cursor), calibrations.list_pages(cursor, week_ago)
        rows = self._service.judge.calibration_rows(compared)
        for row in rows:
            effects = [effect for name, effect in pages if name == row["detector"]]
            row["pages"], least = len(effects), row.pop("other_least_effect", None)
            known = other is not None and least is not None
            row |= {"other_least_effect": least, "other_pages": _count_kept(effects, least) if known else None}
        return {"rows": rows, "versions": versions}

    def export_calibration(self, version: int | None) -> Mapping[str, Any]:
        """Returns a version as a document, or the one in force now. Raises KeyError without that version."""
        if version is None:
            return self._service.judge.calibration()
        with contextlib.closing(self.cursor()) as cursor:
            return calibrations.load_calibration(cursor, version)

    def change_calibration(
        self, action: Calibrated, version: int | None, user: str, expected: int | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Pins, unpins or rolls back; returns the versions. Raises KeyError without that version."""
        return self.people.change_calibration(action, version, user, expected)

    def list_budgets(self) -> Sequence[Mapping[str, Any]]:
        """Returns the page budget of each detector."""
        return self._require_engine().list_budgets()

    def reset_budget(self, detector: str, user: str) -> Sequence[Mapping[str, Any]]:
        """Forgets the wrong pages of a detector until now. Raises UsageError if it is unknown."""
        return self.people.reset_budget(detector, user)

    # --- receivers ----------------------------------------------------------------------------------

    def list_receivers(self) -> Sequence[Mapping[str, Any]]:
        """Returns the state of each endpoint of a receiver."""
        with contextlib.closing(self.cursor()) as cursor:
            return self._service.notifier.list_receivers(ledger.count_payloads(cursor))

    def replay_notifications(self, ids: Sequence[str], receiver: str | None, user: str) -> Sequence[Mapping[str, Any]]:
        """Sends dead messages again. Raises UsageError if the receiver is not configured."""
        service = self._service
        if receiver is not None and receiver not in service.notifier.receivers:
            known = ", ".join(service.notifier.receivers) or "none"
            raise UsageError(f"receiver {receiver!r} is not configured; known: {known}")
        with service.database.transaction() as connection:
            entry = AuditEntry(user, "replay notifications", receiver or ", ".join(ids))
            write_audit(connection, [entry], service.clock())
        holding = service.notifier.holding
        found = replay_payloads(service.database, ids, receiver, user, service.clock(), holding)
        service.notifier.write_missed()  # its incident may have ended while the receiver was not configured
        log.info("%d dead messages are sent again, by %s", len(found), user)
        service.notifier.wake()
        with contextlib.closing(self.cursor()) as cursor:
            rows = ledger.list_notifications(cursor, most=MOST_REPLAYED)
        return [row for row in rows if row["id"] in found]

    def receive_pagerduty(self, name: str, signature: str, body: bytes, origin: str) -> str:
        """Acknowledges what a person acknowledged in PagerDuty; everything else that a person did is a comment."""
        event = self._service.notifier.receivers[name].read_webhook(signature, body)
        if not event.person or not event.incident:
            return "nothing: no person did this, or to no incident of ours"
        incidents = [event.incident]
        if event.incident.startswith(GROUP_PREFIX):
            with contextlib.closing(self.cursor()) as cursor:
                incidents = held_rows.list_group_incidents(cursor, name, event.incident)
        who, origin = make_printable(event.person).strip() or "unknown", f"{origin} via receiver {name}"
        person = Caller(who, "operator", origin, receiver=name)
        done = [one for one in incidents if self._apply_pagerduty(event, person, one)]
        return f"{event.kind} by {event.person}: {', '.join(done) or 'nothing to change'}"

    def _apply_pagerduty(self, event: InboundEvent, person: Caller, incident: str) -> bool:
        """Returns whether the event changed an incident; a repeated one changes nothing."""
        with contextlib.closing(self.cursor()) as cursor:
            try:
                known = ledger.read_incident(cursor, incident)
            except KeyError:
                return False
        text = f"{event.kind} in PagerDuty"
        if any(row["actor"] == person and event.id in row["comment"] for row in known["history"]):
            return False
        if event.kind == "acknowledged" and known["state"] == "open":
            self.acknowledge(incident, person, f"{text} ({event.id})")
        elif event.kind in ("acknowledged", "unacknowledged", "resolved", "reassigned", "escalated", "annotated"):
            said = f": {strip_codes(event.comment)}" if event.comment else ""
            self.comment(incident, person, f"{text} ({event.id}){said}")
        else:
            return False
        return True

    def list_modes(self) -> Sequence[Mapping[str, Any]]:
        """Returns the rules of [[modes]]."""
        rules = self._service.config.modes
        return [{"detector": r.detector, "scope": r.scope, "mode": r.mode} for r in rules]

    def list_unready_reasons(self) -> list[str]:
        """Returns why the pipeline is not ready; empty if it is."""
        return self._service.list_unready_reasons()

    def list_evaluation_faults(self) -> list[str]:
        """Returns why incidents may be missing: why the pipeline is not ready, apart from receivers."""
        return self._service.list_evaluation_faults()

    def read_health(self) -> Health:
        """Returns watermark, backlog, lag, stall, and counts of agents and losses."""
        service = self._service
        engine, progress, now = service.engine, service.ingest.progress, service.clock()
        newest, waiting = progress.newest, progress.backlog
        lateness = int(service.config.pipeline.lateness * SECOND)
        due = max(service.compute_watermark() or 0, (newest or 0) - lateness)
        unevaluated = max(due - service.evaluated, service.evaluating)  # in the order in which data passes
        return {
            "watermark": engine.progress.judged if engine and engine.progress.judged > 0 else None,
            "backlog": engine is None or waiting is not None or unevaluated > COMMIT_LIMIT,
            "lag_s": None if (oldest := waiting or newest) is None else max(0.0, (now - oldest) / SECOND),
            "stalled": service.is_stalled(),
            "sources": self._count_sources(),
        }

    def read_senders(self) -> SenderStates:
        """See `Backend.read_senders`."""
        ingest = self._service.ingest
        progress = ingest.progress
        arrivals = self._service.decommissioned.keep_senders(progress.arrivals)
        intervals = {node: ingest.senders.interval_of(node) for node in arrivals}
        return SenderStates(arrivals, progress.nodes, intervals, progress.clock_errors, progress.newer)

    def read_lags(self) -> Mapping[str, TopicLag]:
        """Returns topic -> how long its messages took to the store, of the last minutes."""
        return self._service.ingest.lags.summarize(self._service.clock())

    def _count_sources(self) -> Sources:
        ingest = self._service.ingest
        nodes = self._service.decommissioned.keep_senders(ingest.progress.nodes)
        state = ingest, ingest.counters["commits"], self._service.retention_at
        if self._losses[0] != state:
            with contextlib.closing(self.cursor()) as cursor:
                self._losses = state, count_losses(cursor)
        gaps, letters = self._losses[1]
        silent = sum(self._service.clock() - time > SILENCE_LIMIT for time in nodes.values())
        return {"agents": len(nodes), "silent": silent, "gaps": gaps, "dead_letters": letters}

    def read_counters(self) -> Mapping[str, float]:
        """Returns the metrics of /metrics by name with labels."""
        service, health = self._service, self.read_health()
        ingest, engine = service.ingest, service.engine
        out = {f"fleetpulse_ingest_{name}_total": float(n) for name, n in list(ingest.counters.items())}
        out |= {f'fleetpulse_ingest_rejected_total{{rule="{name}"}}': float(ingest.rejected[name]) for name in RULES}
        foreign = "fleetpulse_ingest_foreign_rejected_total"
        out |= {f'{foreign}{{rule="{name}"}}': float(ingest.foreign_rejected[name]) for name in RULES}
        with contextlib.closing(self.cursor()) as cursor:
            payloads = ledger.count_payloads(cursor)
        for (receiver, state), number in sorted(payloads.items()):
            out[f'fleetpulse_outbox{{receiver="{receiver}",state="{state}"}}'] = float(number)
        out |= service.sealer.count()
        problems = (service.database.find_space_problem(), service.database.find_space_problem(events=True))
        out["fleetpulse_ingest_shed_seconds_total"] = ingest.shed_seconds
        out["fleetpulse_store_shedding"] = float(sum(map(bool, problems)))
        out["fleetpulse_store_entities_skipped"] = float(service.skipped)
        out |= service.site.count() | self.reservations.count()
        out["fleetpulse_ready"] = float(not self.list_unready_reasons())
        out["fleetpulse_lag_seconds"] = health["lag_s"] or 0.0
        out["fleetpulse_heartbeat_age_seconds"] = service.progress.heartbeat.age_s
        out["fleetpulse_sites_silent"] = float(len(service.site_silence.silent))
        out["fleetpulse_agents"] = health["sources"]["agents"]
        out["fleetpulse_clocks_wrong"] = float(len(ingest.progress.clock_errors))
        out["fleetpulse_agents_newer"] = float(len(ingest.progress.newer))
        out["fleetpulse_dead_letter_bytes"] = float(ingest.letter_limits.stored)
        out["fleetpulse_agents_silent"] = health["sources"]["silent"]
        if engine is not None:
            late = engine.framer.late
            out |= {f'fleetpulse_rows_late_total{{class="{c}"}}': float(n) for c, n in sorted(late.items())}
            if engine.progress.judged > 0:
                out["fleetpulse_judged_up_to_timestamp_seconds"] = engine.progress.judged / SECOND
            out["fleetpulse_nodes_decommissioned"] = float(len(engine.decommissioned.nodes))
            out["fleetpulse_decommissioned_rows_total"] = float(engine.decommissioned.rows)
            out["fleetpulse_decommissioned_events_total"] = float(engine.decommissioned.events)
            out["fleetpulse_desk_faults_total"] = float(engine.faults)
            out["fleetpulse_rows_unjudged"] = float(engine.unjudged)
        for row in service.judge.listing():
            out[f'fleetpulse_detector_errors_total{{detector="{row["name"]}"}}'] = float(row["errors"])
        return out


def _audited(write: decommission.Write, entry: AuditEntry, now: int) -> decommission.Write:
    """Returns a write that also adds its row of the audit, in the same transaction."""

    def both(connection: duckdb.DuckDBPyConnection) -> None:
        write(connection)
        write_audit(connection, [entry], now)

    return both


def _count_kept(effects: Sequence[float | None], least: float) -> int:
    """Returns how many pages had at least an effect; those without one compare nothing and stay."""
    return sum(effect is None or abs(effect) >= least for effect in effects)
