"""Chooses combinations of values to try: the cells of the matrix and the cases of the conformance kit."""
