"""A correct backend in plain torch, and families of backends with one mistake each."""
