"""The board over HTTP, for the executor: it has its own token and no access to the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar, get_type_hints
from urllib.parse import quote

from pipeline.acts.act import Act, Plan, parse_act
from pipeline.acts.board import Work
from pipeline.acts.guards import Facts
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import WireError
from pipeline.model.records import to_json

T = TypeVar("T")


def encode_facts(facts: Facts) -> dict[str, Any]:
    """Returns facts for JSON; sets become sorted lists."""
    return {
        f.name: sorted(value) if isinstance(value := getattr(facts, f.name), frozenset) else to_json(value)
        for f in fields(facts)
    }


def parse_facts(table: Mapping[str, Any]) -> Facts:
    """Returns the facts that `encode_facts` wrote. Raises KeyError if a field is unknown: a guard may depend on it."""
    hints = {name: str(hint) for name, hint in get_type_hints(Facts).items()}
    parsed: dict[str, Any] = dict(table)
    for name, value in table.items():
        if hints[name].startswith("frozenset"):
            parsed[name] = frozenset(value)
        elif hints[name].startswith("tuple"):
            parsed[name] = tuple(value)
    return Facts(**parsed)


def _parse_work(row: Mapping[str, Any]) -> Work:
    return Work(row["job"], parse_act(json.loads(row["act"])), parse_facts(row["facts"]))


def _parse(parse: Callable[[Any], T], answer: Any) -> T:
    """Returns what an answer of the pipeline says. Raises WireError if it is not understood."""
    try:
        return parse(answer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"the pipeline sends what this executor does not know ({error!r}); nothing is done"
        raise WireError(f"{said}: install the executor of the pipeline's version") from error


class RemoteBoard:
    """See `BoardAccess`. Raises Unreachable while the pipeline does not answer, Refused as the board does, WireError if
    the pipeline is of another version and uses a word that is unknown here."""

    def __init__(self, config: Config) -> None:
        token_file = config.executor.token_file or config.api.token_file
        self._config = replace(config, api=replace(config.api, token_file=token_file))

    def claim(self, who: str, instance: str = "", waits: Mapping[str, str] | None = None) -> list[Work]:
        """See `Board.claim`."""
        rows = self._post("claim", {"executor": who, "instance": instance, "waits": dict(waits or {})})["work"]
        return [_parse(_parse_work, row) for row in rows]

    def collect_facts(self, id_: str) -> Facts:
        """See `Board.collect_facts`."""
        answer = self._post(f"acts/{quote(id_, safe='')}/facts", {"executor": self._config.executor.name})
        return _parse(lambda got: parse_facts(got["facts"]), answer)

    def plan(self, id_: str, plan: Plan) -> Act:
        """See `Board.plan`."""
        return self._change(id_, "plan", {"plan": to_json(asdict(plan))})

    def begin(self, id_: str, failing: Sequence[str], who: str, instance: str = "", again: bool = False) -> Act:
        """See `Board.begin`."""
        body = {"failing": list(failing), "executor": who, "instance": instance, "again": again}
        return self._change(id_, "begin", body)

    def report(self, id_: str, state: str, who: str, result: Mapping[str, Any], comment: str = "") -> Act:
        """See `Board.report`."""
        body = {"state": state, "executor": who, "result": to_json(dict(result)), "comment": comment[:4000]}
        return self._change(id_, "report", body)

    def report_undone(self, id_: str, target: str, seen: str, who: str) -> Act:
        """See `Board.report_undone`."""
        return self._change(id_, "undone", {"target": target, "seen": seen, "executor": who})

    def _change(self, id_: str, what: str, body: Mapping[str, Any]) -> Act:
        answer = self._post(f"acts/{quote(id_, safe='')}/{what}", body)
        return _parse(lambda got: parse_act(json.loads(got["act"])), answer)

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return client.post(self._config, f"/api/v1/executor/{path}", body)
