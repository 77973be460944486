"""Tables and views of the store, and the schema version, which migrates forward, never back.

Telemetry is wide: one row per device and tick. Each device class has hot tables `hot_CLASS_N`, one per set of signals
that senders report together, and `hot_CLASS` with all signals of the class, for sets without an own table
(pipeline/store/hot_tables.py). `latest_CLASS` has the newest row of each device. The view with the name of the class
shows `time, entity, signals...` of all its hot tables.

Evaluated frames can be rebuilt from the store: `late` in a hot table marks a row that arrived after its frame had
closed and was not evaluated (view `late_rows`); `judged` in `events` is the event time of the frame in which a late
event was evaluated, null for an event that was evaluated in its own frame.

Full hours leave the hot tables for Parquet files (pipeline/store/sealing.py), which the view of the class shows too.
`recent_CLASS` is the part of the view in hot tables.

Versions: 1 had one hot table per class, and no `partition_offset`. 2 had no sealed files. 3 had mutes as a table
instead of silences, and incidents without a life.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence

import duckdb

from pipeline.model.errors import DamagedStore, UsageError
from pipeline.model.signals import CATALOGUE, CLASSES, Signal, signals_of_class
from pipeline.store import history_files, job_membership, older_schemas, schema_mark, topology_lines

SCHEMA_VERSION = 4
RESERVED = ("time", "entity", "device", "late", "node", "simulated")
"""Columns of class tables, views and sealed files that are not signals."""
UNFIT = frozenset({*RESERVED, "at", "id", "place"})
"""Columns that no new signal may have: our queries have these names beside those of signals."""
SQL_TYPES: Mapping[str, str] = {
    "u1": "UTINYINT",
    "u2": "USMALLINT",
    "u4": "UINTEGER",
    "u8": "UBIGINT",
    "f4": "FLOAT",
    "f8": "DOUBLE",
}

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key VARCHAR PRIMARY KEY, value VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS device (
    class VARCHAR NOT NULL, id INTEGER NOT NULL, site VARCHAR NOT NULL, entity VARCHAR NOT NULL, node VARCHAR NOT NULL,
    simulated BOOLEAN NOT NULL, PRIMARY KEY (class, id));
CREATE TABLE IF NOT EXISTS entity (
    entity VARCHAR PRIMARY KEY, kind VARCHAR NOT NULL, site VARCHAR NOT NULL, simulated BOOLEAN NOT NULL,
    parents VARCHAR[] NOT NULL, attributes VARCHAR NOT NULL);
ALTER TABLE entity ADD COLUMN IF NOT EXISTS node VARCHAR;
ALTER TABLE entity ADD COLUMN IF NOT EXISTS named TIMESTAMPTZ;
CREATE TABLE IF NOT EXISTS events (
    time TIMESTAMPTZ NOT NULL, entity VARCHAR NOT NULL, kind VARCHAR NOT NULL, data VARCHAR NOT NULL,
    site VARCHAR NOT NULL, node VARCHAR NOT NULL, simulated BOOLEAN NOT NULL);
ALTER TABLE events ADD COLUMN IF NOT EXISTS judged TIMESTAMPTZ;
CREATE TABLE IF NOT EXISTS ingest_commit (
    topic VARCHAR NOT NULL, partition VARCHAR NOT NULL, incarnation VARCHAR NOT NULL, first_offset BIGINT NOT NULL,
    next_offset BIGINT NOT NULL, rows BIGINT NOT NULL, committed TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (topic, partition, incarnation, first_offset));
CREATE TABLE IF NOT EXISTS partition_offset (
    topic VARCHAR NOT NULL, partition VARCHAR NOT NULL, incarnation VARCHAR NOT NULL, next_offset BIGINT NOT NULL,
    PRIMARY KEY (topic, partition, incarnation));
CREATE TABLE IF NOT EXISTS producer_mark (
    topic VARCHAR NOT NULL, node VARCHAR NOT NULL, epoch VARCHAR NOT NULL, sequence BIGINT NOT NULL,
    PRIMARY KEY (topic, node, epoch));
CREATE TABLE IF NOT EXISTS sender (
    node VARCHAR PRIMARY KEY, arrived TIMESTAMPTZ NOT NULL, newest TIMESTAMPTZ NOT NULL, clock_error BIGINT NOT NULL);
ALTER TABLE producer_mark ADD COLUMN IF NOT EXISTS sent BIGINT;
ALTER TABLE sender ADD COLUMN IF NOT EXISTS apart BIGINT;
CREATE TABLE IF NOT EXISTS owner (
    entity VARCHAR PRIMARY KEY, node VARCHAR NOT NULL, former VARCHAR NOT NULL, since TIMESTAMPTZ NOT NULL,
    released BOOLEAN NOT NULL);
CREATE TABLE IF NOT EXISTS gaps (
    time TIMESTAMPTZ NOT NULL, topic VARCHAR NOT NULL, source VARCHAR NOT NULL, epoch VARCHAR NOT NULL,
    first_sequence BIGINT NOT NULL, next_sequence BIGINT NOT NULL, cause VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS dead_letter (
    time TIMESTAMPTZ NOT NULL, topic VARCHAR NOT NULL, partition VARCHAR NOT NULL, "offset" BIGINT NOT NULL,
    reason VARCHAR NOT NULL, payload BLOB NOT NULL);
ALTER TABLE dead_letter ADD COLUMN IF NOT EXISTS rule VARCHAR DEFAULT 'wire';
ALTER TABLE dead_letter ADD COLUMN IF NOT EXISTS "key" BLOB;
ALTER TABLE dead_letter ADD COLUMN IF NOT EXISTS signature BLOB;
ALTER TABLE producer_mark ADD COLUMN IF NOT EXISTS updated TIMESTAMPTZ;
CREATE TABLE IF NOT EXISTS losses (
    kind VARCHAR NOT NULL, topic VARCHAR NOT NULL, cause VARCHAR NOT NULL, number BIGINT NOT NULL,
    messages BIGINT NOT NULL, first TIMESTAMPTZ NOT NULL, last TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (kind, topic, cause));
CREATE TABLE IF NOT EXISTS findings (
    time TIMESTAMPTZ NOT NULL, onset TIMESTAMPTZ NOT NULL, entity VARCHAR NOT NULL, detector VARCHAR NOT NULL,
    level VARCHAR NOT NULL, score DOUBLE, summary VARCHAR NOT NULL, evidence VARCHAR NOT NULL,
    signals VARCHAR[] NOT NULL, incident VARCHAR, PRIMARY KEY (detector, entity, onset));
CREATE TABLE IF NOT EXISTS incidents (
    id VARCHAR PRIMARY KEY, cause VARCHAR NOT NULL, opened TIMESTAMPTZ NOT NULL, onset TIMESTAMPTZ NOT NULL,
    resolved TIMESTAMPTZ, severity VARCHAR NOT NULL, members VARCHAR[] NOT NULL, confidence DOUBLE,
    state VARCHAR NOT NULL, summary VARCHAR NOT NULL, simulated BOOLEAN NOT NULL, detector VARCHAR NOT NULL,
    entity VARCHAR NOT NULL, updated TIMESTAMPTZ NOT NULL);
CREATE TABLE IF NOT EXISTS history (
    incident VARCHAR NOT NULL, number INTEGER NOT NULL, time TIMESTAMPTZ NOT NULL, kind VARCHAR NOT NULL,
    actor VARCHAR NOT NULL, comment VARCHAR NOT NULL, incident_json VARCHAR NOT NULL, PRIMARY KEY (incident, number));
CREATE TABLE IF NOT EXISTS outbox (
    id VARCHAR PRIMARY KEY, incident VARCHAR NOT NULL, number INTEGER NOT NULL, receiver VARCHAR NOT NULL,
    kind VARCHAR NOT NULL, payload VARCHAR NOT NULL, created TIMESTAMPTZ NOT NULL, attempts INTEGER NOT NULL,
    next_attempt TIMESTAMPTZ NOT NULL, state VARCHAR NOT NULL, answer VARCHAR NOT NULL);
ALTER TABLE outbox ADD COLUMN IF NOT EXISTS part_of VARCHAR;
CREATE TABLE IF NOT EXISTS notify_groups (
    receiver VARCHAR NOT NULL, id VARCHAR NOT NULL, state VARCHAR NOT NULL, PRIMARY KEY (receiver, id));
CREATE TABLE IF NOT EXISTS notify_threads (
    receiver VARCHAR NOT NULL, thread VARCHAR NOT NULL, reference VARCHAR NOT NULL, time TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (receiver, thread));
CREATE TABLE IF NOT EXISTS notify_silences (
    receiver VARCHAR NOT NULL, incident VARCHAR NOT NULL, text VARCHAR NOT NULL, time TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (receiver, incident));
CREATE TABLE IF NOT EXISTS decommissioned (
    node VARCHAR NOT NULL, since TIMESTAMPTZ NOT NULL, "user" VARCHAR NOT NULL, reason VARCHAR NOT NULL,
    returned TIMESTAMPTZ, returned_by VARCHAR, PRIMARY KEY (node, since));
ALTER TABLE incidents ADD COLUMN IF NOT EXISTS life VARCHAR;
ALTER TABLE incidents ADD COLUMN IF NOT EXISTS explanation VARCHAR;
CREATE TABLE IF NOT EXISTS silences (
    id VARCHAR PRIMARY KEY, kind VARCHAR NOT NULL, matchers VARCHAR NOT NULL, starts TIMESTAMPTZ NOT NULL,
    ends TIMESTAMPTZ NOT NULL, author VARCHAR NOT NULL, reason VARCHAR NOT NULL, created TIMESTAMPTZ NOT NULL,
    updated TIMESTAMPTZ NOT NULL, updated_by VARCHAR NOT NULL, version INTEGER NOT NULL, expired TIMESTAMPTZ,
    expired_by VARCHAR, source VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS audit (
    number BIGINT PRIMARY KEY, time TIMESTAMPTZ NOT NULL, actor VARCHAR NOT NULL, role VARCHAR NOT NULL,
    origin VARCHAR NOT NULL, action VARCHAR NOT NULL, target VARCHAR NOT NULL, reason VARCHAR NOT NULL,
    outcome VARCHAR NOT NULL, before VARCHAR, after VARCHAR, id VARCHAR, hash VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS acts (
    id VARCHAR PRIMARY KEY, key VARCHAR NOT NULL, state VARCHAR NOT NULL, verb VARCHAR NOT NULL,
    targets VARCHAR[] NOT NULL, incident VARCHAR NOT NULL, requested_by VARCHAR NOT NULL,
    created TIMESTAMPTZ NOT NULL, updated TIMESTAMPTZ NOT NULL, expires TIMESTAMPTZ NOT NULL, version INTEGER NOT NULL,
    active BOOLEAN NOT NULL, document VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS act_history (
    act VARCHAR NOT NULL, number INTEGER NOT NULL, time TIMESTAMPTZ NOT NULL, state VARCHAR NOT NULL,
    actor VARCHAR NOT NULL, comment VARCHAR NOT NULL, PRIMARY KEY (act, number));
CREATE TABLE IF NOT EXISTS act_breaker (
    opened TIMESTAMPTZ NOT NULL, reason VARCHAR NOT NULL, closed TIMESTAMPTZ, closed_by VARCHAR,
    closing_reason VARCHAR);
CREATE TABLE IF NOT EXISTS calibrations (
    version INTEGER PRIMARY KEY, time TIMESTAMPTZ NOT NULL, action VARCHAR NOT NULL, "of" INTEGER,
    "user" VARCHAR NOT NULL, document VARCHAR);
CREATE TABLE IF NOT EXISTS wrong_pages (
    incident VARCHAR PRIMARY KEY, detector VARCHAR NOT NULL, time TIMESTAMPTZ NOT NULL, reason VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS impact (
    incident VARCHAR PRIMARY KEY, time TIMESTAMPTZ NOT NULL, gpus INTEGER NOT NULL, nodes INTEGER NOT NULL,
    ranks INTEGER NOT NULL, jobs INTEGER NOT NULL, lost_gpu_hours DOUBLE NOT NULL,
    lost_gpu_hours_per_hour DOUBLE NOT NULL, cost DOUBLE, currency VARCHAR, frozen BOOLEAN NOT NULL,
    detail VARCHAR NOT NULL, state VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS impact_jobs (
    incident VARCHAR NOT NULL, job VARCHAR NOT NULL, state VARCHAR NOT NULL, slowdown DOUBLE, gpus INTEGER NOT NULL,
    ranks INTEGER NOT NULL, lost_gpu_hours DOUBLE NOT NULL, lost_gpu_hours_per_hour DOUBLE NOT NULL,
    basis VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    job VARCHAR NOT NULL, started TIMESTAMPTZ NOT NULL, ended TIMESTAMPTZ, name VARCHAR NOT NULL,
    account VARCHAR NOT NULL, "user" VARCHAR NOT NULL, scheduler VARCHAR NOT NULL, ranks INTEGER NOT NULL,
    gpus INTEGER NOT NULL, nodes VARCHAR[] NOT NULL, checkpoint TIMESTAMPTZ, simulated BOOLEAN NOT NULL,
    step_time DOUBLE, usual_step_time DOUBLE, moved TIMESTAMPTZ, hanging BOOLEAN NOT NULL,
    PRIMARY KEY (job, started));
CREATE TABLE IF NOT EXISTS job_pace (
    job VARCHAR NOT NULL, time TIMESTAMPTZ NOT NULL, step_time DOUBLE NOT NULL, steps DOUBLE NOT NULL,
    pause BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS job_loss (
    time TIMESTAMPTZ NOT NULL, incident VARCHAR NOT NULL, job VARCHAR NOT NULL, gpu_hours DOUBLE NOT NULL);
CREATE TABLE IF NOT EXISTS job_energy (
    job VARCHAR NOT NULL, hour TIMESTAMPTZ NOT NULL, kwh DOUBLE NOT NULL, gpu_hours DOUBLE NOT NULL,
    PRIMARY KEY (job, hour));
CREATE TABLE IF NOT EXISTS snapshot (key VARCHAR PRIMARY KEY, time TIMESTAMPTZ NOT NULL, state VARCHAR NOT NULL);
"""

