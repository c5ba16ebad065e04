"""Measured selection: workloads, timing, and the table of times that selections read."""
