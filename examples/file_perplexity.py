"""Print the perplexity of text files, and the line of each with the highest perplexity.

python examples/file_perplexity.py a.txt b.txt --model shakespeare
"""

import argparse
from pathlib import Path

from nanoinfer import LLM

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("files", type=Path, nargs="+")
parser.add_argument("--model", default="shakespeare")
parser.add_argument("--stride", type=int, default=None, help="tokens by which the window advances")
args = parser.parse_args()

llm = LLM(args.model)
texts = [path.read_text(encoding="utf-8") for path in args.files]
for path, text, whole in zip(args.files, texts, llm.perplexity(texts, stride=args.stride), strict=True):
    bits = -whole.log_likelihood / 0.6931471805599453 / len(text)
    print(f"{path}: perplexity {whole.perplexity:.2f}, {bits:.3f} bits per character, {whole.num_tokens} tokens")
    lines = [line for line in text.splitlines() if len(llm.tokenize(line)) > 1]
    if lines:
        scores = llm.perplexity(lines, stride=args.stride)
        worst = max(range(len(lines)), key=lambda i: scores[i].perplexity)
        print(f"  least likely line: {lines[worst]!r} (perplexity {scores[worst].perplexity:.2f})")
