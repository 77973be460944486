"""Every table of the store has a bound, and rows deleted from the loss tables stay counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.sections import Store
from pipeline.incidents import ledger
from pipeline.judging.mutes import Mute
from pipeline.model.records import SECOND
from pipeline.store import retention
from pipeline.store.database import Database
from pipeline.store.retention import BOUNDS, DAY, HOUR, apply_bounds, count_losses

NOW = 1_790_000_000 * SECOND


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "store.duckdb")


def run(database: Database, query: str) -> list[tuple[object, ...]]:
    return database.connection.execute(query).fetchall()


def time_ago(age: int) -> str:
    return f"make_timestamptz({NOW - age})"


def test_every_table_has_a_bound_and_every_bound_a_table(database: Database) -> None:
    found = {name for (name,) in run(database, "SELECT table_name FROM duckdb_tables()")}
    assert found == set(BOUNDS), "a new table needs its bound in pipeline/store/retention.py"


def test_every_bound_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    named = {name: bound for name, bound in BOUNDS.items() if not name.startswith(("hot_", "latest_"))}
    assert [n for n, bound in named.items() if f"| `{n}` | {bound.text} |" not in page] == []


def put_gaps(database: Database, *gaps: tuple[int, int, str]) -> None:
    """Inserts gaps of (age, messages, cause)."""
    for age, messages, cause in gaps:
        run(database, f"INSERT INTO gaps VALUES ({time_ago(age)}, 't', 'n1', 'e', 0, {messages}, '{cause}')")


def put_letters(database: Database, *letters: tuple[int, int]) -> None:
    """Inserts dead letters of (age, bytes)."""
    for age, size in letters:
        run(
            database,
            f"""INSERT INTO dead_letter (time, topic, partition, "offset", reason, payload, rule)
                VALUES ({time_ago(age)}, 't', 'n1', 0, 'r', repeat('x', {size})::BLOB, 'wire')""",
        )


def test_old_gaps_are_deleted_and_stay_counted(database: Database) -> None:
    put_gaps(database, (40 * DAY, 5, "full"), (31 * DAY, 7, "full"), (35 * DAY, 1, "damaged"), (DAY, 9, "full"))
    before = count_losses(database.connection)
    apply_bounds(database, Store(), NOW)
    apply_bounds(database, Store(), NOW)
    assert run(database, "SELECT next_sequence FROM gaps") == [(9,)]
    found = run(database, "SELECT kind, topic, cause, number, messages, epoch_us(first) FROM losses ORDER BY cause")
    assert found == [("gap", "t", "damaged", 1, 1, NOW - 35 * DAY), ("gap", "t", "full", 2, 12, NOW - 40 * DAY)]
    assert count_losses(database.connection) == before == (4, 0)


def test_gaps_beyond_the_bound_are_deleted_oldest_first(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    run(
        database,
        f"""INSERT INTO gaps SELECT make_timestamptz({NOW} - i), 't', 'n1', 'e', i, i + 1, 'full'
            FROM range({retention.GAP_ROWS + 500}) r(i)""",
    )
    apply_bounds(database, Store(), NOW)
    assert run(database, "SELECT count(*), max(first_sequence) FROM gaps") == [
        (retention.GAP_ROWS, retention.GAP_ROWS - 1)
    ]
    assert count_losses(database.connection) == (retention.GAP_ROWS + 500, 0)


def test_the_number_of_loss_causes_is_bounded_although_senders_choose_the_text(database: Database) -> None:
    for start in (0, 900, 1800):
        run(
            database,
            f"""INSERT INTO gaps SELECT {time_ago(40 * DAY)}, 't', 'n1', 'e', i, i + 1, 'cause ' || i
                FROM range({start}, {start + 900}) r(i)""",
        )
        apply_bounds(database, Store(), NOW)
    assert run(database, "SELECT count(*) <= 2000 FROM losses") == [(True,)]
    assert count_losses(database.connection) == (2700, 0)


def test_dead_letters_are_deleted_by_age_and_by_size_and_stay_counted(database: Database) -> None:
    put_letters(database, (200 * HOUR, 10), (3 * HOUR, 400), (2 * HOUR, 400), (HOUR, 400))
    apply_bounds(database, Store(dead_letter_bytes=1000), NOW)
    assert run(database, "SELECT epoch_us(time) FROM dead_letter ORDER BY 1") == [(NOW - 2 * HOUR,), (NOW - HOUR,)]
    assert count_losses(database.connection) == (0, 4)
    assert run(database, "SELECT kind, cause, messages FROM losses") == [("dead_letter", "wire", 2)]


def put_incident(database: Database, name: str, resolved: str) -> None:
    run(
        database,
        f"""INSERT INTO incidents VALUES ('{name}', 'c', {time_ago(200 * DAY)}, {time_ago(200 * DAY)}, {resolved},
            'page', [], 1, 'open', 's', false, 'd', 'e', {time_ago(200 * DAY)}, NULL, NULL)""",
    )
    run(database, f"INSERT INTO history VALUES ('{name}', 1, {time_ago(200 * DAY)}, 'opened', 'a', '', '{{}}')")
    run(
        database,
        f"""INSERT INTO findings VALUES ({time_ago(200 * DAY)}, {time_ago(200 * DAY)}, 'e', '{name}', 'page', 1, 's',
            '{{}}', [], '{name}')""",
    )
    run(
        database,
        f"""INSERT INTO outbox VALUES ('{name}', '{name}', 1, 'r', 'firing', '', {time_ago(200 * DAY)}, 1,
            {time_ago(200 * DAY)}, 'delivered', '', NULL)""",
    )


def test_incidents_are_deleted_with_all_their_rows_a_quarter_after_they_were_resolved(database: Database) -> None:
    put_incident(database, "old", time_ago(91 * DAY))
    put_incident(database, "recent", time_ago(89 * DAY))
    put_incident(database, "unresolved", "NULL")
    apply_bounds(database, Store(), NOW)
    for table, column in (
        ("incidents", "id"),
        ("history", "incident"),
        ("outbox", "incident"),
        ("findings", "incident"),
    ):
        found = run(database, f"SELECT {column} FROM {table} ORDER BY 1")
        assert found == [("recent",), ("unresolved",)], table


def test_marks_and_offsets_of_spools_that_were_silent_for_long_are_deleted(database: Database) -> None:
    for epoch, age in (("old", 91), ("new", 1)):
        run(database, f"INSERT INTO producer_mark VALUES ('t', 'n1', '{epoch}', 7, NULL, {time_ago(age * DAY)})")
        run(database, f"INSERT INTO ingest_commit VALUES ('t', 'n1', '{epoch}', 0, 8, 8, {time_ago(age * DAY)})")
        run(database, f"INSERT INTO partition_offset VALUES ('t', 'n1', '{epoch}', 8)")
    run(database, "INSERT INTO producer_mark VALUES ('t', 'n2', 'before it was kept', 7, NULL, NULL)")
    apply_bounds(database, Store(), NOW)
    assert run(database, "SELECT epoch FROM producer_mark ORDER BY 1") == [("before it was kept",), ("new",)]
    assert run(database, "SELECT incarnation FROM ingest_commit") == [("new",)]
    assert run(database, "SELECT incarnation FROM partition_offset") == [("new",)]


def test_mutes_are_deleted_long_after_their_end(database: Database) -> None:
    for name, until in (("old", NOW - 91 * DAY), ("standing", NOW + DAY)):
        ledger.add_mute(database.connection, Mute(name, "*", "rack:r1", NOW - 200 * DAY, until, "", "u"))
    apply_bounds(database, Store(), NOW)
    assert run(database, "SELECT id FROM mutes") == [("standing",)]
