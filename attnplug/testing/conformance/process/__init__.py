"""Checks of what a backend does to its process: imports, settings, memory and output."""
