"""NVLinks: how many a GPU has, and the older calls for GPUs whose driver does not tell links' state as fields."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from agents.sources.nvml.calls import LINK_CALLS
from agents.sources.nvml.driver import Driver
from agents.sources.nvml.fields import GPU_FIELDS, LINK_FIELDS, Field, number_of
from agents.sources.nvml.places import Place
from agents.sources.nvml.reader import Wanted, what
from agents.sources.nvml.refusals import Refusals
from agents.sources.nvml.values import Values

EVERY = 10
MOST_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of nvidia-ml-py 13.615.71."""


def count_links(driver: Driver, handle: Any) -> int:
    """Links of one GPU: what it says, else as many as answer; none on a GPU without NVLink."""
    told = driver.field(handle, driver.nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
    if told is not None:
        return told if told <= MOST_LINKS else 0
    ask, state = driver.function("nvmlDeviceGetNvLinkState"), ctypes.c_uint()
    count = 0
    while ask is not None and count < MOST_LINKS and ask(handle, ctypes.c_uint(count), ctypes.byref(state)) == 0:
        count += 1
    return count


def wanted(driver: Driver, version: str, places: Iterable[Place], values: Values) -> Iterator[Wanted]:
    """Every field to be read, of every GPU and link."""
    numbers = {field.name: number_of(field.name, driver.nvml, version) for field in (*GPU_FIELDS, *LINK_FIELDS)}
    first = 0
    for place in places:
        for entry in GPU_FIELDS:
            yield from _want(
                entry, numbers[entry.name], place.index, entry.scope, values.place(entry.signal, place.index)
            )
        for link in range(place.links or 0):
            for entry in LINK_FIELDS:
                yield from _want(
                    entry, numbers[entry.name], place.index, link, values.place(entry.signal, first + link)
                )
        first += place.links or 0


def _want(field: Field, number: int | None, gpu: int, scope: int, place: tuple[bool, int]) -> Iterator[Wanted]:
    if number is not None:
        yield Wanted(gpu, number, scope, field.every, place, field.scale, field.packed)


class LinkCalls:
    """Asks link by link for what was refused as a field."""

    def __init__(self, driver: Driver, version: str, refusals: Refusals) -> None:
        names = {field.signal: field.name for field in LINK_FIELDS}
        self._never = frozenset(driver.never)
        self._calls = [
            (signal, number_of(names[signal], driver.nvml, version), driver.function(function), kind(), arguments)
            for signal, function, arguments, kind in LINK_CALLS
        ]
        self._refusals = refusals

    def read(
        self,
        place: Place,
        first: int,
        values: Values,
        timed: Callable[..., int],
    ) -> int:
        """Reads the links of one GPU; returns NVML's last code."""
        code, refusals, gpu = 0, self._refusals, place.index
        for signal, number, function, found, arguments in self._calls:
            if function is None or refusals.refused(gpu, signal):
                continue
            for link in range(place.links or 0):
                if number is not None and not refusals.refused(gpu, what(number, link)):
                    continue
                code = timed(place, function, place.handle, ctypes.c_uint(link), *arguments, ctypes.byref(found))
                if code == 0:
                    refusals.answer(gpu, signal)
                    values.put(values.place(signal, first + link), found.value)
                elif code in self._never:
                    refusals.refuse(gpu, signal, getattr(function, "__name__", signal))
                    break
        return code
