"""What a training run will cost and what fits, before it starts: FLOPs, memory, accelerators."""
