"""Plant: the models of everything in a fleet, and the order in which one follows from the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.physics.facility import SUPPLY_C, Facility, Psus, Sensors
from agents.sim.physics.gpus import Gpus
from agents.sim.physics.hosts import Hosts
from agents.sim.physics.jobs import Jobs
from agents.sim.physics.lives import Lives
from agents.sim.physics.nvlink import Nvlinks
from agents.sim.physics.ports import Links
from agents.sim.physics.state import State
from agents.sim.schedule import Schedule
from pipeline.model.records import SECOND

Columns = dict[str, NDArray[Any]]


class Plant:
    """State of a whole fleet; advances block by block."""

    def __init__(self, layout: Layout, schedule: Schedule, interval: float, seed: int, state: State) -> None:
        running = schedule.running_jobs(np.zeros(1), layout.gpus)[0]
        self._jobs = Jobs(layout, schedule, interval, seed, state)
        self._gpus = Gpus(layout, interval, seed, SUPPLY_C, running, state)
        self._links = Links(layout, interval, seed, state)
        self._nvlinks = Nvlinks(layout, interval, seed, state)
        self._hosts = Hosts(layout, interval, seed, state)
        self._facility = Facility(layout, interval, seed, state)
        self._psus, self._sensors = Psus(layout, seed), Sensors(layout, interval, seed, state)
        self._lives = Lives(layout, state)

    def step(self, block: int, effects: Effects) -> dict[str, Columns]:
        """Device class -> true columns, of ranks those of the block's stays: load, heat, the pace of jobs, the rest."""
        before, stays = self._lives.readings(), list(effects.stays)
        tempo, supply = self._jobs.load(effects, stays), self._facility.supply(block, effects)
        gpu, clock = self._gpus.step(block, tempo, supply, effects, stays)
        sent = self._jobs.step(block, tempo, clock, effects, stays)
        columns = {
            "gpu": gpu,
            "nic": self._links.step(block, tempo, effects),
            "nvlink": self._nvlinks.step(block, tempo, effects),
            "node": self._hosts.step(block, tempo, effects),
            "psu": self._psus.step(block, gpu["gpu.power"], effects),
            "sensor": self._sensors.step(block, effects),
            **self._facility.step(block, supply, gpu["gpu.power"], effects),
        }
        self._lives.follow(columns, before, effects, effects.start // SECOND)
        names = sent[0][1] if sent else {}
        ranks = {name: np.concatenate([columns[name] for _, columns in sent], axis=1) for name in names}
        return {**columns, "rank": ranks}
