"""Layers and batches to run with a backend: the axes of what it declares, the designed cases and the small steps.

Every other room of the kit calls in; calls none of them.
"""
