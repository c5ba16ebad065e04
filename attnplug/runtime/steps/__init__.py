"""A step as it runs: its checks, the metadata of all groups, the layers, and CUDA graphs.

`attention_runtime` and `ranks` call in; reads `batch`, `caches` and `plan`.
"""
