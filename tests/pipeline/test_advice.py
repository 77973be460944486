"""Advice and runbooks: shipped for every detector, overridden key by key, read again when the file changes."""

from __future__ import annotations

import os

import pytest

from detectors import DETECTORS
from pipeline.incidents.advice import SHIPPED, AdviceBook, read_advice
from pipeline.model.errors import ConfigError


def test_every_detector_has_shipped_advice_and_nothing_else_has():
    names = {detector.name for detector in DETECTORS} | {"alert_storm", "page_budget"}
    shipped = read_advice(SHIPPED)["detector"]
    assert set(shipped) == names
    assert all(len(keys["advice"]) > 30 for keys in shipped.values())


def test_a_site_replaces_single_keys_and_a_change_counts_without_a_restart(tmp_path):
    path = tmp_path / "advice.toml"
    path.write_text('[detector.xid]\nrunbook = "https://wiki.example/xid"\n')
    book = AdviceBook(path, "https://fleet.example/detectors")
    assert book.find("xid", "gpu:n1.0")["runbook_url"] == "https://wiki.example/xid"
    assert "XID" in book.find("xid", "gpu:n1.0")["advice"]
    assert book.find("link", "leaf:l1")["advice"].startswith("A leaf switch is affected")
    assert book.find("link", "leaf:l1")["runbook_url"] == "https://fleet.example/detectors?detector=link"
    path.write_text('[cause.leaf]\nadvice = "Call the network team."\n')
    os.utime(path, ns=(1, 1))
    assert book.find("link", "leaf:l1")["advice"].startswith("Call the network team. Clean or reseat")
    path.write_text("[detector")
    os.utime(path, ns=(2, 2))
    assert book.find("link", "leaf:l1")["advice"].startswith("Call the network team.")
    assert book.find("of_a_site", "gpu:n1.0")["advice"] is None


def test_a_storm_is_not_advised_as_a_fault_of_its_whole_site():
    found = AdviceBook(None).find("alert_storm", "site:fra1")["advice"]
    assert found.startswith("Look for one cause")
    assert AdviceBook(None).find("telemetry_site", "site:fra1")["advice"].startswith("A whole site is affected")


@pytest.mark.parametrize(
    ("text", "why"),
    [("[detector", "is not TOML"), ("[link]\na = 1", r"\[link\]: expected"), ("[detector.xid]\nhelp = 'x'", "help")],
)
def test_a_file_that_cannot_be_used_is_named_at_the_start(tmp_path, text, why):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=why):
        AdviceBook(tmp_path / "a.toml")
