"""The base of all state: growth, snapshot, restore and reset come from the declared fields."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest

from detectors.base.detector import Detector
from detectors.base.findings import Comparison, build_finding
from detectors.base.job_index import JobIndex
from detectors.base.state import FORMAT, N, State, memory, notes, pack_state, part, parts, piece_of, unpack_state
from detectors.base.streams import Channel, Streams
from detectors.base.topology_index import per_device_topology, per_topology
from detectors.runner import Runner
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology
from tests.detectors.snapshots import packed, read, written

CELL = np.dtype([("count", np.int64), ("since", np.int64)])


@dataclass
class Inner(State):
    """A part with cells."""

    level: Any = memory(np.nan, np.float32, shape=(3, N))
    kept: Any = memory(0.0, kept=True)


@dataclass
class Ports(State):
    """A part whose cells are ports."""

    errors: Any = memory(0, np.int64)


@dataclass
class Piece(State):
    """One field of every kind."""

    setting: float
    cells: Any = memory(7.0)
    hours: Any = memory(np.nan, np.float32, shape=(N, 24))
    structured: Any = memory(0, CELL)
    last: int = notes(int)
    known: dict[str, list[int]] = notes()
    first_samples: Any = notes(lambda: np.zeros(2))
    inner: Inner = part(Inner)
    ports: Ports = part(Ports, of="nic")
    by_name: dict[str, Inner] = part(lambda: {"a": Inner(), "b": Inner()})
    row: list[Inner] = part(lambda: [Inner(), Inner()])
    on_demand: dict[str, Inner] = parts(Inner)
    left_alone: Inner = part(Inner, kept=True)
    derived: int = field(default=0, init=False)
    _hidden: int = notes(int)


def filled() -> Piece:
    piece = Piece(1.0)
    piece.grow(4)
    piece.cells[:], piece.hours[1, 5], piece.structured["count"][2] = np.arange(4.0), 3.0, 9
    piece.last, piece._hidden, piece.derived = 5, 6, 7
    piece.known["gpu:n0.0"] = [1, 2]
    piece.on_demand["job:7"] = Inner()
    for inner in (piece.inner, *piece.by_name.values(), *piece.row, *piece.on_demand.values(), piece.left_alone):
        inner.grow(4)
        inner.level[:], inner.kept[:] = 2.0, 2.0
    piece.ports.grow(3)
    piece.ports.errors[:] = 4
    return piece


def test_cells_grow_with_their_fill_and_never_shrink():
    piece = filled()
    piece.grow(6)
    assert piece.cells.tolist() == [0.0, 1.0, 2.0, 3.0, 7.0, 7.0]
    assert piece.hours.shape == (6, 24)
    assert np.isnan(piece.hours[4:]).all()
    piece.grow(2)
    assert len(piece.cells) == 6
    assert piece.inner.level.shape == (3, 4)  # parts grow when they are used


def test_a_snapshot_names_fields_and_holds_no_configuration():
    state = filled().snapshot()
    own = {"cells", "hours", "structured", "last", "known", "first_samples", "hidden"}
    assert set(state) == {*own, "inner", "ports", "by_name", "row", "on_demand", "left_alone"}
    assert set(state["row"]) == {"0", "1"}
    assert set(state["on_demand"]) == {"job:7"}


def test_a_snapshot_through_bytes_restores_everything():
    first, second = filled(), Piece(1.0)
    second.on_demand["job:8"] = Inner()
    packed = b"".join(pack_state(first.snapshot()))
    second.restore(unpack_state(packed))
    assert b"".join(pack_state(second.snapshot())) == packed
    assert set(second.on_demand) == {"job:7"}
    assert second.derived == 0


def test_later_changes_do_not_show_in_a_snapshot():
    piece = filled()
    state = piece.snapshot()
    before = repr(copy.deepcopy(state))
    piece.cells[:], piece.inner.level[:] = 0.0, 0.0
    piece.known["gpu:n0.0"].append(3)
    assert repr(state) == before
    piece.restore(state)
    piece.cells[:] = 1.0
    assert repr(state) == before


def test_a_reset_refills_the_cells_of_a_mask_here_and_in_parts():
    piece = filled()
    piece.reset(np.array([False, True, False, False, True]))
    assert piece.cells.tolist() == [0.0, 7.0, 2.0, 3.0, 7.0]
    for inner in (piece.inner, *piece.by_name.values(), *piece.row, piece.on_demand["job:7"]):
        assert np.isnan(inner.level[:, [1, 4]]).all()
        assert (inner.level[:, [0, 2, 3]] == 2.0).all()
        assert inner.kept.tolist() == [2.0, 2.0, 2.0, 2.0, 0.0]
    assert (piece.left_alone.level == 2.0).all()
    assert piece.ports.errors.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("last"),
        lambda s: s.update(more=1),
        lambda s: s.update(cells=np.zeros((2, 4))),
        lambda s: s.update(cells=np.zeros(3)),  # another length than the other arrays
        lambda s: s.update(cells=np.zeros(4, np.float32)),
        lambda s: s.update(hours=np.zeros((4, 12), np.float32)),
        lambda s: s["by_name"].pop("a"),
        lambda s: s["inner"].pop("level"),
        lambda s: s.update(cells=[1.0, 2.0]),
    ],
)
def test_state_of_another_layout_is_refused(change):
    state = filled().snapshot()
    change(state)
    with pytest.raises((ValueError, KeyError, AttributeError)):
        Piece(1.0).restore(state)


def test_fields_that_a_structured_cell_lacks_begin_as_new():
    state = filled().snapshot()
    state["structured"] = state["structured"][["count"]]
    piece = Piece(1.0)
    piece.restore(state)
    assert piece.structured["count"].tolist() == [0, 0, 9, 0]
    assert piece.structured["since"].tolist() == [0, 0, 0, 0]


@dataclass
class Learning(Detector):
    """Learns of GPUs and ports. Source: this test."""

    name: ClassVar[str] = "learning"
    family: ClassVar[str] = "none"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.power",)
    cannot_see: ClassVar[str] = "Everything."

    own: Any = memory(0.0)
    streams: Streams = part(lambda: Streams(Channel(1.0, 1.0)))
    ports: Ports = part(Ports, of="nic")
    nested: Piece = part(lambda: Piece(1.0), kept=True)

    def observe(self, frames):
        self.grow(len(frames["gpu"].entities))
        self.own += 1
        return []


TOPOLOGY = Topology(
    {f"{kind}:n{n}.{i}": (f"node:n{n}",) for n in range(2) for i in range(2) for kind in ("gpu", "port")}
)
GPUS = tuple(f"gpu:n{n}.{i}" for n in range(2) for i in range(2))
PORTS = tuple(f"port:n{n}.{i}" for n in range(2) for i in range(2))


def frames(tick: int = 0, *events: Event) -> dict[str, Frame]:
    gpu = Frame(tick * 10 * SECOND, "gpu", GPUS, {"gpu.power": np.full(4, 500.0)}, TOPOLOGY, events)
    return {"gpu": gpu, "nic": Frame(gpu.time, "nic", PORTS, {}, TOPOLOGY)}


def test_feedback_resets_parts_by_the_members_of_their_class():
    detector = Learning()
    detector.observe(frames())
    detector.streams.grow(4)
    detector.streams.cells[:] = 1.0
    detector.ports.grow(4)
    detector.ports.errors[:] = 1
    detector.accept_as_normal("node:n1", frames())
    assert detector.streams.cells[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert detector.ports.errors.tolist() == [1, 1, 0, 0]
    assert detector.own.tolist() == [1.0] * 4
    detector.accept_as_normal("gpu:n0.0", frames())
    assert detector.streams.cells[0].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert detector.ports.errors.tolist() == [1, 1, 0, 0]


def test_a_snapshot_of_another_format_is_ignored_and_logged_once(caplog):
    runner, other = Runner([Learning()]), Runner([Learning()])
    runner.observe(frames(1))
    state = read(packed(runner))
    assert state["format"] == FORMAT
    for old in ({**state, "format": FORMAT + 1}, {k: v for k, v in state.items() if k != "format"}):
        caplog.clear()
        other.restore(written(old))
        (record,) = caplog.records
        found = old.get("format", 1)
        assert record.getMessage() == (
            f"all detectors start with empty state: their snapshot has format {found}, this version reads {FORMAT}"
        )
        assert len(other.detectors[0].own) == 0
    other.restore(written(state))
    assert other.detectors[0].own.tolist() == [1.0] * 4


class Counting:
    """Counts how often each result is computed."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    @per_topology
    def of_frame(self, frame: Frame, what: str = "") -> list[str]:
        self.calls.append((frame.device_class, what))
        return list(frame.entities)

    @per_device_topology
    def of_devices(self, frame: Frame) -> list[str]:
        self.calls.append((frame.device_class, "devices"))
        return list(frame.entities)

    @per_topology
    def of_names(self, names: tuple[str, ...], topology: Topology, chosen: frozenset[str]) -> int:
        self.calls.append((len(names), chosen))
        return len(names)


