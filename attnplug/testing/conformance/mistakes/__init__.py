"""What is wrong with an answer: its rows and values in words, and the known mistake that gives the same numbers.

The smallest step that is wrong in the same way, as a test; and the kinds of mistakes, for a summary of a run.

The rooms that compare with the oracle call in.
"""
