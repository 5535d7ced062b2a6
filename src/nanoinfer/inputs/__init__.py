"""Prompts, messages and chat templates: what a request is made from."""
