"""Recordings of one node: the readings of its collectors, as files that `fleetpulse replay` and the agent play back.

`files` writes and reads the folder, `playback` plays it in place of the collectors. The folder holds:
    telemetry-CLASS.csv  the replay format, one line per entity and tick; empty = missing, or not read at this tick
    events.jsonl         the replay format, with `seen` (the tick it came with) and, except for states, `collector`
    topology.toml        parents and attributes, from the collectors' inventories
    collectors.jsonl     each change of a collector's state: time, collector, state, reason, latency in s
    recording.json       node, interval, and each collector's signals, events and entities
"""
