"""Which checks of a held node ran since its hold, and which failed: diagnostics and canaries, for the release.

A check is of the whole node. A diagnostic of one GPU, or canaries that left a GPU out, say nothing about the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import duckdb

from pipeline.acts import ledger
from pipeline.acts.act import Act
from pipeline.model.event_kinds import CANARY_IS_RIGHT, CANARY_IS_WRONG

Diagnostic = tuple[Act, int]
"""A diagnostic that ended, and when it began to run (UTC us)."""
DEEP = 3
"""Least level of a diagnostic that counts after a relapse. Source: `dcgmi diag -r 3` is the first to stress GPUs."""
_RIGHT = f"""
SELECT DISTINCT entity FROM events
WHERE kind = 'digest' AND node = $1 AND time >= make_timestamptz($2::BIGINT) AND {CANARY_IS_RIGHT}"""
_WRONG = f"""
SELECT entity, count(*), epoch_us(max(time)) FROM events
WHERE kind = 'digest' AND node = $1 AND time >= make_timestamptz($2::BIGINT) AND {CANARY_IS_WRONG}
GROUP BY entity ORDER BY 3 DESC LIMIT 1"""


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks of one node since its hold. passed, failed: in words, "" if there is none.   deep: a diagnostic
    of level DEEP or above passed."""

    passed: str
    deep: bool
    failed: str


def find_checks(
    connection: duckdb.DuckDBPyConnection, held: Mapping[str, int], gpus: Mapping[str, Collection[str]]
) -> dict[str, Checks]:
    """Returns the checks of held nodes. held: when each was held (UTC us).   gpus: all of each node (`gpu:...`)."""
    done = _list_diagnostics(connection, held) if held else []
    return {name: _find_of_node(connection, name, since, done, gpus[name]) for name, since in held.items()}


def _find_of_node(
    connection: duckdb.DuckDBPyConnection, name: str, since: int, done: Sequence[Diagnostic], gpus: Collection[str]
) -> Checks:
    own = [(act, begun) for act, begun in done if f"node:{name}" in act.targets and begun >= since]
    whole = [(act, begun) for act, begun in own if act.state == "verified" and not _gpu(act)]
    passed = f"diagnose level {_level(whole[0][0])} passed ({whole[0][0].id})" if whole else ""
    deep = [begun for act, begun in whole if _is_as_deep(_level(act), str(DEEP))]
    failed = _find_failed(name, own) or _find_wrong_canary(connection, name, since, max(deep, default=0))
    return Checks(passed or _find_right_canaries(connection, name, since, gpus), bool(deep), failed)


def _list_diagnostics(connection: duckdb.DuckDBPyConnection, names: Collection[str]) -> list[Diagnostic]:
    """Returns the diagnostics of nodes that passed or failed, newest first, with when each began."""
    found = ledger.load_diagnostics(connection, [f"node:{name}" for name in names])
    begun = ledger.find_begun(connection, [act.id for act in found])
    return [(act, begun[act.id]) for act in found if act.id in begun]


def _find_failed(name: str, own: Sequence[Diagnostic]) -> str:
    """Returns the newest diagnostic that failed on a node, and that none passed since which tests as much; "" if there
    is none. own: the diagnostics of the node since its hold."""
    for act, begun in sorted(own, key=lambda found: -found[1]):
        if act.state != "failed" or _has_passed_on(act, name):
            continue
        if not any(a.state == "verified" and b > begun and _covers(a, act) for a, b in own):
            return f"diagnose level {_level(act)} failed ({act.id})"
    return ""


def _has_passed_on(act: Act, name: str) -> bool:
    """Returns whether a diagnostic that failed did so on another of its nodes alone."""
    outcome = act.result.get("targets", {}).get(f"node:{name}", {})
    return bool(outcome.get("done")) and "link_soak" not in act.result


def _covers(act: Act, other: Act) -> bool:
    """Returns whether a diagnostic tests at least what another one does: as deeply, and the same GPU or all."""
    return _gpu(act) in ("", _gpu(other)) and _is_as_deep(_level(act), _level(other))


def _is_as_deep(level: str, other: str) -> bool:
    return level == other or (level.isdecimal() and other.isdecimal() and int(level) >= int(other))


def _level(act: Act) -> str:
    return act.params.get("level", "1")


def _gpu(act: Act) -> str:
    """Returns the GPU that a diagnostic is for, "" if it is for all of the node."""
    return act.params.get("gpu", "")


def _find_right_canaries(connection: duckdb.DuckDBPyConnection, name: str, since: int, gpus: Collection[str]) -> str:
    """Returns the check by canaries in words: right on each GPU of the node; of a node without GPUs on any device."""
    right = {str(entity) for (entity,) in connection.execute(_RIGHT, [name, since]).fetchall()}
    if not right or not right.issuperset(gpus):
        return ""
    return f"canary right on {len(gpus) or len(right)} {'GPUs' if gpus else 'devices'}"


def _find_wrong_canary(connection: duckdb.DuckDBPyConnection, name: str, since: int, checked: int) -> str:
    """Returns the device whose canary was wrong last, in words; "" if none was, or a deep diagnostic passed since.

    checked: when the newest such diagnostic began (UTC us). Wrong results come and go: right ones later prove nothing.
    """
    row = connection.execute(_WRONG, [name, since]).fetchone()
    return f"canary of {row[0]} wrong {row[1]} times" if row is not None and row[2] >= checked else ""
