"""attnplug for models and engines that others wrote."""
