"""The commands of people against a served API, with exit codes and tables of at most 120 columns; completion."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
import time

import pytest

import fleetpulse
from pipeline.api.entity_detail import read_entity
from pipeline.api.server import create_app, start_server
from pipeline.commands import completion
from pipeline.commands.arguments import COMMANDS
from pipeline.commands.completion import PATIENCE_S, list_words, make_script
from pipeline.commands.notify import LISTED, choose_columns
from pipeline.commands.options import MOST_OWNED_HOURS
from pipeline.commands.output import render_rows, wrap_cells
from pipeline.commands.people import AUDIT, _fact_rows, describe_lateness, shorten_times
from pipeline.commands.pipeline import PipelineBackend
from pipeline.commands.verbs import VERBS
from pipeline.config.sections import Api, Config, Store
from pipeline.engine import people
from pipeline.model.records import from_iso
from pipeline.model.silence_end import describe_end
from tests.pipeline.api.test_api_people import Service
from tests.pipeline.living import LivingSite


@pytest.fixture
def site(tmp_path):
    made = LivingSite(tmp_path / "store.duckdb")
    yield made
    made.database.close()


@pytest.fixture
def run(site, tmp_path, capsys):
    """Runs a command: (exit code, stdout, stderr)."""
    backend = PipelineBackend(Service(site))
    backend.list_unready_reasons, backend.list_evaluation_faults, backend.read_revision = list, list, object
    backend.read_health = lambda: {"watermark": None, "stalled": False}
    config, stop = Config(api=Api(port=0), store=Store(path=tmp_path / "store.duckdb")), threading.Event()
    server = start_server(create_app(backend, config, lambda: site.now), config, stop)
    file = tmp_path / "fleetpulse.toml"
    file.write_text(f'[api]\nport = {server.port}\n[store]\npath = "{tmp_path}/store.duckdb"\n')

    def call(*words):
        code = fleetpulse.main([*words, "--config", str(file)])
        out = capsys.readouterr()
        assert max(map(len, out.out.splitlines()), default=0) <= 120 or "--output" in words
        return code, out.out, out.err

    yield call
    stop.set()
    server.join(5)


def test_a_shift_by_the_command_line(site, run):
    page, ticket = site.report("gpu:n0.0"), site.report("gpu:n5.0", level="ticket")
    code, out, _ = run("incidents")
    assert (code, out.count("\n")) == (0, 3)
    assert run("ack", page, "--comment", "on it")[1].count("acknowledged") == 1
    assert "bob" in run("assign", page, "bob")[1]
    assert run("feedback", page, "useful")[0] == 0
    shown = run("incidents", "show", page)[1]
    assert "4  " in shown
    assert [line.split()[2] for line in shown.splitlines()[1:3]] == ["title", "cause"]
    assert json.loads(run("incidents", "show", page, "--output", "json")[1])[0]["version"] == 4
    assert page in run("silences", "preview", 'rack="r0"')[1]
    made = run("silences", "add", 'rack="r0"', "--hours", "2", "--reason", "a long reason " * 9, "--output", "json")[1]
    silence = json.loads(made)[0]["id"]
    listed = " ".join(run("silences")[1].split())
    assert (listed.count("a long reason"), "…" in listed) == (9, False)
    assert run("silences", "extend", silence, "--hours", "1")[0] == 0
    assert run("silences", "edit", silence, "node=n0", "--reason", "only n0")[1].count('node="n0"') == 1
    assert "Silenced: 1" in run("handover")[1]
    assert json.loads(run("handover", "--output", "json")[1])[0]["muted"]["incidents"][0]["id"] == page
    assert "expired" in run("silences", "expire", silence)[1]
    window = run("maintenance", "add", "rack:r1", "--hours", "1", "--reason", "pump")
    assert (window[0], " + 15 min grace" in " ".join(window[1].split())) == (0, True)
    assert " + 15 min grace" in run("handover")[1]
    assert "silenced" in run("incidents", "list", "--state", "silenced")[1]
    assert run("resolve", ticket, page)[1].count("resolved") == 2
    assert run("reopen", page, "--comment", "still there")[1].count("open") == 1 + 1  # the heading `opened`
    code, out, _ = run("audit", "--limit", "2")
    assert (code, out.splitlines()[1].split()[0]) == (0, "11")


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("incidents",), "no unresolved incidents"),
        (("incidents", "--all"), "no incidents"),
        (("incidents", "list", "--state", "resolved"), "no incidents with --state resolved"),
        (("silences",), "no silences that are active or pending"),
        (
            ("silences", "preview", "rack=r9", "severity=critical"),
            "no open incidents that match rack=r9 severity=critical",
        ),
        (("maintenance", "list", "--all"), "no maintenance windows"),
        (("mutes",), "no active mutes"),
        (
            ("notify", "list", "--state", "dead", "--incident", "inc-7"),
            "no messages with --state dead --incident inc-7",
        ),
        (("audit", "--actor", "eve"), "no rows of the audit with --actor eve"),
        (("token",), "no tokens"),
    ],
)
def test_where_there_is_nothing_a_command_says_of_what_and_programs_get_an_empty_list(run, words, said):
    code, out, err = run(*words)
    assert (code, out, err.splitlines()[-1]) == (0, "", f"fleetpulse: {said}")
    assert run(*words, "--output", "json") == (0, "[]\n", "")


@pytest.mark.slow
def test_maintenance_of_what_no_agent_and_no_source_names_is_announced_with_a_warning(run, site):
    site.topology.merge({"node:n20": ("rack:r1",)})  # of [topology] path, before an agent runs there
    code, out, err = run("maintenance", "add", "rack:r1", "node:n20", "rack:r-1", "--hours", "1", "--reason", "pump")
    assert (code, out.count("maintenance")) == (0, 1)
    said = "scope = 'rack:r-1': unknown entity; no effect until it appears; did you mean 'rack:r1'?"
    assert err == f"fleetpulse: warning: {said}\n"
    assert read_entity(site.database.cursor(), site.topology, "node:n20")["parents"] == ["rack:r1"]


NOW = from_iso("2026-01-31T08:10:00Z")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"judged": "2026-01-31T08:09:20.000000Z", "stalled": False, "unready": []}, ""),
        ({"judged": None, "stalled": False, "unready": []}, "no telemetry was evaluated yet"),
        (
            {"judged": "2026-01-31T08:04:00.000000Z", "stalled": False, "unready": []},
            "telemetry is evaluated until 2026-01-31T08:04:00Z, 6 min ago",
        ),
        ({"judged": None, "stalled": True, "unready": ["the store is full"]}, "the store is full"),
    ],
)
def test_a_list_of_incidents_says_when_some_may_be_missing(answer, said):
    found = describe_lateness(answer, NOW)
    assert found == (f"incidents may be missing: {said}" if said else "")


@pytest.mark.slow
def test_a_history_shows_long_comments_in_full_on_several_lines(site, run):
    page, text = site.report("gpu:n0.0"), " ".join(f"word{n}" for n in range(60))
    run("comment", page, "--comment", text)
    lines = run("incidents", "show", page)[1].splitlines()
    begin = lines[0].index("comment")
    assert text in " ".join(line[begin:] for line in lines)
    assert not any("…" in line for line in lines)


def test_an_incident_is_shown_with_state_owner_members_and_what_holds_back_its_alerts(site, run):
    page, other = site.report("gpu:n0.0"), site.report("gpu:n0.1")
    site.people.merge(page, [other], "ann", "one")
    facts = read_facts(run("incidents", "show", page)[1])
    assert facts["members"] == "2: gpu:n0.0 gpu:n0.1"
    assert (facts["state"], facts["severity"], facts["owner"]) == ("open", "page", "nobody")
    assert facts.keys().isdisjoint({"silences", "inhibited"})
    run("ack", page, "--hours", "2")
    run("assign", page, "bob")
    facts = read_facts(run("incidents", "show", page)[1])
    assert facts["state"].startswith("acknowledged by ")
    assert facts["state"].endswith(" until 2026-09-21 16:13Z")
    assert facts["owner"] == "bob"
    made = run("silences", "add", 'rack="r0"', "--hours", "2", "--reason", "pump", "--output", "json")[1]
    (silence,) = json.loads(made)
    facts = read_facts(run("incidents", "show", page)[1])
    assert facts["silences"] == f"{silence['id']} until 2026-09-21 16:13Z, {silence['author']}: pump"
    run("resolve", page)
    assert read_facts(run("incidents", "show", page)[1])["state"].startswith("resolved at 2026-09-21 14:13Z")


def read_facts(text):
    """Kind -> text of the rows of an incident."""
    lines = text.splitlines()
    kind, comment = lines[0].index("kind"), lines[0].index("comment")
    facts, name = {}, ""
    for line in lines[1:]:
        new = line[kind : line.index(" ", kind)].strip() if len(line) > kind and line[kind] != " " else ""
        name = new or name
        facts[name] = f"{facts[name]} {line[comment:]}" if not new else line[comment:]
    return facts


def test_what_an_incident_shows_of_many_members_and_of_a_storm_is_bounded():
    names = [f"gpu:n{n}.0" for n in range(1500)]
    incident = {
        **dict.fromkeys(("assignee", "acknowledged_by", "acknowledged_until", "resolved", "confidence", "advice")),
        "summary": "t",
        "cause": "leaf:l1",
        "state": "open",
        "severity": "page",
        "members": names,
        "onset": "x",
        "inhibited_by": ["inc-1"],
        "inhibitor": "inc-2",
        "inhibit_rule": "xid",
        "runbook_url": "",
    }
    facts = {row["kind"]: row["comment"] for row in _fact_rows(incident, [])}
    assert facts["members"].startswith("1,500: gpu:n0.0 gpu:n1.0 ")
    assert facts["members"].endswith(" gpu:n99.0 and 1,400 more (--output json)")
    assert facts["inhibited"] == "part of inc-1; by inc-2 (xid)"


@pytest.mark.slow
def test_a_merge_names_the_incident_that_is_resolved_or_unknown(site, run):
    page, other = site.report("gpu:n0.0"), site.report("gpu:n5.0")
    code, _, said = run("merge", page, "inc-nope", "--comment", "one")
    assert (code, "incident inc-nope: no such incident" in said) == (2, True)
    run("resolve", other, "--comment", "swapped")
    code, _, said = run("merge", page, other, "--comment", "one")
    assert (code, f"incident {other}: already resolved, cannot be merged" in said) == (4, True)
    code, _, said = run("split", other, "gpu:n5.0", "--comment", "two")
    assert (code, f"incident {other}: already resolved, cannot be split" in said) == (4, True)


@pytest.mark.slow
def test_codes_for_terminals_in_a_comment_are_not_printed(site, run):
    page = site.report("gpu:n0.0")
    run("comment", page, "--comment", "\x1b[2Jgone \x1b]0;title\x07 \u202eetad")
    for words in (("incidents", "show", page), ("audit",), ("handover",)):
        out = run(*words)[1]
        assert page in out or "gone" in out
        assert not set(out) & {"\x1b", "\x07", "\u202e"}


def test_a_long_answer_of_a_receiver_is_shown_in_full_in_120_columns():
    answer = "[[notify.slack]] slack: token_file = '/etc/fleetpulse/slack-token': " + "cannot be read: " * 12
    rows = [{**dict.fromkeys(LISTED, "x"), "created": "2026-11-27T15:57:22.749357Z", "answer": answer.strip()}]
    lines = render_rows(wrap_cells(shorten_times(rows, LISTED), LISTED, 120), LISTED, "table").splitlines()
    assert max(map(len, lines)) <= 120
    begin = lines[0].index("answer")
    assert " ".join(line[begin:] for line in lines[1:]) == answer.strip()
    assert "2026-11-27 15:57:22 " in lines[1]


@pytest.mark.parametrize("width", [90, 120])
def test_several_long_cells_of_a_row_are_all_shown_in_full(width):
    reason = "acknowledged in PagerDuty by " + "ann, " * 30
    row = {**dict.fromkeys(AUDIT, "x"), "number": 7, "target": "inc-0123456789ab/" * 9, "reason": reason.strip()}
    lines = render_rows(wrap_cells([row, {**row, "number": 8}], AUDIT, width), AUDIT, "table").splitlines()
    assert max(map(len, lines)) <= width
    starts = {name: lines[0].index(name) for name in ("target", "reason")}
    first = lines[1 : next(i for i, line in enumerate(lines) if line[: len("number")].strip() == "8")]
    shown = ["".join(line[starts["target"] : starts["reason"]].split()) for line in first]
    assert "".join(shown) == row["target"]
    assert " ".join(" ".join(line[starts["reason"] :] for line in first).split()) == row["reason"]


def test_a_list_of_messages_shows_silences_at_receivers_if_there_are_some():
    sent, silenced = {"id": "a", "remote": None}, {"id": "b", "remote": "silenced by ada: new cables"}
    assert choose_columns([sent]) == LISTED
    assert choose_columns([sent, silenced]) == (*LISTED, "remote")


def test_a_table_that_fits_is_not_wrapped():
    rows = [{**dict.fromkeys(AUDIT, "short"), "number": 7}]
    assert wrap_cells(rows, AUDIT, 120) == rows


@pytest.mark.slow
def test_what_is_refused_unknown_or_away_has_its_exit_code(site, run, tmp_path, monkeypatch):
    page = site.report("gpu:n0.0")
    assert run("ack", "inc-nope")[0] == 2
    assert "/api/v1/incidents/inc-nope: incident 'inc-nope' is not known" in run("incidents", "show", "inc-nope")[2]
    assert run("ack", page, "--if-version", "7")[0] == 4
    assert run("reopen", page, "--comment", "x")[0] == 4
    assert run("silences", "add", "a!=b", "--hours", "1", "--reason", "x")[0] == 2
    code, out, err = run("token", "create", "eve", "--role", "viewer")
    assert code == 0
    token = out.strip()
    assert token.isprintable()
    assert "viewer token" in err
    assert "from now on the API answers nobody without a token; here: export FLEETPULSE_TOKEN=..." in err
    assert "[dashboard] token_file" in err
    assert "from now on" not in run("token", "create", "bob", "--role", "viewer")[2]
    assert token not in (tmp_path / "store.duckdb.tokens").read_text()
    code, _, err = run("incidents")
    assert code == 4
    assert "no token was sent; export FLEETPULSE_TOKEN=..., or set [api] token_file" in err
    monkeypatch.setenv("FLEETPULSE_TOKEN", token)
    assert run("incidents")[0] == 0
    code, _, said = run("ack", page)
    assert (code, "eve is viewer" in said) == (4, True)
    id_ = run("token")[1].splitlines()[1].split()[0]
    assert "revoked" in run("token", "revoke", id_)[1]
    assert run("incidents")[0] == 4


def test_the_longest_acknowledgement_of_the_command_is_that_of_the_api():
    assert people.MAX_HOURS == MOST_OWNED_HOURS


@pytest.mark.parametrize(
    ("silence", "shown"),
    [
        ({"ends": "2026-01-31T08:00:00Z", "until": "2026-01-31T08:15:00Z"}, "2026-01-31 08:00 + 15 min grace"),
        ({"ends": "2026-01-31T08:00:00Z", "until": "2026-01-31T08:00:00Z"}, "2026-01-31 08:00"),
        (
            {"ends": "2026-01-31T08:00:00Z", "until": "2026-01-31T06:15:00Z", "expired": "2026-01-31T06:00:00Z"},
            "2026-01-31 06:00 + 15 min grace",
        ),
    ],
)
def test_the_end_of_a_window_says_that_a_grace_follows(silence, shown):
    assert describe_end(silence) == shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("handover", "--hours", "nan"), "--hours: 'nan'; expected a number of hours, at most 87,600"),
        (("handover", "--hours", "1e9"), "--hours: '1e9'; expected a number of hours"),
        (("ack", "x", "--hours", "-1"), "--hours: '-1'; expected a number of hours, at most 168, or 0"),
        (("ack", "x", "--hours", "169"), "--hours: '169'; expected a number of hours, at most 168, or 0"),
        (("silences", "extend", "x", "--hours", "0"), "--hours: '0'; expected a number of hours above 0"),
        (("handover", "--since", "yesterday"), "--since: 'yesterday'; expected a time like 2026-01-31T08:00:00Z"),
        (("audit", "--since", ""), "--since: ''; expected a time"),
        (("topology", "show", "node:n1", "--time", "3 am"), "--time: '3 am'; expected a time"),
    ],
)
def test_a_wrong_duration_or_time_is_refused_before_anything_is_asked(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        fleetpulse.main([*words])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_completion_knows_every_command_verb_and_option():
    words = list_words()
    assert set(COMMANDS) <= set(words[""])
    for name, verbs in VERBS.items():
        assert set(verbs) <= set(words[name])
    assert {"--hours", "--reason"} <= set(words["silences add"])
    fish = make_script("fish")
    assert all(f" -a {name} " in fish for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (("inc",), ["incidents"]),
        (("silences", "e"), ["edit", "extend", "expire"]),
        (("silences", "add", "--re"), ["--reason"]),
        (("feedback", "x", "u"), ["useful"]),
        (("token", "create", "ann", "--role", "v"), ["viewer"]),
        (("incidents", "--state", "="), ["open", "acknowledged", "silenced", "resolved"]),
        (("incidents", "--state", "=", "res"), ["resolved"]),
        (("incidents", "--state=res"), ["--state=resolved"]),
    ],
)
def test_bash_completes_with_the_script(tmp_path, line, wanted):
    script = tmp_path / "complete"
    words = " ".join(f"'{word}'" for word in ("fleetpulse", *line))
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(line)}; _fleetpulse; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script.write_text(make_script("bash") + ask)
    ran = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == wanted


def test_completion_lists_ids_of_incidents_with_titles(site, run, monkeypatch):
    monkeypatch.setattr(completion, "PATIENCE_S", 30.0)  # a busy machine
    old, page = site.report("gpu:n5.0"), site.report("gpu:n0.0")
    assert run("resolve", old, "--comment", "swapped")[0] == 0
    assert run("completion", "incidents") == (0, f"{page}\tgpu:n0.0: hot; rank 0 of job 1 on it\n", "")
    assert run("completion", "resolved") == (0, f"{old}\tgpu:n5.0: hot; jobs not known\n", "")


ANSWERS = {"refuses": [b"HTTP/1.0 403 x\r\n\r\n{}"], "is no JSON": [b"HTTP/1.0 200 x\r\n\r\nhello"], "hangs": []}
ANSWERS |= {"trickles": [b"HTTP/1.0 200 x\r\n\r\n", *[b" "] * 200]}


@pytest.mark.parametrize("api", ["closed", "no configuration", *ANSWERS])
def test_completion_of_ids_is_silent_and_over_soon_without_an_answer(tmp_path, capsys, api):
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as connection, contextlib.suppress(OSError):
                connection.recv(65536)
                for part in ANSWERS[api]:
                    connection.sendall(part)
                    over.wait(0.1 * (len(ANSWERS[api]) > 1))
                over.wait(0 if ANSWERS[api] else 30)

        file = tmp_path / "fleetpulse.toml"
        if api != "no configuration":
            file.write_text(f"[api]\nport = {server.getsockname()[1]}\n")
        thread = threading.Thread(target=answer)
        if api in ANSWERS:
            thread.start()
        else:
            server.close()
        began = time.monotonic()
        assert fleetpulse.main(["completion", "incidents", "--config", str(file)]) == 0
        assert time.monotonic() - began < PATIENCE_S + 8, "of which 8 s are for a busy machine"
        over.set()
        if api in ANSWERS:
            thread.join(30)
    assert capsys.readouterr() == ("", "")


ID_LINES = [
    (("ack", "inc-"), ["inc-a1", "inc-b2"]),
    (("ack", "inc-a1", "inc-b"), ["inc-b2"]),
    (("reopen", "inc-"), ["inc-old"]),
    (("incidents", "show", "inc-"), ["inc-a1", "inc-b2"]),
    (("assign", "inc-"), ["inc-a1", "inc-b2"]),
    (("assign", "inc-a1", "inc-"), []),
    (("ack", "--comment", "inc-"), []),
    (("silences", "add", "inc-"), []),
    (("ack", "--config", "other.toml", "inc-"), ["inc-other"]),
    (("ack", "--config", "=", "other.toml", "inc-"), ["inc-other"]),
]
STUB = """fleetpulse() {
  case "$*" in
    "completion incidents") printf 'inc-a1\\tGPU 3: hot\\ninc-b2\\tinc-no\\n' ;;
    "completion resolved") printf 'inc-old\\tx\\n' ;;
    "completion incidents --config other.toml") printf 'inc-other\\tx\\n' ;;
  esac
}
"""


@pytest.mark.parametrize(("line", "wanted"), ID_LINES)
def test_bash_completes_ids_where_a_command_takes_incidents(tmp_path, line, wanted):
    words = " ".join(f"'{word}'" for word in ("fleetpulse", *line))
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(line)}; _fleetpulse; printf '%s\n' \"${{COMPREPLY[@]}}\""
    (tmp_path / "complete").write_text(make_script("bash") + STUB + ask)
    ran = subprocess.run(["bash", str(tmp_path / "complete")], capture_output=True, text=True, check=True)
    assert (ran.stdout.split(), ran.stderr) == (wanted, "")


def test_an_empty_text_is_no_one_to_assign_an_incident_to(site, run):
    page = site.report("gpu:n0.0")
    run("assign", page, "bob")
    code, _, err = run("assign", page, "")
    assert (code, "'-' to remove the assignee" in err) == (2, True)
    assert "bob" in run("incidents", "show", page)[1]
    code, _, err = run("assign", page, "\u200b")
    assert (code, "visible characters" in err) == (2, True)
    assert "bob" in run("incidents", "show", page)[1]
    assert run("assign", page, "-")[0] == 0
    assert "bob" not in run("incidents", "--output", "json")[1]
