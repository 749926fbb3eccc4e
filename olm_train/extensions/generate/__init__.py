"""Text out of a trained model: for looking at it, in a run and by hand; export it to serve it.

prompts -> runner (KV cache) -> logits -> sampling -> ids -> text -> command, chat, serve
           `---------------- engine: any number of texts at a time ----'
"""

COMMANDS = {
    "generate": ("Commands", "Continue a text with a trained model."),
    "chat": ("Commands", "Talk with a trained model in the terminal."),
}
