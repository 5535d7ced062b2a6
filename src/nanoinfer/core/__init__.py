"""One step of scheduler, engine and sampler, and what belongs to it: beam search, overlap, outputs, building."""
