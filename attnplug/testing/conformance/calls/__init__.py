"""Checks of single calls: inputs that stay as they are, outputs that are written whole, and tensors as engines keep them."""
