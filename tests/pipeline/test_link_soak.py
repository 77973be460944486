"""A link soak is judged by the counters of the links: load on all of them, long enough, without an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from pipeline.acts.act import Act
from pipeline.acts.adapters.adapter import Outcome
from pipeline.acts.scheduler import SchedulerNode
from pipeline.commands.act_board import CheckedBoard
from pipeline.commands.link_soak import MIN_SOAK_S, judge_soak
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology
from pipeline.store.database import Database
from tests.pipeline.acts_world import START, World

PORTS = ("port:n00.mlx5_0", "port:n00.mlx5_1")
TOPOLOGY = Topology(dict.fromkeys(PORTS, ("node:n00",)))
MINUTE = 60 * SECOND


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with closing(Database(tmp_path_factory.mktemp("soak") / "store.duckdb")) as made:
        for number, port in enumerate(PORTS):
            made.connection.execute("INSERT INTO device VALUES ('nic', $1, 's', $2, 'n00', false)", [number, port])
        yield made


class SoakWorld(World):
    """A world with a node of two ports, whose program of the soak takes `minutes`."""

    kind = CheckedBoard
    minutes = 10.0

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        database.connection.execute("DELETE FROM hot_nic")
        assert isinstance(self.board, CheckedBoard)
        self.board.judge = lambda act: judge_soak(database.connection, TOPOLOGY, act)  # type: ignore[method-assign]
        self.carry_out = self.scheduler.carry_out
        self.scheduler.carry_out = self.take_time  # type: ignore[method-assign]

    def take_time(self, act: Act, node: SchedulerNode) -> Outcome:
        if act.verb == "diagnose":
            self.now += round(self.minutes * MINUTE)
        return self.carry_out(act, node)

    def count(self, port: int, minute: float, sent: int, errors: int | None = 0) -> None:
        """A row of counters of a port, minutes after the start."""
        self.database.connection.execute(
            """INSERT INTO hot_nic (time, device, late, tx_bytes, phy_symbol_errors)
               VALUES (make_timestamptz($1::BIGINT), $2, false, $3, $4)""",
            [START + round(minute * MINUTE), port, sent, errors],
        )

    def soak(self) -> Act:
        """Holds the node and soaks its links."""
        self.approve(self.propose("hold", "n00"))
        self.run(3)
        act = self.propose("diagnose", "n00", params={"level": "link-soak"})
        self.approve(act)
        self.run(4)
        return self.board.find(act.id)


@pytest.fixture
def world(store: Database) -> SoakWorld:
    made = SoakWorld(store)
    for port in (0, 1):
        made.count(port, -60, 0)
        made.count(port, -30, 1_000)  # both are in use
    return made


def end(world: SoakWorld, port: int, sent: int, errors: int | None = 0) -> None:
    world.count(port, 0, 1_000)
    world.count(port, 5, sent, errors)
    world.count(port, 11, sent, errors)


def test_a_soak_with_load_on_all_links_and_no_error_is_a_check(world: SoakWorld) -> None:
    for port in (0, 1):
        end(world, port, 9_000_000)
    act = world.soak()
    assert (act.state, act.result["link_soak"]) == ("verified", "2 links carried traffic, 0 errors")


def test_a_link_that_counts_an_error_fails_the_soak_although_the_program_passed(world: SoakWorld) -> None:
    end(world, 0, 9_000_000)
    end(world, 1, 9_000_000, 12)
    act = world.soak()
    assert (act.state, act.result["reason"]) == ("failed", "link soak: port mlx5_1 of n00: 12 phy symbol errors")


def test_a_link_whose_errors_nobody_counts_has_passed_nothing(world: SoakWorld) -> None:
    end(world, 0, 9_000_000)
    end(world, 1, 9_000_000, None)
    act = world.soak()
    assert (act.state, act.result["reason"]) == (
        "failed",
        "link soak: port mlx5_1 of n00: no error counter has values",
    )


def test_a_link_without_load_fails_the_soak(world: SoakWorld) -> None:
    end(world, 0, 9_000_000)
    end(world, 1, 1_000)
    assert "no traffic" in world.soak().result["reason"]


def test_a_soak_that_ended_at_once_is_none(world: SoakWorld) -> None:
    world.minutes = 0.1
    for port in (0, 1):
        end(world, port, 9_000_000)
    assert f"expected at least {MIN_SOAK_S:.0f} s" in world.soak().result["reason"]


def test_the_last_values_are_waited_for_and_without_any_the_soak_fails(world: SoakWorld) -> None:
    world.count(0, 0, 1_000)
    world.count(0, 5, 9_000_000)
    act = world.soak()
    assert act.state == "verifying"
    world.now += 3 * MINUTE
    world.run()
    assert world.state(act) == "failed"


def test_a_node_without_links_has_no_soak(world: SoakWorld) -> None:
    world.database.connection.execute("DELETE FROM hot_nic")
    assert world.soak().result["reason"] == "link soak: no link carried traffic"
