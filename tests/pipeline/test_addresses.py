"""What errors, `config show` and `config diff` show of addresses without a scheme, and of names that look like them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fleetpulse
from pipeline.config.addresses import HIDDEN, hide_address, hide_addresses, hide_in_text
from pipeline.config.changes import list_changes
from pipeline.config.sections import load_config

NAMES = ("node:gpu0@h200-1", "mailto:someone@example.org", "oidc:ada@id.example", "rack:r1@hall-2", "User:a@REALM")
LOGINS = (
    "ada:PASS@h200-1",
    "ada:PASS@h.example:8600",
    "ada:PASS@h.example/x",
    "ada:PA SS@h.example",
    "ada:PA/SS@h.example",
    "ada:PA@SS@h.example",
    "ada:PASS@[::1]:8600",
    "node:PASS@h.example:5432",
    "oidc:PASS@h.example/x",
    "exporter:PASS@h.example",
    "https://ada:PASS@h.example",
    "https://node:PASS@h.example",
    "oidc://ada:PASS@h.example",
)


def run(*words: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = fleetpulse.main(list(words))
    return code, out.getvalue() + error.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_an_error_shows_a_name_that_has_the_form_of_a_login_whole(name: str, tmp_path: Path) -> None:
    """`node:gpu0@h200-1` was shown as `h200-1`."""
    path = tmp_path / "fleetpulse.toml"
    for text in (
        f'[[modes]]\nmode = "{name}"\n',
        f'[store]\nmemory_limit = "{name}"\n',
        f'[agent]\ninterval = "{name}"\n',
        f'[notify]\nwebhooks = "{name}"\n',
    ):
        path.write_text(text)
        code, said = run("config", "check", "--config", str(path))
        assert (code, repr(name) in said) == (2, True), said
    assert hide_addresses([name]) == [name]


@pytest.mark.parametrize("login", LOGINS)
@pytest.mark.parametrize("key", ["memory_limit", "url", "notify.alertmanagers[0].urls[1]", ""])
def test_the_login_of_an_address_is_hidden_whatever_its_key_is(login: str, key: str) -> None:
    shown = str(hide_addresses([login], key))
    assert [word for word in ("PA", "SS", "ada") if word in shown] == []


def test_a_name_is_an_address_where_the_key_asks_for_one() -> None:
    assert hide_address("node:gpu0@h200-1") == "h200-1"
    assert hide_address("oidc:PASS@h.example") == "h.example"
    assert hide_address("mailto:someone@example.org") == "mailto:someone@example.org"


@pytest.mark.parametrize("key", ["scope", "modes[0].scope", "admission.speaks_for[0].entities", "route.matchers"])
def test_patterns_of_entities_of_any_kind_are_shown_whole(key: str) -> None:
    assert hide_addresses("chiller:north@b2/*", key) == "chiller:north@b2/*"
    assert hide_addresses("https://ada:PASS@h.example", key) == "https://h.example"


SITE = """
[[notify.webhooks]]
name = "a"
url = "ada:PASS@h.example/WORD"
[[notify.webhooks]]
name = "b"
url = "WORD@h.example:8443"
[[notify.webhooks]]
name = "c"
url = "h.example/WORD"
[[notify.alertmanagers]]
name = "d"
urls = ["h.example:9093", "h.example/WORD", "ada:@h.example"]
[dashboard]
api_url = "ada:PA SS@h.example?WORD"
[[modes]]
mode = "notify"
scope = "node:gpu0@h200-1"
[[collector.redfish.bmcs]]
url = "WORD@h.example/WORD"
"""


def test_show_diff_and_records_show_the_hosts_of_addresses_without_a_scheme_alone(tmp_path: Path) -> None:
    """`config show` printed paths and logins without a password, which errors hide."""
    path, other = tmp_path / "fleetpulse.toml", tmp_path / "other.toml"
    path.write_text(SITE)
    other.write_text("")
    code, said = run("config", "show", "--output", "json", "--config", str(path))
    assert code == 0
    shown: dict[str, Any] = {row["key"]: row["value"] for row in json.loads(said)}
    code, compared = run("config", "diff", str(other), "--output", "json", "--config", str(path))
    rows = {row["key"]: row["here"] for row in json.loads(compared)}
    assert code == 1
    assert shown["notify.webhooks[0].url"] == rows["notify.webhooks[0].url"] == f"h.example/{HIDDEN}"
    assert shown["notify.webhooks[1].url"] == "h.example:8443"
    assert shown["notify.webhooks[2].url"] == f"h.example/{HIDDEN}"
    assert shown["notify.alertmanagers[0].urls"] == ["h.example:9093", f"h.example/{HIDDEN}", "h.example"]
    assert shown["modes[0].scope"] == rows["modes[0].scope"] == "node:gpu0@h200-1"
    assert shown["dashboard.api_url"] == f"h.example/{HIDDEN}"
    recorded = str(list_changes(load_config(path, {}), load_config(other, {}), [], "pipeline"))
    for text in (said, compared, recorded):
        assert [word for word in ("WORD", "PA", "SS", "ada:") if word in text] == []


@pytest.mark.parametrize("letter", ["a", "+", "a.", "a:", "a:/", "://", "a\\", "é"])
def test_a_text_of_a_million_characters_without_a_space_takes_no_longer_than_with_spaces(letter: str) -> None:
    begun = time.process_time()
    text = letter * (1_000_000 // len(letter))
    assert len(hide_in_text(text)) > 5
    assert time.process_time() - begun < 5, "a line of base64 in a log: it took hours"


@given(
    st.lists(
        st.sampled_from(["a", "9", "+", "-", ".", "é", "_", "://", ":", "/", "@", "\\", " ", "'", "\n", "host", "]"])
    )
)
def test_in_long_texts_the_same_is_hidden(parts: list[str]) -> None:
    text = "".join(parts)
    plain = re.compile(r"\w[\w+.-]*://(?:\\\\|[^\s'\"<>\\])*")
    assert hide_in_text(text) == plain.sub(lambda found: hide_in_text(found[0]), text)
