"""Links: ports and cables, optics, leaves, NVLink and PCIe."""
