"""Stream an answer from an `Engine`, which stays loaded between requests; stop it when there is enough.

python docs/examples/02_stream.py engines/build/smollm2-135m
"""

import sys

from runtime import Engine, Request

with Engine(sys.argv[1]) as engine:
    if engine.tokenizer is None:
        sys.exit("this bundle serves token ids only")
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": "Write a Python function that adds two numbers."}])
    handle = engine.submit(Request(prompt_ids=tuple(ids), max_new_tokens=200))
    characters = 0
    for piece in engine.stream(handle):  # each round brings one piece, of one token or several
        print(piece.text, end="", flush=True)
        characters += len(piece.text)
        if characters > 400:
            engine.cancel(handle)
    result = engine.result(handle)  # what came until then; the engine forgets the request
    print(f"\n[{result.finish_reason} after {len(result.token_ids)} tokens]")
