"""A consumer with a mistake that a type checker must find in the wheel's types."""

from attnplug import LayerSpec

LayerSpec(num_heads="32", num_kv_heads=8, head_size=128)
