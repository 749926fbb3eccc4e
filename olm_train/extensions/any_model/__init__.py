"""Trains any `nn.Module` on the batches of any data loader of torch."""
