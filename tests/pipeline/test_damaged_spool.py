"""With any damage to the files of a spool, each message is read once, in order, or is in a counted gap."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.node.spool.spool import Spool
from pipeline.model.errors import GapError
from pipeline.transport import segments, wire
from pipeline.transport.salvage import find_valid_record
from pipeline.transport.spool import MARK_TIMEOUT_S, SpoolTransport
from tests.examples import examples

COUNT = 240
TOPIC = "telemetry.v1"


def fill_spool(directory: Path, count: int = COUNT, seed: int = 7) -> Path:
    """Writes a spool of some segments and closes the writer; returns its folder."""
    rng = random.Random(seed)
    with Spool(directory, "n1", TOPIC, segment_bytes=4000, max_bytes=1 << 20, free_bytes=0) as spool:
        for _ in range(count):
            spool.append(rng.randbytes(rng.randrange(20, 300)), wire.TELEMETRY_KIND, 0)
            spool.sync()
    return segments.epoch_folders(directory / "n1" / TOPIC)[-1]


@dataclass
class Reader:
    """Reads as ingest does, with a clock beyond every wait."""

    directory: Path
    now: float = 0.0
    offset: int = 0
    read: dict[int, bytes] = field(default_factory=dict)
    gaps: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.transport = SpoolTransport(self.directory, monotonic=lambda: self.now)

    def drain(self, limit: int = 10_000) -> Reader:
        """Reads up to `limit` messages, until none came for longer than a mark may be absent."""
        partition, idle = self.transport.partitions()[0], 0
        while idle < 3 and limit > 0:
            try:
                found = self.transport.read(partition, self.offset, min(limit, 50), 1 << 16)
            except GapError as gap:
                self.skip(gap)
                continue
            for message in found:
                assert message.offset == self.offset, "in order, without an unreported hole"
                assert message.offset not in self.read, "never twice"
                self.read[message.offset] = message.value
                self.offset += 1
            limit -= len(found)
            idle = 0 if found else idle + 1
            self.now += MARK_TIMEOUT_S
        return self

    def skip(self, gap: GapError) -> None:
        assert gap.first == self.offset < gap.next_offset, "a gap never goes back"
        self.gaps.append((gap.first, gap.next_offset, gap.cause))
        self.offset = gap.next_offset

    @property
    def counted(self) -> int:
        return len(self.read) + sum(behind - first for first, behind, _ in self.gaps)


@pytest.mark.parametrize("damage", ["absent", "empty", "flipped", "short"])
def test_without_a_valid_mark_all_messages_of_a_stopped_writer_are_read(tmp_path: Path, damage: str) -> None:
    """Before the fix none of the 240 were read."""
    mark = fill_spool(tmp_path) / "mark"
    data = mark.read_bytes()
    mark.unlink()
    if damage != "absent":
        mark.write_bytes({"empty": b"", "flipped": bytes([data[0] ^ 1]) + data[1:], "short": data[:20]}[damage])
    found = Reader(tmp_path).drain()
    assert (len(found.read), found.gaps) == (COUNT, [])


def test_a_mark_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    (fill_spool(tmp_path) / "mark").unlink()
    reader = Reader(tmp_path)
    (partition,) = reader.transport.partitions()
    assert reader.transport.read(partition, 0, 10, 1 << 16) == []
    reader.now += MARK_TIMEOUT_S
    assert len(reader.transport.read(partition, 0, 10, 1 << 16)) == 10


def test_messages_read_without_a_mark_are_made_durable_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power failure could undo messages already read, and reuse their sequences."""
    (fill_spool(tmp_path) / "mark").unlink()
    synced: list[int] = []
    monkeypatch.setattr("pipeline.transport.spool.os.fsync", synced.append)
    assert len(Reader(tmp_path).drain().read) == COUNT
    assert len(synced) == 1


def test_after_a_lost_mark_the_writer_continues_in_a_new_epoch_and_both_are_read(tmp_path: Path) -> None:
    old = fill_spool(tmp_path)
    (old / "mark").unlink()
    new = fill_spool(tmp_path, 5)
    assert new != old
    transport = SpoolTransport(tmp_path)
    read = {p.incarnation: len(transport.read(p, 0, 1000, 1 << 20)) for p in transport.partitions()}
    assert read[new.name.partition("-")[2]] == 5


