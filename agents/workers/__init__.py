"""Where collectors run, so that one that hangs holds up nobody.

`worker.Worker` is the agent's view of one collector; `looking.Looking` asks all of them each tick. At the other end of
a socket pair `errand.serve` runs the collector: in a thread of the agent, or in a process that `nursery` forked.
"""
