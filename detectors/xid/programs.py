"""Whether a program or a GPU is to blame for what both cause: XIDs 13, 31, 43, 45, 109 and those of copy engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from detectors.xid import cases as xid_cases
from detectors.xid import levels as xid_levels
from detectors.xid.cases import Case
from pipeline.records import SECOND
from pipeline.topology import Topology, kind_of

_BURST = 180 * SECOND  # within which XIDs are one burst (NVSentinel)
_MOST = 16  # bursts of a GPU that are remembered; chosen


class Programs:
    """Jobs whose program is blamed, and the lone errors of each GPU within a day.

    blamed: job, or node where no job is known -> onset, last, gpus and codes.
    bursts: GPU -> [time, job, part of the GPU] of each.
    """

    def __init__(self) -> None:
        self.blamed: dict[str, dict[str, Any]] = {}
        self.bursts: dict[str, list[list[Any]]] = {}

    def judge(
        self, cases: Mapping[str, Case], time: int, topology: Topology, settle: int, together: int, again: int
    ) -> None:
        """Marks cases of GPUs of one job that erred together as its program's, and one that errs alone repeatedly.

        settle: us that the lines of one error take.   together, again: windows (us).
        """
        mine: dict[str, list[str]] = {}
        since = min((c["fresh"] for c in cases.values() if c["fresh"]), default=time) - together
        near = {e: c for e, c in cases.items() if c["fresh"] or c["last"] >= since}
        for entity, case in sorted(near.items()):
            if kind_of(entity) == "gpu" and xid_cases.made_by_programs(case):
                mine.setdefault(case["job"] or topology.above_of_kind(entity, "node") or entity, []).append(entity)
        for job, gpus in mine.items():
            fresh = [e for e in gpus if cases[e]["fresh"]]
            first = min((cases[e]["fresh"] for e in fresh), default=time)
            if not fresh or time - first < settle:
                continue
            close_by = self._together(cases, gpus, first, together)
            for entity in fresh:
                if entity in close_by:
                    cases[entity]["program"] = len(close_by)
                else:
                    self._remember(entity, cases[entity], again)
            if close_by:
                codes = sorted({code for e in close_by for code in xid_cases.numbers(cases[e])})
                known = self.blamed.get(job, {"onset": first})
                self.blamed[job] = {**known, "last": time, "gpus": close_by, "codes": codes}

    def _together(self, cases: Mapping[str, Case], gpus: list[str], first: int, together: int) -> list[str]:
        """Those that erred together, if they are several; the one that its driver wants reset is broken itself."""
        near = [e for e in gpus if abs(cases[e]["last"] - first) <= together]
        erred = [e for e in near if set(xid_cases.numbers(cases[e])) - xid_levels.CLEANUP]
        hurt = [e for e in erred if xid_levels.level_of_action(cases[e]["driver"] or "none") == "page"]
        erred = [e for e in erred if len(hurt) != 1 or e not in hurt]
        return [e for e in near if len(hurt) != 1 or e not in hurt] if len(erred) > 1 else []

    def summary(self, job: str) -> str:
        """Who is to blame, in a sentence."""
        program = self.blamed[job]
        codes = ", ".join(map(str, program["codes"]))
        who = "its program" if kind_of(job) == "job" else "a program on it, of no job that is known,"
        return f"{job}: XID {codes} on {len(program['gpus'])} of its GPUs at once: {who} is to blame, no GPU"

    def forget(self, entity: str) -> None:
        """A person said that what is found of it is no fault."""
        self.blamed.pop(entity, None)
        self.bursts.pop(entity, None)

    def over(self, since: int) -> list[str]:
        """Forgets and gives the jobs that have not erred since then."""
        gone = [job for job, program in self.blamed.items() if program["last"] < since]
        for job in gone:
            del self.blamed[job]
        return gone

    def _remember(self, gpu: str, case: Case, again: int) -> None:
        """Notes XIDs of a lone GPU, and whether it had them before under another job or in the same part."""
        now, job, place = case["fresh"], case["job"], case["place"]
        kept = [b for b in self.bursts.pop(gpu, []) if now - b[0] <= again]
        apart = [b for b in kept if now - b[0] > _BURST]
        same = [b for b in apart if place and b[2] == place]
        jobs = {b[1] for b in apart if b[1]} | ({job} if job else set())
        if xid_levels.REPEATING & set(xid_cases.numbers(case)):
            if same:
                case["repeats"] = f"it erred {len(same) + 1} times in {place} within a day"
            elif len(jobs) > 1:
                case["repeats"] = f"it erred under {len(jobs)} jobs within a day, alone each time"
        self.bursts[gpu] = [*kept, [now, job, place]][-_MOST:]  # the newest stands last
        while now - self.bursts[oldest := next(iter(self.bursts))][-1][0] > again:
            del self.bursts[oldest]

    def snapshot(self) -> dict[str, Any]:
        return {"blamed": self.blamed, "bursts": self.bursts}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.blamed, self.bursts = dict(state["blamed"]), dict(state["bursts"])
