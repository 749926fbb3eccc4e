"""Where text comes from: files of every format, local or remote, named hub datasets, the Python library."""
