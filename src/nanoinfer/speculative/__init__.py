"""Speculation: drafters propose tokens, the engine verifies them all in one step."""
