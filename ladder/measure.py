"""What each rung prints: its text, its speed, and the speed that arithmetic allows on this machine.

A rung appends one (B, T, S) to `steps` for each call of the model: B sequences with T new tokens, and S positions of
keys and values that it reads, of all sequences together. From these follow the bytes and the FLOPs of the step, and

    seconds = max(bytes / bandwidth, FLOPs / throughput)          the roofline model (Williams et al. 2009)

if reading and computing overlap, and nothing else takes time. Both speeds are measured here, in a second.
"""

import argparse
import contextlib
import importlib
import time
from pathlib import Path

import torch
from model import load

# Of unequal lengths; two of them begin with the same 22 tokens.
SHARED = "First Citizen: Before we proceed any further, hear me speak. All: "
PROMPTS = ["O Romeo,", SHARED + "Speak, speak.", "To be, or not to be, that is", SHARED + "Resolved. resolved. We know"]


def weight_bytes(model):
    """Return the bytes of the model that a step reads: blocks and head, and of the embeddings next to nothing."""
    parts = [model.transformer.h, model.transformer.ln_f, model.lm_head]
    return sum(t.nbytes for part in parts for t in [*part.parameters(), *part.buffers()])


def predict(model, steps, bandwidth, throughput):
    """Return the seconds that the steps take if nothing but reading or computing takes time."""
    seconds = 0.0
    for B, T, S, *other in steps:
        m = other[0] if other else model  # a draft
        L, C, V = m.n_layer, m.n_embd, m.transformer.wte.num_embeddings
        num_bytes = weight_bytes(m) + 2 * L * C * S * 4
        flops = 2 * (12 * L * C * C * B * T + V * C * B) + 4 * L * C * T * S
        seconds += max(num_bytes / bandwidth, flops / throughput)
    return seconds


def best(run, seconds=0.4):
    """Return the shortest time of `run`, in seconds: what disturbs a run makes it only longer."""
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.inference_mode()
def limits(num_bytes):
    """Return (bytes/s, FLOP/s) of a matrix of as many bytes as the weights times a vector, and of a matrix product."""
    w, x = torch.randn(num_bytes // 4096, 1024), torch.randn(1024)
    a = torch.randn(1024, 1024)
    return w.nbytes / best(lambda: w @ x), 2 * 1024**3 / best(lambda: a @ a)


def main(generate, file, sampling=None, option=None, also=None, load=load, model="shakespeare", prompts=PROMPTS):
    """Run a rung as a program.

    Args:
        generate: (model, prompts, max_new_tokens, steps, **parameters) -> token ids of each prompt; greedy by default.
        file: `__file__` of the rung.
        sampling: parameters of `generate` with the names of nanoinfer's `SamplingParams`.
        option: (name, default, help) of one more parameter of `generate`.
        also: (model, prompts) -> None, raises if a property of this rung alone does not hold.
        load, model: path -> (model, encode, decode), and the path that is the default.
        prompts: texts of --check, the first of which is the default.
    """
    parser = argparse.ArgumentParser(description=importlib.import_module(Path(file).stem).__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model), help="built-in model, GPT-2 folder, or nanoGPT's ckpt.pt")
    parser.add_argument("--prompt", action="append", help="text to continue; several: a batch")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--check", action="store_true", help="compare tokens with the rung before and with the engine")
    if option:
        name, default, text = option
        parser.add_argument(f"--{name}", default=default, type=type(default), help=text)
    args = parser.parse_args()
    try:
        model, encode, decode = load(args.model)
    except (OSError, KeyError, ValueError) as e:
        parser.error(f"--model {args.model} cannot be read: {e}")
    if args.check:
        return check(generate, file, args.model, model, [encode(prompt) for prompt in prompts], sampling, also)
    prompts = [encode(prompt) for prompt in args.prompt or prompts[:1]]
    num_tokens, crops = max(map(len, prompts)) + args.max_new_tokens, int(Path(file).stem[:2]) <= 3
    if min(map(len, prompts)) == 0 or args.max_new_tokens < 1 or (num_tokens > model.block_size and not crops):
        parser.error(f"a prompt and its new tokens are at least 1 each and at most {model.block_size} together")
    parameters = {**(sampling or {}), **({option[0]: getattr(args, option[0])} if option else {})}
    with contextlib.redirect_stdout(None):
        generate(model, prompts, 8, [], **parameters)  # warm up
    steps, start = [], time.perf_counter()
    outputs = generate(model, prompts, args.max_new_tokens, steps, **parameters)
    seconds = time.perf_counter() - start
    for prompt, output in zip(prompts, outputs, strict=True):
        print(decode(prompt + output), end="\n\n")
    bandwidth, throughput = limits(weight_bytes(model))
    predicted, num_tokens = predict(model, steps, bandwidth, throughput), sum(map(len, outputs))
    print(f"{num_tokens} tokens in {len(steps)} steps, {seconds:.2f} s: {num_tokens / seconds:,.0f} tokens/s")
    speeds = f"{bandwidth / 1e9:.1f} GB/s and {throughput / 1e9:,.0f} GFLOP/s"
    print(f"limit: {num_tokens / predicted:,.0f} tokens/s at {speeds}")
    print(f"reached: {predicted / seconds:.0%} of the limit")


def check(generate, file, name, model, prompts, sampling, also):
    """Compare a rung with nanoinfer's own recomputation and, greedy, with the rung before; raise if a token differs."""
    from nanoinfer import LLM, SamplingParams

    number = int(Path(file).stem[:2])
    cases = [(prompts, 32)]
    if number <= 3:  # past the context
        cases.append(([(prompts[1] * 100)[: model.block_size - 4]], 7))
    before = [path.stem for path in Path(file).parent.glob(f"{number - 1:02}_*.py") if number <= 10]
    llm = LLM(name, engine="recompute", device="cpu", dtype="float32")
    for prompts, num_tokens in cases:
        slide = {"overflow": "slide", "slide_stride": 1}
        common = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **slide}
        for setting in [sampling, {}] if sampling else [{}]:
            outputs = [o.outputs[0] for o in llm.generate(prompts, SamplingParams(**{**common, **setting}))]
            found = generate(model, prompts, num_tokens, [], **setting)
            assert found == [[*output.token_ids] for output in outputs], f"other tokens than LLM, {setting}"
        for module in before:
            previous = importlib.import_module(module).generate(model, prompts, num_tokens, [])
            assert found == previous, f"other tokens than {module}"
    if also:
        also(model, cases[0][0])
    print(f"the tokens of {' and of '.join([*before, 'LLM(engine=recompute)'])}")
