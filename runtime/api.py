"""`runtime.generate`: prompts in, results out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import cast

from runtime.engine import Engine, Handle
from runtime.errors import RequestError
from runtime.request import Request, is_id_sequence, stop_strings, token_ids
from runtime.result import Result
from runtime.sampling import Coupling, SamplingParams
from runtime.text import Message, Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]


def generate(
    bundle: str | PathLike[str] | Engine,
    prompts: Sequence[Prompt],
    *,
    n: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    seed: int | None = None,
    coupling: Coupling = "rejection",
    speculate: bool = True,
    max_draft: int | None = None,
    confidence_threshold: float | None = None,
    adaptive: bool = True,
    logprobs: int | None = None,
) -> list[Result]:
    """Generate `n` continuations of each prompt, as many at once as the bundle has slots.

    Args:
        bundle: a bundle's directory, or an `Engine` that already serves one.
        prompts: each is raw text, a list of messages (``{"role": …, "content": …}``, put through the chat template), or
            token ids.
        n: continuations of each prompt, each drawn anew; greedy ones are all the same.
        max_new_tokens: most tokens a result has; 0 gives empty results.
        temperature: 0 takes the most probable token, else tokens are drawn.
        top_p: tokens are drawn from the smallest set with this much probability; 1 for no cut.
        top_k: tokens are drawn from the k most probable; 0 for no cut.
        min_p: tokens less probable than this times the most probable one are not drawn; 0 for no cut.
        repetition_penalty: above 1 makes tokens of prompt and output less probable; 1 for none.
        presence_penalty: taken from the logits of tokens that the output has; 0 for none.
        frequency_penalty: the same for each time that the output has them.
        logit_bias: what is added to the logits of token ids; ``-inf`` forbids one.
        stop: strings that end a text, and are cut from it.
        stop_token_ids: ids that end a sequence besides the model's own.
        ignore_eos: go on past the model's end-of-sequence ids.
        seed: fixes the random numbers; results of one call draw from different streams. None takes a random one.
        coupling: how drafts are verified when drawing: by ``"rejection"``, which accepts most, or by ``"gumbel"``,
            which gives the very tokens of plain decoding with the same seed.
        speculate: False decodes plainly. Greedy tokens are the same, drawn ones have the same distribution.
        max_draft: most drafts a round; None takes the bundle's default.
        confidence_threshold: drafts end before the first confidence below it; None takes the bundle's default.
        adaptive: False verifies as many drafts as the two above allow, even where fewer would be faster.
        logprobs: report each token's log-probability and that of so many likeliest alternatives; None reports none.

    The values that sampling takes are described at `SamplingParams`, the others at `Request`.

    Returns:
        ``results[i * n + k]`` is continuation k of prompt i.

    Raises:
        RequestError: a prompt or argument that can't be served; no prompt has been run then.
        ServingError: a prompt that failed while it was served.
        BundleError, BackendUnavailable: the bundle can't be served here.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise RequestError("prompts", "not a list", expected="a list of prompts", found=type(prompts).__name__)
    if type(n) is not int or n < 1:
        raise RequestError("n", "not a count", expected="an integer ≥ 1", found=repr(n), remedy="Leave it out for one")
    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias={} if logit_bias is None else logit_bias,
        coupling=coupling,
    )
    stops, stop_ids = stop_strings(stop), token_ids("stop_token_ids", stop_token_ids)

    def requests(engine: Engine) -> list[Request]:
        made: list[Request] = []
        for index, prompt in enumerate(prompts):
            try:
                request = Request(
                    prompt_ids=prompt_ids(prompt, engine.tokenizer),
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    stop=stops,
                    stop_token_ids=stop_ids,
                    ignore_eos=ignore_eos,
                    speculate=speculate,
                    max_draft=max_draft,
                    confidence_threshold=confidence_threshold,
                    adaptive=adaptive,
                    logprobs=logprobs,
                )
                request.check(engine.bundle.manifest.limits, engine.bundle.manifest.models.vocab_size)
            except RequestError as error:
                if error.where.startswith(("prompt", "messages")):
                    raise error.at(f"prompts[{index}]") from None
                raise
            made += [replace(request, draw_stream=index * n + k) for k in range(n)]
        return made

    if isinstance(bundle, Engine):
        return _run(bundle, requests(bundle))
    with Engine(bundle) as engine:
        return _run(engine, requests(engine))


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The token ids of a prompt of any kind.

    Raises:
        RequestError: text or messages for a bundle without a tokenizer or template, or a prompt of no known kind.
    """
    if not isinstance(prompt, str) and not is_id_sequence(prompt):
        kinds = "text, a list of messages, or a list of token ids"
        raise RequestError("prompt", "of no known kind", expected=kinds, found=type(prompt).__name__)
    items = tuple(prompt)
    if not isinstance(prompt, str) and not isinstance(next(iter(items), None), Mapping):
        return cast("tuple[int, ...]", items)  # `Request` looks at each
    if tokenizer is None:
        raise RequestError("prompt", "the bundle has no tokenizer", expected="token ids", found=type(prompt).__name__)
    if isinstance(prompt, str):
        return tuple(tokenizer.encode_text(prompt))
    return tuple(tokenizer.encode_chat(cast("tuple[Message, ...]", items)))


def _run(engine: Engine, requests: list[Request]) -> list[Result]:
    handles: list[Handle] = []
    try:
        for request in requests:
            while not engine.accepts:
                engine.step()
            handles.append(engine.submit(request))
        return [engine.result(handle) for handle in handles]
    finally:
        # Ctrl-C or an error must leave nothing running on an engine that others use.
        for handle in handles:
            engine.forget(handle)
