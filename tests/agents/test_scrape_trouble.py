"""Exporters that are slow, broken or hostile, and two that report the same entity."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.collectors.exporters import scraper as fetching
from agents.collectors.exporters import scraper as scraping
from agents.collectors.exporters.prometheus import Endpoint, Prometheus
from agents.collectors.exporters.scraper import EndpointScraper, PageFetcher, ScrapeError, ScrapeResult
from pipeline.foreign.mapping import load_mapping
from tests.agents.exporter_double import OK, peer, read_until_reported

GIVEN = {"target": "t1", "node": "n1"}


def scrape(fetch: PageFetcher) -> ScrapeResult:
    return EndpointScraper(fetch, load_mapping(""), GIVEN, 3600.0, 100).scrape()


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "drip"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (b"HTTP/1.1 200", b" "),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1"),
        (OK + b"\r\n", b"a"),
    ],
    ids=["header", "status", "continue", "chunk", "body"],
)
def test_a_slowly_dripping_exporter_times_out(message: bytes, drip: bytes) -> None:
    with peer(message, drip=drip) as url:
        began = time.monotonic()
        with pytest.raises(ScrapeError, match=r"timed out: no whole page within 0\.3 s"):
            PageFetcher(url, 0.3)()
        assert time.monotonic() - began < 2.0


def test_a_slowly_dripping_handshake_times_out() -> None:
    with peer(b"\x16\x03\x03\x40\x00", drip=b"\x02") as url:
        began = time.monotonic()
        with pytest.raises(ScrapeError, match="timed out"):
            PageFetcher(url.replace("http:", "https:"), 0.3)()
        assert time.monotonic() - began < 2.0


@pytest.mark.slow
def test_a_slowly_dripping_header_is_reported_as_down_and_the_same_thread_retries() -> None:
    with peer(b"HTTP/1.1 200 OK\r\nX: ", drip=b"x") as url:
        made = Prometheus(endpoints=(Endpoint("x", url, interval=1.0, timeout=0.2),))
        made.open("n1")
        try:
            found = read_until_reported(made, "x") + read_until_reported(made, "x")
            threads = [t for t in threading.enumerate() if t.name == "scrape x"]
        finally:
            made.close()
    assert [e.data["state"] for r in found for e in r.events] == ["down"]
    assert len(threads) == 1


def test_a_hang_without_a_timeout_is_reported_as_down_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "OVERDUE_S", 0.1)
    answered = threading.Event()  # like a resolver that does not answer, or a file on an unreachable server
    monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *_, **__: answered.wait() and [])
    made = Prometheus(endpoints=(Endpoint("x", "http://127.0.0.1:1/", interval=3600.0, timeout=0.1),))
    made.open("n1")
    try:
        found = read_until_reported(made, "x")
        assert made.read() == ()
    finally:
        made.close()
        answered.set()  # releases the thread
    (event,) = [e for r in found for e in r.events]
    assert (event.data["state"], event.data["reason"].partition(":")[0]) == ("down", "a GET does not end")


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no series in 0 characters, which begin with ''"),
        (b"<html>\n<body x>\nload 1\n", "2 invalid lines and 1 series: is it another page"),
        (
            b"<html><title>Log in</title>\x1b[31m\n",
            r"no series in 33 characters, which begin with '<html><title>Log in",
        ),
        (gzip.compress(b"a 1\n", mtime=0), r"begin with '\x1f\ufffd"),
        (b"# TYPE a gauge\n", "no series in 15 characters"),
    ],
    ids=["empty", "page of HTML", "login", "packed and not said", "comments"],
)
def test_an_endpoint_whose_page_has_no_series_is_down(body: bytes, message: str) -> None:
    with peer(OK, b"\r\n", body) as url:
        found = scrape(PageFetcher(url, 5.0))
    assert message in found.reason
    assert found.reason.isprintable()
    assert len(found.reason) < 300


def test_a_compressed_page_is_decompressed() -> None:
    with peer(OK, b"Content-Encoding: gzip\r\n\r\n", gzip.compress(b"a 1\n")) as url:
        assert PageFetcher(url, 5.0)() == "a 1\n"


@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        (b"gzip", gzip.compress(b"a" * (2 << 20), mtime=0), "more than 1 MiB after decompression"),
        (b"gzip", gzip.compress(b"a 1\n", mtime=0)[:-3], "not one whole gzip member"),
        (b"gzip", gzip.compress(b"a 1\n", mtime=0) * 2, "not one whole gzip member"),
        (b"gzip", b"a 1\n", "but the page is not"),
        (b"br", b"a 1\n", "Content-Encoding br; expected none, or gzip"),
    ],
    ids=["bomb", "torn", "two members", "not packed", "another way"],
)
def test_a_page_that_decompresses_too_large_or_badly_is_refused(
    monkeypatch: pytest.MonkeyPatch, encoding: bytes, body: bytes, message: str
) -> None:
    monkeypatch.setattr(fetching, "MAX_PAGE_BYTES", 1 << 20)
    with peer(OK, b"Content-Encoding: " + encoding + b"\r\n\r\n", body) as url, pytest.raises(ScrapeError) as refused:
        PageFetcher(url, 5.0)()
    assert message in str(refused.value)


def test_text_of_a_hostile_exporter_is_shortened_and_printable() -> None:
    with peer(b"HTTP/1.1 500 \x1b[2J" + b"x" * 60_000 + b"\r\n\r\n") as url:
        found = scrape(PageFetcher(url, 5.0))
    assert found.reason.startswith("answered 500 ?[2Jxxx")
    assert len(found.reason) == scraping.MAX_REASON_CHARS


# --- two endpoints ---------------------------------------------------------------------------------------------------


def test_an_endpoint_down_at_start_loses_no_entity_and_reports_them_once_up() -> None:
    pages: list[Callable[[], str]] = [lambda: "", lambda: "a 1\n", lambda: "", lambda: "a 2\n"]

    class FixedPages(PageFetcher):
        def __call__(self) -> str:
            return pages.pop(0)()

    made = Prometheus(endpoints=(Endpoint("x", "http://127.0.0.1:1/"),))
    scraper = EndpointScraper(FixedPages("http://127.0.0.1:1/", 1.0), load_mapping(""), {"target": "x"}, 3600.0, 10)
    made._scrapers = [scraper]
    reported = []
    while pages:
        scraper._newest = scraper.scrape()
        found = {e for r in made.read() for e in r.entities}
        reported.append((sorted(found), made.inventory_changed()))
        assert found <= made.inventory().keys()
    up = ["custom:x.a", "exporter:x"]
    assert reported == [(["exporter:x"], True), (up, True), (["exporter:x"], False), (up, False)]


def test_attributes_of_one_entity_from_two_endpoints_are_merged(tmp_path: Path) -> None:
    paths = []
    for attribute in ("sku", "serial"):
        paths.append(tmp_path / f"{attribute}.toml")
        paths[-1].write_text(
            f'version = 1\n[entities]\ncoolant = "cdu:c"\n[attributes.coolant]\n{attribute} = "{attribute}"\n'
            '[[metric]]\nname = "flow"\nsignal = "coolant.flow"\n'
        )
    with peer(OK, b'\r\nflow{sku="s",serial="7"} 3\n') as url:
        made = Prometheus(endpoints=tuple(Endpoint(p.stem, url, str(p)) for p in paths))
        made.open("n1")
        try:
            for target in ("sku", "serial"):
                while f"exporter:{target}" not in made.inventory():
                    made.read()
                    time.sleep(0.01)
            known = made.inventory()["cdu:c"].attributes
        finally:
            made.close()
    assert known == {"sku": "s", "serial": "7"}
