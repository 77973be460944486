"""How many examples Hypothesis tries a property on: a fifth in `make test`; `make test-all` runs it again with all.

`make test` is for every change, and new examples are drawn in each run of it: a rare failure is found within a few
changes, and at the latest by `make test-all`.
"""

from __future__ import annotations

import os

ALL_EXAMPLES = "FLEETPULSE_TEST_ALL_EXAMPLES"
"""Set by `make test-all`."""
_SHARE = 5
_FEWEST = 5  # fewer would often draw nothing but the simplest values


def examples(count: int) -> int:
    """Returns how many of a property's examples this run tries."""
    return count if os.environ.get(ALL_EXAMPLES) else min(count, max(_FEWEST, count // _SHARE))
