"""Hold a conversation in the terminal: the model continues a dialogue. An empty line ends it.

python examples/conversation.py --you ROMEO --other JULIET
"""

import argparse

from nanoinfer import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="shakespeare")
parser.add_argument("--you", default="ROMEO", help="your name in the dialogue")
parser.add_argument("--other", default="JULIET", help="the model's name in the dialogue")
parser.add_argument("--max-tokens", type=int, default=80, help="most tokens of an answer")
parser.add_argument("--seed", type=int, default=None)
args = parser.parse_args()

llm = LLM(args.model)
# An empty line ends each turn. overflow="slide" drops the oldest tokens when the context is full.
params = SamplingParams(
    max_tokens=args.max_tokens, temperature=0.8, top_k=50, seed=args.seed, stop=["\n\n"], overflow="slide"
)
dialogue = ""
while True:
    try:
        line = input(f"{args.you}: ")
    except EOFError:
        break
    if not line:
        break
    dialogue += f"{args.you}:\n{line}\n\n{args.other}:\n"
    print(f"{args.other}: ", end="")
    for piece in llm.stream(dialogue, params):
        print(piece, end="", flush=True)
        dialogue += piece
    print()
    dialogue += "\n\n"
