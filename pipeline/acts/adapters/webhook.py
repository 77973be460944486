"""A house tool that does the work, asked by a signed request (Standard Webhooks 1.0): POST, then 200 is done.

The body names the act, verb, node, mark and parameters; `webhook-id` is the same for each repetition, so that the tool
can drop a second one. 202 means that it is not done yet: the request is repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from pipeline.acts.act import VERBS, Act, Verb
from pipeline.acts.adapters.adapter import GIVE_UP_DIAGNOSTIC_S, GIVE_UP_S, Outcome, StillRunning, write_note
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.config.acts import Acts
from pipeline.model.errors import ConfigError, Unreachable
from pipeline.model.regular_files import read_regular_text
from pipeline.notify.delivery import Answer, Call, Request, Target, check_receiver, exchange
from pipeline.notify.receivers.webhook import decode_secret, sign

SECTION = "acts.webhook"
KEPT = 500
"""Characters of the answer that are kept, for people. Chosen."""


class Webhook:
    """Asks a house tool. It must look at the scheduler itself: use it beside a scheduler that knows the nodes."""

    name = "webhook"
    verbs: frozenset[Verb] = frozenset(VERBS)
    repeatable: frozenset[Verb] = frozenset(VERBS)
    """All: a repeated request has the same `webhook-id`."""
    saved_after_s = 0.0

    def __init__(self, config: Acts, call: Call = exchange, clock: Callable[[], float] = time.time) -> None:
        access = config.webhook
        if not access.url or access.secret_file is None:
            raise ConfigError(f"[{SECTION}] url and secret_file: missing; the adapter webhook needs both")
        self._target = Target(SECTION, "acts", access.url, access.allow_http, access.allow_private)
        check_receiver(self._target)
        try:
            secrets = read_regular_text(access.secret_file).split()
        except OSError as error:
            raise ConfigError(f"[{SECTION}] secret_file {access.secret_file}: {error.strerror}") from error
        self._keys = [decode_secret(text, f"[{SECTION}]") for text in secrets]
        self._call, self._clock = call, clock
        self._asked: set[tuple[str, str]] = set()

    def read_state(self, now: int) -> SchedulerState:
        """Returns no nodes: a webhook cannot list them."""
        return SchedulerState(now, {})

    def list_commands(self, act: Act, world: SchedulerState) -> tuple[str, ...]:
        """See `Adapter.list_commands`."""
        del world
        url = self._target.url
        return tuple(f"POST {url} {self._body(act, target.partition(':')[2]).decode()}" for target in act.targets)

    def carry_out(self, act: Act, node: SchedulerNode) -> Outcome:
        """See `Adapter.carry_out`. 202 raises StillRunning: asked again until the tool answers 200 or an error."""
        answer = self._send(act, node.name, act.verb)
        self._asked.discard((act.id, node.name))
        said = answer.body.decode(errors="replace")[:KEPT]
        if answer.status in (200, 201, 204):
            return Outcome(True, said)
        if answer.status == 202:
            self._asked.add((act.id, node.name))
            raise StillRunning(f"[{SECTION}]: HTTP 202: the tool is at work on {node.name}")
        if answer.status in (0, 408, 429) or answer.status >= 500:
            self._asked.add((act.id, node.name))
            raise Unreachable(f"[{SECTION}]: {answer.error or f'HTTP {answer.status}'}")
        return Outcome(False, f"HTTP {answer.status}: {said}")

    def is_waiting(self, act: Act) -> bool:
        """See `Adapter.is_waiting`: the tool was asked, and has not said that it is done."""
        return any(id_ == act.id for id_, _ in self._asked)

    def find_limit(self, act: Act) -> float:
        """See `Adapter.find_limit`."""
        return GIVE_UP_DIAGNOSTIC_S if act.verb == "diagnose" else GIVE_UP_S

    def undo(self, act: Act, node: SchedulerNode) -> Outcome:
        """Asks the tool to undo a hold (verb `undo`)."""
        answer = self._send(act, node.name, "undo")
        return Outcome(answer.status in (200, 201, 204), f"HTTP {answer.status}")

    def find_effect(self, act: Act, node: SchedulerNode) -> bool | None:
        """See `Adapter.find_effect`: what the scheduler shows, for the verbs that change it; else the tool's answer.

        A node that the tool took out without our mark is not held here: it could be neither watched nor released.
        """
        if act.verb == "hold":
            return (node.out and node.mark == act.mark) or None
        return not node.out or None if act.verb == "release" else True

    def _send(self, act: Act, name: str, verb: str) -> Answer:
        body = self._body(act, name, verb)
        headers = sign(self._keys, f"{act.id}.{name}.{verb}", int(self._clock()), body)
        return self._call(Request(self._target, body, {**headers, "Content-Type": "application/json"}))

    def _body(self, act: Act, name: str, verb: str = "") -> bytes:
        table = {
            "type": "act.requested",
            "act": act.id,
            "verb": verb or act.verb,
            "node": name,
            "note": write_note(act),
        }
        return json.dumps({**table, "incident": act.incident, "params": dict(act.params)}).encode()
