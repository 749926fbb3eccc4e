"""What `bench_tokenize.py` measures on: its inputs."""
