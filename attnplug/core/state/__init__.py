"""State layers: layers that keep a matrix of fixed size for each request, and no keys and values of tokens."""
