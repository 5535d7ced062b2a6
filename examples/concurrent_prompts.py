"""Complete prompts in an event loop, each within a time limit, and print them as they end.

python examples/concurrent_prompts.py "O Romeo," "To be" "My lord" --seconds 5
"""

import argparse
import asyncio

from nanoinfer import AsyncLLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompts", nargs="*", default=["O Romeo,", "To be, or", "My lord"])
parser.add_argument("--model", default="shakespeare")
parser.add_argument("--max-tokens", type=int, default=64)
parser.add_argument("--seconds", type=float, default=10.0, help="time limit of each prompt")
args = parser.parse_args()


async def _read(llm: AsyncLLM, prompt: str, params: SamplingParams, pieces: list[str]) -> str | None:
    async for output in llm.generate(prompt, params, output_kind="delta"):
        pieces.append(output.outputs[0].text)
    return output.outputs[0].finish_reason


async def _complete(llm: AsyncLLM, prompt: str, params: SamplingParams) -> None:
    pieces = [prompt]
    try:
        ended = await asyncio.wait_for(_read(llm, prompt, params, pieces), args.seconds)
    except asyncio.TimeoutError:  # the iterator was left, which has cancelled the request
        ended = "time limit"
    print(f"--- {prompt!r} ended by {ended}\n{''.join(pieces)}")


async def _main(llm: AsyncLLM, params: SamplingParams) -> None:
    async with llm:
        await asyncio.gather(*(_complete(llm, prompt, params) for prompt in args.prompts))


params = SamplingParams(max_tokens=args.max_tokens, temperature=0.8, top_k=50, seed=0)
asyncio.run(_main(AsyncLLM(args.model), params))  # the model is loaded, which blocks, before the loop runs
