"""Tasks in a Slurm job array."""
