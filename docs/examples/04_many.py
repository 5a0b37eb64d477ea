"""Serve many requests at once: submit them, step the engine, pick up results as they come; look at its statistics.

python docs/examples/04_many.py engines/build/smollm2-135m
"""

import sys

from runtime import Engine, Request

subjects = ["the sea", "a lighthouse", "winter", "old books", "a train at night", "rain"]

with Engine(sys.argv[1]) as engine:
    if engine.tokenizer is None:
        sys.exit("this bundle serves token ids only")
    running = {}
    for i, subject in enumerate(subjects):  # those without a slot wait in a queue, which raises QueueFull when full
        ids = engine.tokenizer.encode_chat([{"role": "user", "content": f"Write a sentence about {subject}."}])
        running[engine.submit(Request(prompt_ids=tuple(ids), max_new_tokens=20 + 5 * i))] = subject
    while running:
        engine.step()  # some prompt tokens of those that came last, and a round of everyone else
        for handle in [handle for handle in running if engine.finished(handle)]:
            print(f"{running.pop(handle)}: {engine.result(handle).text.strip()}")

    stats = engine.stats()
    print(f"{stats.finished} after {stats.steps} steps")
    print(f"{stats.generated_tokens} tokens, {stats.tokens_per_round:.2f} a round")
