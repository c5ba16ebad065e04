"""Checks of what a backend says of itself: attributes, values, options, pages and refusals."""
