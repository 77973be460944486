"""What NVIDIA's XIDs mean: the table, the texts of the driver's log, the rules of NVLink's."""
