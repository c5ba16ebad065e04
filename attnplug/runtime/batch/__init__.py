"""The requests in flight, and the batch of each step over all KV groups, in buffers that stay.

`attention_runtime` and `steps` call in; values of an engine are checked here, before anything changes.
"""
