"""What NVIDIA's driver, the kernel and the BMC say in words: XIDs and broken hosts."""
