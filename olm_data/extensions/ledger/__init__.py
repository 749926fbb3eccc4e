"""The files of the loss of every piece of a document, as it was trained on."""
