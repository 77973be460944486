"""Only the whole configuration is judged, and an error names the file, group or variable with which it begins."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

import fleetpulse
from pipeline.commands.arguments import build_parser
from pipeline.commands.setup import run_setup
from pipeline.commands.start_checks import check_receivers
from pipeline.config.layers import PREFIX
from pipeline.config.origin import check_with_origin
from pipeline.config.sections import load_config
from pipeline.model.errors import ConfigError

USER = "[dashboard.proxy_login]\nuser_header = 'U'\n"
GROUPS = "[dashboard.proxy_login]\ngroups_header = 'G'\n"
BOTH = USER + "groups_header = 'G'\n"
ROLES = "[dashboard]\ntoken_file = '/t'\n[dashboard.roles]\nsre = 'operator'\n"
WRONG = "[notify.route]\nreceiver = 'nosuch'\n"
UNRELATED = "[api]\nsql_rows = 7\n"
GROUPS_VARIABLE = {f"{PREFIX}DASHBOARD__PROXY_LOGIN__GROUPS_HEADER": "G"}
ROLES_VARIABLE = {f"{PREFIX}DASHBOARD__ROLES__SRE": "operator"}
TOKEN_VARIABLE = {f"{PREFIX}DASHBOARD__TOKEN_FILE": "/t"}
MISSING = "[dashboard.proxy_login] groups_header: missing; a value is required"


def write(folder: Path, main: str, *drop_ins: str) -> Path:
    """Returns the file; drop-ins are conf.d/1.toml, 2.toml and so on."""
    (folder / "conf.d").mkdir()
    for number, text in enumerate(drop_ins, 1):
        (folder / "conf.d" / f"{number}.toml").write_text(text)
    path = folder / "fleetpulse.toml"
    path.write_text(main)
    return path


@pytest.mark.parametrize(
    ("texts", "environ"),
    [
        ((USER + ROLES, UNRELATED), GROUPS_VARIABLE),
        ((USER, ROLES), GROUPS_VARIABLE),
        ((UNRELATED, USER), GROUPS_VARIABLE | ROLES_VARIABLE | TOKEN_VARIABLE),
        (("", USER, GROUPS + ROLES), {}),
        (("[api]\nport = 'x'\n", UNRELATED), {f"{PREFIX}API__PORT": "9"}),
        (("", "[api]\nport = -1\n", "[api]\nport = 9\n"), {}),
        (
            (
                "",
                USER + '[[groups]]\nnodes = "*"\n' + ROLES.replace("[dashboard", "[groups.dashboard"),
                GROUPS,
            ),
            {},
        ),
        ((USER + ROLES, '[[groups]]\nnodes = "elsewhere"\n[groups.api]\nport = 9\n'), GROUPS_VARIABLE),
    ],
)
def test_what_a_later_file_or_a_variable_completes_is_no_error(
    texts: tuple[str, ...], environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file and a variable worked; with any drop-in beside it, the service did not start."""
    path = write(tmp_path, *texts)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        assert fleetpulse.main(["config", "check", "--config", str(path)]) == 0, said.getvalue()


