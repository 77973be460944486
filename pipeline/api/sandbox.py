"""The SQL sandbox's gate: exactly one SELECT over our own tables, or an error with the reason.

DuckDB parses the text, so that there is no second grammar to disagree with; the gate then walks the parsed tree and
lets only known kinds of node pass. It fails closed: a node, table or function that it does not know is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import duckdb

from pipeline.api.functions import SCALARS, TABLE_FUNCTIONS
from pipeline.model.errors import OverLimit, Refused, WrongQuery
from pipeline.model.signals import CLASSES

TABLES = frozenset(CLASSES) | {
    "entities", "links", "events", "findings", "incidents", "history", "mutes", "gaps", "dead_letter", "losses",
    "ingest_commit", "outbox",
}  # fmt: skip
INTERNAL = frozenset({"meta", "device", "entity", "owner", "producer_mark", "sender", "snapshot"})
"""Tables of the store that are not served: the pipeline's own memory, or columns of a view that is."""
QUERY_CHARACTERS = 64 * 1024
"""Longest query text (chosen: no person writes more, and its parsed tree stays below some tens of MB)."""
CALLS = 300
"""Most function calls in one query (chosen: counting and summing all columns of a view takes about 100). Each may add
as much as its input, and DuckDB looks at its time and memory limits between them, not within."""
_QUERIES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_RELATIONS = frozenset({"BASE_TABLE", "SUBQUERY", "JOIN", "EMPTY", "EXPRESSION_LIST", "TABLE_FUNCTION"})
_MODIFIERS = frozenset({"ORDER_MODIFIER", "LIMIT_MODIFIER", "LIMIT_PERCENT_MODIFIER", "DISTINCT_MODIFIER"})
_ORDERS = frozenset({"ORDER_DEFAULT", "ASCENDING", "DESCENDING"})
_NODES = _QUERIES | _RELATIONS | _MODIFIERS | _ORDERS
_EXPRESSIONS = frozenset(
    {
        "BETWEEN", "CASE", "CAST", "COLLATE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION",
        "LAMBDA", "LAMBDA_REF", "OPERATOR", "POSITIONAL_REFERENCE", "STAR", "SUBQUERY", "TYPE", "WINDOW",
    }
)  # fmt: skip
Names = frozenset[str]


@dataclass(frozen=True)
class Checked:
    """A statement that may run, and the names of our tables that it reads."""

    statement: duckdb.Statement
    tables: frozenset[str]


def check(cursor: duckdb.DuckDBPyConnection, query: str) -> Checked:
    """The one statement of `query`, ready to run. `cursor` is on any database; it parses and says what it knows.

    Raises WrongQuery for what is no SQL or names nothing that exists, Refused for anything but reading our own tables,
    OverLimit for a text that is too long or too deep.
    """
    if len(query) > QUERY_CHARACTERS:
        raise OverLimit(f"the query has {len(query)} characters; expected at most {QUERY_CHARACTERS}")
    if "\0" in query:
        raise WrongQuery("not SQL: a NUL character")
    try:
        query.encode()  # half a surrogate pair is no text
        statements = cursor.extract_statements(query)
    except (duckdb.Error, UnicodeError) as error:
        if "expression depth" in str(error):
            raise OverLimit("the query is nested too deeply") from error
        raise WrongQuery(f"not SQL: {_first_line(error)}") from error
    if not statements:
        raise WrongQuery("found no statement; expected exactly one SELECT")
    if len(statements) != 1:
        raise Refused(f"found {len(statements)} statements; expected exactly one SELECT")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise Refused(f"found a statement of type {statements[0].type.name}; only SELECT is served")
    gate = _Gate(cursor)
    try:
        gate.walk(_tree(cursor, query), frozenset())
    except RecursionError as error:
        raise OverLimit("the query is nested too deeply") from error
    return Checked(statements[0], frozenset(gate.tables))


