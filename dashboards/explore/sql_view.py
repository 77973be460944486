"""The SQL view of Explore: a query with examples, the tables and their columns, the result with a simple chart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape

import altair as alt
import pyarrow as pa
import pyarrow.ipc
import streamlit as st

from dashboards import markup, snapshot
from dashboards.client import ApiError
from dashboards.explore import export
from dashboards.explore.columns import plain_table, shown_table
from dashboards.views import parts
from dashboards.words import amount, unit_name
from pipeline.model.signals import CATALOGUE, CLASSES, signals_of_class

MAX_SHOWN = 1_000
"""Rows in the table; the export has all that were read. Chosen: more are not read by a person."""
MAX_CHART_ROWS = 5_000
"""Rows of a chart. Source: marks that a Vega chart draws without delay."""
TIMEOUT_S = 30.0
"""Limit of a query (s): [api] sql_seconds is 10 by default; sites raise it. Chosen."""
KEPT_S = 60.0
"""Time that a result is kept (s), so that a table, its chart and its export are of one run. Chosen."""
EXAMPLES = {
    "Hottest GPU of each node": (
        "SELECT entity, max(temperature) AS hottest\nFROM gpu\nWHERE time > now() - INTERVAL '10 minutes'\n"
        "GROUP BY entity\n"
        "QUALIFY row_number() OVER (PARTITION BY split_part(entity, '.', 1) ORDER BY hottest DESC) = 1\n"
        "ORDER BY hottest DESC LIMIT 50"
    ),
    "Power of the fleet by minute": (
        "SELECT time_bucket(INTERVAL '1 minute', time) AS minute,\n"
        "       avg(power) * count(DISTINCT entity) / 1000 AS kilowatts\n"
        "FROM gpu\nWHERE time > now() - INTERVAL '1 hour'\nGROUP BY minute ORDER BY minute"
    ),
    "Ports with symbol errors": (
        "SELECT entity, max(symbol_errors)::BIGINT - min(symbol_errors)::BIGINT AS errors\nFROM nic\n"
        "WHERE time > now() - INTERVAL '1 hour'\nGROUP BY entity HAVING errors > 0 ORDER BY errors DESC LIMIT 50"
    ),
    "XIDs of the last day": (
        "SELECT time, entity, data ->> '$.xid' AS xid, data ->> '$.name' AS name\nFROM events\n"
        "WHERE kind = 'xid' AND time > now() - INTERVAL '1 day'\nORDER BY time DESC LIMIT 200"
    ),
    "Incidents by detector, 30 days": (
        "SELECT detector, count(*) AS incidents, count(*) FILTER (severity = 'page') AS pages\nFROM incidents\n"
        "WHERE opened > now() - INTERVAL '30 days'\nGROUP BY detector ORDER BY incidents DESC"
    ),
    "A GPU over 30 days, from rollups": (
        "SELECT time, temperature_mean, temperature_max\nFROM rollup_600_gpu\n"
        "WHERE entity = 'gpu:n042.3' AND time > now() - INTERVAL '30 days'\nORDER BY time"
    ),
}
TABLES = (
    "entities", "links", "events", "incidents", "findings", "history", "silences", "mutes", "audit", "outbox", "gaps",
    "losses", "dead_letter", "decommissioned", "ingest_commit",
)  # fmt: skip
"""Tables besides those of the device classes and their rollups. Source: docs/sql.md."""
LIMITS = (
    "One SELECT, read only. At most 10 s, 100,000 rows, 64 MiB, 512 MiB of memory and 4 queries at a time, unless the "
    "site configured other limits ([api] sql_...). Comparisons with time and entity make a query cheap."
)
ERRORS = {
    "urn:fleetpulse:wrong-query": "The query has a mistake. Columns are listed under Tables and columns.",
    "urn:fleetpulse:refused": "Only SELECT over the listed tables is allowed, without functions that read files, "
    "settings or the catalogue.",
    "urn:fleetpulse:over-limit": "Add `WHERE time > now() - INTERVAL '10 minutes'` or an entity, or use a "
    "rollup table.",
}
"""Class of a problem -> what to do."""


@dataclass(frozen=True, slots=True)
class Result:
    """Rows of a query; truncated: rows at the end are missing. error, kind: why there are none."""

    table: pa.Table | None
    truncated: bool = False
    error: str = ""
    kind: str = ""
    seconds: float = 0.0


def draw() -> None:
    """Draws the view. The query is in the address, so a link runs it."""
    badges = [parts.simulated_label(snapshot.fetch_fleet_of())]
    st.html(markup.title("SQL", badges, "DuckDB's dialect over the tables of the store. Times are UTC."))
    asked = st.query_params.get("sql", "")
    st.session_state["sql-text"] = asked
    left, right = st.columns([1.7, 1], gap="medium")
    with left:
        st.text_area("Query", key="sql-text", height=190, on_change=_write_query, placeholder="SELECT ...")
        row = st.container(horizontal=True, vertical_alignment="center", gap="small")
        row.button("Run", type="primary", key="sql-run", help="Ctrl+Enter in the query", on_click=_run_again)
        row.selectbox(
            "Examples", list(EXAMPLES), index=None, key="sql-example", placeholder="Examples", width=260,
            label_visibility="collapsed", on_change=_write_example,
        )  # fmt: skip
        st.html(f'<p class="fp-below">{escape(LIMITS)}</p>')
    with right:
        _draw_schema()
    if asked.strip():
        _draw_result(run(snapshot.api_url(), asked))


def _write_query() -> None:
    st.query_params["sql"] = st.session_state["sql-text"]


def _run_again() -> None:
    """Reads the rows again, although the query did not change."""
    run.clear(snapshot.api_url(), st.query_params.get("sql", ""))


def _write_example() -> None:
    if name := st.session_state["sql-example"]:
        st.query_params["sql"] = EXAMPLES[name]


@st.cache_data(ttl=KEPT_S, max_entries=16, show_spinner="Running the query")
def run(url: str, query: str) -> Result:
    """Returns the result of a query; `url` is a part of the cache key."""
    client = replace(snapshot.make_client(), timeout=TIMEOUT_S)
    began = snapshot.now()
    try:
        raw, truncated = client.run_query(query)
        table = plain_table(pa.ipc.open_stream(raw).read_all())
    except ApiError as error:
        return Result(None, error=str(error), kind=error.kind)
    except pa.ArrowException as error:
        return Result(None, error=f"The result cannot be read ({error}); expected an Arrow stream of the same version.")
    return Result(table, truncated, seconds=(snapshot.now() - began) / 1e6)


def _draw_schema() -> None:
    """Draws the tables and the columns of one of them."""
    tables = [*CLASSES, *(f"rollup_{step}_{name}" for name in CLASSES for step in (60, 600)), *TABLES]
    name = st.selectbox("Tables and columns", tables, key="sql-table")
    rows = columns_of(str(name))
    if not rows:
        found = run(snapshot.api_url(), f'FROM "{name}" LIMIT 0').table
        rows = [] if found is None else [(f.name, str(f.type), "") for f in found.schema]
    body = "".join(f"<tr><td>{escape(c)}</td><td>{escape(u)}</td><td>{escape(h)}</td></tr>" for c, u, h in rows)
    table = f'<table class="fp-table"><tbody>{body}</tbody></table>' if body else "Columns are not known now."
    st.html(f'<div class="fp-schema" tabindex="0">{table}</div>')


def columns_of(name: str) -> list[tuple[str, str, str]]:
    """Returns (column, unit, meaning) of a table of a device class or of its rollups; empty for others."""
    device_class = name.rpartition("_")[2] if name.startswith("rollup_") else name
    if device_class not in CLASSES:
        return []
    fixed = [("time", "UTC", "time of the row, or start of the interval"), ("entity", "", "kind:name of the device")]
    if name == device_class:
        return [*fixed, *((s.column, _unit(s.name), s.help) for s in signals_of_class(device_class))]
    parts = ("mean", "min", "max", "count")
    own = signals_of_class(device_class)
    return [*fixed, *((f"{s.column}_{part}", _unit(s.name), s.help) for s in own for part in parts)]


def _unit(name: str) -> str:
    return unit_name(CATALOGUE[name].unit)


# --- the result -----------------------------------------------------------------------------------------------------


def _draw_result(found: Result) -> None:
    if found.table is None:
        st.html(markup.notice(found.error, "critical", "No result."))
        if advice := ERRORS.get(found.kind):
            st.html(markup.notice(advice, "quiet", "What to do:"))
        return
    table = found.table
    cut = ", cut at the limit of the API: rows at the end are missing" if found.truncated else ""
    st.html(markup.section("Result", f"{amount(table.num_rows, 'row', 'rows')} in {found.seconds:.2g} s{cut}"))
    if not table.num_rows:
        st.html(markup.notice("The query returned no rows. Is the time range too short, or a name misspelled?"))
        return
    _draw_chart(table)
    st.dataframe(shown_table(table.slice(0, MAX_SHOWN)), hide_index=True, height=380)
    row = st.container(horizontal=True, vertical_alignment="center", gap="small")
    row.download_button(
        "CSV", lambda: export.write_csv(table), "fleetpulse-query.csv", "text/csv",
        key="sql-csv", on_click="ignore", icon=":material/download:",
    )  # fmt: skip
    row.download_button(
        "Parquet", lambda: export.write_parquet(table), "fleetpulse-query.parquet", "application/vnd.apache.parquet",
        key="sql-parquet", on_click="ignore", icon=":material/download:",
    )  # fmt: skip
    if table.num_rows > MAX_SHOWN:
        row.html(f'<span class="fp-below">The table shows the first {MAX_SHOWN:,} rows; the files have all.</span>')


def chart_columns(table: pa.Table) -> tuple[str, list[str]]:
    """Returns the axis and the numbers that a chart shows: the first time or text against up to four numbers."""
    kinds = {f.name: f.type for f in table.schema}
    times = [name for name, kind in kinds.items() if pa.types.is_timestamp(kind)]
    texts = [name for name, kind in kinds.items() if pa.types.is_string(kind)]
    numbers = [
        name
        for name, kind in kinds.items()
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    ]
    axis = next(iter([*times, *texts]), "")
    return (axis, numbers[:4]) if axis and numbers else ("", [])


def _draw_chart(table: pa.Table) -> None:
    """Draws lines over time, or bars of the first 40 rows."""
    axis, numbers = chart_columns(table)
    if not axis or table.num_rows < 2:
        return
    over_time = pa.types.is_timestamp(table.schema.field(axis).type)
    frame = table.select([axis, *numbers]).slice(0, MAX_CHART_ROWS if over_time else 40).to_pandas()
    frame = frame.rename(columns={name: f"c{i}" for i, name in enumerate([axis, *numbers])})
    names = {f"c{i + 1}": name for i, name in enumerate(numbers)}
    long = frame.melt("c0", list(names), "series", "value").replace({"series": names})
    colour = alt.Color("series:N", title=None, legend=alt.Legend(orient="top") if len(numbers) > 1 else None)
    base = alt.Chart(long)
    if over_time:
        x = alt.X("c0:T", title=None, scale=alt.Scale(type="utc"), axis=alt.Axis(format="%d %b %H:%M", grid=False))
        chart = base.mark_line().encode(x=x, y=alt.Y("value:Q", title=None), color=colour)
    else:
        y = alt.Y("c0:N", title=None, sort=None, axis=alt.Axis(labelLimit=220))
        chart = base.mark_bar().encode(y=y, x=alt.X("value:Q", title=None), color=colour)
    st.altair_chart(chart.properties(height=220 if over_time else alt.Step(18)), width="stretch")