def test_a_result_per_topology_is_kept_until_topology_or_fleet_changes():
    counting, topology = Counting(), Topology({"gpu:a": ("node:a",)})
    frame = Frame(0, "gpu", ("gpu:a",), {}, topology)
    first = counting.of_frame(frame)
    assert counting.of_frame(Frame(9, "gpu", ("gpu:a",), {}, topology)) is first
    assert counting.of_frame(frame, "other") is not first
    assert counting.of_frame(Frame(0, "nic", (), {}, topology)) == []
    assert counting.of_frame(frame) is first  # one result for each class and text
    assert counting.of_frame(Frame(9, "gpu", ("gpu:a", "gpu:b"), {}, topology)) == ["gpu:a", "gpu:b"]
    topology.merge({"gpu:b": ("node:a",)})
    calls = len(counting.calls)
    counting.of_frame(Frame(9, "gpu", ("gpu:a", "gpu:b"), {}, topology))
    assert len(counting.calls) == calls + 1
    counting.of_frame(Frame(9, "gpu", ("gpu:a", "gpu:b"), {}, Topology()))
    assert len(counting.calls) == calls + 2


def test_jobs_that_come_and_go_keep_a_result_that_asks_for_devices_alone():
    counting, topology = Counting(), Topology({"gpu:a": ("node:a",)})
    gpus, ranks = (Frame(0, name, (entity,), {}, topology) for name, entity in (("gpu", "gpu:a"), ("rank", "rank:j.0")))
    kept, of_ranks = counting.of_devices(gpus), counting.of_devices(ranks)
    topology.merge({"rank:j.0": ("gpu:a", "job:j"), "job:j": ()}, {"job:j": {"name": "train"}})
    assert counting.of_devices(gpus) is kept
    assert counting.of_devices(ranks) is not of_ranks
    topology.remove_entities(["rank:j.0", "job:j"])
    assert counting.of_devices(gpus) is kept
    topology.merge({}, {"gpu:a": {"sku": "H200"}})
    assert counting.of_devices(gpus) is not kept
    kept = counting.of_devices(gpus)
    topology.remove_entities(["gpu:a"])
    assert counting.of_devices(gpus) is not kept


