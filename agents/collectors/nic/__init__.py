"""Network ports of the node: Ethernet and RDMA, their counters, modules and neighbours."""
