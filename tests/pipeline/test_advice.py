"""Advice and runbooks: shipped for every detector, overridden key by key, read again when the file changes."""

from __future__ import annotations

import os

import pytest

from dashboards.words import recommended_action
from detectors import DETECTORS
from pipeline.commands import burn_in, objectives_keeper
from pipeline.incidents.advice import SHIPPED, AdviceBook, read_advice
from pipeline.incidents.factors import FACTOR_KINDS
from pipeline.incidents.reach import SPREADS
from pipeline.incidents.storms import STORM
from pipeline.model.errors import ConfigError

OTHERS = {STORM, "page_budget", objectives_keeper.DETECTOR, burn_in.DETECTOR}
"""Names of detectors of the pipeline itself."""


def test_every_detector_has_shipped_advice_and_nothing_else_has():
    names = {detector.name for detector in DETECTORS} | OTHERS
    shipped = read_advice(SHIPPED)["detector"]
    assert set(shipped) == names
    assert all(len(keys["advice"]) > 30 for keys in shipped.values())


@pytest.mark.parametrize("detector", ["sdc", "sdc_replica"])
def test_a_checkpoint_before_the_onset_is_not_called_safe_as_doubt_begins_earlier(detector: str) -> None:
    for text in (AdviceBook(None).find(detector, "gpu:n1.0")["advice"], recommended_action(detector, "gpu:n1.0")):
        assert "in doubt (see impact)" in text
        assert "checkpoints from before the onset" not in text
        assert "checkpoint before the onset" not in text


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


def test_every_kind_of_cause_that_may_be_blamed_for_its_members_has_advice():
    """The solver blames the kinds of FACTOR_KINDS; SPREADS are those of which all below suffers."""
    causes = read_advice(SHIPPED)["cause"]
    assert set(causes) == set(FACTOR_KINDS) | SPREADS
    assert all(len(keys["advice"]) > 30 for keys in causes.values())


@pytest.mark.parametrize("cause", ["version:nvidia_driver=580.65.06", "change:firmware=28.43"])
@pytest.mark.parametrize("detector", ["link", "xid", "straggler", "telemetry", "memory"])
def test_a_version_at_fault_is_no_reason_to_repair_devices(detector, cause):
    found = AdviceBook(None).find(detector, cause)["advice"]
    assert "roll-out" in found
    assert found.endswith("Repair no device before that.")


def test_slow_ranks_of_a_job_or_stage_are_no_reason_to_swap_a_gpu():
    for cause in ("job:81", "stage:81.0"):
        for detector in ("straggler", "straggler_inferred"):
            found = AdviceBook(None).find(detector, cause)["advice"]
            assert found == read_advice(SHIPPED)["cause"][cause.partition(":")[0]]["advice"]
    assert "Look for what all ranks share" in AdviceBook(None).find("straggler_job", "job:81")["advice"]


def test_a_sites_own_advice_of_a_detector_is_shown_for_every_cause(tmp_path):
    path = tmp_path / "advice.toml"
    path.write_text('[detector.link]\nadvice = "Call the network team."\n')
    found = AdviceBook(path).find("link", "version:firmware=28.43")["advice"]
    assert found.endswith("Call the network team.")


def test_a_sites_own_runbook_of_a_detector_brings_no_wrong_advice_back(tmp_path):
    """Any key of the site counted as its own advice: the cable was to be cleaned for a wrong driver."""
    path = tmp_path / "advice.toml"
    path.write_text(
        '[detector.link]\nrunbook = "https://wiki/link"\n[detector.straggler]\nrunbook = "https://wiki/slow"\n'
    )
    for detector, cause, page in (
        ("link", "version:driver.550.54", "https://wiki/link"),
        ("straggler", "job:81", "https://wiki/slow"),
        ("straggler", "stage:81.0", "https://wiki/slow"),
    ):
        found = AdviceBook(path).find(detector, cause)
        assert found == {**AdviceBook(None).find(detector, cause), "runbook_url": page}


def test_a_storm_is_not_advised_as_a_fault_of_its_whole_site():
    found = AdviceBook(None).find("alert_storm", "site:fra1")["advice"]
    assert found.startswith("Look for one cause")
    assert AdviceBook(None).find("telemetry_site", "site:fra1")["advice"].startswith("A whole site is affected")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[detector", "is not TOML"),
        ("[link]\na = 1", r"\[link\]: expected"),
        ("[detector.xid]\nhelp = 'x'", "found help$"),
        ("[detector.xid]\nadvice = 1", "found advice, which is no text"),
        ("[detector]\nxid = 1", r"\[detector.xid\]: .* found no table"),
        ("[detector.stragler]\nadvice = 'x'", r"\[detector.stragler\]: no such detector; did you mean 'straggler'\?"),
        ("[detector.of_mine]\nadvice = 'x'", "no such detector; expected one of straggler, .*, burn_in"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_at_the_start(tmp_path, text, why):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=why):
        AdviceBook(tmp_path / "a.toml")
