"""Workers: each collector runs apart from the agent's loop, so that one that hangs does not delay the others.

`worker.Worker` is the agent's side of one collector, and `pool` asks all of them at each tick. On the other side of a
socket pair, `read_server.serve` runs the collector: in a thread of the agent, or in a process from `processes`.
"""
