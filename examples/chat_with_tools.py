"""A conversation in which the model calls Python functions, through the `openai` package.

    dsv4-jax serve CHECKPOINT    # a model that knows conversations; chat_checkpoint.py writes one
    python examples/chat_with_tools.py "What is 17 times 23?"

The server holds the arguments to each tool's schema, since the tools are strict. The model that
ships in the package only completes text and cannot chat.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import openai

HOURS = {"Bern": 14, "Tokyo": 21}
"""A stand-in for what your program knows."""


def multiply(a: int, b: int) -> int:
    """A product."""
    return a * b


def hour_in(city: str) -> int:
    """The hour of day in a city."""
    return HOURS[city]


def tool(function: Callable[..., Any], description: str, **schemas: Any) -> dict[str, Any]:
    """A function as the protocol describes it, with the schema of each argument."""
    schema = {
        "type": "object",
        "properties": schemas,
        "required": list(schemas),
        "additionalProperties": False,
    }
    described = {"name": function.__name__, "description": description, "parameters": schema}
    return {"type": "function", "function": described | {"strict": True}}


FUNCTIONS = {function.__name__: function for function in (multiply, hour_in)}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
"""Bounds end a number where a model does not, such as the small one of `chat_checkpoint.py`."""
TOOLS = [
    tool(multiply, "Multiplies two whole numbers.", a=NUMBER, b=NUMBER),
    tool(hour_in, "The hour of day in a city.", city={"enum": list(HOURS)}),
]


def chat(
    client: openai.OpenAI,
    model: str,
    question: str,
    *,
    first_choice: str = "auto",
    max_rounds: int = 5,
    **options: Any,
) -> list[Any]:
    """Asks, runs what the model calls, and gives it the results until it answers with text.

    Args:
      client: of the server.
      model: its name there.
      question: what the user says.
      first_choice: `tool_choice` of the first request: "required" makes the model call something.
      max_rounds: requests at most.
      **options: fields of each request.

    Returns:
      The messages of the conversation.
    """
    messages: list[Any] = [{"role": "user", "content": question}]
    for number in range(max_rounds):
        print("asking ...", file=sys.stderr, flush=True)  # the whole answer comes at once
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=first_choice if number == 0 else "auto",
            **options,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls or answer.choices[0].finish_reason == "length":
            print(message.content)
            break  # it has answered, or was cut off
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = FUNCTIONS[call.function.name](**arguments)
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    return messages


def main(argv: list[str] | None = None) -> list[Any]:
    """One question."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="any")
    parser.add_argument("--first-choice", default="auto", choices=["auto", "required"])
    parser.add_argument("--max-rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=1024)
    args = parser.parse_args(argv)
    with openai.OpenAI(base_url=args.base_url, api_key=args.api_key) as client:
        try:
            model = next(iter(client.models.list())).id
        except openai.APIConnectionError:
            parser.exit(1, f"no server at {args.base_url}; start one, or pass --base-url\n")
        return chat(
            client,
            model,
            args.question,
            first_choice=args.first_choice,
            max_rounds=args.max_rounds,
            max_tokens=args.max_tokens,
        )


if __name__ == "__main__":
    main()
