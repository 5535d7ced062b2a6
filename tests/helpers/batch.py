"""Batches on a model that is loaded already."""

from __future__ import annotations

from nanoinfer import LLM, SamplingParams
from nanoinfer.batch.files import FileOutput, LineReader, open_output
from nanoinfer.batch.run import BatchOptions, BatchRunner
from nanoinfer.utils.progress import ProgressBar


def run_on(llm: LLM, source: str, target: str, options: BatchOptions | None = None) -> FileOutput:
    """Run a batch on a model that is loaded already."""
    reader, output = LineReader([source]), open_output(target, {}, overwrite=True)
    assert isinstance(output, FileOutput)
    options = options or BatchOptions(SamplingParams(max_tokens=2))
    try:
        output.skip(reader)
        output.start()
        runner(llm, options).run(reader, output, ProgressBar("batch", False))
    finally:
        output.close()
    return output


def runner(llm: LLM, options: BatchOptions) -> BatchRunner:
    return BatchRunner(llm, options)
