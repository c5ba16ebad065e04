"""The plan of a model: one backend for each layer, KV groups, equal pages, and what fits into memory.

`attnplug.plan` and every other room of the runtime call in; calls none of them.
"""
