"""`nanoinfer explain`: record a generation, and write it as a page that a reader steps through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import NO_FLAGS, config_flag, flags, llm_config, of_model, option
from nanoinfer.config import LLMConfig
from nanoinfer.roofline.ceilings import CPU_WORKLOAD, MEASURE, find_device, measure
from nanoinfer.sampling_params import COMMAND_DEFAULTS, SamplingParams
from nanoinfer.utils.files import require_writable, write_atomically


@command("explain")
@argument("prompts", metavar="PROMPT...", nargs=-1, required=True, help="One, or several that are generated together.")
@option("output", "HTML file to write.", "FILE")
@config_flag("model", default="shakespeare")
@config_flag("tokenizer")
@option("device_limits", "Also show the limit of each step: a device of `nanoinfer roofline`, or 'measure'.", "NAME")
@flags(SamplingParams, "params", skip=NO_FLAGS, defaults={**COMMAND_DEFAULTS, "max_tokens": 32})
@llm_config("engine", "speculation", "scheduler")
def explain(
    *,
    prompts: tuple[str, ...],
    output: Path,
    device_limits: str = MEASURE,
    config: LLMConfig,
    params: SamplingParams,
) -> None:
    """Write a page that shows a generation step by step.

    Examples:
        nanoinfer explain "O Romeo," -o page.html
        nanoinfer explain "To be" "My lord," -o page.html -n 2 --draft prompt-lookup
        nanoinfer explain "To be" "My lord," -o page.html --max-num-seqs 1
    """
    require_writable(output.parent, output.name)

    from nanoinfer.entrypoints.llm import LLM
    from nanoinfer.explain.page import page
    from nanoinfer.explain.record import record

    if config.engine.sampler == "auto":  # the logits of overlapped steps stay on the device
        config = replace(config, engine=replace(config.engine, sampler="reference"))
    llm = LLM.from_config(config)
    short = replace(CPU_WORKLOAD, num_bytes=1 << 28, matrix_size=768, num_rounds=5)  # takes about a second
    is_cpu = device_limits == MEASURE and llm.device == "cpu"
    ceiling = measure(short) if is_cpu else find_device(device_limits, llm.device)
    recording = record(llm, list(prompts), of_model(params, llm), ceiling, config.speculation.draft)
    write_atomically(output, page(recording).encode())
    print(f"{output}: {len(recording.steps)} steps")
