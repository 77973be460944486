"""Slurm by its REST API (slurmrestd of 24.05 or newer, data parser v0.0.40 to v0.0.42): hold and release, no commands.

Traps that this follows: `/ping` answers 200 to a bad token, so a login is proved by reading nodes; a wrong or expired
token is 511; an unknown node is 500; after RESUME a node is shown as NOT_RESPONDING for a moment. An older slurmrestd
cannot change nodes.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.acts.act import Act, Verb
from pipeline.acts.adapters.adapter import Immediate, NotYet, Outcome, check_owner, write_note
from pipeline.acts.adapters.slurm import (
    MAX_ACCOUNT,
    MUST_REGISTER,
    NO_ANSWER,
    NOT_REGISTERED,
    SAVED_AFTER_S,
    count_gpus,
    find_out,
    find_undo,
)
from pipeline.acts.scheduler import SchedulerJob, SchedulerNode, SchedulerState, list_jobs_by_node
from pipeline.config.acts import Acts
from pipeline.http.addresses import make_opener
from pipeline.model.errors import ConfigError, Unreachable
from pipeline.model.names import clean_text
from pipeline.model.regular_files import read_regular_text

VERSION = "v0.0.40"
"""The oldest data parser of 24.05, which all later ones still have."""
TIMEOUT_S = 30.0
"""Time limit of one request (s). Chosen: as for Slurm's commands."""
RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED"})


class Slurmrestd(Immediate):
    """Carries out holds and releases over HTTP with a token of `scontrol token`, read again for each request."""

    name = "slurmrestd"
    verbs: frozenset[Verb] = frozenset({"hold", "release"})
    saved_after_s = SAVED_AFTER_S

    def __init__(self, config: Acts) -> None:
        access = config.slurm
        if not access.url or access.token_file is None:
            raise ConfigError("[acts.slurm] url and token_file: missing; the adapter slurmrestd needs both")
        self._url, self._user, self._token_file = access.url.rstrip("/"), access.user, access.token_file
        self._opener = make_opener()

    def read_state(self, now: int) -> SchedulerState:
        """See `Adapter.read_state`."""
        jobs = parse_jobs(self._call("GET", "jobs/"))
        return SchedulerState(now, parse_nodes(self._call("GET", "nodes/"), jobs), jobs)

    def list_commands(self, act: Act, world: SchedulerState) -> tuple[str, ...]:
        """See `Adapter.list_commands`."""
        del world
        names = [target.partition(":")[2] for target in act.targets]
        return tuple(f"POST {self._path(f'node/{name}')} {json.dumps(_body(act))}" for name in names)

    def carry_out(self, act: Act, node: SchedulerNode) -> Outcome:
        """See `Adapter.carry_out`."""
        fresh = self._find(node.name)
        decided = check_owner(act, fresh, node)
        done = self._change(node.name, _body(act)) if decided is None else decided
        if act.verb == "release" and not done.done and NOT_REGISTERED in done.output:
            raise NotYet(f"{node.name} {MUST_REGISTER}: {done.output}")
        return done

    def undo(self, act: Act, node: SchedulerNode) -> Outcome:
        """See `Adapter.undo`."""
        fresh = self._find(node.name)
        if fresh.mark != act.mark:
            return Outcome(False, f"{node.name}: is not held for {act.id}")
        state, reason = find_undo(fresh, node)
        return self._change(node.name, {"state": [state]} | ({"reason": reason} if reason else {}))

    def find_effect(self, act: Act, node: SchedulerNode) -> bool | None:
        """See `Adapter.find_effect`."""
        return node.out and node.mark == act.mark if act.verb == "hold" else not node.out or None

    def _change(self, name: str, body: Mapping[str, Any]) -> Outcome:
        answer = self._call("POST", f"node/{quote(name, safe='')}", body)
        said = [f"{e.get('error', '')}: {e.get('description', '')}" for e in answer.get("errors", ())]
        return Outcome(not said, "; ".join(said) or "done")

    def _find(self, name: str) -> SchedulerNode:
        found = parse_nodes(self._call("GET", f"node/{quote(name, safe='')}"), {})
        if name not in found:
            raise Unreachable(f"{self._url}: Slurm does not know node {name}")
        return found[name]

    def _path(self, what: str) -> str:
        return f"{self._url}/slurm/{VERSION}/{what}"

    def _call(self, method: str, what: str, body: Mapping[str, Any] | None = None) -> Any:
        """Returns the JSON of an answer, also of one with `errors` of a refused change. Raises Unreachable."""
        url, data = self._path(what), None if body is None else json.dumps(body).encode()
        headers = {"X-SLURM-USER-NAME": self._user, "X-SLURM-USER-TOKEN": _read_token(self._token_file)}
        request = urllib.request.Request(url, data, {**headers, "Content-Type": "application/json"}, method=method)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read().decode(errors="replace"))  # text of users may be no UTF-8
        except urllib.error.HTTPError as error:
            with error:
                return self._explain(url, error, method)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"{url}: {error}") from error

    def _explain(self, url: str, error: urllib.error.HTTPError, method: str) -> Any:
        """Returns the answer to a refused change; raises Unreachable for a refused login or a fault of the server."""
        if error.code in (401, 511):
            raise Unreachable(f"{url}: the token of {self._token_file} is refused (HTTP {error.code})") from error
        try:
            answer = json.loads(error.read())
        except ValueError as wrong:
            raise Unreachable(f"{url}: HTTP {error.code}") from wrong
        if method == "POST" and answer.get("errors"):
            return answer
        said = "; ".join(str(e.get("description") or e.get("error")) for e in answer.get("errors", ()))
        raise Unreachable(f"{url}: {said or error.reason} (HTTP {error.code})") from error


