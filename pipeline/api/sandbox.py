"""The SQL sandbox's gate: exactly one SELECT over our own tables, or Refused with the reason.

DuckDB parses the text, so that there is no second grammar to disagree with; the gate then walks the parsed tree and
lets only known kinds of node pass. It fails closed: a node, table or function that it does not know is refused.
"""

from __future__ import annotations

import json
from typing import Any

import duckdb

from pipeline.api.functions import SCALARS, TABLE_FUNCTIONS
from pipeline.errors import Refused
from pipeline.signals import CLASSES

TABLES = frozenset(CLASSES) | {
    "entities", "links", "events", "findings", "incidents", "history", "mutes", "gaps", "dead_letter",
    "ingest_commit", "outbox",
}  # fmt: skip
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


def check(cursor: duckdb.DuckDBPyConnection, query: str) -> duckdb.Statement:
    """The one statement of `query`, ready to run. Raises Refused if it is anything but reading our own tables."""
    if len(query) > QUERY_CHARACTERS:
        raise Refused(f"the query has {len(query)} characters; wanted at most {QUERY_CHARACTERS}")
    if "\0" in query:
        raise Refused("not SQL: a NUL character")
    try:
        query.encode()  # half a surrogate pair is no text
        statements = cursor.extract_statements(query)
    except (duckdb.Error, UnicodeError) as error:
        raise Refused(f"not SQL: {_first_line(error)}") from error
    if len(statements) != 1:
        raise Refused(f"found {len(statements)} statements; wanted exactly one SELECT")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise Refused(f"found a statement of type {statements[0].type.name}; only SELECT is served")
    try:
        _walk(_tree(cursor, query), frozenset())
    except RecursionError as error:
        raise Refused("the query is nested too deeply") from error
    return statements[0]


def _tree(cursor: duckdb.DuckDBPyConnection, query: str) -> dict[str, Any]:
    """The parsed statement as DuckDB serialises it, which it does for SELECT alone."""
    try:
        text: str = cursor.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0][0]
    except duckdb.Error as error:
        raise Refused(f"not a SELECT: {_first_line(error)}") from error
    if (calls := text.count('"class":"FUNCTION"')) > CALLS:
        raise Refused(f"the query calls {calls} functions; wanted at most {CALLS}")
    parsed: dict[str, Any] = json.loads(text)
    if parsed["error"] or len(parsed["statements"]) != 1:
        raise Refused(f"not a SELECT: {parsed.get('error_message', 'no statement')}")
    tree: dict[str, Any] = parsed["statements"][0]
    return tree


def _walk(node: Any, ctes: Names) -> None:
    """Visits everything below `node`; `ctes` are the names that WITH has defined for it."""
    if isinstance(node, list):
        for item in node:
            _walk(item, ctes)
    elif isinstance(node, dict):
        ctes = _judge(node, ctes)
        for key, value in node.items():
            if key != "cte_map":
                _walk(value, ctes)


def _judge(node: dict[str, Any], ctes: Names) -> Names:
    """Refuses a node that is not known; the names of CTEs that hold below it."""
    kind = node.get("type")
    if "class" in node:
        if node["class"] not in _EXPRESSIONS:
            raise Refused(f"{_words(node['class'])} is not served")
        if "function_name" in node:
            _function(node, SCALARS)
    elif isinstance(kind, str) and kind not in _NODES:
        raise Refused(f"{_words(kind)} is not served; wanted a SELECT over our tables")
    if kind == "BASE_TABLE" and "class" not in node:
        _table(node, ctes)
    if kind == "TABLE_FUNCTION" and "class" not in node:
        _function(node["function"], TABLE_FUNCTIONS)
        _walk(node["function"]["arguments"], ctes)
        node["function"] = None  # judged as a table function; the walk would judge it as a scalar one
    if kind == "RECURSIVE_CTE_NODE":
        ctes |= {node["cte_name"].lower()}
    for entry in (node.get("cte_map") or {}).get("map", ()):
        _walk(entry["value"], ctes)
        ctes |= {entry["key"].lower()}
    return ctes


def _table(node: dict[str, Any], ctes: Names) -> None:
    path = node["qualified_name"]["path"]
    if node["at_clause"] is not None:
        raise Refused("AT is not served")
    if len(path) != 1 or path[0].lower() not in ctes | TABLES:
        raise Refused(f"{'.'.join(path)!r} is no table that is served; there are: {', '.join(sorted(TABLES))}")


def _function(node: dict[str, Any], offered: Names) -> None:
    path = node["qualified_name"]["path"]
    name = path[-1].lower() if path else node["function_name"].lower()
    if len(path) > 1 or name not in offered or node["function_name"].lower() != name:
        where = "after FROM" if offered is TABLE_FUNCTIONS else "in expressions"
        raise Refused(f"function {'.'.join(path)!r} is not served {where}; docs/sql.md lists those that are")


def _words(kind: Any) -> str:
    return str(kind).replace("_NODE", "").replace("_", " ").strip()


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
