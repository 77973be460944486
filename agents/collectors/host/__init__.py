"""The server: processors, memory, disks, file systems, sensors, clock, services, versions, kernel log."""
