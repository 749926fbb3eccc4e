"""Chats: rows of messages, rendered by a chat template, with the tokens that are trained."""
