"""Models of Hugging Face's transformers: their configurations and tensors as ours, and back."""
