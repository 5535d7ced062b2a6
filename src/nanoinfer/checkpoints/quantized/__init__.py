"""Folders of quantized weights as tools write them for the Hugging Face Hub."""
