"""Faults of links, NICs, leaves and NVLinks show their signature within their window and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.faults.gpu import NvlinkError
from agents.sim.faults.kind import Kind
from agents.sim.faults.leaf import Congestion, LeafCrash
from agents.sim.faults.link import LinkDown, LinkFlap, NicStall, OpticDegradation
from agents.sim.fleet import FleetSimulator
from agents.sim.physics.links import failures
from agents.sim.scenario import Fleet, Line, Scenario

ONSET, END = 1200.0, 2400.0
WITHIN, AFTER = slice(121, 239), slice(242, 360)
GPUS, BUSY = 64, 56  # of 8 nodes, the last of which is a spare


def simulator(*lines: Line, seed: int = 1, hours: float = 1.0, interval: float = 10.0) -> FleetSimulator:
    return FleetSimulator(Scenario(hours * 3600, interval, None, Fleet(8, 8), lines), seed)


def simulate_fault(
    kind: Kind, entity: str | None = None, seed: int = 1, end: float = END
) -> tuple[FleetSimulator, Sequence[Chunk]]:
    made = simulator(Line(kind, ONSET, end, entity), seed=seed)
    return made, list(made.chunks())


@cache
def sound() -> Sequence[Chunk]:
    return list(simulator().chunks())


def columns(chunks: Sequence[Chunk], signal: str) -> np.ndarray:
    return np.concatenate([c.columns[signal.partition(".")[0]][signal] for c in chunks]).astype(float)


def growth(chunks: Sequence[Chunk], signal: str) -> np.ndarray:
    return np.diff(columns(chunks, signal), axis=0, prepend=np.nan)


def events(made: FleetSimulator, chunks: Sequence[Chunk], kind: str) -> list[tuple[float, str, dict[str, object]]]:
    found = [e for c in chunks for _, e in c.events if e.kind == kind]
    return [((e.time - made.start) / 1e6, e.entity, dict(e.data)) for e in found]


def step_time(chunks: Sequence[Chunk]) -> np.ndarray:
    return np.concatenate([c.columns["rank"]["rank.step_time"][:, 0] for c in chunks if c.columns["rank"]])


def port_of(made: FleetSimulator) -> int:
    return made.faults[0].device


def test_healthy_ports_have_varying_raw_errors_and_almost_no_symbol_errors() -> None:
    raw = np.log10(growth(sound(), "nic.phy_corrected_bits")[1:] / growth(sound(), "nic.phy_bits")[1:])
    level = np.median(raw, axis=0)
    assert -9.6 < level.min() < -8
    assert -7 < level.max() < -5.9
    assert np.abs(raw - level).max() < 0.5
    assert growth(sound(), "nic.symbol_errors")[1:].sum() <= 5
    assert growth(sound(), "nic.link_downs")[1:].sum() == 0


def test_waits_and_marks_follow_the_traffic() -> None:
    wait, sent = growth(sound(), "nic.port_tx_wait")[1:], growth(sound(), "nic.tx_bytes")[1:]
    saving = sent[:, 0] < 0.5 * np.median(sent[:, 0])
    assert np.median(wait[~saving][:, :BUSY]) > 10 * (1 + np.median(wait[:, BUSY:]))
    assert growth(sound(), "nic.ecn_marked")[1:, BUSY:].sum() == 0
    assert growth(sound(), "nic.ecn_marked")[1:, :BUSY].sum() > 0


def test_jobs_send_at_their_own_levels_within_the_line_rate() -> None:
    share = growth(sound(), "nic.tx_bytes")[1:, :BUSY] / (50e9 * 10)
    assert 0.08 < np.median(share) < 0.30
    assert share.max() <= 1.001


def test_error_correction_works_up_to_its_published_limit_and_fails_within_a_third_of_a_decade() -> None:
    hold, limit, over = failures(np.log10([1e-5, 2.4e-4, 5e-4]))
    assert hold == 0
    assert 0.05 < limit * 3600 < 1.0  # one codeword in hours
    assert 1.0 < over < 10.0  # every second


@pytest.mark.slow
def test_a_degraded_optic_loses_decades_before_the_cliff_and_flaps_beyond_it() -> None:
    kind = OpticDegradation(slope=1.0, start=-4.5, loss=2.0, cause="dirt")
    made = simulator(Line(kind, 0.0, 2 * 86_400.0, "port:sim-n001.mlx5_3"), hours=48, interval=120.0)
    chunks, port, fault = list(made.chunks()), 3, made.faults[0]
    raw = np.log10(growth(chunks, "nic.phy_corrected_bits")[:450, port] / growth(chunks, "nic.phy_bits")[:450, port])
    hours = np.arange(48 * 30) / 30
    assert abs(raw[13 * 30] - -4.0) < 0.15
    assert kind.detectable_from(fault) < 3600
    cliff = kind.cliff_time(fault) / 3600
    assert 20 < cliff < 24
    symbols = columns(chunks, "nic.symbol_errors")[:, port]
    assert symbols[hours < cliff - 3][-1] - symbols[0] <= 1
    assert symbols[-1] - symbols[0] > 1000
    flaps = [t / 3600 for t, entity, _ in events(made, chunks, "link_state")]
    assert len(flaps) > 20
    assert min(flaps) > cliff
    light = columns(chunks, "nic.rx_power_min")
    assert light[-1, port] < 0.75 * light[1, port]
    assert np.all(np.abs(light[-1] / light[1] - 1)[4:] < 0.2)
    assert made.truth()[0]["parameters"]["attribution"] == "network"


def test_a_hot_module_shows_its_heat_and_no_loss_of_light() -> None:
    kind = OpticDegradation(slope=1.0, start=-3.6, heat=20.0, cause="heat")
    made = simulator(Line(kind, 0.0, 86_400.0, "port:sim-n001.mlx5_3"), hours=12, interval=60.0)
    chunks = list(made.chunks())
    heat, light = (columns(chunks, f"nic.{n}")[:, 3] for n in ("module_temperature", "rx_power_min"))
    assert 12 < heat[-1] - heat[0] < 25
    assert abs(light[-1] / light[0] - 1) < 0.2


def test_an_optic_with_a_weak_start_is_detectable_a_decade_later() -> None:
    kind = OpticDegradation(slope=0.5, start=-7.5)
    made = simulator(Line(kind, 0.0, 20 * 86_400.0))
    assert kind.detectable_from(made.faults[0]) == pytest.approx(3600 + 2 * 86_400)
    assert made.truth(30 * 86_400.0)[0]["parameters"]["detectable"] == "2026-01-03T01:00:00.000000Z"


def test_a_dead_link_is_down_and_dark_and_ends_its_job() -> None:
    made, chunks = simulate_fault(LinkDown(dies_after=60.0), "port:sim-n002.mlx5_1")
    port, state = port_of(made), columns(chunks, "nic.state")
    assert (state[WITHIN, port] == 0).all()
    assert np.delete(state, port, axis=1).all()
    assert np.isnan(columns(chunks, "nic.speed")[WITHIN, port]).all()
    assert columns(chunks, "nic.rx_power_min")[130:230, port].max() < 0.01
    assert [d["state"] for _, _, d in events(made, chunks, "link_state")] == ["down", "up"]
    assert growth(chunks, "nic.link_downs")[1:, port].sum() == 1
    assert growth(chunks, "nic.carrier_changes")[1:, port].sum() == 2
    assert made.schedule.allocations[0].end == ONSET + 60
    assert 1 not in set(made.layout.node_of_gpu[made.schedule.allocations[1].gpus].tolist())  # moved to the spare


def test_a_flap_doubles_some_steps_and_each_one_is_counted() -> None:
    made, chunks = simulate_fault(LinkFlap(flaps=3), "port:sim-n002.mlx5_1", end=ONSET + 600)
    port = port_of(made)
    assert growth(chunks, "nic.link_downs")[1:, port].sum() == 3
    reported = events(made, chunks, "link_state")
    assert [d["state"] for _, _, d in reported] == ["down", "up"] * 3
    lengths = [up[0] - down[0] for down, up in zip(reported[::2], reported[1::2], strict=True)]
    assert all(1 <= length <= 30 for length in lengths)
    assert all(ONSET <= t < ONSET + 600 for t, _, _ in reported)
    quiet, slow = step_time(chunks)[:120], step_time(chunks)[120:180]
    assert 1.5 < slow.max() / np.median(quiet) < 2.6
    assert len(made.schedule.allocations) == 1
    assert growth(chunks, "nic.ack_timeouts")[1:, port].sum() > 0


def test_flaps_of_an_episode_are_one_plus_a_geometric_number() -> None:
    drawn = [simulator(Line(LinkFlap(), ONSET, END), seed=s).faults[0].kind.flaps for s in range(12)]
    assert min(drawn) == 1
    assert 1 < max(drawn) < 12


def test_a_leaf_crash_takes_down_all_its_ports_within_five_seconds_and_ends_its_jobs() -> None:
    made, chunks = simulate_fault(LeafCrash(dies_after=30.0), "leaf:sim-l3")
    mine = np.flatnonzero(made.layout.leaf_of_port == port_of(made))
    state = columns(chunks, "nic.state")
    assert (state[WITHIN, mine] == 0).sum() == 118 * len(mine)
    assert np.delete(state, mine, axis=1).all()
    down = [t for t, _, d in events(made, chunks, "link_state") if d["state"] == "down"]
    assert len(down) == len(mine)
    assert ONSET <= min(down) < max(down) <= ONSET + 5
    switch = events(made, chunks, "switch_state")
    assert [(e, d["state"], d["ports"]) for _, e, d in switch] == [
        ("leaf:sim-l3", "gone", len(mine)),
        ("leaf:sim-l3", "seen", len(mine)),
    ]
    assert made.schedule.allocations[0].end == ONSET + 30
    assert made.schedule.allocations[1].begin >= END
    assert made.truth()[0]["entity"] == "leaf:sim-l3"


def test_a_stalled_nic_has_no_traffic_although_its_link_is_up() -> None:
    made, chunks = simulate_fault(NicStall(dies_after=120.0, cqe_rate=5.0), "port:sim-n002.mlx5_1")
    port = port_of(made)
    assert growth(chunks, "nic.tx_bytes")[WITHIN, port].sum() == 0
    assert growth(chunks, "nic.rx_bytes")[WITHIN, port].sum() == 0
    assert columns(chunks, "nic.state").all()
    assert 300 < growth(chunks, "nic.req_cqe_errors")[WITHIN, port].sum() < 900
    assert np.delete(growth(chunks, "nic.req_cqe_errors")[1:], port, axis=1).sum() == 0
    (message,) = events(made, chunks, "kernel")
    assert message[1:2] == ("port:sim-n002.mlx5_1",)
    assert message[2]["pattern"] == "mlx5_health"
    assert made.schedule.allocations[0].end == ONSET + 120
    assert made.truth()[0]["class"] == "hard"  # a job ran there until it died of it
    assert [d["signals"][:2] for _, _, d in events(made, chunks, "counter_reset")]


def test_congestion_slows_every_rank_and_makes_no_error() -> None:
    made, chunks = simulate_fault(Congestion(slowdown=0.5, rise=60.0), "leaf:sim-l3")
    mine = np.flatnonzero(made.layout.leaf_of_port == port_of(made))
    wait, quiet = growth(chunks, "nic.port_tx_wait"), growth(sound(), "nic.port_tx_wait")
    risen = wait[130:235].mean(axis=0)[:BUSY] > 3 * quiet[130:235].mean(axis=0)[:BUSY]
    assert set(np.flatnonzero(risen)) <= set(mine.tolist())
    assert risen.sum() >= 0.5 * (mine < BUSY).sum()
    marked = growth(chunks, "nic.ecn_marked")[130:235].sum(axis=0)
    assert marked[np.flatnonzero(risen)].min() > 3 * np.median(marked[:BUSY])
    for name in ("symbol_errors", "crc_errors", "link_downs", "carrier_changes", "out_of_sequence", "ack_timeouts"):
        assert np.array_equal(columns(chunks, f"nic.{name}"), columns(sound(), f"nic.{name}"))
    slow, before = np.median(step_time(chunks)[130:235]), np.median(step_time(chunks)[20:115])
    assert 1.3 < slow / before < 1.7
    assert slow / before == pytest.approx(1.5, abs=0.02)  # of the job's own step, however long that is
    line = made.truth()[0]
    assert (line["entity"], line["class"]) == ("leaf:sim-l3", "soft")
    assert (line["parameters"]["effect"], line["parameters"]["effect_unit"]) == (0.5, "time")


def test_congestion_of_large_jobs_lasts_three_times_as_long() -> None:
    def mean(nodes: int) -> float:
        made = FleetSimulator(Scenario(60.0, 10.0, None, Fleet(nodes, 8)), 1)
        rng = np.random.default_rng(1)
        return float(np.mean([Congestion.draw_duration(made.layout, rng) for _ in range(400)]))

    assert 2.2 < mean(128) / mean(16) < 3.4


def test_a_weak_nvlink_slows_its_nodes_ranks_and_is_logged() -> None:
    made, chunks = simulate_fault(NvlinkError(loss=0.5, crc_rate=10.0, dies_after=5.0), "nvlink:sim-n002.1.0")
    link = port_of(made)
    crc = growth(chunks, "nvlink.crc_errors")[1:]
    assert 8_000 < crc[:, link].sum() < 16_000
    assert np.delete(crc, link, axis=1).sum() == 0
    speed = columns(chunks, "nvlink.speed")
    assert np.allclose(speed[WITHIN, link] / speed[0, link], 0.5)
    assert np.ptp(np.delete(speed, link, axis=1)) == 0
    compute = np.concatenate([c.columns["rank"]["rank.compute_time"] for c in chunks])
    ratio = compute[130:235].mean(axis=0) / compute[20:115].mean(axis=0)
    node = made.layout.node_of_gpu[made.schedule.allocations[0].gpus] == 1
    assert np.all(ratio[node] > 1.07)
    assert np.all(ratio[~node] < 1.05)
    (line,) = made.truth()
    assert line["entities"] == ["nvlink:sim-n002.1.0", "gpu:sim-n002.1"], "its counters do not show which failed"
    xids = events(made, chunks, "xid")
    assert {(e, d["xid"]) for _, e, d in xids} == {("gpu:sim-n002.1", 74)}
    assert [(e, d["sxid"]) for _, e, d in events(made, chunks, "sxid")] == [("node:sim-n002", 20001)]
    assert growth(chunks, "nvlink.recovery_errors")[1:, link].sum() == len(xids)


def test_a_dead_nvlink_ends_its_job_and_its_gpu_is_reset() -> None:
    made, chunks = simulate_fault(NvlinkError(loss=0.95, crc_rate=10.0, dies_after=20.0), "nvlink:sim-n002.1.0")
    assert (columns(chunks, "nvlink.state")[WITHIN, port_of(made)] == 0).all()
    assert made.schedule.allocations[0].end == ONSET + 20
    (xid,), (sxid,) = events(made, chunks, "xid"), events(made, chunks, "sxid")
    assert (xid[2]["xid"], sxid[2]["sxid"], sxid[2]["severity"]) == (74, 20034, "critical")
    assert {e for _, e, _ in events(made, chunks, "counter_reset")} == {"gpu:sim-n002.1", "nvlink:sim-n002.1.0"}


@pytest.mark.parametrize("kind", [LinkDown(), LinkFlap(), LeafCrash(), NicStall(), Congestion(), NvlinkError()])
def test_after_the_end_of_a_fault_its_counters_stay_constant(kind: Kind) -> None:
    chunks = simulate_fault(kind, seed=3)[1]
    errors = ("symbol_errors", "crc_errors", "link_downs", "carrier_changes", "ack_timeouts", "req_cqe_errors")
    for name in (*(f"nic.{n}" for n in errors), "nvlink.crc_errors"):
        assert growth(chunks, name)[AFTER].sum() <= 2, name
    assert columns(chunks, "nic.state")[AFTER].all()
    assert columns(chunks, "nvlink.state")[AFTER].all()
