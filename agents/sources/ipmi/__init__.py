"""The BMC behind the kernel's IPMI device: requests, sensor records, event log."""
