"""The table of mutations: backends with one mistake each, the check that must catch it, and words of its message.

`table` holds the rows; `parts` the hooks of TORCH that most of them replace; `making`, `reference` and `declared` a
backend that is written from the contract alone, and its rows. Each other module is a family of rows, which
`test_mutants_numeric.py`, `test_mutants_structural.py` and the tests named after a family run.
"""
