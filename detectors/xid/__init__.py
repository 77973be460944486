"""Faults that NVIDIA's driver, the kernel and the BMC report as messages: XIDs and broken hosts."""
