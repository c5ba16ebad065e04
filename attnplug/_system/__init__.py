"""The ground floor: files, JSON, processes, terminal tables and text. Knows nothing of attention.

Every other room may call in; from outside it imports the exception tree alone.
"""
