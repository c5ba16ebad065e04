"""Kernels of state layers."""