_LINKS = """
CREATE OR REPLACE VIEW links AS
WITH port AS MATERIALIZED (
    SELECT entity, attributes ->> '$.port_guid' AS own, attributes ->> '$.guid' AS switch,
           attributes ->> '$.port' AS number, attributes ->> '$.peer_guid' AS far,
           attributes ->> '$.peer_port' AS far_number
    FROM entity
    WHERE kind = 'port' AND (contains(attributes, '"port_guid"') OR contains(attributes, '"peer_guid"')))
SELECT a.entity, b.entity AS peer FROM port a JOIN port b ON a.far = b.own
UNION SELECT b.entity, a.entity FROM port a JOIN port b ON a.far = b.own
UNION SELECT a.entity, b.entity FROM port a JOIN port b ON a.far = b.switch AND a.far_number = b.number"""
"""The ends of each cable, one row per end, paired by GUID as in pipeline/model/links.py."""


def create_tables(
    connection: duckdb.DuckDBPyConnection, found: int, catalogue: Mapping[str, Signal] = CATALOGUE
) -> None:
    """Creates missing tables, columns and views. found: version of the file, as `check_version` returns it."""
    current = found == SCHEMA_VERSION and schema_mark.has_mark(connection, catalogue)
    if not current:
        connection.execute(_TABLES + history_files.TABLE + job_membership.TABLE + topology_lines.TABLE)
    missing = 0
    if (folder := history_files.folder_of(connection)) is not None:
        missing = history_files.match_files(connection, folder, new=not found)
    if not current or missing:
        _create_all(connection, catalogue, found)


