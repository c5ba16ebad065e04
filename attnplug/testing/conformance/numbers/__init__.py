"""Checks against the oracle: every designed case, the cache's reads and writes, requests, merged parts."""
