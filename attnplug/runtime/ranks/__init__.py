"""Layers whose tokens several ranks share: partial results, their exchange, and the watch over the ranks.

`attention_runtime` calls in; drives the layers of `steps`.
"""
