"""Plugins and what they offer: found, loaded one by one, and recorded; their options, and the versions installed.

The lowest room of the registry: the others call in, and it calls none of them.
"""
