"""Workers: each collector runs apart from the agent's loop, so that one that hangs does not delay the others.

`worker.Worker` is the agent's side of one collector, and `pool.WorkerPool` reads all of them at each tick. On the other
side of a socket pair, `read_server.serve_reads` runs the collector: in a thread of the agent, or in a process that
`processes.WorkerProcesses` forked.
"""
