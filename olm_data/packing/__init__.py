"""How documents become rows: the packings and the files of their plans."""
