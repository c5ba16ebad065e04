"""attnplug as an attention implementation of Hugging Face transformers."""
