"""Datagrams of training steps: encoded ones are decoded, and nothing from a hostile process gets through."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.jobs.process_identity import clean_name
from agents.collectors.training import datagram, reported_ranks
from agents.collectors.training.datagram import CheckpointReport, DigestsReport, InvalidDatagram, RankSender, StepReport
from agents.collectors.training.reported_ranks import ReportedRanks
from agents.collectors.training.training import Training

SENDER = RankSender("81", 3, 8, "1", 3, "dp0")


def encode_datagram(kind: int, body: bytes, sender: RankSender = SENDER) -> bytes:
    return datagram.encode_header(kind, datagram.encode_identity(sender)) + body


def step(number: int = 1, **values: float) -> bytes:
    reported = StepReport(number, 0, 0, 0, 0, **values)
    return datagram.STEP_BODY.pack(*(getattr(reported, name) for name in StepReport.__dataclass_fields__))


class RankReporter:
    """A clock that is set by hand, and ranks that use it."""

    def __init__(self) -> None:
        self.at = 0.0
        self.ranks = ReportedRanks("n1", lambda: round(self.at * 1e6), lambda: self.at)

    def values(self) -> dict[str, dict[str, float]]:
        found = self.ranks.collect()
        return {
            entity: {name: values[row].item() for name, values in found.columns.items()}
            for row, entity in enumerate(found.entities)
        }


def test_every_kind_of_datagram_is_decoded_as_it_was_encoded() -> None:
    whose, body = datagram.decode_datagram(encode_datagram(datagram.STEP, step(7, step_time=1.5, loss=2.0)))
    assert datagram.decode_sender(whose) == SENDER
    assert isinstance(body, StepReport)
    assert (body.step, body.step_time, body.loss) == (7, 1.5, 2.0)
    assert math.isnan(body.compute_time)
    digests = datagram.encode_digests(9, [(b"layer0", 2**64 - 1), (b"layer1", 0)])
    assert datagram.decode_datagram(encode_datagram(datagram.DIGESTS, digests))[1] == DigestsReport(
        9, (("layer0", 2**64 - 1), ("layer1", 0))
    )
    checkpoint = datagram.CHECKPOINT_BODY.pack(5, 30.0)
    assert datagram.decode_datagram(encode_datagram(datagram.CHECKPOINT, checkpoint))[1] == CheckpointReport(5, 30.0)


@given(st.binary(max_size=600))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    for whole in (
        data,
        encode_datagram(datagram.STEP, data),
        encode_datagram(datagram.DIGESTS, data),
        encode_datagram(datagram.CHECKPOINT, data),
    ):
        with contextlib.suppress(InvalidDatagram):
            datagram.decode_datagram(whole)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(
    st.dictionaries(st.sampled_from(["job", "rank", "world", "stage", "gpu", "group", "x"]), JSON) | JSON,
    st.binary(max_size=60),
)
def test_any_identity_is_a_valid_name_or_refused(reported: object, raw: bytes) -> None:
    for whose in (json.dumps(reported).encode(), raw):
        try:
            found = datagram.decode_sender(whose)
        except InvalidDatagram:
            continue
        assert found.job == clean_name(found.job) != ""
        assert found.rank >= 0
        assert found.world == 0 or found.rank < found.world


@pytest.mark.parametrize(
    "reported",
    [
        {"job": "81"},
        {"job": "81", "rank": True},
        {"job": "81", "rank": 1.0},
        {"job": "81", "rank": -1},
        {"job": "81", "rank": 10**30},
        {"job": "81", "rank": 8, "world": 8},
        {"job": "8 1", "rank": 0},
        {"job": "8.1", "rank": 0},
        {"job": "a" * 121, "rank": 0},
        {"job": "81\n", "rank": 0},
        {"job": "", "rank": 0},
        {"job": "81", "rank": 0, "gpu": 4096},
        {"job": "81", "rank": 0, "stage": "a.b"},
        {"job": "81", "rank": 0, "group": ["a"]},
    ],
)
def test_an_invalid_identity_is_refused(reported: dict[str, object]) -> None:
    with pytest.raises(InvalidDatagram):
        datagram.decode_sender(json.dumps(reported).encode())


def test_deep_and_long_identities_are_refused() -> None:
    with pytest.raises(InvalidDatagram, match="not JSON"):
        datagram.decode_sender(b"[" * 1000)
    with pytest.raises(InvalidDatagram, match="at most 1024"):
        datagram.decode_sender(b" " * 1025)


@pytest.mark.parametrize(
    "body",
    [
        step(2**64 - 1),
        step(step_time=-1.0),
        step(step_time=math.inf),
        step(compute_time=1e7),
        step()[:-1],
        step() + b"x",
    ],
)
def test_an_impossible_step_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidDatagram):
        datagram.decode_datagram(encode_datagram(datagram.STEP, body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        datagram.DIGESTS_BODY.pack(1, 0, 0),
        datagram.DIGESTS_BODY.pack(1, 2, 0) + datagram.DIGEST.pack(1, 1) + b"a",
        datagram.encode_digests(1, [(b"a b", 1)]),
        datagram.encode_digests(1, [(b"\xff", 1)]),
        datagram.encode_digests(1, [(b"", 1)]),
        datagram.encode_digests(1, [(b"a" * 65, 1)]),
        datagram.encode_digests(1, [(b"a", 1)] * 129),
        datagram.encode_digests(1, [(b"a", 1)]) + b"x",
    ],
)
def test_invalid_digests_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidDatagram):
        datagram.decode_datagram(encode_datagram(datagram.DIGESTS, body))


def test_the_most_digests_with_the_longest_names_fit_in_a_datagram() -> None:
    many = [(b"%064d" % number, 2**64 - 1) for number in range(datagram.MAX_DIGESTS)]
    longest = RankSender("j" * 120, 2**24 - 1, 2**24, "s" * 120, 4095, "g" * 120)
    whole = encode_datagram(datagram.DIGESTS, datagram.encode_digests(2**64 - 2, many), longest)
    assert len(whole) <= datagram.MAX_DATAGRAM
    assert len(datagram.encode_identity(longest)) <= datagram.MAX_IDENTITY
    assert isinstance(datagram.decode_datagram(whole)[1], DigestsReport)


# --- kept ranks ------------------------------------------------------------------------------------------------------


def test_several_steps_between_two_reads_give_mean_and_maximum() -> None:
    reporter = RankReporter()
    for number, (seconds, norm) in enumerate([(1.0, 5.0), (3.0, 9.0), (2.0, 4.0)], 1):
        body = step(number, step_time=seconds, compute_time=seconds / 2, loss=10.0 - number, gradient_norm=norm)
        reporter.ranks.receive(encode_datagram(datagram.STEP, body), 0, 7)
    found = reporter.values()["rank:81.3"]
    assert found["rank.step"] == 3
    assert (found["rank.step_time"], found["rank.step_time_longest"]) == (2.0, 3.0)
    assert (found["rank.compute_time"], found["rank.compute_time_longest"]) == (1.0, 1.5)
    assert (found["rank.loss"], found["rank.gradient_norm"]) == (7.0, 9.0)
    assert math.isnan(found["rank.communication_time"])


def test_without_a_new_step_the_last_values_are_repeated() -> None:
    reporter = RankReporter()
    reporter.ranks.receive(encode_datagram(datagram.STEP, step(1, step_time=1.0)), 0, 7)
    reporter.ranks.receive(encode_datagram(datagram.STEP, step(2, step_time=2.0)), 0, 7)
    first, second = reporter.values(), reporter.values()
    assert first["rank:81.3"]["rank.step_time"] == second["rank:81.3"]["rank.step_time"] == 1.5


def test_an_infinite_loss_is_missing_until_a_finite_one_comes() -> None:
    reporter = RankReporter()
    seen = []
    for loss in (2.0, math.inf, math.nan, 3.0):
        reporter.ranks.receive(encode_datagram(datagram.STEP, step(1, loss=loss)), 0, 7)
        seen.append(reporter.values()["rank:81.3"]["rank.loss"])
    assert (seen[0], seen[3]) == (2.0, 3.0)
    assert math.isnan(seen[1])
    assert math.isnan(seen[2])


def test_another_user_cannot_take_over_a_rank() -> None:
    reporter = RankReporter()
    reporter.ranks.receive(encode_datagram(datagram.STEP, step(5)), 0, 1000)
    reporter.ranks.receive(encode_datagram(datagram.STEP, step(99)), 0, 1001)
    assert reporter.values()["rank:81.3"]["rank.step"] == 5
    assert (reporter.ranks.refused, "belongs to user 1000" in reporter.ranks.reason) == (1, True)
    reporter.at = reported_ranks.STALE_S + 1
    assert reporter.values() == {}
    reporter.ranks.receive(encode_datagram(datagram.STEP, step(99)), 0, 1001)
    assert reporter.values()["rank:81.3"]["rank.step"] == 99


def test_a_rank_stays_with_its_reporting_process_while_it_lives() -> None:
    reporter, other = RankReporter(), subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    reporter.ranks.receive(encode_datagram(datagram.STEP, step(5)), other.pid, 7)
    reporter.ranks.receive(encode_datagram(datagram.STEP, step(99)), os.getpid(), 7)
    assert reporter.values()["rank:81.3"]["rank.step"] == 5
    assert f"process {other.pid} reports for rank:81.3" in reporter.ranks.reason
    other.communicate(b"\n")
    reporter.ranks.receive(encode_datagram(datagram.STEP, step(6)), os.getpid(), 7)
    assert reporter.values()["rank:81.3"]["rank.step"] == 6


def test_totals_may_decrease_only_now_and_then() -> None:
    reporter = RankReporter()
    for at, number, shown in ((0, 9, 9), (1, 5, 5), (2, 6, 6), (3, 2, 6), (11, 2, 2), (12, 1, 2)):
        reporter.at = float(at)
        reporter.ranks.receive(encode_datagram(datagram.STEP, step(number)), 0, 7)
        assert reporter.values()["rank:81.3"]["rank.step"] == shown
    assert reporter.ranks.refused == 2


def test_one_user_leaves_room_for_others_and_memory_is_bounded() -> None:
    reporter = RankReporter()
    for uid in range(4):
        for rank in range(reported_ranks.MAX_RANKS_PER_USER + 50):
            reporter.ranks.receive(encode_datagram(datagram.STEP, step(1), RankSender(f"j{uid}", rank)), 0, uid)
        assert len(reporter.ranks.list_senders()) == min(
            (uid + 1) * reported_ranks.MAX_RANKS_PER_USER, reported_ranks.MAX_RANKS
        )
    assert reporter.ranks.refused == 2 * 50 + 2 * (reported_ranks.MAX_RANKS_PER_USER + 50)


def test_events_keep_their_order_and_are_bounded() -> None:
    reporter = RankReporter()
    many = [(b"b%d" % number, number) for number in range(128)]
    for number in range(40):
        reporter.ranks.receive(encode_datagram(datagram.DIGESTS, datagram.encode_digests(number, many)), 0, 7)
    reported = [event for _ in range(20) for event in reporter.ranks.collect().events]
    assert len(reported) == reported_ranks.MAX_QUEUED_EVENTS
    assert reporter.ranks.refused == 40 - reported_ranks.MAX_QUEUED_EVENTS // 128
    assert reported[129].data == {"step": 1, "bucket": "b1", "digest": "0000000000000001", "group": "dp0"}


def test_a_job_on_one_node_has_the_agents_node_name() -> None:
    reporter = RankReporter()
    reporter.ranks.receive(
        encode_datagram(datagram.STEP, step(1), RankSender(f"{datagram.NODE_PLACEHOLDER}-29500", 0)), 0, 7
    )
    assert list(reporter.values()) == ["rank:n1-29500.0"]


@given(st.lists(st.tuples(st.binary(max_size=200), st.integers(0, 3)), max_size=20))
def test_no_datagram_breaks_a_read(sent: list[tuple[bytes, int]]) -> None:
    reporter = RankReporter()
    for data, uid in sent:
        reporter.ranks.receive(encode_datagram(datagram.STEP, data), 0, uid)
        reporter.ranks.receive(data, 0, uid)
    assert set(reporter.ranks.collect().columns) <= set(Training.signals)


def test_cached_identities_are_bounded() -> None:
    reporter = RankReporter()
    for number in range(2 * reported_ranks.MAX_RANKS + 10):
        reporter.ranks.receive(encode_datagram(datagram.STEP, step(1), RankSender("j", number)), 0, 7)
    assert 0 < len(reporter.ranks._senders) <= 2 * reported_ranks.MAX_RANKS
