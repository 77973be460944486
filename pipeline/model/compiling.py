"""Compiling loops over arrays to machine code, with what every compiled loop of the pipeline has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numba

if TYPE_CHECKING:
    from numba.core.dispatcher import Dispatcher

_Loop = TypeVar("_Loop", bound=Callable[..., object])


def compiled(loop: _Loop) -> Dispatcher[_Loop]:
    """Compiles a loop; the machine code is kept on disk for the next start, if a folder can be written."""
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(loop)
    except RuntimeError:  # no folder can be written: beside the source, NUMBA_CACHE_DIR, home
        return numba.njit(nogil=True, error_model="numpy")(loop)


def inlined(part: _Loop) -> Dispatcher[_Loop]:
    """Compiles a part of a loop into the loops that call it: a call with arrays costs as much as its arithmetic."""
    return numba.njit(inline="always", nogil=True, error_model="numpy")(part)
