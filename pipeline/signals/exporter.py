"""Signals of the class exporter: one Prometheus or OpenMetrics endpoint that is scraped. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("exporter.up", "1", "state", "exporter", "u1", "Whether the endpoint gave a page", "own look", "", (0, 1), states=("down", "up"), normal=("up",), harm="down", interval=15.0),
    Signal("exporter.scrape_time", "s", "gauge", "exporter", "f4", "Time of the scrape, translation included", "own timer", "", (0, 1e4), harm="up", interval=15.0),
    Signal("exporter.series", "{series}", "gauge", "exporter", "u4", "Series on the page", "own count", "", interval=15.0),
    Signal("exporter.mapped", "{series}", "gauge", "exporter", "u4", "Of them, those that became signals of the catalogue", "own count", "", harm="down", interval=15.0),
    Signal("exporter.unmapped", "{series}", "gauge", "exporter", "u4", "Of them, those that no mapping knows", "own count", "", interval=15.0),
    Signal("exporter.dropped", "{series}", "gauge", "exporter", "u4", "Of the unmapped ones, those that were not kept: beyond the bound, or buckets of histograms", "own count", "", harm="up", interval=15.0),
    Signal("exporter.bad_lines", "{line}", "gauge", "exporter", "u4", "Lines of the page that are no samples", "own count", "", harm="up", interval=15.0),
)  # fmt: skip