def _create_all(connection: duckdb.DuckDBPyConnection, catalogue: Mapping[str, Signal], found: int) -> None:
    """Migrates from version `found`, and creates all columns and views."""
    if found == 1:
        older_schemas.migrate_from_1(connection)
    if 0 < found < 4 and "mutes" in {name for (name,) in connection.execute(_TABLE_NAMES).fetchall()}:
        connection.execute(older_schemas.FROM_3)
    connection.execute(older_schemas.MUTES)
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", [str(SCHEMA_VERSION)])
    have = _signal_columns(connection)
    for table in (name for name in have if name.startswith("hot_")):
        connection.execute(f'ALTER TABLE "{table}" ADD COLUMN IF NOT EXISTS late BOOLEAN')
    sealed = history_files.list_classes(connection)
    for device_class in CLASSES:
        signals = signals_of_class(device_class, catalogue)
        _ensure_class(connection, device_class, signals, have, device_class in sealed)
    _mark_layouts(connection, CLASSES)
    _create_entities_view(connection)
    _create_late_rows_view(connection, list_hot_tables(connection))
    connection.execute(_LINKS)
    schema_mark.write_mark(connection, catalogue)


_TABLE_NAMES = "SELECT table_name FROM duckdb_tables()"


def check_version(connection: duckdb.DuckDBPyConnection) -> int:
    """The schema version of the file, 0 if it is empty. Raises UsageError if it is newer or of another program.

    Outside of a transaction, which a failed statement ends. DuckDB's list of tables would read all of them: 30 ms.
    """
    try:
        found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()
    except (duckdb.BinderException, duckdb.CatalogException) as error:  # no such table or column
        if tables := sorted(name for (name,) in connection.execute(_TABLE_NAMES).fetchall()):
            raise UsageError(
                f"store: is a DuckDB file of another program (tables {', '.join(tables[:3])}); set another [store] path"
            ) from error
        return 0
    version = str(found[0][0]) if found else "0"
    if not version.isdecimal():
        raise DamagedStore(f"store: its table meta is damaged: schema_version is {version[:40]!r}, expected a number")
    if int(version) > SCHEMA_VERSION:
        raise UsageError(
            f"store: schema version {version}, expected at most {SCHEMA_VERSION}: a newer fleetpulse wrote it"
        )
    return int(version)


