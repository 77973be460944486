"""The configuration: one file, overrides from the environment, and messages that name the fault."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.config import sections
from pipeline.config.sections import Config, load_config
from pipeline.config.settings import build_section
from pipeline.model.errors import ConfigError
from pipeline.store.database import Database


def write_file(folder: Path, text: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def error_of(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(write_file(folder, text), {})
    return str(refused.value)


def test_without_a_file_the_documented_defaults_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, {})
    assert (config.api.host, config.api.port) == ("127.0.0.1", 8600)
    assert (config.dashboard.host, config.dashboard.port) == ("127.0.0.1", 8501)
    assert (config.site.name, config.agent.interval, config.pipeline.transport) == ("local", 1.0, "spool")
    assert (config.kafka.partitions, config.kafka.replication_factor) == (32, -1)
    assert config.source == "defaults"


def test_state_is_below_the_home_folder_unless_xdg_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(None, {}).store.path == tmp_path / ".local/state/fleetpulse/store.duckdb"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert load_config(None, {}).spool.directory == tmp_path / "state/fleetpulse/spool"


def test_the_argument_overrides_the_variable_and_the_variable_overrides_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleetpulse.toml").write_text("[site]\nname = 'folder'\n")
    (tmp_path / "variable.toml").write_text("[site]\nname = 'variable'\n")
    (tmp_path / "argument.toml").write_text("[site]\nname = 'argument'\n")
    variable = {"FLEETPULSE_CONFIG": "variable.toml"}
    assert load_config(None, {}).site.name == "folder"
    assert load_config(None, variable).site.name == "variable"
    assert load_config("argument.toml", variable).site.name == "argument"


def test_a_variable_overrides_the_file(tmp_path: Path) -> None:
    path = write_file(tmp_path, "[api]\nport = 1\nhost = '127.0.0.2'\n")
    config = load_config(path, {"FLEETPULSE__API__PORT": "9000", "FLEETPULSE__STORE__PATH": "/tmp/s.duckdb"})
    assert (config.api.port, config.api.host, config.store.path) == (9000, "127.0.0.2", Path("/tmp/s.duckdb"))


def test_text_in_a_variable_needs_no_quotes_even_if_it_looks_like_a_number(tmp_path: Path) -> None:
    path = write_file(tmp_path, "")
    assert load_config(path, {"FLEETPULSE__SITE__NAME": "east"}).site.name == "east"
    assert load_config(path, {"FLEETPULSE__SITE__NAME": "7"}).site.name == "7"
    assert load_config(path, {"FLEETPULSE__AGENT__NODE": "2026-01-01"}).agent.node == "2026-01-01"


def test_a_list_of_tables_becomes_dataclasses(tmp_path: Path) -> None:
    text = "[[notify.webhooks]]\nname = 'a'\nurl = 'http://127.0.0.1:1/'\nallow_private = ['10.0.0.0/8']\n"
    hook = load_config(write_file(tmp_path, text), {}).notify.webhooks[0]
    assert (hook.name, hook.format, hook.allow_http, hook.allow_private) == (
        "a",
        "alertmanager",
        False,
        ("10.0.0.0/8",),
    )


def test_an_integer_is_accepted_where_a_float_is_expected(tmp_path: Path) -> None:
    interval = load_config(write_file(tmp_path, "[agent]\ninterval = 2\n"), {}).agent.interval
    assert interval == 2.0
    assert type(interval) is float


def test_tables_of_detectors_and_collectors_are_left_to_their_owners(tmp_path: Path) -> None:
    config = load_config(write_file(tmp_path, "[detector.link]\nfloor = 3\n[collector.host]\ninterval = 5.0\n"), {})
    assert config.detector["link"] == {"floor": 3}
    assert config.collector["host"] == {"interval": 5.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[api]\nprot = 1\n", ("fleet.toml", "[api] prot", "did you mean 'port'?")),
        ("[apii]\nport = 1\n", ("fleet.toml", "apii: no such section", "did you mean 'api'?")),
        ("[api]\nxyz = 1\n", ("[api] xyz: no such key", "known: host, port")),
        ("[api]\nport = 'x'\n", ("[api] port = 'x'", "expected int", "got str")),
        ("[api]\nport = true\n", ("[api] port = True", "expected int", "got bool")),
        ("[agent]\ninterval = 'often'\n", ("[agent] interval = 'often'", "expected float")),
        ("[agent]\ninterval = true\n", ("[agent] interval = True", "expected float")),
        ("[store]\npath = 3\n", ("[store] path = 3", "expected Path", "got int")),
        ("[api]\ntoken_file = 3\n", ("[api] token_file = 3", "expected Path")),
        ("[pipeline]\ntransport = 'pigeon'\n", ("[pipeline] transport = 'pigeon'", "'spool', 'kafka'")),
        ("[[notify.webhooks]]\nname = 'a'\n", ("[notify.webhooks[0]] url: missing",)),
        (
            "[[notify.webhooks]]\nname = 'a'\nurl = 'u'\nallow_private = '10.0.0.0/8'\n",
            ("allow_private", "expected list"),
        ),
        ("[notify]\nwebhooks = 'http://x'\n", ("[notify] webhooks = 'http://x'", "expected list")),
        ("[notify]\nwebhooks = ['http://x']\n", ("[notify.webhooks[0]]", "expected a table")),
        ("[detector]\nlink = 3\n", ("[detector.link] is 3", "expected a table")),
        ("detector = 3\n", ("[detector] is 3", "expected a table")),
        ("api = 3\n", ("[api] is 3", "expected a table")),
        ("[api\n", ("fleet.toml", "is not TOML")),
        ("source = 'x'\n", ("source", "not a section")),
    ],
)
def test_an_invalid_key_is_reported_with_file_and_expected_value(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    message = error_of(tmp_path, text)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[api]\nport = 70000\n", ("[api] port = 70000", "0 to 65535")),
        ("[api]\nhost = '127.0.0..1'\n", ("[api] host = '127.0.0..1'", "expected a name or address of a host")),
        ("[gateway]\nhost = 'a b'\n", ("[gateway] host = 'a b'", "expected a name or address of a host")),
        ("[agent]\ninterval = 0\n", ("[agent] interval = 0", "above 0")),
        ("[agent]\ninterval = nan\n", ("[agent] interval = nan", "above 0")),
        ("[agent]\nnode = ''\n", ("[agent] node = ''", "not empty")),
        ("[agent]\nnode = '../x'\n", ("[agent] node = '../x'", "no slash")),
        ("[pipeline]\nframe = -1\n", ("[pipeline] frame = -1", "1 to 600")),
        ("[spool]\nmax_bytes = 10\n", ("[spool] max_bytes = 10", "at least 65536, or 0")),
        ("[spool]\nsync_seconds = 61\n", ("[spool] sync_seconds = 61", "0 to 60")),
        ("[kafka]\ncatch_up = 1.0\n", ("[kafka] catch_up = 1.0", "at least 2")),
        ("[kafka]\njitter = -1\n", ("[kafka] jitter = -1", "0 to 600")),
        ("[kafka]\npartitions = 0\n", ("[kafka] partitions = 0", "above 0")),
        (
            "[[acts.policies]]\nname = 'a'\nscope = 'site:x'\n",
            ("scope = 'site:x'", "below the site", "or * for everywhere"),
        ),
        *(
            (f"[[notify.webhooks]]\nurl = 'u'\nname = {text}\n", ("[notify.webhooks[0]] name = ", shown, "A-Z a-z 0-9"))
            for text, shown in (
                ("'値班'", "'値班'"),
                ('"a\\nb"', r"'a\nb'"),
                ('"a\\n"', r"'a\n'"),
                ("''", "''"),
                ("'a b'", "'a b'"),
                (f"'{'x' * 65}'", "x" * 65),
            )
        ),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    message = error_of(tmp_path, text)
    assert all(word in message for word in words), message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read: No such file"):
        load_config(tmp_path / "gone.toml", {})


def test_a_variable_without_a_key_is_reported() -> None:
    with pytest.raises(ConfigError, match="FLEETPULSE__API: expected FLEETPULSE__SECTION__KEY"):
        load_config(None, {"FLEETPULSE__API": "1"})


def test_a_variable_of_the_wrong_type_is_reported_as_a_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(write_file(tmp_path, ""), {"FLEETPULSE__API__PORT": "many"})
    assert "FLEETPULSE__API__PORT" in str(refused.value)
    assert "expected int" in str(refused.value)


def test_a_variable_of_an_unknown_key_is_reported_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FLEETPULSE__API__PROT: \[api\] prot: no such key; did you mean 'port'\?"):
        load_config(write_file(tmp_path, ""), {"FLEETPULSE__API__PROT": "1"})


def test_a_variable_may_contain_a_list_or_set_a_key_of_a_detector(tmp_path: Path) -> None:
    variables = {
        "FLEETPULSE__NOTIFY__WEBHOOKS": "[{name = 'a', url = 'http://127.0.0.1:1/'}]",
        "FLEETPULSE__DETECTOR__LINK__FLOOR": "4",
    }
    config = load_config(write_file(tmp_path, "[detector.link]\nhold = 2\n"), variables)
    assert config.notify.webhooks[0].url == "http://127.0.0.1:1/"
    assert config.detector["link"] == {"hold": 2, "floor": 4}


def test_a_variable_cannot_address_a_key_below_a_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'port' is not a section"):
        load_config(write_file(tmp_path, "[api]\nport = 1\n"), {"FLEETPULSE__API__PORT__X": "1"})


def test_an_owner_builds_its_dataclass_with_the_same_messages() -> None:
    @dataclass
    class Link:
        floor: float = 3.0

    assert build_section(Link, {"floor": 4}, "fleet.toml", "detector.link").floor == 4.0
    with pytest.raises(ConfigError, match=r"fleet\.toml: \[detector\.link\] flor: no such key; did you mean 'floor'\?"):
        build_section(Link, {"flor": 4}, "fleet.toml", "detector.link")


def test_every_section_is_a_frozen_dataclass() -> None:
    with pytest.raises(AttributeError):
        Config().api.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "limit",
    [
        " 2GB",
        "1.5 GiB",
        "0.5gb",
        ".5G",
        "2000000KB",
        "2147483648 bytes",
        "2 gigabytes",
        "1e3MB",
        "64MB",
        "62MiB",
        "50%",
        "1%",
        "none",
        "-1",
        "-5GB",
    ],
)
def test_duckdb_takes_each_memory_limit_that_the_configuration_takes(tmp_path: Path, limit: str) -> None:
    config = load_config(write_file(tmp_path, f"[store]\nmemory_limit = {limit!r}\n"), {})
    with closing(Database(tmp_path / "store.duckdb", config.store.memory_limit)):
        pass


@pytest.mark.parametrize(
    "limit",
    [
        "lots",
        "2",
        "2Gi",
        "512Mi",
        "150%",
        "0GB",
        "99999999999TB",
        "",
        "-5%",
        "1KB",
        "2MB",
        "63.9MB",
        "61MiB",
        "63999999 bytes",
        "0.5%",
        "\u0665GB",
        "\u0665%",
        "5\u212aB",
        "\u00a05GB",
    ],
)
def test_a_memory_limit_that_is_no_size_is_refused_before_a_start(tmp_path: Path, limit: str) -> None:
    assert "expected a size such as 2GB" in error_of(tmp_path, f"[store]\nmemory_limit = {limit!r}\n")


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("pipeline", "frame = 1e9"),
        ("pipeline", "frame = 0.0001"),
        ("pipeline", "lateness = -1"),
        ("pipeline", "lateness = inf"),
        ("store", "telemetry_days = 1e300"),
        ("store", "audit_days = 100001"),
        ("store", "hot_hours = 1e300"),
        ("store", "free_bytes = 99999999999999999999999"),
        ("spool", "free_bytes = -1"),
        ("spool", "max_bytes = 99999999999999999999999"),
        ("spool", "segment_bytes = 0"),
        ("api", "sql_rows = 99999999999999999999999"),
        ("kafka", "catch_up = inf"),
        ("incidents", "storm_minutes = 1e300"),
    ],
)
def test_a_number_with_which_nothing_works_is_refused(tmp_path: Path, section: str, line: str) -> None:
    """A frame of 32 years closes never, and a time in 1e300 days is no timestamp of the store."""
    said = error_of(tmp_path, f"[{section}]\n{line}\n")
    assert f"[{section}] {line.partition(' ')[0]} = " in said
    assert "expected" in said


def test_no_number_of_a_section_is_without_a_bound() -> None:
    found = [value for name in vars(sections) if isinstance(value := getattr(sections, name), type)]
    numbers = {
        (section.__name__, one.name): one.metadata
        for section in found
        if dataclasses.is_dataclass(section)
        for one in dataclasses.fields(section)
        if one.type in ("int", "float")
    }
    assert [key for key, metadata in numbers.items() if not metadata] == []
    for key, metadata in numbers.items():
        assert not any(holds(10**30) for _, holds in metadata.values()), key
