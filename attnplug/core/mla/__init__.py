"""Latent attention (MLA) in the contract: its sizes, the class of a decode kernel, and a layer's projections.

Specs, impls, `attnplug.mla` and backends of latents call in.
"""
