"""Other projects measured beside ours.

    harness       what is common: a tool, its environment, its task, its surroundings
    tokenizers/   text to token files         bench_tokenize.py --peers
    loaders/      token files to batches      bench_loader.py --peers
    llama         a training step             bench_train_step.py

One file a tool. `python benchmarks/bench_NAME.py --help` says what is measured and how.
"""
