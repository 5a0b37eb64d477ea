"""Answer two prompts with `runtime.generate`, and look at what speculation did.

python docs/examples/01_generate.py engines/build/smollm2-135m
"""

import sys

import runtime

# A string is raw text, a list of messages goes through the chat template, a list of ints is token ids.
prompts = ["The capital of France is", [{"role": "user", "content": "Name three primary colours."}]]

for result in runtime.generate(sys.argv[1], prompts, max_new_tokens=40):
    stats = result.stats
    print(result.text.strip())
    print(f"  {len(result.token_ids)} tokens, ended by {result.finish_reason}, {result.tokens_per_second:.1f} a second")
    print(f"  {stats.rounds} rounds: {sum(stats.accepted)} of {sum(stats.proposed)} drafts accepted")