def test_the_job_of_a_node_is_known_where_all_its_ranks_are_of_one():
    lines = {f"gpu:{node}.{i}": (f"node:{node}",) for node in "ab" for i in range(2)}
    topology = Topology(lines)
    index, other = JobIndex(), JobIndex()
    assert index.job_of_node("node:a", topology) is None
    topology.merge({f"rank:j.{i}": (f"gpu:a.{i}", "job:j") for i in range(2)})
    topology.merge({"rank:j.2": ("gpu:b.0", "job:j"), "rank:k.0": ("gpu:b.1", "job:k")})
    for each in (index, other):
        assert each.job_of_node("node:a", topology) == "job:j"
        assert each.job_of_node("node:b", topology) is None  # two jobs
        assert each.job_on("gpu:b.1", topology) == "job:k"
        assert each.gpus_of("node:a", topology) == {"gpu:a.0", "gpu:a.1"}
    topology.remove_entities(["rank:k.0"])
    assert index.job_of_node("node:b", topology) == "job:j"
    assert index.job_on("gpu:b.1", topology) is None


def test_sets_count_by_value_and_sequences_by_length():
    counting, topology = Counting(), Topology()
    for names, chosen in ((("a",), {"x"}), (("b",), {"x"}), (("b",), {"y"}), (("b", "c"), {"y"})):
        counting.of_names(names, topology, frozenset(chosen))
    assert [size for size, _ in counting.calls] == [1, 1, 2]


def test_results_per_topology_are_in_no_copy_and_no_pickle():
    counting, frame = Counting(), Frame(0, "gpu", ("gpu:a",), {}, Topology())
    counting.of_frame(frame)
    for other in (copy.deepcopy(counting), pickle.loads(pickle.dumps(counting))):
        other.of_frame(frame)
        assert len(other.calls) == 2


def test_a_finding_is_built_only_for_due_entities():
    compared = Comparison(2.0, 1.0, None, "rack:r1", 7, 1.0, "K")
    found = build_finding(
        *("heat", 9, "gpu:a", (3, "ticket")),
        score=2.0,
        summary="GPU a is warm",
        signals=("gpu.temperature",),
        clears="clears when it is cool",
        compared=compared,
        cause="dust",
    )
    assert (found.key, found.time, found.level, found.score) == (("heat", "gpu:a", 3), 9, "ticket", 2.0)
    assert list(found.evidence) == [
        "value",
        "expected",
        "spread",
        "cohort",
        "peers",
        "effect",
        "unit",
        "cause",
        "clears",
    ]


def test_a_piece_is_made_once_for_each_key():
    pieces, made = dict[str, Inner](), list[Inner]()

    def make():
        made.append(Inner())
        return made[-1]

    first = piece_of(pieces, "a", make)
    assert piece_of(pieces, "a", make) is first is pieces["a"]
    assert piece_of(pieces, "b", make) is not first
    assert made == [pieces["a"], pieces["b"]]
