"""The command `fleetpulse`. Reads the arguments; each command imports what it needs when it runs.

Exit codes: 0 ok, 1 findings or a failed check, 2 bad usage or configuration, 3 a dependency is unreachable, 4 refused
by a guard, 130 interrupted. Data on stdout, messages on stderr.
"""

from __future__ import annotations

import argparse
import sys

from pipeline.commands import arguments

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from detectors.base.detector import Detector
    from pipeline.config.sections import Config

ON_NODES = ("agent", "once", "record", "doctor", "config")
SERVICES = ("agent", "gateway", "pipeline", "dashboard", "up", "demo", "simulate")
KEEP_STATE = ("agent", "gateway", "pipeline", "dashboard", "up", "demo", "init", "backup", "restore", "support")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = arguments.build_parser()
    if given and not given[0].startswith("-") and given[0] not in RUN:
        parser.error(f"no command '{given[0]}'{arguments.suggest_command(given[0])}; fleetpulse --help lists all")
    parsed = parser.parse_args(given)
    if parsed.version:
        print(f"fleetpulse {arguments.read_version()}")
        return 0
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return 2
    return _run(parsed)


def _run(given: argparse.Namespace) -> int:
    from pipeline.model.errors import ConfigError, FleetpulseError
    from pipeline.runtime.state_home import set_state_home

    try:
        set_state_home()
        if given.command in ON_NODES:
            _limit_blas_threads()
        if given.command in KEEP_STATE:
            _set_private_umask()
        if given.command in SERVICES:
            _handle_stop_signals()
        code: int = RUN[given.command](given)
        sys.stdout.flush()
        return code
    except FleetpulseError as error:
        print(f"fleetpulse: {_hide_addresses(error) if isinstance(error, ConfigError) else error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        from pipeline.commands.installed import explain_missing

        print(f"fleetpulse {given.command}: {explain_missing(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0 if given.command in SERVICES else 130
    except BrokenPipeError:  # the reader of stdout has ended, as in `fleetpulse signals | head`
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the interpreter flushes to the closed pipe at exit
        return 0


def _hide_addresses(error: Exception) -> str:
    """Returns an error about a value of the configuration, for logs: of addresses in it only the host."""
    from pipeline.config.addresses import hide_in_text

    return hide_in_text(str(error))


def _limit_blas_threads() -> None:
    """Limits the BLAS of NumPy to one thread, before NumPy is loaded: it would start one per core, each with memory."""
    import os

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _set_private_umask() -> None:
    """Makes all files that this process and its children create inaccessible to other users."""
    import os

    from pipeline.runtime.private_files import UMASK

    os.umask(UMASK)


def _handle_stop_signals() -> None:
    """Makes SIGTERM, SIGINT (also if the shell ignored it) and the end of the parent stop a service like Ctrl-C."""
    import signal

    from pipeline.runtime.supervise import stop_with_parent

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    stop_with_parent()


def _call_on_signals(act: Callable[[], None]) -> None:
    """Calls `act` on SIGTERM and SIGINT, for commands that finish their work before they end."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: act())


def _print_message(line: str) -> None:
    print(line, file=sys.stderr)


def _load_config(given: argparse.Namespace) -> Config:
    from pipeline.config.sections import load_config

    return load_config(given.config)


def _load_service_config(given: argparse.Namespace) -> Config:
    """Loads the configuration; warns on stderr about files with state or secrets that other users can read."""
    from pipeline.runtime import private_files

    config = _load_config(given)
    for warning in private_files.list_warnings(config):
        _print_message(f"fleetpulse: warning: {warning}")
    return config


def _own_command() -> list[str]:
    """Returns the words with which a child process starts this program."""
    import os

    return [sys.executable, os.path.abspath(__file__)]


def _print_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], form: str) -> None:
    from pipeline.commands.output import render_rows

    sys.stdout.write(render_rows(rows, columns, form))  # type: ignore[arg-type] # argparse admits only the four


def _agent(given: argparse.Namespace) -> int:
    config = _load_service_config(given)
    if given.replay_recording is None and given.speed is None:
        from agents.node import agent

        return _or_start_again(agent.run(config, load_again=lambda: _load_config(given)))
    from agents.recording import playback

    return playback.play(config, given.replay_recording, given.speed)


def _gateway(given: argparse.Namespace) -> int:
    from agents.gateway.gateway import run
    from pipeline.runtime.supervise import Stop

    config, stop = _load_service_config(given), Stop()
    _call_on_signals(stop.set)
    return run(config, stop)


def _pipeline(given: argparse.Namespace) -> int:
    config = _load_service_config(given)
    import detectors
    from detectors.runner import Runner, warm_up
    from pipeline.commands import run_pipeline
    from pipeline.runtime import logs

    logs.log_to_stderr()
    runner = Runner(_configure_detectors(config))

    def load_again() -> Config:
        fresh = _load_config(given)
        _configure_detectors(fresh)
        return fresh

    code = _or_start_again(run_pipeline.run(config, runner, lambda: warm_up(detectors.configured({}, "")), load_again))
    _end_process(code)
    return code


def _configure_detectors(config: Config) -> list[Detector]:
    """Returns the detectors. Raises ConfigError for a key of [detector.NAME], or an unknown detector of [[modes]]."""
    from pipeline.config.origin import check_with_origin

    return check_with_origin(config, _make_detectors)


def _make_detectors(config: Config) -> list[Detector]:
    import detectors
    from pipeline.judging.mutes import check_rules

    found = detectors.configured(config.detector, config.source)
    check_rules(config.modes, [detector.name for detector in found], config.source)
    return found


def _or_start_again(code: int) -> int:
    """Returns the exit code; a service that was asked to start again, by SIGHUP, does so in this process instead."""
    from pipeline.runtime import reload

    if code == reload.AGAIN:
        reload.start_again()
    return code


def _end_process(code: int) -> None:
    """Ends this process now, if it is the command's own: everything is closed.

    The interpreter would use 0.9 s of CPU to collect the objects of compiled code, while a service manager waits.
    """
    if sys.modules["__main__"].__dict__.get("main") is not main:  # called by another program
        return
    import atexit
    import os

    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _dashboard(given: argparse.Namespace) -> int:
    config = _load_service_config(given)
    from dashboards import commands

    return _or_start_again(commands.run(config, given, lambda: _load_config(given)))


def _up(given: argparse.Namespace) -> int:
    from pipeline.commands import demo

    return demo.up(_load_config(given), _own_command(), given.config)


def _demo(given: argparse.Namespace) -> int:
    from pipeline.commands import demo

    return demo.demo(_load_config(given), _own_command())


def _setup(given: argparse.Namespace) -> int:
    from pipeline.commands import setup
    from pipeline.model.errors import UsageError

    def ask(question: str) -> str:
        sys.stderr.write(question)
        sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            raise UsageError(
                "setup: its input ended, nothing was written; expected at most four answers, or flags for all"
            )
        return line

    print("\n".join(setup.run_setup(given, ask)))
    return 0


def _support(given: argparse.Namespace) -> int:
    import subprocess
    from pathlib import Path

    from pipeline.commands import support
    from pipeline.config.addresses import HIDDEN

    checks = subprocess.run(_doctor_command(given, "json"), capture_output=True, text=True)
    names, wrong = support.write_with_any(given.config, Path(given.target), checks.stdout or checks.stderr)
    _print_rows([{"file": name} for name in names], ["file"], "table")
    _print_message(f"fleetpulse: {wrong}{given.target}: read it before you send it; secrets are replaced by {HIDDEN}")
    return 0


def _doctor_command(given: argparse.Namespace, output: str) -> list[str]:
    """Returns the command of `doctor` with the same configuration."""
    return [*_own_command(), "doctor", "--output", output, *(["--config", given.config] if given.config else [])]


def _doctor(given: argparse.Namespace) -> int:
    from agents.node import doctor as node_doctor
    from pipeline.commands import doctor, next_steps

    config = _load_config(given)
    if given.wait is not None:
        return next_steps.wait_until_sound(_doctor_command(given, given.output), given.wait)
    # collectors first: they are forked, which must happen before other checks start threads
    collectors = doctor.run_checks(config, [node_doctor.prepare_collector_checks(config)])
    checks = [*doctor.run_checks(config), *doctor.run_checks(config, [node_doctor.check_agent]), *collectors]
    checks += next_steps.check_gate(config, checks) if next_steps.is_gate() else []
    if given.output == "table":
        sys.stdout.write(doctor.format_checks(checks))
        sys.stdout.write("\n".join(["", *next_steps.suggest_next(config, checks), ""]))
    else:
        _print_rows(doctor.check_rows(checks), doctor.COLUMNS, given.output)
    return doctor.exit_code(checks)


def _config(given: argparse.Namespace) -> int:
    from pipeline.commands import configuration

    given.verb = given.verb or "check"
    rows, columns = configuration.run_config(given, _check_group_owners)
    if given.verb == "check":
        _check_owners(_load_config(given), given.agent)
    if given.verb == "diff" and given.output == "table":
        rows = configuration.show_empty(rows)
    _print_rows(rows, columns, given.output)
    return int(given.verb == "diff" and bool(rows))


def _check_owners(config: Config, agent: bool) -> None:
    """Raises ConfigError for what collectors refuse, on a node for all that a start of its agent refuses, and where
    detectors are installed, for what they refuse. agent: only what a start of an agent refuses.

    On a server the settings of agents may be those of other nodes, which groups complete.
    """
    from agents.node.start_checks import check_configuration, configure
    from pipeline.commands.installed import is_node
    from pipeline.config.origin import check_with_origin

    if agent or is_node():
        check_configuration(config)
    else:
        check_with_origin(config, configure)
    if not agent and _has_detectors():
        _configure_detectors(config)


def _check_group_owners(config: Config) -> None:
    """Raises ConfigError for what the agent of another node refuses, and where detectors are installed, they."""
    from agents.node.start_checks import check_distinct_ports, check_settings, configure

    configure(config)
    check_settings(config)
    check_distinct_ports(config)
    if _has_detectors():
        _make_detectors(config)


def _has_detectors() -> bool:
    import importlib.util

    return importlib.util.find_spec("numba") is not None


def _check(given: argparse.Namespace) -> int:
    from agents.node.health import check

    return check.run_check(lambda: _load_config(given), given.nagios, given.timeout, given.output)


def _signals(given: argparse.Namespace) -> int:
    from pipeline.model.signals import LISTING_COLUMNS, listing_rows

    _print_rows(listing_rows(), LISTING_COLUMNS, given.output)
    return 0


def _once(given: argparse.Namespace) -> int:
    config = _load_config(given)
    if given.replay_recording is not None:
        from agents.recording import playback

        return playback.once(config, given.replay_recording, given.output)
    from agents.node.once import print_once

    return print_once(config, given.output)


def _record(given: argparse.Namespace) -> int:
    from agents.recording import playback
    from pipeline.runtime.supervise import Stop

    config, stop = _load_config(given), Stop()
    _call_on_signals(stop.set)
    return playback.record(config, given.output, given.seconds, stop)


def _init(given: argparse.Namespace) -> int:
    from pipeline.commands import init

    return init.initialize(_load_config(given), _print_message, given.acls)


def _detectors(given: argparse.Namespace) -> int:
    from detectors import command

    rows, columns = command.detector_rows(_load_config(given), given.names, _print_message)
    if given.names and given.output == "table":
        sys.stdout.write("\n".join(map(command.row_text, rows)))
        return 0
    _print_rows(rows, columns if given.output in ("table", "csv") else list(rows[0]), given.output)
    return 0


def _calibration(given: argparse.Namespace) -> int:
    from detectors import command

    rows, columns = command.run_calibration(_load_config(given), given)
    if columns:
        _print_rows(rows, columns, given.output)
    else:
        sys.stdout.write(command.document_text(rows))
    return 0


def _budget(given: argparse.Namespace) -> int:
    from detectors import command

    _print_rows(command.run_budget(_load_config(given), given), command.BUDGET_COLUMNS, given.output)
    return 0


def _simulate(given: argparse.Namespace) -> int:
    from agents.sim.command import SimulateOptions, simulate
    from agents.sim.kinds import list_kinds
    from pipeline.model.errors import UsageError
    from pipeline.recording.writer import RecordingWriter
    from pipeline.runtime.supervise import Stop

    if given.list:
        sys.stdout.write(list_kinds())
        return 0
    if given.scenario is None:
        raise UsageError("simulate: no scenario; expected --scenario FILE.toml, or --scenario demo")
    order = SimulateOptions(given.scenario, given.seed, given.to, given.speed, given.backfill)
    config, stop = _load_config(given), Stop()
    sink = RecordingWriter(given.output) if given.output else None
    return simulate(order, config, sink, stop.wait, on_planned=lambda: _call_on_signals(stop.set))


def _replay(given: argparse.Namespace) -> int:
    config = _load_config(given)
    from detectors.replay import replay

    files = {"events": given.events, "signals": given.signals, "topology": given.topology}
    files |= {"calibration": given.calibration}
    if given.incidents is None:
        return replay(config, given.input, given.output, **files)
    from pipeline.incidents.desk import Desk

    return replay(config, given.input, given.output, **files, incidents=given.incidents, desk=Desk)


def _score(given: argparse.Namespace) -> int:
    from detectors.scoring.score import format_score, score

    files = {"incidents": given.incidents, "topology": given.topology, "meta": given.meta, "json_file": given.json}
    files |= {"clean": given.clean, "events": given.events}
    lines, columns, more = format_score(score(given.findings, given.truth, **files), given.output)
    _print_rows(lines, columns, given.output)
    sys.stdout.write(more)
    return 0


def _of_pipeline(given: argparse.Namespace) -> int:
    from pipeline.commands import dispatch

    return dispatch.RUN[given.command](given)


RUN: Mapping[str, Callable[[argparse.Namespace], int]] = {
    **dict.fromkeys(arguments.COMMANDS, _of_pipeline),
    "demo": _demo,
    "up": _up,
    "agent": _agent,
    "gateway": _gateway,
    "pipeline": _pipeline,
    **dict.fromkeys(("dashboard", "report"), _dashboard),
    "init": _init,
    "setup": _setup,
    "support": _support,
    "doctor": _doctor,
    "check": _check,
    "config": _config,
    "once": _once,
    "record": _record,
    "signals": _signals,
    "detectors": _detectors,
    "calibration": _calibration,
    "budget": _budget,
    "simulate": _simulate,
    "replay": _replay,
    "score": _score,
}


if __name__ == "__main__":
    sys.exit(main())