Plant = Callable[[Path, list[Path]], Path]


def copied_segment(folder: Path, files: list[Path]) -> Path:
    return shutil.copy(files[0], segments.segment_path(folder, int(files[1].stem) // 2))


def later_segment(folder: Path, files: list[Path]) -> Path:
    return shutil.copy(files[3], segments.segment_path(folder, int(files[1].stem) - 1))


def segment_far_ahead(folder: Path, files: list[Path]) -> Path:
    return shutil.copy(files[0], segments.segment_path(folder, 999_999))


def random_bytes_segment(folder: Path, files: list[Path]) -> Path:
    path = segments.segment_path(folder, int(files[1].stem) + 1)
    path.write_bytes(random.Random(3).randbytes(5000))
    return path


def partial_segment(folder: Path, files: list[Path]) -> Path:
    """Returns a few valid records from the middle of a segment, under their correct name."""
    data = files[1].read_bytes()
    found = find_valid_record(data, len(data) // 3)
    assert found is not None
    end = find_valid_record(data, found[0] + 600)
    assert end is not None
    path = segments.segment_path(folder, found[1])
    path.write_bytes(data[found[0] : end[0]])
    return path


PLANTS = [copied_segment, later_segment, segment_far_ahead, random_bytes_segment, partial_segment]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_stray_segment_loses_no_message_and_moves_no_gap_back(tmp_path: Path, plant: Plant) -> None:
    folder = fill_spool(tmp_path)
    stray = plant(folder, sorted(folder.glob("*.seg")))
    reader = Reader(tmp_path).drain()
    assert (len(reader.read), reader.gaps) == (COUNT, [])
    assert plant is partial_segment or list(reader.transport.stray_files) == [stray]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_stray_segment_added_while_its_spool_is_read_loses_no_message(tmp_path: Path, plant: Plant) -> None:
    folder = fill_spool(tmp_path)
    reader = Reader(tmp_path).drain(30)
    plant(folder, sorted(folder.glob("*.seg")))
    reader.drain()
    assert (len(reader.read), reader.gaps) == (COUNT, [])


@pytest.mark.parametrize("plant", PLANTS)
def test_a_stray_segment_does_not_make_the_writer_unlink_unread_data(tmp_path: Path, plant: Plant) -> None:
    folder = fill_spool(tmp_path)
    reader = Reader(tmp_path).drain(20)
    (partition,) = reader.transport.partitions()
    plant(folder, sorted(folder.glob("*.seg")))
    reader.transport.commit_offset(partition, reader.offset)
    reader.transport.close()
    fill_spool(tmp_path, 40, seed=8)
    again = Reader(tmp_path, offset=reader.offset).drain()
    assert again.counted == again.offset - reader.offset
    assert [gap for gap in again.gaps if gap[0] < COUNT] == []
    assert again.offset >= COUNT


def test_a_segment_of_another_spool_is_not_read_under_its_name(tmp_path: Path) -> None:
    folder, other = fill_spool(tmp_path / "here"), fill_spool(tmp_path / "there", seed=9)
    true = sorted(folder.glob("*.seg"))[2]
    lost = int(sorted(folder.glob("*.seg"))[3].stem) - int(true.stem)
    foreign = next(path for path in sorted(other.glob("*.seg"))[1:] if int(path.stem) > 0)
    true.unlink()
    shutil.copy(foreign, segments.segment_path(folder, int(foreign.stem)))
    reader = Reader(tmp_path / "here").drain()
    assert reader.counted == COUNT
    assert all(wire.open_envelope(value).epoch == segments.parse_epoch(folder) for value in reader.read.values())
    assert sum(behind - first for first, behind, _ in reader.gaps) >= lost


def test_records_behind_inserted_garbage_are_read(tmp_path: Path) -> None:
    folder = fill_spool(tmp_path)
    path = sorted(folder.glob("*.seg"))[1]
    data = path.read_bytes()
    at = find_valid_record(data, 1000)
    assert at is not None
    path.write_bytes(data[: at[0]] + b"garbage" * 100 + data[at[0] :])
    assert (len(Reader(tmp_path).drain().read), Reader(tmp_path).drain().gaps) == (COUNT, [])


def test_many_damaged_records_lose_only_themselves(tmp_path: Path) -> None:
    with Spool(tmp_path, "n1", TOPIC, max_bytes=1 << 20, free_bytes=0) as spool:
        spool.append_many([b"%04d" % i for i in range(300)], wire.TELEMETRY_KIND, 0)
    (path,) = tmp_path.glob(f"n1/{TOPIC}/*/*.seg")
    data = bytearray(path.read_bytes())
    data[1000:15_000] = bytes(14_000)
    path.write_bytes(data)
    reader = Reader(tmp_path).drain()
    ((first, behind, _),) = reader.gaps
    assert (reader.counted, behind - first < 14_000 // 60) == (300, True)


Files = dict[str, bytes]
WHERE = st.floats(0, 1, exclude_max=True)
DAMAGE = st.one_of(
    st.tuples(st.just("flip"), WHERE, WHERE, st.integers(0, 7)),
    st.tuples(st.sampled_from(["cut", "zero", "insert", "delete", "remove part"]), WHERE, WHERE, st.integers(1, 900)),
    st.tuples(st.sampled_from(["copy", "rename", "foreign"]), WHERE, WHERE, st.integers(0, 400)),
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return fill_spool(tmp_path_factory.mktemp("one")), fill_spool(tmp_path_factory.mktemp("two"), seed=11)


def apply_damage(folder: Path, foreign: Path, step: tuple[str, float, float, int]) -> None:
    """Applies one kind of damage to one file of the folder."""
    how, which, where, number = step
    files = sorted(folder.iterdir())
    path = files[int(which * len(files))] if files else folder / "mark"
    data = path.read_bytes() if path.exists() else b""
    at = int(where * len(data))
    if how == "flip" and data:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << number]) + data[at + 1 :])
    elif how == "cut":
        path.write_bytes(data[:at])
    elif how == "zero":
        path.write_bytes(data[:at] + bytes(min(number, len(data) - at)) + data[at + number :])
    elif how == "insert":
        path.write_bytes(data[:at] + random.Random(number).randbytes(number) + data[at:])
    elif how == "remove part":
        path.write_bytes(data[:at] + data[at + number :])
    elif how == "delete":
        path.unlink(missing_ok=True)
    elif how == "foreign":
        others = sorted(foreign.glob("*.seg"))
        shutil.copy(others[int(which * len(others))], segments.segment_path(folder, number))
    elif path.suffix == ".seg":
        path.rename(segments.segment_path(folder, number))
        if how == "copy":
            path.write_bytes(data)


def intact_sequences(files: list[Path], sent: dict[int, bytes]) -> set[int]:
    """Returns the sequences whose records are complete in any of the files, with every byte as written."""
    data = [path.read_bytes() for path in files]
    return {
        sequence for sequence, value in sent.items() if any(segments.pack_record(sequence, value) in d for d in data)
    }


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(DAMAGE, max_size=4), read=st.integers(0, COUNT), after=st.lists(DAMAGE, max_size=4))
def test_no_damage_makes_a_reader_crash_read_twice_go_back_or_skip_without_a_report(
    tmp_path_factory: pytest.TempPathFactory,
    originals: tuple[Path, Path],
    before: list[tuple[str, float, float, int]],
    read: int,
    after: list[tuple[str, float, float, int]],
) -> None:
    original, foreign = originals
    directory = tmp_path_factory.mktemp("spoilt")
    folder = directory / "n1" / TOPIC / original.name
    shutil.copytree(original, folder)
    sent = Reader(original.parents[2]).drain().read
    for step in before:
        apply_damage(folder, foreign, step)
    reader = Reader(directory).drain(read)
    for step in after:
        apply_damage(folder, foreign, step)
    reader.drain()
    assert all(sent[sequence] == value for sequence, value in reader.read.items()), "only bytes that were written"
    assert reader.counted == reader.offset, "each is read or counted"
    true = [path for path in folder.glob("*.seg") if path not in reader.transport.stray_files]
    assert all(sequence < reader.offset for sequence in intact_sequences(true, sent)), (
        "no intact message is left unread"
    )
    if segments.read_mark(folder) is not None:
        assert reader.offset >= COUNT, "the mark gives the end"
    reader.transport.close()
    shutil.rmtree(directory)
