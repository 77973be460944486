"""What is remembered of the memory of each GPU."""

from __future__ import annotations

import numpy as np

from detectors.memory import rows

MEM = np.dtype(
    [
        ("lost", "<f8"),  # uncorrected errors of device memory in this life
        ("lost_at", "<i8"),
        ("lost_rows", "<f8"),  # rows replaced when the first came
        ("chip", "<f8"),  # uncorrected errors of caches and registers in this life
        ("chip_at", "<i8"),
        *rows.FIELDS,
        ("heard_at", "<i8"),  # the newest reading of what follows
        ("pending_at", "<i8"),  # since when a row waits for a reset; 0: none does
        ("failed_at", "<i8"),
        ("many_at", "<i8"),  # since when corrected errors of caches are above the limit
        ("threshold_at", "<i8"),
    ]
)
