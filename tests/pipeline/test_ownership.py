"""Admission by owner: an entity belongs to one sender, by configuration, by its name or by the first report."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline.config import sections
from pipeline.config.sections import SpeaksFor
from pipeline.config.settings import build_section
from pipeline.ingest.ownership import KEEP_CLAIMS, RANK_TAKEOVER, Claim, Owners
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, Batch, Block, Event, Origin
from pipeline.transport import wire
from tests.pipeline.conftest import NOW

TAKEOVER = 600 * SECOND


def send_blocks(site, node: str, time: int, **entities: tuple[str, ...]) -> None:
    """Sends one row of each entity, by class; its one value is 1."""
    signals = {"gpu": "gpu.temperature", "coolant": "coolant.flow", "nic": "nic.state", "rank": "rank.step_time"}
    made = []
    for device_class, names in entities.items():
        values = np.ones((1, len(names)), "u1" if device_class == "nic" else "f4")
        made.append(Block(device_class, names, {signals[device_class]: values}))
    site.send_raw(node, wire.encode(Batch(Origin("local", node, b"b" * 16), np.array([time]), tuple(made))))


def stored(site, device_class: str = "gpu") -> list[str]:
    return [entity for (entity,) in site.rows(f'SELECT entity FROM "{device_class}" ORDER BY time, entity')]


def reasons(site) -> list[str]:
    return [reason for (reason,) in site.rows("SELECT reason FROM dead_letter ORDER BY ALL")]


def inventory(site, node: str, time: int, lines: dict[str, tuple[str, ...]]) -> None:
    entities = {entity: {"parents": list(parents), "attributes": {}} for entity, parents in lines.items()}
    site.send_events(node, Event(time, f"node:{node}", "inventory", {"entities": entities}))


# --- by name ---------------------------------------------------------------------------------------------------------


def test_a_gpu_of_another_node_is_rejected_and_the_rest_of_the_message_is_stored(site):
    send_blocks(site, "h1", NOW, gpu=("gpu:h1.0", "gpu:h2.0", "gpu:h1.1"))
    send_blocks(site, "h2", NOW + 1, gpu=("gpu:h2.0",))
    ingest = site.drain()
    assert stored(site) == ["gpu:h1.0", "gpu:h1.1", "gpu:h2.0"]
    assert reasons(site) == ["owner: 'gpu:h2.0': belongs to node h2 by its name"]
    assert ingest.rejected["owner"] == 1
    assert ingest.counters["samples"] == 3
    assert site.rows("SELECT node FROM device ORDER BY entity") == [("h1",), ("h1",), ("h2",)]


def test_each_value_stays_with_its_entity_when_others_of_its_block_are_rejected(site):
    columns = {
        "gpu.temperature": np.arange(6, dtype="f4").reshape(2, 3),
        "gpu.sm_clock": np.arange(6, dtype="u2").reshape(2, 3),
    }
    names = ("gpu:h1.0", "gpu:h2.0", "gpu:h1.2")
    batch = Batch(Origin("local", "h1", b"b" * 16), NOW + np.arange(2) * SECOND, (Block("gpu", names, columns),))
    site.send_raw("h1", wire.encode(batch))
    site.drain()
    assert site.rows("SELECT entity, temperature, sm_clock FROM gpu ORDER BY time, entity") == [
        ("gpu:h1.0", 0, 0), ("gpu:h1.2", 2, 2), ("gpu:h1.0", 3, 3), ("gpu:h1.2", 5, 5)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sender", "entity", "allowed"),
    [
        ("h1", "node:h1", True),
        ("h1", "node:h2", False),
        ("h1", "node:h1.2", True),
        ("h1", "gpu:h10.0", False),
        ("h1", "gpu:unknown.0", False),
        ("h1", "gpu:h2.example.0", False),
        ("h2.example", "gpu:h2.example.0", True),
        ("h2", "gpu:h2.example.0", False),
        ("h1", "agent:h2", False),
        ("h1", "port:h2.mlx5_0", False),
        ("h1", "port:leaf-4.17", True),
        ("h1", "psu:row3-shelf.1", True),
        ("h1", "cdu:h2", True),
        ("h1", "job:81", True),
    ],
)
def test_an_entity_with_a_host_name_belongs_to_that_host(sender, entity, allowed):
    owners = Owners(senders=dict.fromkeys(("h1", "h2", "h2.example"), NOW))
    assert (owners.claim_entity(sender, entity, NOW) is None) == allowed


def test_a_port_first_reported_by_another_node_belongs_to_its_host_from_its_first_message_on(site):
    send_blocks(site, "h1", NOW, nic=("port:h2.mlx5_0",))
    send_blocks(site, "h2", NOW + SECOND, nic=("port:h2.mlx5_0",))
    send_blocks(site, "h1", NOW + 2 * SECOND, nic=("port:h2.mlx5_0",))
    site.drain()
    assert len(stored(site, "nic")) == 2
    assert reasons(site) == ["owner: 'port:h2.mlx5_0': belongs to node h2 by its name"]


# --- by claim --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_entity_without_a_host_name_belongs_to_its_first_reporter_also_after_a_restart(site):
    send_blocks(site, "row3", NOW, coolant=("cdu:c1",))
    site.drain()
    send_blocks(site, "h1", NOW + SECOND, coolant=("cdu:c1",), gpu=("gpu:h1.0",))
    send_blocks(site, "row3", NOW + 2 * SECOND, coolant=("cdu:c1",))
    site.drain()
    assert len(stored(site, "coolant")) == 2
    assert stored(site) == ["gpu:h1.0"]
    assert reasons(site)[0].startswith("owner: 'cdu:c1': belongs to row3")


@pytest.mark.slow
def test_a_device_of_a_store_without_claims_belongs_to_the_node_of_its_row(site):
    send_blocks(site, "row3", NOW, coolant=("cdu:c1",))
    site.drain()
    site.database.connection.execute("DELETE FROM owner")  # as an older version writes it
    send_blocks(site, "h1", NOW + SECOND, coolant=("cdu:c1",))
    ingest = site.drain()
    assert ingest.rejected["owner"] == 1
    assert ingest.admission.owners.claims["cdu:c1"].owner == "row3"


@pytest.mark.slow
def test_a_silent_owner_is_replaced_and_gets_its_entity_back_when_it_returns(site):
    send_blocks(site, "row3", NOW - 3 * TAKEOVER - SECOND, coolant=("cdu:c1",))
    send_blocks(
        site, "h1", NOW - 2 * TAKEOVER, coolant=("cdu:c1",)
    )  # impostor or successor: they cannot be distinguished
    site.drain()
    assert site.rows("SELECT node FROM device") == [("h1",)]
    send_blocks(site, "row3", NOW - 2 * TAKEOVER + SECOND, coolant=("cdu:c1",))
    send_blocks(site, "h1", NOW - 2 * TAKEOVER + 2 * SECOND, coolant=("cdu:c1",))
    ingest = site.drain()
    assert site.rows("SELECT node, count(*) FROM device JOIN coolant USING (entity) GROUP BY 1") == [("row3", 3)]
    assert ingest.rejected["owner"] == 1


def test_messages_that_an_owner_sent_before_its_replacement_are_stored_however_late_they_arrive():
    owners = Owners()
    owners.claim_entity("row3", "cdu:c1", NOW)
    assert owners.claim_entity("h1", "cdu:c1", NOW + 2 * TAKEOVER) is None
    assert owners.claim_entity("row3", "cdu:c1", NOW + TAKEOVER) is None
    assert owners.claims["cdu:c1"].owner == "h1"


def test_future_timestamps_do_not_take_over_an_entity(site):
    send_blocks(site, "row3", NOW, coolant=("cdu:c1",))
    send_blocks(site, "h1", NOW + 5 * TAKEOVER, coolant=("cdu:c1",))  # arrives at NOW
    assert site.drain().rejected["owner"] == 1


@pytest.mark.slow
def test_an_owner_that_removes_an_entity_from_its_inventory_can_be_replaced_immediately(site):
    send_blocks(site, "row3", NOW, coolant=("cdu:c1",))
    inventory(site, "row3", NOW, {"cdu:c1": ()})
    send_blocks(site, "row4", NOW + SECOND, coolant=("cdu:c1",))
    assert site.drain().rejected["owner"] == 1
    inventory(site, "row3", NOW + 2 * SECOND, {})  # its configuration no longer contains the BMC
    site.drain()
    send_blocks(site, "row4", NOW + 3 * SECOND, coolant=("cdu:c1",))
    site.drain()
    assert site.rows("SELECT node FROM device") == [("row4",)]


def test_an_entity_that_only_inventory_reports_stays_with_its_owner_as_long_as_it_sends_anything():
    owners = Owners()
    owners.claim_entity("fabric", "leaf:l4", NOW)
    owners.record_message("fabric", NOW + 5 * TAKEOVER)
    assert owners.claim_entity("h1", "leaf:l4", NOW + 5 * TAKEOVER + SECOND) is not None
    assert owners.claim_entity("h1", "leaf:l4", NOW + 6 * TAKEOVER + SECOND) is None


@pytest.mark.slow
def test_expired_claims_are_dropped_from_memory_and_store(site):
    send_blocks(site, "row3", NOW, coolant=("cdu:c1",))
    ingest = site.drain()
    ingest.admission.owners.drop_expired(NOW + KEEP_CLAIMS)
    assert ingest.admission.owners.claims
    ingest.admission.owners.drop_expired(NOW + KEEP_CLAIMS + SECOND)
    assert not ingest.admission.owners.claims
    site.send("h1", NOW)
    ingest.step()
    assert site.rows("SELECT * FROM owner") == []


# --- by configuration ------------------------------------------------------------------------------------------------


def test_the_configuration_gives_entities_to_one_sender_alone():
    rules = sections.Admission(speaks_for=(SpeaksFor("row3", ("cdu:row3-*", "gpu:wafer*")),))
    owners = Owners(rules, {"cdu:row3-1": Claim("h1", NOW, NOW, True)}, {"h1": NOW, "row3": NOW})
    assert owners.claim_entity("row3", "cdu:row3-1", NOW) is None
    assert owners.claim_entity("row3", "gpu:wafer7.0", NOW) is None
    assert "gives it to row3" in owners.claim_entity("h1", "cdu:row3-1", NOW)
    assert owners.claim_entity("row3", "gpu:h1.0", NOW) is not None


@pytest.mark.parametrize(
    "table",
    [
        {"takeover": 1.0},
        {"speaks_for": [{"node": "row3"}]},
        {"speaks_for": [{"node": "row3", "entities": []}]},
        {"speaks_for": [{"node": "row3", "entities": ["cdu"]}]},
        {"speaks_for": [{"node": "", "entities": ["cdu:*"]}]},
    ],
)
def test_an_invalid_rule_is_refused_at_the_start(table):
    with pytest.raises(ConfigError, match="admission"):
        build_section(sections.Admission, table, "fleetpulse.toml", "admission")


# --- ranks and jobs --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_belongs_to_the_node_that_runs_it_and_moves_once_it_ended_there(site):
    placed = {"rank:81.0": {"gpu": "gpu:h1.0"}}
    site.send_events("h1", Event(NOW, "job:81", "job_start", {"ranks": placed}))
    send_blocks(site, "h1", NOW, rank=("rank:81.0",))
    send_blocks(site, "h2", NOW + SECOND, rank=("rank:81.0",))
    site.drain()
    assert stored(site, "rank") == ["rank:81.0"]
    site.send_events("h1", Event(NOW + 2 * SECOND, "job:81", "job_end", {"ranks": ["rank:81.0"]}))
    site.drain()
    send_blocks(site, "h2", NOW + 3 * SECOND, rank=("rank:81.0",))
    site.drain()
    assert stored(site, "rank") == ["rank:81.0"] * 2
    assert len(reasons(site)) == 1


@pytest.mark.slow
def test_a_rank_moves_a_minute_after_its_node_was_lost(site):
    send_blocks(site, "h1", NOW - RANK_TAKEOVER - SECOND, rank=("rank:81.0",))
    send_blocks(site, "h2", NOW, rank=("rank:81.0",))
    site.drain()
    assert stored(site, "rank") == ["rank:81.0"] * 2
    assert reasons(site) == []


@pytest.mark.slow
def test_the_end_of_a_job_ends_the_senders_ranks_alone(site):
    for node, rank in (("h1", "rank:81.0"), ("h2", "rank:81.1")):
        site.send_events(node, Event(NOW, "job:81", "job_start", {"ranks": {rank: {"gpu": f"gpu:{node}.0"}}}))
    site.send_events("h1", Event(NOW + SECOND, "job:81", "job_end", {"ranks": ["rank:81.0", "rank:81.1"]}))
    site.send_events("h1", Event(NOW + SECOND, "job:81", "job_end", {}))
    site.drain()
    assert site.rows("SELECT data FROM events WHERE kind = 'job_end'") == [('{"ranks": ["rank:81.0"]}',)]
    assert [reason.split(":", 1)[0] for reason in reasons(site)] == ["owner", "owner"]
    assert "without `ranks`" in reasons(site)[1] + reasons(site)[0]


def test_a_checkpoint_of_a_rank_that_another_node_runs_is_rejected(site):
    site.send_events("h1", Event(NOW, "job:81", "job_start", {"ranks": {"rank:81.0": {}}}))
    site.send_events("h2", Event(NOW + 1, "job:81", "checkpoint", {"rank": 0}))
    site.send_events("h1", Event(NOW + 2, "job:81", "checkpoint", {"rank": 0}))
    site.drain()
    assert site.rows("SELECT node FROM events WHERE kind = 'checkpoint'") == [("h1",)]


# --- inventory and events --------------------------------------------------------------------------------------------


def test_an_inventory_sets_parents_of_the_senders_entities_alone(site):
    inventory(site, "h2", NOW, {"node:h2": ("rack:r2",), "gpu:h2.0": ("node:h2",)})
    lines = {"node:h1": ("rack:r1",), "gpu:h2.0": ("cdu:c1",), "node:h2": ("rack:r1",), "job:81": ("cdu:c1",)}
    inventory(site, "h1", NOW + SECOND, lines | {"stage:81.0": ("job:81",), "stage:81.1": ("cdu:c1",)})
    ingest = site.drain()
    assert site.rows("SELECT entity, parents FROM entity ORDER BY ALL") == [
        ("gpu:h2.0", ["node:h2"]), ("node:h1", ["rack:r1"]), ("node:h2", ["rack:r2"])
    ]  # fmt: skip
    assert ingest.rejected["owner"] == 1
    # four lines in all: stage:81.0 was accepted, and removed because no rank is in it
    assert reasons(site) == ["owner: 'gpu:h2.0': belongs to node h2 by its name; and 3 more entities"]


def send_job_inventory(site, node: str, time: int, name: str, *ranks: str, job: str = "job:81") -> None:
    """Sends an inventory of a node with a job, a stage, and its ranks."""
    lines = {job: ((), {"name": name}), "stage:81.0": (("job:81",), {"name": name})}
    lines |= {rank: (("stage:81.0", "job:81"), {"node": node}) for rank in ranks}
    entities = {entity: {"parents": list(over), "attributes": facts} for entity, (over, facts) in lines.items()}
    site.send_events(node, Event(time, f"node:{node}", "inventory", {"entities": entities}))


def job_names(site) -> dict[str, str]:
    rows = site.rows("SELECT entity, attributes FROM entity WHERE kind IN ('job', 'stage')")
    return {entity: json.loads(attributes)["name"] for entity, attributes in rows}


@pytest.mark.slow
def test_the_attributes_of_a_job_come_from_its_first_node_and_no_other_node_replaces_them(site):
    send_job_inventory(site, "h1", NOW, "good", "rank:81.0")
    site.drain()
    send_job_inventory(site, "evil", NOW + SECOND, "evil")
    send_job_inventory(site, "h2", NOW + 2 * SECOND, "another", "rank:81.1")
    site.drain()
    assert job_names(site) == {"job:81": "good", "stage:81.0": "good"}
    [reason] = reasons(site)
    assert reason.startswith("owner: 'job:81': evil"), "an honest node of the job is not reported"
    assert site.rows("SELECT entity FROM entity WHERE kind = 'rank' ORDER BY ALL") == [("rank:81.0",), ("rank:81.1",)]


@pytest.mark.slow
def test_a_node_without_ranks_of_a_job_does_not_describe_it_even_as_the_first(site):
    send_job_inventory(site, "evil", NOW, "evil")
    send_job_inventory(site, "evil2", NOW, "evil", "rank:82.0")
    send_job_inventory(site, "h1", NOW + SECOND, "good", "rank:81.0")
    site.drain()
    assert job_names(site) == {"job:81": "good", "stage:81.0": "good"}


def test_another_node_of_a_job_describes_it_once_the_first_has_no_rank_of_it(site):
    send_job_inventory(site, "h1", NOW, "good", "rank:81.0")
    send_job_inventory(site, "h2", NOW + SECOND, "good", "rank:81.1")
    inventory(site, "h1", NOW + 2 * SECOND, {"node:h1": ()})
    send_job_inventory(site, "h2", NOW + 3 * SECOND, "renewed", "rank:81.1")
    site.drain()
    assert job_names(site) == {"job:81": "renewed", "stage:81.0": "renewed"}
    assert reasons(site) == []


def test_an_inventory_in_the_name_of_another_node_is_rejected_as_a_whole(site):
    site.send_events("h1", Event(NOW, "node:h2", "inventory", {"entities": {"node:h2": {"parents": ["rack:r9"]}}}))
    site.send_events("h1", Event(NOW, "node:h1.x", "inventory", {"entities": {"node:h1": {"parents": ["rack:r9"]}}}))
    site.drain()
    assert site.rows("SELECT * FROM entity") == []
    assert len(reasons(site)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("entity", ["gpu:h2.0", "cdu:c1", "rank:81.0"])
def test_an_event_of_another_senders_entity_is_rejected(site, entity):
    site.send("h2", NOW)
    send_blocks(site, "row3", NOW, coolant=("cdu:c1",))
    send_blocks(site, "h2", NOW, rank=("rank:81.0",))
    site.drain()
    site.send_events("h1", Event(NOW, entity, "xid", {"code": 79}), Event(NOW, "gpu:h1.0", "xid", {"code": 31}))
    site.drain()
    assert site.rows("SELECT entity FROM events") == [("gpu:h1.0",)]
    assert len(reasons(site)) == 1


def test_events_claim_nothing_so_that_invented_names_take_no_memory(site):
    site.send_events("h1", *(Event(NOW, f"cdu:{n}", "leak", {}) for n in range(100)))
    ingest = site.drain()
    assert ingest.admission.owners.claims == {}


def test_a_job_start_accepts_no_stage_of_another_job(site):
    ranks = {"rank:b.0": {"stage": "stage:a.forward"}, "rank:b.1": {"stage": "stage:b.forward"}}
    site.send_events("h1", Event(NOW, "job:b", "job_start", {"ranks": ranks}))
    site.drain()
    [(data,)] = site.rows("SELECT data FROM events")
    assert json.loads(data)["ranks"] == {"rank:b.1": {"stage": "stage:b.forward"}}
    assert len(reasons(site)) == 1
    assert "expected a stage of its job" in reasons(site)[0]


@pytest.mark.slow
def test_invalid_ranks_do_not_affect_the_rest_of_an_event(site):
    site.send_events("h2", Event(NOW, "job:a", "job_start", {"ranks": {"rank:a.0": {}}}))
    site.drain()
    bad = Event(NOW + 1, "job:a", "job_end", {"ranks": ["rank:a.0", {}, ["x"], "rank:a.1"]})
    site.send_events("h1", bad, Event(NOW + 1, "gpu:h1.0", "xid", {"xid": 79}))
    ingest = site.drain()
    assert site.rows("SELECT entity, kind FROM events WHERE node = 'h1' ORDER BY ALL") == [
        ("gpu:h1.0", "xid"), ("job:a", "job_end")
    ]  # fmt: skip
    assert dict(ingest.rejected) == {"owner": 1}


def test_invented_senders_are_dropped_before_active_ones(monkeypatch):
    monkeypatch.setattr("pipeline.ingest.ownership.MAX_SENDERS", 20)
    owners = Owners()
    for i in range(100):
        owners.record_message(f"m{i}", NOW)
        owners.record_message("h1", NOW + i)
    assert len(owners._newest_of) <= 20
    assert "h1" in owners._newest_of


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["maintenance_start", "maintenance_end", "version"])
@pytest.mark.parametrize("entity", ["job:81", "stage:81.f", "rack:a", "site:local", "cdu:c1", "node:h2"])
def test_a_sender_cannot_mute_entities_of_others(site, kind, entity):
    send_blocks(site, "row3", NOW, coolant=("cdu:c2",))
    site.drain()
    site.send_events("h1", Event(NOW, entity, kind, {"seconds": 86400}), Event(NOW, "node:h1", kind, {}))
    site.send_events("row3", Event(NOW, "cdu:c2", kind, {}))
    ingest = site.drain()
    assert site.rows("SELECT entity FROM events ORDER BY ALL") == [("cdu:c2",), ("node:h1",)]
    assert dict(ingest.rejected) == {"owner": 1}


def test_a_scheduler_announces_work_on_entities_that_the_configuration_gives_it():
    owners = Owners(sections.Admission(speaks_for=(SpeaksFor("slurm", ("rack:*", "job:*")),)))
    assert owners.is_owner("slurm", "rack:a")
    assert owners.is_owner("slurm", "job:81")
    assert not owners.is_owner("h1", "rack:a")


def test_the_end_of_a_job_without_ranks_is_rejected(site):
    site.send_events("h1", Event(NOW, "job:81", "job_end", {"ranks": []}))
    assert site.drain().rejected["owner"] == 1