@pytest.mark.parametrize(
    ("texts", "environ", "said"),
    [
        ((USER + ROLES, UNRELATED), {}, f"fleetpulse.toml: {MISSING}"),
        (("", UNRELATED, USER + ROLES, "[site]\n"), {}, f"conf.d/2.toml: {MISSING}"),
        (("[api]\nport = 'x'\n", UNRELATED), {}, "fleetpulse.toml: [api] port = 'x': expected int"),
        (("[api]\nport = 1\n", "[api]\nport = -1\n"), {}, "conf.d/1.toml: [api] port = -1"),
        (("", UNRELATED), {f"{PREFIX}API__PORT": "x"}, f"environment: {PREFIX}API__PORT: [api] port = 'x'"),
        ((ROLES + BOTH, "[dashboard]\nhost = '0.0.0.0'\n"), {}, "conf.d/1.toml: [dashboard] "),
        (
            (ROLES + BOTH, ""),
            {f"{PREFIX}DASHBOARD__HOST": "0.0.0.0"},
            f"environment: {PREFIX}DASHBOARD__HOST: ",
        ),
        (("", UNRELATED), ROLES_VARIABLE, f"environment: {PREFIX}DASHBOARD__ROLES__SRE: [dashboard] roles: expected"),
        (("api = 3\n",), {f"{PREFIX}API__PORT": "9"}, "fleetpulse.toml: [api] is 3; expected a table"),
        (("", "api = 3\n"), {f"{PREFIX}API__PORT": "9"}, "conf.d/1.toml: [api] is 3; expected a table"),
        ((UNRELATED,), {f"{PREFIX}API": "9"}, f"environment: {PREFIX}API: expected {PREFIX}SECTION__KEY"),
        ((UNRELATED,), {f"{PREFIX}SOURCE__X": "9"}, f"environment: {PREFIX}SOURCE__X: [source] is not a section"),
        # what only the variable completes: wrong in the file, in the drop-in, in the variable
        ((USER + ROLES + "[api]\nprot = 1\n", ""), GROUPS_VARIABLE, "fleetpulse.toml: [api] prot: no such key"),
        ((USER + ROLES, UNRELATED + "prot = 1\n"), GROUPS_VARIABLE, "conf.d/1.toml: [api] prot: no such key"),
        (
            (USER + ROLES, UNRELATED),
            GROUPS_VARIABLE | {f"{PREFIX}API__PROT": "1"},
            f"environment: {PREFIX}API__PROT: [api] prot: no such key",
        ),
    ],
)
def test_an_error_names_the_file_or_the_variable_with_which_it_begins(
    texts: tuple[str, ...], environ: dict[str, str], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path, *texts)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ)
    found = str(caught.value)
    assert found.removeprefix(f"{tmp_path}/").startswith(said), found


@pytest.mark.parametrize(
    ("texts", "environ", "said"),
    [
        ((USER + ROLES + WRONG,), GROUPS_VARIABLE, "fleetpulse.toml: [notify.route] receiver = 'nosuch'"),
        ((USER + ROLES, WRONG, UNRELATED), GROUPS_VARIABLE, "conf.d/1.toml: [notify.route] receiver = 'nosuch'"),
        (
            (USER + ROLES, UNRELATED),
            GROUPS_VARIABLE | {f"{PREFIX}NOTIFY__ROUTE__RECEIVER": "nosuch"},
            f"environment: {PREFIX}NOTIFY__ROUTE__RECEIVER: [notify.route] receiver = 'nosuch'",
        ),
    ],
)
def test_a_variable_that_completes_the_files_is_not_blamed_for_another_error(
    texts: tuple[str, ...], environ: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variable the configuration can be built for the first time; what the check finds was there before."""
    path = write(tmp_path, *texts)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        check_with_origin(load_config(path), check_receivers)
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(said)


def test_a_group_of_other_nodes_is_refused_although_a_variable_of_this_one_covers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{PREFIX}API__PORT", "9")
    path = write(tmp_path, '[[groups]]\nnodes = "elsewhere"\n[groups.api]\nport = -1\n')
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert fleetpulse.main(["config", "check", "--config", str(path)]) == 2
    assert f"{path}: [[groups]] 1: [api] port = -1" in said.getvalue()


@pytest.mark.parametrize("command", [["config", "check"], ["setup", "--role", "node"], ["doctor"]])
@pytest.mark.parametrize("place", ["loop.toml", "folder/fleetpulse.toml"])
def test_links_that_lead_back_to_themselves_are_an_error_that_says_what_to_do(
    command: list[str], place: str, tmp_path: Path
) -> None:
    """`setup` ended with a traceback."""
    (tmp_path / "loop.toml").symlink_to("other.toml")
    (tmp_path / "other.toml").symlink_to("loop.toml")
    (tmp_path / "folder").symlink_to("folder")
    path = tmp_path / place
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        assert fleetpulse.main([*command, "--config", str(path)]) == 2
    assert said.getvalue() == (
        f"fleetpulse: {path}: its symbolic links lead back to themselves; expected a TOML file, or a link to one; "
        f"remove the wrong link, which this shows: namei {path}\n"
    )
    assert (tmp_path / "loop.toml").is_symlink()


def test_setup_of_another_file_does_without_that_of_the_units_whose_links_lead_nowhere(tmp_path: Path) -> None:
    of_units = tmp_path / "units.toml"
    of_units.symlink_to("units.toml")
    words = ["setup", "--role", "node", "--site", "a", "--kafka", "k:9092", "--gpus", "0", "--config"]
    given = build_parser().parse_args([*words, str(tmp_path / "own.toml")])
    run_setup(given, lambda question: "", False, tmp_path, of_units)
    assert load_config(tmp_path / "own.toml", {}).site.name == "a"
