"""Other tools that turn text into token files, measured beside `olm-data tokenize`.

One file a tool: what it needs, how it is started, and how its output is read back. `driver`
compares them.
"""
