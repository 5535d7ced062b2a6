"""Complete the prompts of a JSONL file: each line is an object with "prompt"; "completion" is added to it.

python examples/complete_jsonl.py prompts.jsonl > completed.jsonl
"""

import argparse
import json
from pathlib import Path

from nanoinfer import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path, help="one JSON object a line, with the key prompt")
parser.add_argument("--model", default="shakespeare")
parser.add_argument("--max-tokens", type=int, default=64)
parser.add_argument("--temperature", type=float, default=0.8)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

lines = args.file.read_text(encoding="utf-8").splitlines()
objects = [json.loads(line) for line in lines if line.strip()]
llm = LLM(args.model)
params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_k=50, seed=args.seed)
for given, output in zip(objects, llm.generate([o["prompt"] for o in objects], params), strict=True):
    completion = output.outputs[0]
    print(json.dumps(given | {"completion": completion.text, "finish_reason": completion.finish_reason}))
