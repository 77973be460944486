"""replica_digest: 64 bits that show whether two ranks hold the same parameters, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
"""The sum so far is multiplied by it before the next array is added, so that the order of arrays counts. Odd, so that
no bit is lost: 2^64 over the golden ratio, as in Fibonacci hashing (Knuth vol. 3, 6.4)."""


def replica_digest(arrays: Any) -> int:
    """Returns a digest of one array, or of several in order: NumPy arrays, PyTorch tensors, or what NumPy converts.

    Each array counts as the sum of its 64-bit words modulo 2^64. One changed word always changes it; changes that
    cancel exactly, such as two swapped words, are not seen. Tensors are summed on their device, and 8 bytes are copied
    back. The bits count, not the numbers: 0.0 and -0.0 differ.
    """
    torch = sys.modules.get("torch")  # a caller with tensors has loaded it
    many: Iterable[Any] = (arrays,) if hasattr(arrays, "dtype") else arrays
    total: Any = 0
    for array in many:
        word = _sum_tensor(array, torch) if torch is not None and isinstance(array, torch.Tensor) else _sum_array(array)
        total = _combine(total, word)
    return int(total) & _MASK


def _combine(total: Any, word: Any) -> Any:
    """Returns the sum with the next array's added, modulo 2^64: Python integers, or a tensor once one is among them."""
    if isinstance(total, int) and isinstance(word, int):
        return (total * _MULTIPLIER + word) & _MASK
    if isinstance(total, int):
        return word + _to_signed(total * _MULTIPLIER)
    if isinstance(word, int):
        return total * _to_signed(_MULTIPLIER) + _to_signed(word)
    return total * _to_signed(_MULTIPLIER) + word.to(total.device)


def _to_signed(value: int) -> int:
    """Returns the same 64 bits as the signed number with which torch computes."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _sum_array(array: Any) -> int:
    """Returns the sum of an array's words."""
    import numpy as np  # only digests need it

    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = data.size // 8 * 8
    words = data[:whole]
    if words.ctypes.data % 8:  # a view into the middle of a buffer
        words = words.copy()
    total = int(words.view(np.uint64).sum(dtype=np.uint64)) if whole else 0
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) & _MASK


def _sum_tensor(tensor: Any, torch: Any) -> Any:
    """Returns the sum as a tensor of one int64 on the same device; nothing is copied to the host."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole]
    if words.storage_offset() % 8:  # a view into the middle of a buffer
        words = words.clone()
    total = words.view(torch.int64).sum()
    for place, rest in enumerate(range(whole, data.numel())):
        total = total + (data[rest].to(torch.int64) << (8 * place))
    return total
