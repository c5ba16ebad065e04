"""Conformance checks in worker processes: one that hangs, crashes or takes all memory fails alone."""
