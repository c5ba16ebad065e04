"""Reads model configurations into LayerSpecs; needs transformers."""
