"""Checks of builders: what they need of a step, what they keep of one, and what groups of layers may share."""
