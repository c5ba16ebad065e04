"""Checks of a backend as an engine drives it: whole models, several ranks, graphs and the steps of a GPU."""
