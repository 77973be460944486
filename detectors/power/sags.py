"""Voltages that are off, in words and levels: who is told of a sag and how loudly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from detectors.base.findings import Compared, evidence
from detectors.power.voltages import DEEP, OF_FEEDS, OF_RAILS, OF_SUPPLIES, TOLD, Departure, Voltages
from pipeline.records import Finding, Level, finite
from pipeline.topology import Topology

_CONFIRMS = 0.5
"""Share of the supplies below a meter that must show it, too; chosen: with two feeds half of them hang on the other."""


def findings(
    voltages: Voltages,
    braked: Collection[str],
    topology: Topology,
    time: int,
    name: str,
    at_work: Callable[[str], bool],
) -> Iterator[Finding]:
    """A ticket each; a page where many nodes have less than equipment bears; a suspect where the meter is likelier."""
    for each in voltages.departures(topology):
        if any(at_work(e) for e in (each.entity, *each.units)):
            continue
        lower = not each.value > each.usual
        level, why = _level(each, voltages.share_below(each.entity, lower, topology), _below(braked, each, topology))
        what = "is off" if not each.value > 0 else "sags" if lower else "is too high"
        read = each.value > 0 and each.usual > 0  # else its BMC alone says that it is out of range
        off = each.value / each.usual - 1 if read else 0.0
        size = f"{each.value:.4g} V, usual are {each.usual:.4g} V" if read else "its BMC calls it out of range"
        summary = f"{each.entity}: {_whose(each)} {what} ({size}){why}"
        compared = Compared(each.value, each.usual, None, "own past", 0, off, "V") if read else None
        told = evidence(
            "over when the voltage is near its usual, or told to be in range",
            compared,
            readings=list(each.members[:64]),
            chassis=list(each.units[:64]),
            others_well=each.others,
            share=finite(off),
        )
        signals = (each.signal, TOLD) if each.signal == OF_SUPPLIES else (each.signal,)
        yield Finding(time, each.since, each.entity, name, level, float(len(each.units)), summary, told, signals)


def below(braked: Collection[str], found: Sequence[Finding], topology: Topology) -> set[str]:
    """Nodes that the brake holds whose feed or rail pages: that tells why, and as loudly."""
    off = {e for f in found if f.level == "page" for e in (f.entity, *f.evidence["chassis"])}
    return {node for node in braked if off and not off.isdisjoint((node, *topology.above(node)))}


def _below(braked: Collection[str], each: Departure, topology: Topology) -> int:
    """Nodes among those that the brake holds that hang on what is off."""
    around = {each.entity, *each.units}
    return sum(1 for node in braked if not around.isdisjoint((node, *topology.above(node))))


def _whose(each: Departure) -> str:
    """What is off, and on how many."""
    many, chassis = len(each.members), len(each.units)
    if each.signal == OF_RAILS:
        rails = f"voltage of its rail {each.members[0]}" if many == 1 else f"voltage of {many} rails"
        return rails if chassis == 1 else f"{rails} in {chassis} chassis"
    if each.signal == OF_SUPPLIES:
        return "its input voltage" if many == 1 else f"input voltage of {many} supplies in {chassis} chassis"
    return "voltage"


def _level(each: Departure, share: float | None, braked: int) -> tuple[Level, str]:
    """And what speaks for it."""
    if each.signal == OF_RAILS and len(each.members) <= each.others:
        return "suspect", "; the other rails there are well: more likely its meter"  # a brake there is told by itself
    if each.signal in OF_FEEDS and share is not None and share < _CONFIRMS and not braked:
        return "suspect", f"; {share:.0%} of the supplies below show it: more likely its meter"
    if braked:
        return "page", f"; the power brake slows the GPUs of {braked} node{'s' * (braked > 1)} there"
    many = len(each.units) > 1 or (each.signal in OF_FEEDS and share is not None)
    if each.deep and many and each.signal != OF_RAILS:
        return "page", f" on {max(len(each.units), 1)} at once; equipment bears {DEEP:.0%} less for 10 s"
    return "ticket", ""
