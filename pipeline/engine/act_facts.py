"""What the pipeline knows about the targets of an act, for the guards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import duckdb

from pipeline.acts import ledger
from pipeline.acts.act import POLICY, Act
from pipeline.acts.guards import Facts
from pipeline.config.acts import Acts
from pipeline.engine.act_checks import find_checks
from pipeline.engine.engine import Engine
from pipeline.model.records import SECOND
from pipeline.model.topology import kind_of

RECENT = 600 * SECOND
"""Window of the guard `acts_per_10_minutes` (us)."""
SINGLE = frozenset(
    {"gpu", "node", "port", "nic", "nvlink", "cpu", "disk", "dimm", "psu", "bmc", "sensor", "job", "rank"}
)
"""Kinds of causes that are one node or less, or no hardware: they need no plan for a group."""
_CHECKPOINTS = """
SELECT DISTINCT split_part(entity, ':', 2) FROM events
WHERE kind = 'checkpoint' AND time >= make_timestamptz($1::BIGINT)"""


class FactSource:
    """Collects the facts of an act from a running engine. read_recovery: what the driver recommends, by node."""

    def __init__(
        self,
        engine: Engine,
        config: Acts,
        read_recovery: Callable[[tuple[str, ...]], Mapping[str, str]] = lambda names: {},
    ) -> None:
        self._engine, self._config, self._read_recovery = engine, config, read_recovery

    def collect(self, act: Act) -> Facts:
        """Returns the facts as they are now."""
        engine, names = self._engine, tuple(target.partition(":")[2] for target in act.targets)
        waits = act.when == "after_checkpoint" and bool(act.approvals)
        with engine.lock:
            condition, cause, below = self._describe_incident(act.incident)
            silent = frozenset(name for name in names if not engine.has_telemetry(f"node:{name}"))
            racks, domains = self._group("rack", names), self._group("chassis", names)
            running, gpus = (self._list_running(names) if waits else {}), {n: self._list_gpus(n) for n in names}
        connection = engine.database.connection
        with engine.database.lock:
            acts = ledger.load_acts(connection, only_open=True)
            recent = ledger.count_steps(connection, ["executing"], engine.clock() - RECENT, besides=act.id)
            held = {target.partition(":")[2]: other for other in acts for target in other.held}
            begun = find_held_since(connection, {name: held[name] for name in names if name in held})
            checks = find_checks(connection, begun, gpus)
            relapses = find_relapses(connection, begun, self._config.burn_in_days) if act.verb == "release" else {}
            written = connection.execute(_CHECKPOINTS, [find_approved(act)]).fetchall() if waits else []
            breaker = ledger.read_breaker(connection)
        return Facts(
            racks=racks,
            domains=domains,
            automatic=act.requested_by.startswith(POLICY),
            condition=condition,
            cause=cause,
            cause_nodes=below,
            silent=silent,
            leaving=find_leaving(acts, act),
            open_acts={t.partition(":")[2]: a.id for a in acts if a.id != act.id and is_at_work(a) for t in a.targets},
            recent=recent,
            excluded=self._config.excluded,
            recovery=self._read_recovery(names),
            held={name: other.id for name, other in held.items()},
            checks={name: found.passed for name, found in checks.items() if found.passed},
            breaker=breaker,
            checkpoints=frozenset(job for (job,) in written),
            running=running,
            relapses=relapses,
            deep_checks=frozenset(name for name, found in checks.items() if found.deep),
            failed_checks={name: found.failed for name, found in checks.items() if found.failed},
        )

    def _describe_incident(self, id_: str) -> tuple[str, str, frozenset[str]]:
        """Returns whether its condition is open, its cause, and the nodes below a cause that is a group."""
        found = self._engine.life.shown.get(id_) if id_ else None
        if found is None:
            return ("cleared" if id_ else ""), "", frozenset()
        state = "open" if found.resolved is None else "cleared"
        if kind_of(found.cause) in SINGLE:
            return state, found.cause, frozenset()
        below = self._engine.topology.descendants(found.cause)
        return state, found.cause, frozenset(e.partition(":")[2] for e in below if kind_of(e) == "node")

    def _group(self, kind: str, names: tuple[str, ...]) -> dict[str, str]:
        """Returns the group of each node that shares one with a target."""
        topology = self._engine.topology
        groups = {topology.ancestor_of_kind(f"node:{name}", kind) for name in names} - {None}
        return {
            entity.partition(":")[2]: str(group)
            for group in groups
            for entity in topology.descendants(str(group))
            if kind_of(entity) == "node"
        }

    def _list_running(self, names: tuple[str, ...]) -> dict[str, list[str]]:
        """Returns the names of the jobs with ranks on each node."""
        places = self._engine.impact.jobs.places
        on = {name: {places.of[rank].job for rank in places.on.get(f"node:{name}", ())} for name in names}
        return {name: sorted(job.partition(":")[2] for job in jobs) for name, jobs in on.items()}

    def _list_gpus(self, name: str) -> list[str]:
        """Returns the GPUs of a node."""
        return [e for e in self._engine.topology.descendants(f"node:{name}") if kind_of(e) == "gpu"]


def find_leaving(acts: Iterable[Act], asked: Act) -> frozenset[str]:
    """Returns the nodes of other holds that began and are not verified, without `node:`."""
    begun = (a for a in acts if a.id != asked.id and a.state in ("executing", "executed", "verifying"))
    return frozenset(target.partition(":")[2] for a in begun for target in a.held)


def find_approved(act: Act) -> int:
    """Returns when the last of the people approved an act that is approved (UTC us)."""
    return max(approval.time for approval in act.approvals)


def is_at_work(act: Act) -> bool:
    """Returns whether an act has been approved and is not over: no other act begins on its nodes until then."""
    return act.is_open and act.state not in ("proposed", "planned", "awaiting_approval")


def find_held_since(connection: duckdb.DuckDBPyConnection, holds: Mapping[str, Act]) -> dict[str, int]:
    """Returns when each held node was held (UTC us): a hold may have waited for its approval for hours."""
    done = ledger.find_done(connection, [hold.id for hold in holds.values()])
    return {name: done[hold.id] for name, hold in holds.items()}


def find_relapses(connection: duckdb.DuckDBPyConnection, begun: Mapping[str, int], days: float) -> dict[str, str]:
    """Returns the nodes whose present hold began within their burn-in, with the release before it.

    begun: when each node was held (UTC us).
    """
    found = {}
    for name, since in begun.items():
        row = connection.execute(
            """SELECT a.id, epoch_us(max(h.time)) FROM acts a JOIN act_history h ON h.act = a.id
               WHERE a.verb = 'release' AND h.state = 'executed' AND a.document ->> '$.mode' = 'on'
                 AND list_contains(a.targets, $1) AND h.time < make_timestamptz($2::BIGINT)
                 AND h.time >= make_timestamptz($3::BIGINT) GROUP BY a.id ORDER BY 2 DESC LIMIT 1""",
            [f"node:{name}", since, since - round(days * 86_400 * SECOND)],
        ).fetchone()
        if row is not None:
            found[name] = f"released by {row[0]} {(since - row[1]) / 86_400 / SECOND:.1f} days before this hold"
    return found
