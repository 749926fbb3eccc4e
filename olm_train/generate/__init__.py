"""Text out of a trained model: for looking at it, in a run and by hand; export it to serve it.

prompts -> runner (KV cache) -> logits -> sampling -> ids -> text -> command, chat, serve
           `---------------- engine: any number of texts at a time ----'
"""
