"""The built-in backends, each a plugin of the kind that a third party would ship."""
