"""State layers in Triton: one kernel for all recurrences and one for short convolutions."""
