"""Hold a conversation in the terminal: the model continues a dialogue. An empty line ends it.

python examples/conversation.py --you ROMEO --other JULIET
"""

import argparse

from nanoinfer import LLM, SamplingParams

# The built-in model has no chat template: this one writes the messages as a play.
TEMPLATE = "{% for m in messages %}{{ names[m.role] }}:\n{{ m.content }}\n\n{% endfor %}{{ names.assistant }}:\n"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="shakespeare")
parser.add_argument("--you", default="ROMEO", help="your name in the dialogue")
parser.add_argument("--other", default="JULIET", help="the model's name in the dialogue")
parser.add_argument("--max-tokens", type=int, default=80, help="most tokens of an answer")
parser.add_argument("--seed", type=int, default=None)
args = parser.parse_args()

llm = LLM(args.model)
names = {"user": args.you, "assistant": args.other}
conversation = llm.conversation(chat_template=TEMPLATE, chat_template_kwargs={"names": names})
params = SamplingParams(max_tokens=args.max_tokens, temperature=0.8, top_k=50, seed=args.seed, stop=["\n\n"])
while True:
    try:
        line = input(f"{args.you}: ")
    except EOFError:
        break
    if not line:
        break
    print(f"{args.other}: ", end="")
    for piece in conversation.send(line, params):  # processes the new tokens only
        print(piece, end="", flush=True)
    print()
