"""How a model configuration becomes LayerSpecs: one concept per module, transformers needed."""
