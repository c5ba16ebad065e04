"""attnplug in models and engines of other projects."""
