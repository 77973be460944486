"""Heat and coolant: loops, leaks, cold plates, air."""
