"""The board over HTTP, for the executor: it has its own token and no access to the store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, get_type_hints
from urllib.parse import quote

from pipeline.acts.act import Act, Plan, parse_act
from pipeline.acts.board import Work
from pipeline.acts.guards import Facts
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.records import to_json


def encode_facts(facts: Facts) -> dict[str, Any]:
    """Returns facts for JSON; sets become sorted lists."""
    return {
        f.name: sorted(value) if isinstance(value := getattr(facts, f.name), frozenset) else to_json(value)
        for f in fields(facts)
    }


def parse_facts(table: Mapping[str, Any]) -> Facts:
    """Returns the facts that `encode_facts` wrote. Raises TypeError if a field is unknown."""
    hints = {name: str(hint) for name, hint in get_type_hints(Facts).items()}
    parsed: dict[str, Any] = dict(table)
    for name, value in table.items():
        if hints[name].startswith("frozenset"):
            parsed[name] = frozenset(value)
        elif hints[name].startswith("tuple"):
            parsed[name] = tuple(value)
    return Facts(**parsed)


class RemoteBoard:
    """See `BoardAccess`. Raises Unreachable while the pipeline does not answer, Refused as the board does."""

    def __init__(self, config: Config) -> None:
        token_file = config.executor.token_file or config.api.token_file
        self._config = replace(config, api=replace(config.api, token_file=token_file))

    def claim(self, who: str, instance: str = "", waits: Mapping[str, str] | None = None) -> list[Work]:
        """See `Board.claim`."""
        rows = self._post("claim", {"executor": who, "instance": instance, "waits": dict(waits or {})})["work"]
        return [Work(row["job"], parse_act(json.loads(row["act"])), parse_facts(row["facts"])) for row in rows]

    def collect_facts(self, id_: str) -> Facts:
        """See `Board.collect_facts`."""
        return parse_facts(
            self._post(f"acts/{quote(id_, safe='')}/facts", {"executor": self._config.executor.name})["facts"]
        )

    def plan(self, id_: str, plan: Plan) -> Act:
        """See `Board.plan`."""
        return self._change(id_, "plan", {"plan": to_json(asdict(plan))})

    def begin(self, id_: str, failing: Sequence[str], who: str, instance: str = "") -> Act:
        """See `Board.begin`."""
        return self._change(id_, "begin", {"failing": list(failing), "executor": who, "instance": instance})

    def report(self, id_: str, state: str, who: str, result: Mapping[str, Any], comment: str = "") -> Act:
        """See `Board.report`."""
        body = {"state": state, "executor": who, "result": to_json(dict(result)), "comment": comment[:4000]}
        return self._change(id_, "report", body)

    def report_undone(self, id_: str, target: str, seen: str, who: str) -> Act:
        """See `Board.report_undone`."""
        return self._change(id_, "undone", {"target": target, "seen": seen, "executor": who})

    def _change(self, id_: str, what: str, body: Mapping[str, Any]) -> Act:
        return parse_act(json.loads(self._post(f"acts/{quote(id_, safe='')}/{what}", body)["act"]))

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return client.post(self._config, f"/api/v1/executor/{path}", body)
