"""The states of requests: their pages in each step, and the layers that read and advance them."""
