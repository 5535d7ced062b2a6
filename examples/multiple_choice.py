"""Answer multiple-choice questions as lm-evaluation-harness does: by the choice with the highest log-likelihood.

Each line of the file is {"question": ..., "choices": [...], "answer": 0}. Without a file, one built-in question.
python examples/multiple_choice.py questions.jsonl --model gpt2
"""

import argparse
import json
from pathlib import Path

from nanoinfer import LLM

QUESTION = {
    "question": "O Romeo, Romeo! wherefore art thou",
    "choices": [" Romeo?", " zebra?", " xylophone?"],
    "answer": 0,
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path, nargs="?", help="one JSON object a line")
parser.add_argument("--model", default="shakespeare")
args = parser.parse_args()

lines = args.file.read_text(encoding="utf-8").splitlines() if args.file else [json.dumps(QUESTION)]
llm = LLM(args.model)
right = right_per_character = 0
for item in map(json.loads, lines):
    found = llm.loglikelihood(item["question"], item["choices"])
    best = max(range(len(found)), key=lambda i: found[i].log_likelihood)
    # acc_norm: log-likelihood a character, so that long choices are not at a disadvantage
    best_norm = max(range(len(found)), key=lambda i: found[i].log_likelihood / len(item["choices"][i]))
    right += best == item["answer"]
    right_per_character += best_norm == item["answer"]
    print(f"{item['question']!r} -> {item['choices'][best]!r} ({found[best].log_likelihood:.2f})")
print(f"acc {right / len(lines):.3f}, acc_norm {right_per_character / len(lines):.3f}, {len(lines)} questions")
