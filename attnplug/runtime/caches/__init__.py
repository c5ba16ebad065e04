"""KV caches: their tensors, the blocks of a pool, and memory that an engine owns.

Every other room of the runtime may call in; calls none of them.
"""
