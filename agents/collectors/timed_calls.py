"""Calls that may hang, several devices at once: each in a thread of its own, none asked again before it came back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Answer(Generic[T]):
    """What a call brought, or the OSError that it ended with. `took` is None while it is under way, seconds else."""

    began: float
    took: float | None = None
    value: T | None = None
    error: OSError | None = None


class Calls(Generic[T]):
    """As many threads as there are devices that do not answer; all the others end with the look."""

    def __init__(self) -> None:
        self._under_way: dict[str, Answer[T]] = {}
        self._finished = threading.Condition()

    def ask(self, calls: Mapping[str, Callable[[], T]], patience: float) -> dict[str, Answer[T]]:
        """Runs all calls and waits `patience` seconds for them together; what hangs from before is not asked anew."""
        with self._finished:
            asked = {name: self._under_way[name] for name in calls if name in self._under_way}
        for name, call in calls.items():
            if name not in asked:
                asked[name] = self._begin(name, call)
        with self._finished:
            self._finished.wait_for(lambda: all(a.took is not None for a in asked.values()), patience)
            return {name: Answer(a.began, a.took, a.value, a.error) for name, a in asked.items()}

    @staticmethod
    def waiting(answer: Answer[T]) -> float:
        """Seconds that a call has been under way, or took."""
        return time.monotonic() - answer.began if answer.took is None else answer.took

    def _begin(self, name: str, call: Callable[[], T]) -> Answer[T]:
        answer: Answer[T] = Answer(time.monotonic())
        with self._finished:
            self._under_way[name] = answer
        thread = threading.Thread(target=self._run, args=(name, call, answer), name=f"asks {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: nothing is under way that would ever come back
            with self._finished:
                del self._under_way[name]
            raise
        return answer

    def _run(self, name: str, call: Callable[[], T], answer: Answer[T]) -> None:
        value, error = None, None
        try:
            value = call()
        except OSError as failed:
            error = failed
        with self._finished:
            answer.value, answer.error, answer.took = value, error, time.monotonic() - answer.began
            del self._under_way[name]
            self._finished.notify_all()
