"""Network ports of the node, Ethernet and RDMA: counters, transceiver modules and neighbors."""
