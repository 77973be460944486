"""A simulated InfiniBand fabric for tests: ibsim with opensm, read by the real management tools; no kernel module.

The tools reach it through a preloaded library (umad2sim); `tools` is a folder of wrapped commands.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.parts import do_without

COMMANDS = ("ibsim", "opensm", "iblinkinfo", "ibnetdiscover", "ibqueryerrors", "perfquery", "ibstat")
PREFIX = 0xA088C20300000000
"""Company part of the GUIDs; the rest is kind and number."""
_READY_S, _ANSWER_S, _END_S = 60.0, 10.0, 5.0


def library() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").glob("*/umad2sim/libumad2sim.so"))), None)


def missing() -> str:
    """Returns missing programs; empty if all are installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [command for command in COMMANDS if shutil.which(command, path=path) is None]
    return ", ".join([*absent, *(() if library() else ("libumad2sim",))])


@dataclass(frozen=True)
class Plan:
    """A fat tree: every leaf has `hosts` hosts on its first ports, then one cable to each spine."""

    leaves: int = 2
    spines: int = 2
    hosts: int = 8

    def spine(self, s: int) -> int:
        return PREFIX + 0x10000 + s * 0x100

    def leaf(self, n: int) -> int:
        return PREFIX + 0x20000 + n * 0x100

    def host(self, n: int, h: int) -> int:
        return PREFIX + 0x100000 * n + h * 0x10

    def host_port_guid(self, n: int, h: int) -> str:
        """GUID in the format of sysfs."""
        text = f"{self.host(n, h) + 1:016x}"
        return ":".join(text[i : i + 4] for i in range(0, 16, 4))

    def host_lid(self, n: int, h: int) -> int:
        return 10 + (n - 1) * self.hosts + h

    def net(self) -> str:
        """Returns the file that ibsim reads, in the format of ibnetdiscover."""
        return "\n\n".join(
            [*map(self._spine, self._r(self.spines)), *map(self._leaf, self._r(self.leaves)), *self._hosts()]
        )

    @staticmethod
    def _r(count: int) -> range:
        return range(1, count + 1)

    def _switch(self, guid: int, name: str, lid: int) -> str:
        head = f"vendid=0x2c9\ndevid=0xd2f2\nsysimgguid={guid:#x}\nswitchguid={guid:#x}({guid:x})"
        return f'{head}\nSwitch\t40 "S-{guid:016x}"\t\t# "{name}" base port 0 lid {lid} lmc 0'

    def _spine(self, s: int) -> str:
        cables = [
            f'[{n}]\t"S-{self.leaf(n):016x}"[{self.hosts + s}]\t\t# "leaf{n}" lid {800 + n} 4xHDR'
            for n in self._r(self.leaves)
        ]
        return "\n".join([self._switch(self.spine(s), f"spine{s}", 900 + s), *cables])

    def _leaf(self, n: int) -> str:
        hosts = [
            f'[{h}]\t"H-{self.host(n, h):016x}"[1]({self.host(n, h) + 1:x})'
            f'\t\t# "n{n}{h:02d} mlx5_0" lid {self.host_lid(n, h)} 4xHDR'
            for h in self._r(self.hosts)
        ]
        spines = [
            f'[{self.hosts + s}]\t"S-{self.spine(s):016x}"[{n}]\t\t# "spine{s}" lid {900 + s} 4xHDR'
            for s in self._r(self.spines)
        ]
        return "\n".join([self._switch(self.leaf(n), f"leaf{n}", 800 + n), *hosts, *spines])

    def _hosts(self) -> Iterator[str]:
        for n in self._r(self.leaves):
            for h in self._r(self.hosts):
                guid = self.host(n, h)
                yield (
                    f'vendid=0x2c9\ndevid=0x1021\ncaguid={guid:#x}\nCa\t1 "H-{guid:016x}"\t\t# "n{n}{h:02d} mlx5_0"\n'
                    f'[1]({guid + 1:x})\t"S-{self.leaf(n):016x}"[{h}]\t\t'
                    f'# lid {self.host_lid(n, h)} lmc 0 "leaf{n}" lid {800 + n} 4xHDR'
                )


