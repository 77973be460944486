"""Limits of new columns: a new signal widens a table permanently, so their number is limited.

A signal with an existing column is always accepted, however full the table is: one sender cannot block others.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from pipeline.model.errors import Rejected, WireError
from pipeline.model.signals import CLASSES, column_of, signals_of_class
from pipeline.store.schema import RESERVED, UNFIT
from pipeline.transport import wire

MAX_NEW = 512
"""Maximum columns of a class in addition to the catalogue. Chosen: three times the widest class."""
MAX_PER_SENDER = 128
"""Maximum new columns per sender until the next start; chosen: four times the signals of a large exporter."""
_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")


class ColumnLimits:
    """Checks the signals of messages in reading order. For one thread.

    stored: class -> wire types of stored columns. New signals count from their check on.
    """

    def __init__(self, stored: Callable[[str], Mapping[str, str]]) -> None:
        self._stored = stored
        self._added: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._of_sender: Counter[str] = Counter()

    def check_signals(self, node: str, shape: wire.Shape) -> None:
        """Registers the new signals of a message. Raises WireError if they do not fit, Rejected if too many."""
        fresh: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for device_class, _, signals in shape.blocks:
            if device_class not in CLASSES:
                raise WireError(
                    f"device class {device_class!r}: expected one of {', '.join(CLASSES)}: upgrade the pipeline"
                )
            if len({column_of(name, device_class) for name, _ in signals}) < len(signals):
                raise WireError(f"class {device_class}: two signals would share one column")
            known = {**self._stored(device_class), **self._added[device_class], **fresh[device_class]}
            fresh[device_class] |= _find_new_columns(device_class, signals, known)
            own = {signal.column for signal in signals_of_class(device_class)}
            if fresh[device_class] and len((known.keys() | fresh[device_class]) - own) > MAX_NEW:
                raise Rejected("signals", f"class {device_class}: more than {MAX_NEW} signals besides the catalogue")
        more = sum(map(len, fresh.values()))
        if more and self._of_sender[node] + more > MAX_PER_SENDER:
            raise Rejected(
                "signals",
                f"{more} new signals in addition to {self._of_sender[node]} of sender {node}, at most "
                f"{MAX_PER_SENDER} are accepted",
            )
        for device_class, columns in fresh.items():
            self._added[device_class] |= columns
        if more:
            self._of_sender[node] += more


def _find_new_columns(
    device_class: str, signals: tuple[tuple[str, str], ...], known: Mapping[str, str]
) -> dict[str, str]:
    """New columns. Raises WireError on invalid names, and on types that differ from the stored column."""
    new: dict[str, str] = {}
    for name, code in signals:
        column = column_of(name, device_class)
        wanted = known.get(column)
        if wanted is None and not _NAME.fullmatch(name):
            raise WireError(f"signal {name!r}: expected lower-case words and dots, at most 64 characters")
        if wanted is not None and wanted != code:
            raise WireError(
                f"{name}: values of type {code}, expected {wanted}: senders disagree; upgrade the older side"
            )
        if column in RESERVED or (wanted is None and column in UNFIT):
            raise WireError(f"signal {name!r}: this name is reserved by the store")
        if wanted is None:
            new[column] = code
    return new
