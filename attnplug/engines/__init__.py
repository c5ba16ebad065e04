"""The kit's numeric cases through the client of each engine: a backend, unchanged, is right in every engine.

Results are of a client with a backend. They are never evidence of the backend itself.
"""
