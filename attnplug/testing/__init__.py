"""For authors of backends: the float64 oracle."""
