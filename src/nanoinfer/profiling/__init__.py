"""Where the time of a generation goes: by part of the model, by operator, and on a GPU by launches."""
