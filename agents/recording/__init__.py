"""Recordings of one node: what its collectors saw, as files that `fleetpulse replay` and the agent itself play back.

`writer` writes the folder, `tape` reads it tick by tick, `playback` stands in for the collectors. The folder holds:
  telemetry-CLASS.csv  the replay format, one line per entity and tick; empty = missing, or not looked at
  events.jsonl         the replay format, with `seen` (the tick it came with) and, but for states, `collector`
  topology.toml        parents and attributes, from the collectors' inventories
  collectors.jsonl     each change of a collector's state: time, collector, state, reason, latency in s
  recording.json       node, interval, and what each collector claims and sees
"""
