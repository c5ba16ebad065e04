"""State layers in plain PyTorch: recurrences token by token and in chunks, and short convolutions."""
