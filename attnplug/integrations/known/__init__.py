"""Layers of the usual model types, read from config.json alone: neither torch nor transformers is imported."""
