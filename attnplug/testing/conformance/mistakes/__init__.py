"""What is wrong with an answer: its rows and values in words, and the known mistake that gives the same numbers.

The rooms that compare with the oracle call in.
"""
