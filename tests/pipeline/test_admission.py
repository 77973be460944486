"""Admission: a rejected message is never stored, becomes a dead letter with the name of the rule, and is counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config.sections import Limits
from pipeline.ingest.admission import MAX_DATA, MAX_NESTING, MAX_PARENTS, Admission
from pipeline.ingest.columns import MAX_NEW, MAX_PER_SENDER
from pipeline.ingest.entities import EXPIRY, EntityCounts, load_entities, load_topology
from pipeline.model.names import MAX_NAME, MAX_TEXT
from pipeline.model.records import SECOND, Batch, Block, Event, EventBatch, Origin
from pipeline.model.topology import MAX_DEPTH
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import Message, Partition, wire
from tests.examples import examples

T0 = 1_780_000_000 * SECOND


def inventory(node, lines, time=T0):
    entities = {entity: {"parents": list(parents), "attributes": {}} for entity, parents in lines.items()}
    return Event(time, f"node:{node}", "inventory", {"entities": entities})


def read_rejections(site):
    """Returns (rule, reason) of every dead letter."""
    return [tuple(reason.split(": ", 1)) for (reason,) in site.rows("SELECT reason FROM dead_letter ORDER BY ALL")]


def send_gpus(site, node, *entities, site_name="local"):
    block = Block("gpu", entities, {"gpu.temperature": np.full((1, len(entities)), 40.0, "f4")})
    site.send_raw(node, wire.encode(Batch(Origin(site_name, node, b"b" * 16), np.array([T0]), (block,))))


def topology_at_start(site):
    """Returns the topology that a pipeline loads when it starts on this store."""
    return load_topology(load_entities(site.database.connection, 0))


# --- kinds of event -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["feedback", "no_such_kind", ""])
def test_an_event_kind_that_no_agent_sends_is_rejected(site, kind):
    site.send_events("n1", Event(T0, "node:n1", kind, {"verdict": "not_a_fault"}), Event(T0, "gpu:n1.0", "xid", {}))
    ingest = site.drain()
    assert site.rows("SELECT kind FROM events") == [("xid",)]
    [(rule, reason)] = read_rejections(site)
    assert rule == "kind"
    assert repr(kind) in reason
    assert ingest.rejected["kind"] == 1


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("kind", "entity"),
    [
        ("xid", "site:local"),
        ("xid", "job:81"),
        ("xid", "rack:r0"),
        ("gpu_lost", "fleet:gpu"),
        ("leak", "node:n1"),
        ("flow_collapse", "site:local"),
        ("temperature_rise", "rack:r1"),
        ("link_state", "leaf:l1"),
        ("job_end", "stage:81.0"),
        ("kernel", "fleet:gpu"),
    ],
)
def test_an_event_on_a_kind_of_entity_that_the_catalogue_does_not_allow_is_rejected(site, kind, entity):
    """XIDs of a whole site, of a job and of the fleet once paged for each; no driver reports such XIDs."""
    site.send_events("n1", Event(T0, entity, kind, {"state": "critical", "xid": 79, "ranks": []}))
    ingest = site.drain()
    assert site.rows("SELECT kind FROM events") == []
    [(rule, reason)] = read_rejections(site)
    assert (rule, entity in reason) == ("kind", True)
    assert ingest.rejected["kind"] == 1


@pytest.mark.parametrize(
    ("kind", "entity"),
    [("xid", "gpu:n1.0"), ("xid", "node:n1"), ("switch_state", "spine:s1"), ("temperature_rise", "cdu:c1")],
)
def test_an_event_on_a_kind_of_entity_that_the_catalogue_allows_is_stored(site, kind, entity):
    site.send_events("n1", Event(T0, entity, kind, {"state": "cleared"}))
    site.drain()
    assert site.rows("SELECT kind, entity FROM events") == [(kind, entity)]


# --- topology -------------------------------------------------------------------------------------------------------


def test_a_circle_of_parents_is_not_stored_and_the_next_pipeline_starts(site):
    site.send_events("n1", inventory("n1", {"rack:a": ["row:b"], "row:b": ["rack:a"]}))
    ingest = site.drain()
    assert site.rows("SELECT * FROM entity") == site.rows("SELECT * FROM events") == []
    assert [rule for rule, _ in read_rejections(site)] == ["topology"]
    assert ingest.rejected["topology"] == 1
    assert topology_at_start(site).parents == {}


def test_a_circle_across_the_inventories_of_two_senders_is_rejected(site):
    site.send_events("n1", inventory("n1", {"rack:a": ["row:b"]}))
    site.send_events("n2", inventory("n2", {"row:b": ["rack:a"]}, T0 + 1))
    site.drain()
    assert site.rows("SELECT entity FROM entity") == [("rack:a",)]
    [(rule, reason)] = read_rejections(site)
    assert (rule, "row:b -> rack:a -> row:b" in reason) == ("topology", True)


@pytest.mark.slow
def test_a_circle_with_entities_stored_before_a_restart_is_rejected(site):
    site.send_events("n1", inventory("n1", {"rack:a": ["row:b"]}))
    site.drain()
    site.shut()
    site.send_events("n2", inventory("n2", {"row:b": ["rack:a"]}, T0 + 1))
    site.drain()
    assert site.rows("SELECT entity FROM entity") == [("rack:a",)]
    assert [rule for rule, _ in read_rejections(site)] == ["topology"]


def test_a_bad_inventory_does_not_affect_the_topology_of_other_nodes(site):
    site.send_events("n1", inventory("n1", {"rack:a": ["row:b"], "row:b": ["rack:a"]}), Event(T0, "gpu:n1.0", "xid"))
    site.send_events("n2", inventory("n2", {"node:n2": ["rack:a"]}, T0 + 1))
    site.drain()
    assert topology_at_start(site).parents == {"node:n2": ("rack:a",)}
    assert site.rows("SELECT kind FROM events ORDER BY ALL") == [("inventory",), ("xid",)]


def test_parents_deeper_than_the_bound_are_rejected_across_messages_too(site):
    chain = {f"x:{i}": [f"x:{i + 1}"] for i in range(MAX_DEPTH)}
    site.send_events("n1", inventory("n1", chain))
    site.send_events("n2", inventory("n2", {f"x:{MAX_DEPTH}": ["x:top"]}, T0 + 1))
    site.send_events("n3", inventory("n3", {"y:leaf": ["x:0"]}, T0 + 2))
    site.drain()
    assert [rule for rule, _ in read_rejections(site)] == ["topology", "topology"]
    assert len(topology_at_start(site).ancestors("x:0")) == MAX_DEPTH


def test_more_parents_than_the_bound_are_rejected(site):
    site.send_events("n1", inventory("n1", {"node:n1": [f"rack:{i}" for i in range(MAX_PARENTS + 1)]}))
    site.drain()
    assert [rule for rule, _ in read_rejections(site)] == ["topology"]


@pytest.mark.slow
def test_a_store_with_inadmissible_rows_starts_without_them(site, caplog):
    site.send_events("n1", inventory("n1", {"node:n1": ["rack:a"]}))
    site.drain()
    bad = [
        ("rack:c", ["row:d"], "{}"),
        ("row:d", ["rack:c"], "{}"),
        ("gpu:j", [], "{not json"),
        ("gpu:l", [], "[1]"),
        ("gpu:\u202egpj", [], "{}"),
        *((f"deep:{i:05}", [f"deep:{i + 1:05}"], "{}") for i in range(2000)),
    ]
    for entity, parents, attributes in bad:
        site.database.connection.execute(
            "INSERT INTO entity BY NAME SELECT ? AS entity, 'x' AS kind, 'local' AS site, false AS simulated, "
            "? AS parents, ? AS attributes",
            [entity, parents, attributes],
        )
    found = load_entities(site.database.connection, T0)
    topology = load_topology(found)
    assert topology.parents["node:n1"] == ("rack:a",)
    assert {"row:d", "gpu:j", "gpu:l", "gpu:\u202egpj"} <= found.skipped.keys()
    assert max(len(topology.ancestors(f"deep:{i:05}")) for i in range(2000)) == MAX_DEPTH
    assert "rows of table entity skipped" in caplog.text
    assert "\u202e" not in caplog.text


NAMES = st.sampled_from([f"{kind}:{n}" for kind in ("gpu", "node", "rack", "row") for n in range(3)])
LINES = st.dictionaries(NAMES, st.lists(NAMES, max_size=3), max_size=5)


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=4))
def test_a_pipeline_starts_on_every_accepted_topology(new_site, messages):
    """Every stored row is loaded at the start; none is skipped."""
    site = new_site()
    for i, message in enumerate(messages):
        site.send_events(f"n{i}", *(inventory(f"n{i}", lines, T0 + i) for lines in message))
        site.drain()  # each message reaches a pipeline that just started
    if messages:
        found = load_entities(site.database.connection, T0)
        assert found.skipped == {}
        assert topology_at_start(site).parents == {
            entity: tuple(parents)
            for entity, parents in site.rows("SELECT entity, parents FROM entity WHERE len(parents) > 0")
        }
    site.shut()
    for spool in site.spools.values():
        spool.close()


# --- names and data -------------------------------------------------------------------------------------------------

BAD = {
    "line break": "a\nERROR fleetpulse forged",
    "carriage return": "a\rb",
    "escape": "a\x1b[2Jb",
    "delete": "a\x7fb",
    "bidirectional": "a\u202eb",
    "bidirectional isolate": "a\u2066b",
    "zero width": "a\u200bb",
    "byte order mark": "\ufeffab",
    "line separator": "a\u2028b",
    "filler": "a\u3164b",
    "variation selector": "a\ufe0fb",
    "private use": "a\ue000b",
    "unassigned": "a\u0378b",
    "too long": "x" * (MAX_TEXT + 1),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_misleading_name_or_text_is_rejected_in_every_field(site, text):
    lines = {"entities": {"gpu:n1.0": {"parents": ["node:n1"], "attributes": {}}}}
    bad = [
        Event(T0, f"gpu:n1.{text}", "xid"),
        Event(T0, "gpu:n1.0", "xid", {"text": text}),
        Event(T0, "gpu:n1.0", "xid", {text: 1}),
        Event(T0, "gpu:n1.0", "xid", {"sources": [{"deep": [text]}]}),
        inventory("n1", {f"gpu:{text}": ["node:n1"]}),
        inventory("n1", {"gpu:n1.0": [f"node:{text}"]}),
        Event(T0, "node:n1", "inventory", {"entities": {"gpu:n1.0": {"attributes": {"sku": text}}}}),
        Event(T0, "node:n1", "inventory", {"entities": {"gpu:n1.0": {"attributes": {text: "sku"}}}}),
    ]
    good = [Event(T0, "node:n1", "inventory", lines), Event(T0, "gpu:n1.0", "xid", {"text": "Grüße, 構成"})]
    site.send_events("n1", *bad, *good)
    site.drain()
    assert site.rows("SELECT count(*) FROM events") == [(len(good),)]
    assert site.rows("SELECT entity FROM entity") == [("gpu:n1.0",)]
    assert [rule for rule, _ in read_rejections(site)] == ["name"] * len(bad)
    assert all(reason.isprintable() and reason.isascii() for _, reason in read_rejections(site))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", [*BAD.values(), "", " n1", "n1 ", "x" * (MAX_NAME + 1)])
def test_a_message_whose_sender_or_site_has_a_misleading_name_is_rejected_as_a_whole(site, name):
    event = Event(T0, "gpu:n1.0", "xid")
    for origin in (Origin(name, "n1", b"b" * 16), Origin("local", name, b"b" * 16)):
        block = Block("gpu", ("gpu:n1.0",), {"gpu.temperature": np.ones((1, 1), "f4")})
        site.send_raw("n1", wire.encode(Batch(origin, np.array([T0]), (block,))))
        site.spool("n1", "events.v1").append(wire.encode_events(EventBatch(origin, (event,))), wire.EVENTS_KIND, 0)
    site.spool("n1", "events.v1").sync()
    site.drain()
    assert [rule for rule, _ in read_rejections(site)] == ["name"] * 4
    assert site.rows("SELECT count(*) FROM events") == site.rows("SELECT count(*) FROM device") == [(0,)]


def test_one_badly_named_device_does_not_affect_the_rows_of_the_other_devices(site):
    send_gpus(site, "n1", "gpu:n1.0", "gpu:n1.\u202e1", "gpu:n1.2")
    ingest = site.drain()
    assert site.rows("SELECT entity FROM gpu ORDER BY ALL") == [("gpu:n1.0",), ("gpu:n1.2",)]
    assert site.rows("SELECT count(*) FROM device") == [(2,)]
    assert ingest.rejected["name"] == 1


def test_an_entity_in_a_class_that_does_not_fit_its_kind_is_rejected(site):
    send_gpus(site, "n1", "gpu:n1.0", "rack:r1")
    site.drain()
    assert site.rows("SELECT entity FROM gpu") == [("gpu:n1.0",)]
    assert [rule for rule, _ in read_rejections(site)] == ["class"]


def nested(levels):
    return {} if levels == 0 else {"more": nested(levels - 1)}


@pytest.mark.parametrize(
    "data", [{"text": ["x" * MAX_TEXT] * (MAX_DATA // MAX_TEXT)}, {"pids": [1] * MAX_DATA}, nested(MAX_NESTING)]
)
def test_event_data_that_is_too_large_or_too_deeply_nested_is_rejected(site, data):
    site.send_events("n1", Event(T0, "gpu:n1.0", "xid", data), Event(T0, "gpu:n1.0", "xid", nested(MAX_NESTING - 2)))
    site.drain()
    assert [rule for rule, _ in read_rejections(site)] == ["data"]
    assert site.rows("SELECT count(*) FROM events") == [(1,)]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "data",
    [
        {},
        {"entities": []},
        {"entities": {"gpu:1": []}},
        {"entities": {"gpu:1": {"parents": "node:1"}}},
        {"entities": {"gpu:1": {"parents": [1]}}},
        {"entities": {"gpu:1": {"attributes": []}}},
        {"entities": {"gpu:1": {"attributes": {f"a{i}": 1 for i in range(1000)}}}},
    ],
)
def test_inventory_of_an_unknown_form_is_rejected(site, data):
    site.send_events("n1", Event(T0, "node:n1", "inventory", data))
    site.drain()
    assert [rule for rule, _ in read_rejections(site)] == ["data"]
    assert site.rows("SELECT count(*) FROM entity") == [(0,)]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_json_does_not_allow_is_rejected(number):
    batch = EventBatch(Origin("local", "n1", b""), (Event(T0, "gpu:n1.0", "xid", {"value": number}),))
    admitted = Admission().admit(Message(Partition("events.v1", "n1", ""), 0, b""), batch)
    assert (admitted.body, [r.rule for r in admitted.rejected]) == (None, ["data"])


# --- bounds on entities ---------------------------------------------------------------------------------------------


def admit_batch(admission, batch):
    return admission.admit(Message(Partition("events.v1", "0", ""), 0, b""), batch)


def gpus(node, count, first=0):
    lines = {f"gpu:{node}.{i}": [f"node:{node}"] for i in range(first, first + count)}
    return EventBatch(Origin("local", node, b""), (inventory(node, lines),))


def test_a_sender_over_its_entity_bound_keeps_its_known_entities():
    admission = Admission(Limits(entities_per_sender=10, senders={"row": 100}))
    assert admit_batch(admission, gpus("n1", 9)).rejected == ()
    assert [r.rule for r in admit_batch(admission, gpus("n1", 10)).rejected] == ["entities"]
    assert admit_batch(admission, gpus("n1", 9)).rejected == admit_batch(admission, gpus("n2", 9)).rejected == ()
    assert admit_batch(admission, gpus("row", 99)).rejected == ()


def test_all_senders_together_have_a_bound_of_entities_per_kind():
    admission = Admission(Limits(gpus=10, kinds={"node": 2}))
    assert admit_batch(admission, gpus("n1", 8)).rejected == ()
    assert [r.rule for r in admit_batch(admission, gpus("n2", 8)).rejected] == ["entities"]
    assert admit_batch(admission, gpus("n2", 2)).rejected == ()
    assert [r.rule for r in admit_batch(admission, gpus("n3", 0)).rejected] == ["entities"]


def test_telemetry_over_the_bound_gets_no_ids_and_known_devices_continue(site):
    site.limits = Limits(entities_per_sender=3)
    send_gpus(site, "n1", "gpu:n1.0", "gpu:n1.1")
    send_gpus(site, "n1", *(f"gpu:n1.{i}" for i in range(1000)))
    ingest = site.drain()
    assert site.rows("SELECT entity, count(*) FROM gpu GROUP BY ALL ORDER BY ALL") == [
        ("gpu:n1.0", 2),
        ("gpu:n1.1", 2),
        ("gpu:n1.2", 1),
    ]
    assert ingest.rejected["entities"] == 1
    [(rule, reason)] = read_rejections(site)
    assert (rule, "996 more entities" in reason, "[limits]" in reason) == ("entities", True, True)


@pytest.mark.slow
def test_a_restart_counts_the_entities_in_the_store(site):
    site.limits = Limits(entities_per_sender=3)
    send_gpus(site, "n1", "gpu:n1.0")
    site.send_events("n1", inventory("n1", {"gpu:n1.1": ["node:n1"]}))
    site.drain()
    site.shut()
    send_gpus(site, "n1", "gpu:n1.7")
    site.drain()
    assert site.rows("SELECT entity FROM device") == [("gpu:n1.0",)]
    assert [rule for rule, _ in read_rejections(site)] == ["entities"]


def test_an_entity_that_is_no_longer_reported_frees_its_place():
    admission = Admission(Limits(entities_per_sender=10))
    for job in range(100):  # ranks of short jobs, an hour each
        admission.begin(T0 + job * EXPIRY)
        lines = {f"rank:{job}.{i}": [f"job:{job}"] for i in range(3)}
        batch = EventBatch(Origin("local", "n1", b""), (inventory("n1", lines),))
        assert admit_batch(admission, batch).rejected == ()
        admission.commit()


def test_a_failed_transaction_leaves_no_parents_behind():
    admission = Admission()
    admission.begin(T0)
    admit_batch(admission, EventBatch(Origin("local", "n1", b""), (inventory("n1", {"rack:a": ["row:b"]}),)))
    admission.begin(T0)  # the first was never committed
    other = admit_batch(admission, EventBatch(Origin("local", "n2", b""), (inventory("n2", {"row:b": ["rack:a"]}),)))
    assert other.rejected == ()


def test_devices_and_topology_of_an_empty_store_are_empty(tmp_path):
    database = Database(tmp_path / "store.duckdb")
    assert Devices(database.connection).names("gpu") == []
    assert load_topology(load_entities(database.connection, T0)).parents == {}
    database.close()


# --- signals --------------------------------------------------------------------------------------------------------


def signals(node, *names):
    block = Block("gpu", (f"gpu:{node}.0",), {name: np.zeros((1, 1), "f4") for name in names})
    return wire.encode(Batch(Origin("local", node, b"b" * 16), np.array([T0]), (block,)))


@pytest.mark.slow
def test_invented_signals_take_no_column_from_other_senders(site):
    for sender in range(6):
        for part in range(2):
            site.send_raw(f"evil{sender}", signals(f"evil{sender}", *(f"x{sender}.{part}.{i}" for i in range(100))))
    site.drain()
    site.send("n1", T0)
    ingest = site.drain()
    assert site.rows("SELECT count(*) FROM gpu WHERE entity LIKE 'gpu:n1.%'") == [(2,)]
    query = "SELECT count(*) FROM duckdb_columns() WHERE table_name = 'hot_gpu' AND column_name LIKE 'x%'"
    [(columns,)] = site.rows(query)
    assert columns <= MAX_NEW
    assert ingest.rejected["signals"] == 0
    assert {rule for rule, _ in read_rejections(site)} == {"signals"}


@pytest.mark.slow
def test_a_sender_over_its_signal_bound_keeps_its_known_signals(site):
    ingest = site.open()
    site.send_raw("n1", signals("n1", *(f"x.{i}" for i in range(MAX_PER_SENDER))))
    site.send_raw("n1", signals("n1", "y.1"))
    site.send_raw("n1", signals("n1", "x.1", "gpu.temperature"))
    site.send_raw("n2", signals("n2", "y.2"))
    while ingest.step() is not None:
        pass
    assert [rule for rule, _ in read_rejections(site)] == ["signals"]
    assert site.rows("SELECT entity, count(*) FROM gpu GROUP BY ALL ORDER BY ALL") == [("gpu:n1.0", 2), ("gpu:n2.0", 1)]


def test_invented_sites_of_rejected_entities_take_no_memory():
    population = EntityCounts(Limits(entities_per_sender=1))
    for i in range(100):
        population.add_entities(f"site{i}", "n1", ["gpu:n1.0"])
    assert len(population._recent) == 1


@pytest.mark.parametrize(
    ("value", "rule"),
    [(math.nan, "data"), ("\u202e", "name"), ("a " * MAX_DATA, "data"), ([[[[[[[[[1]]]]]]]]], "data")],
)
def test_what_an_inventory_has_beside_its_entities_is_checked_as_other_events_are(value, rule):
    admission = Admission()
    admission.begin(T0)
    event = Event(T0, "node:n1", "inventory", {"entities": {"node:n1": {}}, "more": value})
    message = Message(Partition("events.v1", "0", "i"), 0, b"")
    admitted = admission.admit(message, EventBatch(Origin("local", "n1", b"b" * 16), (event,)), T0)
    assert (admitted.body, [one.rule for one in admitted.rejected]) == (None, [rule])
