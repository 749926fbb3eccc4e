"""Tokenizers: a `tokenizer.json` from a file, folder or hub, and what the rest needs to know about it.

    load_tokenizer("gpt2" | DIR | FILE, eos=None, bos="none") -> TokenizerSpec   (picklable, immutable)

Never imports `tokenizers` at module import time.
"""

from __future__ import annotations
