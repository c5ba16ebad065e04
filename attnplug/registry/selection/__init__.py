"""The choice of one backend for one layer: gates, rules of the user, ranking, and a Decision with its reasons.

`registry.Registry` calls in; reads `plugins` and `measured`.
"""