@dataclass
class SimulatedFabric:
    """Runs below `folder`, where the library also keeps files, until `stop`. Its sockets have unique names."""

    folder: Path
    plan: Plan = field(default_factory=Plan)
    tools: Path = field(init=False)
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.tools = self.folder / "tools"
        self._environment = {
            **os.environ,
            "IBSIM_SOCKNAME": f"fleetpulse-{os.getpid()}-{id(self)}",
            "SIM_HOST": "n101 mlx5_0",
            "OSM_CACHE_DIR": str(self.folder),
            "OSM_TMP_DIR": str(self.folder),
        }

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "net").write_text(self.plan.net() + "\n")
        log = (self.folder / "ibsim.log").open("wb")
        arguments = ("ibsim", "-s", "-N", "4096", "-S", "1024", "-P", "65536", "net")
        simulator = self._spawn(arguments, {}, stdin=subprocess.PIPE, out=log)
        log.close()
        self._await(lambda: "simulator ready" in self._log("ibsim.log"), "ibsim to be ready")
        assert simulator.stdin is not None
        self._console = simulator.stdin
        manager = {"LD_PRELOAD": str(library()), "SIM_HOST": "spine1"}
        self._spawn(("/usr/sbin/opensm", "-f", str(self.folder / "opensm.log")), manager)
        self._write_tools()
        links = 2 * self.plan.leaves * self.plan.spines + self.plan.leaves * self.plan.hosts
        self.await_tool("iblinkinfo", ("--line", "--switches-only"), lambda text: text.count("Active/") == links)
        switches = self.plan.leaves + self.plan.spines
        counted = lambda text: text.count("Data Counters for") == switches  # noqa: E731 - it needs the manager's answer
        self.await_tool("ibqueryerrors", ("--switch", "--counters"), counted)

    def send_command(self, command: str) -> None:
        """Sends a command to ibsim's console, such as `Unlink "H-..."[1]`; ibsim runs commands in order."""
        self._console.write(f"{command}\n".encode())
        self._console.flush()

    def unlink(self, leaf: int, host: int) -> None:
        self.send_command(f'Unlink "H-{self.plan.host(leaf, host):016x}"[1]')

    def relink(self, leaf: int, host: int) -> None:
        self.send_command(f'ReLink "H-{self.plan.host(leaf, host):016x}"[1]')

    def count(self, node: str, port: int, counter: str, value: int) -> None:
        """Sets a counter; node: `S-` or `H-` and the GUID."""
        self.send_command(f'PerformanceSet "{node}"[{port}] PortCounters.{counter}={value}')

    def ask(self, tool: str, *arguments: str) -> str:
        """Returns the output of a management tool."""
        command = [str(self.tools / tool), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False).stdout

    def ask_at(self, host: str, tool: str) -> str:
        """Returns the output of a tool that runs on a host of the fabric and queries its own port."""
        environment = {**self._environment, "LD_PRELOAD": str(library()), "SIM_HOST": host}
        command = [f"/usr/sbin/{tool}"]
        ran = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
        return ran.stdout

    def await_tool(self, tool: str, arguments: tuple[str, ...], holds: Callable[[str], bool]) -> str:
        """Runs the tool until its output is as wanted."""
        found = ""

        def asked() -> bool:
            nonlocal found
            try:
                found = self.ask(tool, *arguments)
            except subprocess.TimeoutExpired:  # while the fabric comes up, an answer may be lost
                return False
            return holds(found)

        self._await(asked, f"{tool} {' '.join(arguments)} to answer as wanted")
        return found

    def stop(self) -> None:
        for process in reversed(self._running):
            process.terminate()
            try:
                process.wait(_END_S / 5)
            except subprocess.TimeoutExpired:  # opensm sometimes ignores SIGTERM
                process.send_signal(signal.SIGKILL)
                process.wait(_END_S)
            if process.stdin is not None:
                process.stdin.close()
        self._running.clear()

    def _spawn(
        self, command: tuple[str, ...], more: dict[str, str], stdin: int = subprocess.DEVNULL, out: object = None
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self._environment, **more},
            stdin=stdin,
            stdout=out or subprocess.DEVNULL,  # type: ignore[call-overload] # a file or a constant
            stderr=subprocess.STDOUT,
        )
        self._running.append(process)
        return process

    def _write_tools(self) -> None:
        self.tools.mkdir(exist_ok=True)
        shown = {k: v for k, v in self._environment.items() if k in ("IBSIM_SOCKNAME", "SIM_HOST")}
        exports = "".join(f"export {k}='{v}'\n" for k, v in {**shown, "LD_PRELOAD": str(library())}.items())
        for command in COMMANDS[2:]:
            script = self.tools / command
            script.write_text(f'#!/bin/sh\n{exports}cd "{self.folder}" && exec /usr/sbin/{command} "$@"\n')
            script.chmod(0o755)

    def _log(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(errors="replace") if file.exists() else ""

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _READY_S
        while not holds():
            dead = [p.args for p in self._running if p.poll() is not None]
            if dead or time.monotonic() > until:
                raise TimeoutError(f"waited {_READY_S:g} s for {what}; ended: {dead}; {self._log('ibsim.log')[-500:]}")
            time.sleep(0.05)


@contextmanager
def fabric(folder: Path, plan: Plan | None = None) -> Iterator[SimulatedFabric]:
    """A running fabric; skips the test where the part is missing."""
    if absent := missing():
        do_without("infiniband", f"no {absent}: run 'make parts', which installs ibsim, opensm and infiniband-diags")
    made = SimulatedFabric(folder, plan or Plan())
    try:
        made.start()
        yield made
    finally:
        made.stop()
