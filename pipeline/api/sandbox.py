"""The SQL sandbox: allows exactly one SELECT over the tables of the store; anything else raises an error.

DuckDB parses the text, so there is no second grammar. The checker then walks the parsed tree. It is an allowlist:
a node, table or function that is not listed here is refused, also if a later DuckDB adds it.

Functions left out on purpose:
- those that read files, settings, variables or the catalogue, run SQL given as text, keep state (sequences, seeds,
  logs) or sleep.
- those that build a huge value from a small number (range, repeat, lpad): DuckDB checks for an interrupt only between
  calls, so `list_sum(range(1e9))` ran 75 s past its limit.
- those that let a text grow (replace, regexp_replace, bin, hex, base64, regexp_escape, list_reduce): DuckDB does not
  count text inside a call, so three `replace` over 40 rows took 22 s and 8 GB, with limits of 3 s and 0.5 GB.
- those whose cost is the product of two text lengths (levenshtein, editdist3, jaro), or that allocate as much as an
  argument requests (reservoir_quantile).
- list_aggregate, which calls any aggregate by name, also those that are not listed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import duckdb

from pipeline.model.errors import InvalidQuery, OverLimit, Refused
from pipeline.model.signals import CLASSES
from pipeline.runtime.guides import guide
from pipeline.store.rollups import VIEWS

_OPERATORS = "+ - * / // % ^ ** & | << >> ~ ~~ !~~ ~~* !~~* ~~~ || @ @> <@ && ^@ -> ->> <-> <=>"
_AGGREGATES = """any_value approx_count_distinct approx_quantile approx_top_k arbitrary arg_max arg_max_null arg_min
    arg_min_null argmax argmin array_agg avg bit_and bit_or bit_xor bool_and bool_or corr count count_if count_star
    countif covar_pop covar_samp entropy favg first fsum geomean geometric_mean group_concat histogram histogram_exact
    kahan_sum kurtosis kurtosis_pop last list listagg lttb mad max max_by mean median min min_by mode product quantile
    quantile_cont quantile_disc regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy
    regr_syy sem skewness stddev stddev_pop stddev_samp string_agg sum sumkahan var_pop var_samp variance wavg
    weighted_avg"""
_WINDOW = """cume_dist dense_rank fill first_value lag last_value lead nth_value ntile percent_rank rank rank_dense
    row_number"""
_NUMBERS = """abs acos acosh add asin asinh atan atan2 atanh bit_count cbrt ceil ceiling cos cosh cot degrees divide
    even exp fdiv floor fmod gamma gcd greatest greatest_common_divisor hash isfinite isinf isnan lcm least
    least_common_multiple lgamma ln log log10 log2 mod multiply nextafter pi pow power radians round round_even
    roundbankers sign signbit sin sinh sqrt subtract tan tanh trunc xor equi_width_bins"""
_TEXT = """ascii chr char_length character_length concat concat_ws contains decode encode ends_with format_bytes
    from_base64 from_hex hamming ilike_escape instr jaccard lcase left length len like_escape lower ltrim md5
    mismatches nfc_normalize not_ilike_escape not_like_escape octet_length ord overlay position prefix regexp_extract
    regexp_extract_all regexp_full_match regexp_matches regexp_split_to_array reverse right rtrim sha1 sha256 split
    split_part starts_with str_split str_split_regex string_split string_split_regex string_to_array strip_accents
    strlen strpos substr substring suffix to_base translate trim ucase unhex unicode upper url_decode url_encode unbin
    from_binary"""
_TIME = """age ago century current_date current_localtime current_localtimestamp date_add date_diff
    date_part date_sub date_trunc datediff datepart datesub datetrunc day dayname dayofmonth dayofweek dayofyear
    days_in_month decade epoch epoch_ms epoch_ns epoch_us era get_current_time get_current_timestamp hour isodow
    isoyear julian last_day make_date make_time make_timestamp make_timestamp_ms make_timestamp_ns make_timestamptz
    microsecond millennium millisecond minute month monthname nanosecond normalized_interval now quarter second
    strftime strptime time_bucket timezone timezone_hour timezone_minute to_centuries to_days to_decades to_hours
    to_microseconds to_millennia to_milliseconds to_minutes to_months to_quarters to_seconds to_timestamp to_weeks
    to_years today transaction_timestamp try_strptime week weekday weekofyear year yearweek"""
_NESTED = """apply array_append array_apply array_cat array_concat array_contains array_distance array_distinct
    array_extract array_filter array_has array_has_all array_has_any array_indexof array_intersect array_length
    array_position array_prepend array_reverse array_reverse_sort array_select array_slice array_sort array_to_string
    array_transform array_unique array_value array_where array_zip cardinality element_at filter flatten json
    json_array json_array_length json_contains json_exists json_extract json_extract_path json_extract_path_text
    json_extract_string json_keys json_object json_structure json_type json_valid json_value list_any_value list_append
    list_apply list_avg list_cat list_concat list_contains list_count list_distance list_distinct list_element
    list_extract list_filter list_first list_grade_up list_has list_has_all list_has_any list_histogram list_indexof
    list_intersect list_last list_max list_median list_min list_mode list_pack list_position list_prepend list_product
    list_reverse list_reverse_sort list_select list_slice list_sort list_stddev_pop list_stddev_samp list_sum
    list_transform list_unique list_value list_var_pop list_var_samp list_where list_zip map map_concat map_contains
    map_entries map_extract map_extract_value map_from_entries map_keys map_values row row_to_json struct_extract
    struct_extract_at struct_insert struct_keys struct_pack struct_values to_json unnest unpivot_list"""
_OTHER = "constant_or_null error if nullif typeof uuid gen_random_uuid alias"

SCALARS = frozenset(
    word
    for table in (_OPERATORS, _AGGREGATES, _WINDOW, _NUMBERS, _TEXT, _TIME, _NESTED, _OTHER)
    for word in table.split()
)
TABLE_FUNCTIONS = frozenset({"range", "generate_series", "unnest"})


LATEST = frozenset(f"latest_{device_class}" for device_class in CLASSES)
"""Tables with the newest values of each device of a class."""
TABLES = frozenset(CLASSES) | LATEST | VIEWS | {
    "entities", "links", "events", "findings", "incidents", "history", "mutes", "wrong_pages", "gaps", "dead_letter",
    "losses", "ingest_commit", "outbox", "silences", "audit", "acts", "act_history", "act_breaker", "decommissioned",
    "job_membership", "impact", "impact_jobs", "jobs", "job_pace", "job_loss", "job_energy", "topology",
}  # fmt: skip
SHOWN = (*sorted(TABLES - VIEWS - LATEST), "latest_CLASS", "rollup_60_CLASS", "rollup_600_CLASS")
"""Names of all tables for people."""
INTERNAL = frozenset(
    {
        "meta",
        "notify_groups",
        "notify_silences",
        "notify_threads",
        "device",
        "entity",
        "job_rank",
        "inventory_past",
        "site_line",
        "site_link",
        "owner",
        "partition_offset",
        "producer_mark",
        "sealed",
        "sender",
        "snapshot",
        "calibrations",
        "decommissioned",
    }
)
"""Tables of the store that are not served: internal state, or tables behind a served view."""
QUERY_CHARACTERS = 64 * 1024
"""Longest query text (chosen: enough for any query by hand; the parsed tree stays below some tens of MB)."""
MAX_CALLS = 300
"""Most function calls in one query (chosen: counting and summing all columns of a view takes about 100). Each may add
as much as its input, and DuckDB checks its time and memory limits only between calls."""
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
class CheckedQuery:
    """A statement that may run, and the tables of the store that it reads."""

    statement: duckdb.Statement
    tables: frozenset[str]


def check_query(cursor: duckdb.DuckDBPyConnection, query: str) -> CheckedQuery:
    """Parses and checks a query; returns its one statement. cursor: on any database, for DuckDB's parser and catalogue.

    Raises InvalidQuery for text that is not SQL or uses unknown names, Refused for anything but a SELECT over the
    store's tables, OverLimit for a text that is too long or nested too deeply.
    """
    if len(query) > QUERY_CHARACTERS:
        raise OverLimit(f"the query has {len(query)} characters; expected at most {QUERY_CHARACTERS}")
    if "\0" in query:
        raise InvalidQuery("not SQL: a NUL character")
    try:
        query.encode()  # fails on half a surrogate pair
        statements = cursor.extract_statements(query)
    except (duckdb.Error, UnicodeError) as error:
        if "expression depth" in str(error):
            raise OverLimit("the query is nested too deeply") from error
        raise InvalidQuery(f"not SQL: {_first_line(error)}") from error
    if not statements:
        raise InvalidQuery("found no statement; expected exactly one SELECT")
    if len(statements) != 1:
        raise Refused(f"found {len(statements)} statements; expected exactly one SELECT")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise Refused(f"found a statement of type {statements[0].type.name}; only SELECT is served")
    checker = _QueryChecker(cursor)
    try:
        checker.walk(_tree(cursor, query), frozenset())
    except RecursionError as error:
        raise OverLimit("the query is nested too deeply") from error
    return CheckedQuery(statements[0], frozenset(checker.tables))


def _tree(cursor: duckdb.DuckDBPyConnection, query: str) -> dict[str, Any]:
    """Returns the parsed statement as DuckDB serializes it, which works only for SELECT."""
    try:
        text: str = cursor.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0][0]
    except duckdb.Error as error:
        raise Refused(f"not a SELECT: {_first_line(error)}") from error
    if (calls := text.count('"class":"FUNCTION"')) > MAX_CALLS:
        raise OverLimit(f"the query calls {calls} functions; expected at most {MAX_CALLS}")
    parsed: dict[str, Any] = json.loads(text)
    if parsed["error"] or len(parsed["statements"]) != 1:
        raise Refused(f"not a SELECT: {parsed.get('error_message', 'no statement')}")
    tree: dict[str, Any] = parsed["statements"][0]
    return tree


class _QueryChecker:
    """Walks a parsed query. tables: the store's tables that it reads, without names that WITH defines."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection) -> None:
        self._cursor = cursor
        self.tables: set[str] = set()

    def walk(self, node: Any, ctes: Names) -> None:
        """Checks everything below `node`. ctes: names that WITH has defined for it."""
        if isinstance(node, list):
            for item in node:
                self.walk(item, ctes)
        elif isinstance(node, dict):
            ctes = self._check(node, ctes)
            for key, value in node.items():
                if key != "cte_map":
                    self.walk(value, ctes)

    def _check(self, node: dict[str, Any], ctes: Names) -> Names:
        """Refuses a node that is not listed; returns the names of CTEs that are valid below it."""
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
            node["function"] = None  # already checked as a table function; the walk would check it as a scalar one
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
            reason = f"{'.'.join(path)!r} is not a table that is served; there are: {', '.join(SHOWN)}"
            raise Refused(reason) if len(path) != 1 or self._exists(name) else InvalidQuery(reason)

    def _exists(self, name: str) -> bool:
        """Returns whether a bare name is a file, a table of the database, or a table that is not served."""
        if not re.fullmatch(r"\w+", name) or name in INTERNAL or name.startswith(("hot_", "latest_", "recent_")):
            return True
        return self._known("duckdb_views() WHERE view_name = ?", name)

    def _function(self, node: dict[str, Any], allowed: Names) -> None:
        path = node["qualified_name"]["path"]
        name = path[-1].lower() if path else node["function_name"].lower()
        if len(path) > 1 or name not in allowed or node["function_name"].lower() != name:
            where = "after FROM" if allowed is TABLE_FUNCTIONS else "in expressions"
            reason = f"function {'.'.join(path)!r} is not served {where}; {guide('sql.md')} lists those that are"
            exists = len(path) > 1 or self._known("duckdb_functions() WHERE function_name = ?", name)
            raise Refused(reason) if exists else InvalidQuery(reason)

    def _known(self, where: str, name: str) -> bool:
        return bool(self._cursor.execute(f"SELECT 1 FROM {where} LIMIT 1", [name]).fetchall())


def _words(kind: Any) -> str:
    return str(kind).replace("_NODE", "").replace("_", " ").strip()


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