def _body(act: Act) -> dict[str, Any]:
    return {"state": ["DRAIN"], "reason": write_note(act)} if act.verb == "hold" else {"state": ["RESUME"]}


def parse_nodes(answer: Mapping[str, Any], jobs: Mapping[str, SchedulerJob]) -> dict[str, SchedulerNode]:
    """Returns the nodes of an answer. States are a list here ("IDLE", "DRAIN")."""
    on = list_jobs_by_node(jobs)
    found = {}
    for row in answer.get("nodes", ()):
        states = [str(state).upper() for state in row.get("state", ())]
        name = str(row["name"])
        reason = str(row.get("reason") or "")
        out, absent = find_out(states, reason)
        jobs_on, unusable = on.get(name, ()), NO_ANSWER in states
        found[name] = SchedulerNode(name, out, "+".join(states), reason, jobs_on, absent=absent, unusable=unusable)
    return found


def parse_jobs(answer: Mapping[str, Any]) -> dict[str, SchedulerJob]:
    """Returns the running jobs of an answer, with nodes from their resources and GPUs from `gres_detail`.

    `tres_alloc_str` names GPUs only where AccountingStorageTRES has them.
    """
    found = {}
    for row in answer.get("jobs", ()):
        if RUNNING.isdisjoint(str(state) for state in row.get("job_state", ())):
            continue
        nodes = tuple(sorted(str(n["nodename"]) for n in (row.get("job_resources") or {}).get("allocated_nodes", ())))
        id_, gpus = str(row["job_id"]), sum(map(count_gpus, row.get("gres_detail") or ()))
        account = clean_text(str(row.get("account") or ""), MAX_ACCOUNT)
        found[id_] = SchedulerJob(id_, nodes, gpus, account, bool(row.get("requeue")))
    return found


def _read_token(path: Path) -> str:
    """Returns the token of a file, also as `scontrol token` prints it. Raises Unreachable: it may be being renewed."""
    try:
        return read_regular_text(path).strip().removeprefix("SLURM_JWT=")
    except OSError as error:
        raise Unreachable(f"[acts.slurm] token_file {path}: {error.strerror}") from error
