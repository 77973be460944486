"""Accelerators of AMD, AWS, Google and Intel, in the signals of any other GPU."""
