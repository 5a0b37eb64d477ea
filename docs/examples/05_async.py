"""The same for asyncio: each task listens to its own request, and a task that is cancelled cancels it.

python docs/examples/05_async.py engines/build/smollm2-135m
"""

import asyncio
import sys

from runtime import AsyncEngine, Request


async def answer(engine: AsyncEngine, question: str) -> str:
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": question}])
    stream = engine.stream(Request(prompt_ids=tuple(ids), max_new_tokens=60))
    first = None
    async for piece in stream:  # `await engine.run(request)` waits for the whole result instead
        first = first or piece.text
    return f"{question} It began with {first!r} and ended by {stream.result.finish_reason}."


async def main() -> None:
    async with AsyncEngine(sys.argv[1]) as engine:  # steps run in a thread of its own
        if engine.tokenizer is None:
            sys.exit("this bundle serves token ids only")
        questions = ["Why is the sky blue?", "What is a prime number?", "Who wrote Hamlet?"]
        for line in await asyncio.gather(*(answer(engine, question) for question in questions)):
            print(line)

        try:
            await asyncio.wait_for(answer(engine, "Tell me a long story."), timeout=0.001)
        except TimeoutError:  # wait_for has cancelled the task
            await engine.drain()
            print(f"given up: {engine.stats().running} running")


asyncio.run(main())
