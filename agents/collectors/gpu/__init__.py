"""NVIDIA GPUs: NVML, the PCI bus, XIDs."""
