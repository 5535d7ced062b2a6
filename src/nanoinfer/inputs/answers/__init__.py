"""How chat models write reasoning, content and tool calls: one description, a parser and a grammar made from it."""
