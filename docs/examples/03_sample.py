"""Sample with a seed: the same call gives the same tokens, whatever else runs. Also: stop strings, and bad input.

python docs/examples/03_sample.py engines/build/smollm2-135m
"""

import sys

import runtime

with runtime.Engine(sys.argv[1]) as engine:
    prompts = ["Once upon a time"] * 2

    def tell(seed: int) -> list[str]:
        results = runtime.generate(
            engine, prompts, max_new_tokens=30, temperature=0.8, top_p=0.95, seed=seed, stop=["\n\n"]
        )
        return [result.text for result in results]

    first, again = tell(seed=1), tell(seed=1)
    print(*first, sep="\n--\n")
    print("repeatable:", first == again)
    print("prompts of one call differ:", first[0] != first[1])

    try:
        runtime.generate(engine, prompts, top_p=1.5)
    except runtime.RequestError as error:  # one line: where, what, expected, found, remedy
        print("refused:", error)
