"""Other projects measured beside ours.

    harness         what is common: a tool, its environment, its task, its surroundings
    token_writers/  text to token files       bench_tokenize.py --peers
    loaders/        token files to batches    bench_loader.py --peers
    llama           a training step           bench_train_step.py --peers

One file a tool, and none with the name of a package: its program's folder comes first where it
imports. A peer that was asked for and cannot run makes the exit code 1.
`python benchmarks/bench_NAME.py --help` says what is measured and how.
"""
