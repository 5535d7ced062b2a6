"""Profile a generation: time by part of the model and by operator, and on a GPU the numbers of launches."""