def ensure_class(connection: duckdb.DuckDBPyConnection, device_class: str, signals: Iterable[Signal]) -> None:
    """Creates tables and view of a device class with at least these signals; a new signal is a new column."""
    _ensure_class(connection, device_class, signals, _signal_columns(connection))
    _mark_layouts(connection, [device_class])


def _ensure_class(
    connection: duckdb.DuckDBPyConnection,
    device_class: str,
    signals: Iterable[Signal],
    have: Mapping[str, list[str]],
    sealed: bool = True,
) -> None:
    """Creates tables and views of a class. sealed: whether it may have sealed files. `_mark_layouts` must follow."""
    hot, latest = f"hot_{device_class}", f"latest_{device_class}"
    types = {signal.column: SQL_TYPES[signal.type] for signal in signals}
    _create_or_widen(connection, hot, _HOT_KEY, types, have)
    _create_or_widen(connection, latest, _LATEST_KEY, types, have)
    have = {**have, hot: list(dict.fromkeys([*have.get(hot, ()), *types]))}
    _create_class_view(connection, device_class, have, sealed)


_HOT_KEY, _LATEST_KEY = "device INTEGER NOT NULL, late BOOLEAN", "device INTEGER NOT NULL PRIMARY KEY"


def _create_or_widen(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    key: str,
    columns: Mapping[str, str],
    have: Mapping[str, Collection[str]],
) -> None:
    """Creates a table of rows by time with these columns (SQL types), or adds those that it lacks."""
    if table in have:
        if new := [f'ALTER TABLE "{table}" ADD COLUMN "{c}" {columns[c]};' for c in columns if c not in have[table]]:
            connection.execute("".join(new))
    else:
        more = "".join(f', "{column}" {kind}' for column, kind in columns.items())
        connection.execute(f'CREATE TABLE "{table}" (time TIMESTAMPTZ NOT NULL, {key}{more})')


