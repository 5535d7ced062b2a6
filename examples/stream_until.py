"""Stream a continuation up to a stop string, and print which one ended it.

python examples/stream_until.py "O Romeo," --stop . --stop "!"
"""

import argparse
import sys

from nanoinfer import LLM, SamplingParams
from nanoinfer.outputs import Delta

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt", nargs="?", default="O Romeo,")
parser.add_argument("--model", default="shakespeare")
parser.add_argument("--stop", action="append", help="string that ends the output; may be repeated (default: . ! ?)")
parser.add_argument("--max-tokens", type=int, default=None, help="default: up to the context length")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

llm = LLM(args.model)
stop = args.stop or [".", "!", "?"]
params = SamplingParams(max_tokens=args.max_tokens, temperature=0.8, top_k=50, seed=args.seed, stop=stop)
print(args.prompt, end="", flush=True)
_, stream = llm.stream_outputs(args.prompt, params)
for item in stream:
    if isinstance(item, Delta):
        print(item.text, end="", flush=True)
    else:  # the last item is the whole output
        ended = item.outputs[0]
print()
print(f"{len(ended.token_ids)} tokens; ended by {ended.finish_reason} {ended.stop_reason or ''}", file=sys.stderr)
