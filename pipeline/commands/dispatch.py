"""Commands that need nothing but `pipeline`: each reads its arguments, runs, prints, and returns the exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipeline.commands.nothing import describe_nothing
from pipeline.commands.output import cut_cells, print_message, render_rows, wrap_cells
from pipeline.config.sections import load_config
from pipeline.model.plain_text import make_printable


def _print_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], given: argparse.Namespace) -> None:
    """Prints rows in the form that was asked for. In place of a table without rows it says so on stderr; the columns
    of a query are shown all the same."""
    found = list(rows)
    if given.output == "table" and not found:
        print_message(f"fleetpulse: {describe_nothing(given)}")
    if found or given.output != "table" or given.command == "sql":
        sys.stdout.write(render_rows(found, columns, given.output))


def _sql(given: argparse.Namespace) -> int:
    from pipeline.commands import sql

    columns, rows, truncated = sql.run_query(load_config(given.config), given.query)
    _print_rows(rows, columns, given)
    if truncated:
        print_message("fleetpulse: the answer is truncated; [api] sql_rows is the maximum number of rows")
    return 0


def _backup(given: argparse.Namespace) -> int:
    from pathlib import Path

    from pipeline.commands import operation

    rows = operation.run_backup(load_config(given.config), Path(given.target), _print_progress)
    _print_rows(rows, operation.COLUMNS, given)
    return 0


def _restore(given: argparse.Namespace) -> int:
    from pathlib import Path

    from pipeline.commands import operation

    rows = operation.run_restore(load_config(given.config), Path(given.source), given.replace, _print_progress)
    _print_rows(rows, operation.COLUMNS, given)
    return 0


def _print_progress(line: str) -> None:
    print_message(f"fleetpulse: {line}")


def _node(given: argparse.Namespace) -> int:
    from pipeline.commands import operation

    _print_rows(operation.run_node(load_config(given.config), given), operation.NODE_COLUMNS, given)
    return 0


def _mutes(given: argparse.Namespace) -> int:
    from pipeline.commands import mutes

    rows = mutes.run_mutes(load_config(given.config), given)
    _print_rows(rows, mutes.COLUMNS, given)
    for warning in filter(None, (row.get("warning") for row in rows)):
        print_message(f"fleetpulse: {warning}")
    return 0


def _notify(given: argparse.Namespace) -> int:
    from pipeline.commands import notify

    rows, columns, code = notify.run_notify(load_config(given.config), given, print_message)
    _print_for_people(rows, columns, given)
    return code


def _routes(given: argparse.Namespace) -> int:
    from pipeline.commands import notify

    rows, columns = notify.run_routes(load_config(given.config), given)
    _print_for_people(rows, columns, given)
    return 0


def _topology(given: argparse.Namespace) -> int:
    from pipeline.commands import topology

    return topology.run_topology(load_config(given.config), given, print_message)


def _people(given: argparse.Namespace) -> int:
    from pipeline.commands import people

    run = people.RUN.get(given.command, people.run_act)
    _print_for_people(*run(load_config(given.config), given), given)
    return 0


def _print_for_people(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], given: argparse.Namespace) -> None:
    """Prints rows: those for people with short times, in 120 columns; others with all fields."""
    from pipeline.commands import people

    form = given.output
    if form == "table" and not rows:
        print_message(f"fleetpulse: {describe_nothing(given)}")
    elif form == "table":
        is_list = columns is people.INCIDENTS
        shown = people.SHOWN_INCIDENTS if is_list else columns
        short = people.shorten_times(rows, shown)
        lines = cut_cells(short, ("who",), people.WIDEST_WHO) if is_list else wrap_cells(short, shown, people.WIDTH)
        sys.stdout.write(render_rows(lines, shown, "table", people.WIDTH))
    else:
        every = list(dict.fromkeys(name for row in rows for name in row)) or columns
        sys.stdout.write(render_rows(rows, every if form != "csv" else columns, form))


def _handover(given: argparse.Namespace) -> int:
    from pipeline.commands import people

    rows, text = people.run_handover(load_config(given.config), given)
    if given.output == "table":
        sys.stdout.write("".join(f"{make_printable(line)}\n" for line in text.splitlines()))
    else:
        _print_for_people(rows, list(rows[0]), given)
    return 0


def _audit(given: argparse.Namespace) -> int:
    from pipeline.commands import people

    if given.verb == "verify":
        said, text, whole = people.verify_audit(load_config(given.config), given)
        if given.output != "table":
            _print_for_people([said], list(said), given)
        print_message(f"fleetpulse: {text}")
        return 0 if whole else 1
    rows, columns, broken = people.run_audit(load_config(given.config), given)
    _print_for_people(rows, columns, given)
    if broken is not None:
        print_message(f"fleetpulse: row {broken} of the audit was changed, or the row before it is missing")
    return 0 if broken is None else 1


def _act(given: argparse.Namespace) -> int:
    from pipeline.commands import acts

    rows, columns = acts.run_acts(load_config(given.config), given)
    _print_for_people(rows, columns, given)
    return 0


def _objectives(given: argparse.Namespace) -> int:
    from pipeline.commands import objectives

    _print_for_people(*objectives.run_objectives(load_config(given.config), given), given)
    return 0


def _rma(given: argparse.Namespace) -> int:
    from pipeline.commands import objectives

    print_message(f"fleetpulse: {objectives.write_rma(load_config(given.config), given)}")
    return 0


def _executor(given: argparse.Namespace) -> int:
    from pipeline.commands import executor

    return executor.run(load_config(given.config))


def _token(given: argparse.Namespace) -> int:
    """A new token alone is on stdout in the form for people, so that a shell can keep it: TOKEN=$(fleetpulse ...)."""
    from pipeline.commands import people

    config = load_config(given.config)
    rows, columns, text = people.run_token(config, given)
    if not text or given.output != "table":
        _print_for_people([{**row, **({"token": text} if text else {})} for row in rows], columns, given)
    elif text:
        sys.stdout.write(f"{text}\n")
    for line in people.explain_token(config, rows[0]) if text else ():
        print_message(f"fleetpulse: {line}")
    return 0


def _completion(given: argparse.Namespace) -> int:
    from pipeline.commands import completion

    if given.shell in completion.IDS:
        sys.stdout.write("".join(f"{line}\n" for line in completion.list_ids(given.shell, given.config)))
    else:
        sys.stdout.write(completion.make_script(given.shell))
    return 0


RUN: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "sql": _sql,
    "backup": _backup,
    "restore": _restore,
    "node": _node,
    **dict.fromkeys(
        ["incidents", "ack", "assign", "comment", "resolve", "reopen", "merge", "split", "feedback"], _people
    ),
    **dict.fromkeys(("silences", "maintenance", "share"), _people),
    "handover": _handover,
    "audit": _audit,
    "act": _act,
    "executor": _executor,
    "objectives": _objectives,
    "rma": _rma,
    "token": _token,
    "completion": _completion,
    "mutes": _mutes,
    "notify": _notify,
    "routes": _routes,
    "topology": _topology,
}
