"""Kernels in Gluon for Hopper: groups of warps with tasks of their own."""