def create_hot_table(connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, str]) -> None:
    """Creates a hot table of a class with these columns (SQL types), or adds them to it. The class has them already."""
    have, device_class = _signal_columns(connection), class_of_table(table)
    _create_or_widen(connection, table, _HOT_KEY, columns, have)
    have[table] = list(dict.fromkeys([*have.get(table, ()), *columns]))
    _create_class_view(connection, device_class, have)
    _mark_layouts(connection, [device_class])
    _create_late_rows_view(connection, have)


def drop_hot_tables(connection: duckdb.DuckDBPyConnection, tables: Iterable[str]) -> None:
    """Drops hot tables of sets of signals; their rows are lost."""
    dropped = sorted(tables)
    left = {table: columns for table, columns in _signal_columns(connection).items() if table not in dropped}
    classes = {class_of_table(table) for table in dropped}
    for device_class in classes:
        _create_class_view(connection, device_class, left)
    if dropped:
        _mark_layouts(connection, classes)
        _create_late_rows_view(connection, left)
    for table in dropped:
        connection.execute(f'DROP TABLE "{table}"')


def class_of_table(table: str) -> str:
    """The device class of a hot table; no name of a class has an underscore."""
    return table.removeprefix("hot_").partition("_")[0]


def list_hot_tables(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """All hot tables, by name."""
    rows = connection.execute(
        "SELECT table_name FROM duckdb_tables() WHERE starts_with(table_name, 'hot_') ORDER BY ALL"
    ).fetchall()
    return [table for (table,) in rows]


def _create_class_view(
    connection: duckdb.DuckDBPyConnection, device_class: str, have: Mapping[str, Sequence[str]], sealed: bool = True
) -> None:
    """Creates the views of a class over all its hot tables and sealed files. have: columns of each table."""
    columns = have[f"hot_{device_class}"]
    each = " UNION ALL BY NAME ".join(
        f'SELECT time, device{"".join(f", {chr(34)}{c}{chr(34)}" for c in have[table])} FROM "{table}"'
        for table in [f"hot_{device_class}", *_narrow_tables(device_class, have)]
    )
    names = "".join(f', h."{column}"' for column in columns)
    connection.execute(
        f'CREATE OR REPLACE VIEW "recent_{device_class}" AS SELECT h.time, d.entity{names} '
        f"FROM ({each}) h JOIN device d ON d.id = h.device AND d.class = '{device_class}'"
    )
    if sealed:
        show_sealed(connection, device_class)
    else:
        connection.execute(f'CREATE OR REPLACE VIEW "{device_class}" AS FROM "recent_{device_class}"')


def _mark_layouts(connection: duckdb.DuckDBPyConnection, classes: Iterable[str]) -> None:
    """Makes layouts that were read before invalid; one statement: each takes 4 ms of CPU, and all classes 5 ms."""
    rows = [value for device_class in classes for value in (_layout_key(device_class), secrets.token_hex(8))]
    places = ", ".join(["(?, ?)"] * (len(rows) // 2))
    connection.execute(f"INSERT OR REPLACE INTO meta VALUES {places}", rows)


def show_sealed(connection: duckdb.DuckDBPyConnection, device_class: str) -> None:
    """Creates the view of a class over its hot tables and the files that `sealed` names now."""
    sealed = history_files.list_files(connection, device_class)
    source = select_class(connection, device_class) if sealed else f'FROM "recent_{device_class}"'
    connection.execute(f'CREATE OR REPLACE VIEW "{device_class}" AS {source}')


def select_class(
    connection: duckdb.DuckDBPyConnection,
    device_class: str,
    columns: Iterable[str] | None = None,
    start: int | None = None,
    end: int | None = None,
) -> str:
    """SQL for columns of the view of a class (None: all), with only the files that may have rows in [start, end).

    Run it in the transaction in which it was made: a file may be sealed in between.
    """
    types = class_types(connection, device_class)
    names = list(types if columns is None else columns)
    hot = f'SELECT {", ".join(f"{chr(34)}{c}{chr(34)}" for c in names)} FROM "recent_{device_class}"'
    files = history_files.list_files(connection, device_class, 0, start, end)
    folder = history_files.folder_of(connection) if files else None
    if folder is None:
        return hot
    return f"{hot} UNION ALL {history_files.select_files(folder, files, {c: types[c] for c in names})}"


def select_latest(device_class: str, columns: Iterable[str], rows: str) -> str:
    """SQL for columns of the newest row of each device of a class, with `entity` instead of its id. rows: a table."""
    names = ", ".join('d.entity AS "entity"' if c == "entity" else f'l."{c}"' for c in columns)
    return f"SELECT {names} FROM {rows} l JOIN device d ON d.id = l.device AND d.class = '{device_class}'"


def class_types(connection: duckdb.DuckDBPyConnection, device_class: str) -> dict[str, str]:
    """Column -> SQL type of the view of a class, in order. `hot_CLASS` has them all, and is bound faster."""
    types = column_types(connection, f"hot_{device_class}")
    signals = {column: kind for column, kind in types.items() if column not in RESERVED}
    return {"time": types["time"], "entity": "VARCHAR", **signals}


Layout = Mapping[str, Mapping[str, str]]
"""Hot tables of a class -> column -> SQL type."""
_LAYOUTS: dict[str, Layout] = {}
"""Layouts by the value of their row in `meta`, which every change of a class's hot tables replaces."""
_MOST_KEPT = 256  # chosen: ten times the classes; two stores at a time are those of a test


def _layout_key(device_class: str) -> str:
    return f"layout_{device_class}"


def read_layout(connection: duckdb.DuckDBPyConnection, device_class: str) -> Layout:
    """The hot tables of a class with their columns. DuckDB's own lists of tables and columns take 2 and 6 ms of CPU."""
    found = connection.execute("SELECT value FROM meta WHERE key = $1", [_layout_key(device_class)]).fetchall()
    state = str(found[0][0]) if found else ""
    if state not in _LAYOUTS:
        names = [name for name in list_hot_tables(connection) if class_of_table(name) == device_class]
        layout = {name: column_types(connection, name) for name in names}
        if not found:  # no pipeline of this version has opened the store yet
            return layout
        if len(_LAYOUTS) >= _MOST_KEPT:
            _LAYOUTS.clear()
        _LAYOUTS[state] = layout
    return _LAYOUTS[state]


def select_hot(
    connection: duckdb.DuckDBPyConnection,
    device_class: str,
    layout: Layout,
    columns: Sequence[str],
    where: str,
    entities: Sequence[str],
) -> str:
    """SQL for hot rows of some devices: time, entity and these columns, of the tables that have the first.

    It is planned in a quarter of the time of the view of the class, which has all columns of all tables.
    """
    known = connection.execute(
        "SELECT id FROM device WHERE class = $1 AND entity IN (SELECT unnest($2))", [device_class, list(entities)]
    ).fetchall()
    ids = ", ".join(str(number) for (number,) in known) or "-1"
    each = " UNION ALL ".join(
        f"SELECT time, device, {', '.join(f'{chr(34)}{c}{chr(34)}' if c in have else f'NULL AS {c}' for c in columns)} "
        f'FROM "{table}" WHERE {where} AND device IN ({ids})'
        for table, have in layout.items()
        if columns[0] in have
    )
    names = ", ".join(f'h."{c}"' for c in columns)
    if len(entities) == 1:
        entity = entities[0].replace("'", "''")
        return f"SELECT h.time, '{entity}' AS entity, {names} FROM ({each}) h"
    join = f"JOIN device d ON d.id = h.device AND d.class = '{device_class}'"
    return f"SELECT h.time, d.entity, {names} FROM ({each}) h {join}"


def column_types(connection: duckdb.DuckDBPyConnection, table: str) -> dict[str, str]:
    """Column -> SQL type of a table or view, in order."""
    found = connection.sql(f'FROM "{table}" LIMIT 0')
    return dict(zip(found.columns, map(str, found.types), strict=True))


def _narrow_tables(device_class: str, tables: Iterable[str]) -> list[str]:
    return sorted(table for table in tables if table.startswith(f"hot_{device_class}_"))


def _signal_columns(connection: duckdb.DuckDBPyConnection) -> dict[str, list[str]]:
    """Table -> its signal columns in order, for all classes."""
    found: dict[str, list[str]] = {}
    rows = connection.execute(
        """SELECT table_name, column_name FROM duckdb_columns()
           WHERE starts_with(table_name, 'hot_') OR starts_with(table_name, 'latest_')
           ORDER BY table_name, column_index"""
    ).fetchall()
    for table, column in rows:
        found.setdefault(table, []).extend([column] if column not in RESERVED else [])
    return found


def _create_late_rows_view(connection: duckdb.DuckDBPyConnection, tables: Iterable[str]) -> None:
    """Creates the view `late_rows`: class, time and entity of rows that were stored but not evaluated."""
    each = " UNION ALL ".join(
        f"SELECT '{c}' AS class, h.time, d.entity FROM \"{table}\" h JOIN device d ON d.id = h.device "
        f"AND d.class = '{c}' WHERE h.late"
        for table in sorted(tables)
        if table.startswith("hot_")
        for c in (class_of_table(table),)
    )
    connection.execute(f"CREATE OR REPLACE VIEW late_rows AS {each}")


def _create_entities_view(connection: duckdb.DuckDBPyConnection) -> None:
    """Creates the view `entities`: all entities in inventories or telemetry, with the time of their last row."""
    seen = " UNION ALL ".join(
        f"SELECT d.entity, d.site, d.simulated, l.time FROM latest_{c} l "
        f"JOIN device d ON d.id = l.device AND d.class = '{c}'"
        for c in CLASSES
    )
    connection.execute(f"""
        CREATE OR REPLACE VIEW entities AS
        WITH seen AS (SELECT entity, any_value(site) AS site, bool_and(simulated) AS simulated, max(time) AS last_seen
                      FROM ({seen}) GROUP BY entity)
        SELECT coalesce(e.entity, s.entity) AS entity,
               split_part(coalesce(e.entity, s.entity), ':', 1) AS kind,
               coalesce(e.parents, []) AS parents, coalesce(e.simulated, s.simulated) AS simulated, s.last_seen,
               coalesce(e.site, s.site) AS site, coalesce(e.attributes, '{{}}') AS attributes
        FROM entity e FULL JOIN seen s ON s.entity = e.entity""")