def _tree(cursor: duckdb.DuckDBPyConnection, query: str) -> dict[str, Any]:
    """The parsed statement as DuckDB serialises it, which it does for SELECT alone."""
    try:
        text: str = cursor.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0][0]
    except duckdb.Error as error:
        raise Refused(f"not a SELECT: {_first_line(error)}") from error
    if (calls := text.count('"class":"FUNCTION"')) > CALLS:
        raise OverLimit(f"the query calls {calls} functions; expected at most {CALLS}")
    parsed: dict[str, Any] = json.loads(text)
    if parsed["error"] or len(parsed["statements"]) != 1:
        raise Refused(f"not a SELECT: {parsed.get('error_message', 'no statement')}")
    tree: dict[str, Any] = parsed["statements"][0]
    return tree


class _Gate:
    """One walk over a parsed query. `tables` are ours that it reads, those of names that WITH defines left out."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection) -> None:
        self._cursor = cursor
        self.tables: set[str] = set()

    def walk(self, node: Any, ctes: Names) -> None:
        """Visits everything below `node`; `ctes` are the names that WITH has defined for it."""
        if isinstance(node, list):
            for item in node:
                self.walk(item, ctes)
        elif isinstance(node, dict):
            ctes = self._judge(node, ctes)
            for key, value in node.items():
                if key != "cte_map":
                    self.walk(value, ctes)

    def _judge(self, node: dict[str, Any], ctes: Names) -> Names:
        """Refuses a node that is not known; the names of CTEs that hold below it."""
        kind = node.get("type")
        if "class" in node:
            if node["class"] not in _EXPRESSIONS:
                raise Refused(f"{_words(node['class'])} is not served")
            if "function_name" in node:
                self._function(node, SCALARS)
        elif isinstance(kind, str) and kind not in _NODES:
            raise Refused(f"{_words(kind)} is not served; expected a SELECT over our tables")
        if kind == "BASE_TABLE" and "class" not in node:
            self._table(node, ctes)
        if kind == "TABLE_FUNCTION" and "class" not in node:
            self._function(node["function"], TABLE_FUNCTIONS)
            self.walk(node["function"]["arguments"], ctes)
            node["function"] = None  # judged as a table function; the walk would judge it as a scalar one
        if kind == "RECURSIVE_CTE_NODE":
            ctes |= {node["cte_name"].lower()}
        for entry in (node.get("cte_map") or {}).get("map", ()):
            self.walk(entry["value"], ctes)
            ctes |= {entry["key"].lower()}
        return ctes

    def _table(self, node: dict[str, Any], ctes: Names) -> None:
        path = node["qualified_name"]["path"]
        name = path[-1].lower()
        if node["at_clause"] is not None:
            raise Refused("AT is not served")
        if len(path) == 1 and name in TABLES - ctes:
            self.tables.add(name)
        elif len(path) != 1 or name not in ctes:
            reason = f"{'.'.join(path)!r} is no table that is served; there are: {', '.join(sorted(TABLES))}"
            raise Refused(reason) if len(path) != 1 or self._exists(name) else WrongQuery(reason)

    def _exists(self, name: str) -> bool:
        """Whether a bare name is that of a file, of a table of the database or of one that is not served."""
        if not re.fullmatch(r"\w+", name) or name in INTERNAL or name.startswith(("hot_", "latest_")):
            return True
        return self._known("duckdb_views() WHERE view_name = ?", name)

    def _function(self, node: dict[str, Any], offered: Names) -> None:
        path = node["qualified_name"]["path"]
        name = path[-1].lower() if path else node["function_name"].lower()
        if len(path) > 1 or name not in offered or node["function_name"].lower() != name:
            where = "after FROM" if offered is TABLE_FUNCTIONS else "in expressions"
            reason = f"function {'.'.join(path)!r} is not served {where}; docs/sql.md lists those that are"
            exists = len(path) > 1 or self._known("duckdb_functions() WHERE function_name = ?", name)
            raise Refused(reason) if exists else WrongQuery(reason)

    def _known(self, where: str, name: str) -> bool:
        return bool(self._cursor.execute(f"SELECT 1 FROM {where} LIMIT 1", [name]).fetchall())


def _words(kind: Any) -> str:
    return str(kind).replace("_NODE", "").replace("_", " ").strip()


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
