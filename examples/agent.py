"""An agent: the model calls two tools until it answers. The first call is required, so that weak models call, too.

python examples/agent.py "What is 17 times 23?" --model path/to/model
"""

import argparse
import json
import operator
from datetime import datetime, timezone

from nanoinfer import LLM, SamplingParams

OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


def calculate(operation: str, a: int, b: int) -> int:
    """Calculate with two numbers."""
    return OPERATIONS[operation](a, b)


def clock() -> str:
    """Return the date and the time."""
    return datetime.now(timezone.utc).isoformat(timespec="minutes")


def describe(function, **properties):
    """Return what a model is told of a function."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": function.__name__, "description": function.__doc__, "parameters": schema}


NUMBER, OPERATION = {"type": "integer", "minimum": 0, "maximum": 9999}, {"enum": list(OPERATIONS)}
FUNCTIONS = {"calculate": calculate, "clock": clock}
DESCRIBED = [describe(calculate, operation=OPERATION, a=NUMBER, b=NUMBER), describe(clock)]
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("question")
parser.add_argument("--model", required=True, help="a model with a chat template")
parser.add_argument("--turns", type=int, default=4, help="most answers of the model")
args = parser.parse_args()

llm = LLM(args.model)
params = SamplingParams(max_tokens=200, temperature=0)
system = "Answer in one sentence. You can call these functions: " + json.dumps(DESCRIBED)
tools = [{"type": "function", "function": function} for function in DESCRIBED]
conversation = llm.conversation(system, tools=tools, parallel_tool_calls=False)
answer = conversation.send(args.question, params, tool_choice="required")
for _ in range(args.turns):
    for _ in answer:  # generates it
        pass
    message, results = conversation.messages[-1], []
    for call in message.get("tool_calls", []):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        result = FUNCTIONS[name](**arguments)  # the arguments match the schema
        print(f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())}) -> {result}")
        results.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    if not results:
        break
    answer = conversation.send(results, params)
print(message["content"])
