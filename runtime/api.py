"""`runtime.generate`: prompts in, results out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import cast

from runtime.engine import Engine, Handle
from runtime.errors import RequestError
from runtime.request import Request, Result, is_id_sequence, stop_strings, token_ids
from runtime.sampling import SamplingParams
from runtime.text import Message, Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]


def generate(
    bundle: str | PathLike[str] | Engine,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    seed: int | None = None,
    speculate: bool = True,
    max_draft: int | None = None,
    confidence_threshold: float | None = None,
) -> list[Result]:
    """Generate a continuation of each prompt.

    Args:
        bundle: a bundle's directory, or an `Engine` that already serves one.
        prompts: each is raw text, a list of messages (``{"role": …, "content": …}``, put through the chat template), or
            token ids.
        max_new_tokens: most tokens a result has; 0 gives empty results.
        temperature: 0 takes the most probable token, else tokens are drawn.
        top_p: tokens are drawn from the smallest set with this much probability.
        stop: strings that end a text, and are cut from it.
        stop_token_ids: ids that end a sequence besides the model's own.
        ignore_eos: go on past the model's end-of-sequence ids.
        seed: fixes the random numbers; prompts of one call draw from different streams. None takes a random one.
        speculate: False decodes plainly. Greedy tokens are the same, drawn ones have the same distribution.
        max_draft: most drafts a round; None takes the bundle's default.
        confidence_threshold: drafts end before the first confidence below it; None takes the bundle's default.

    Returns:
        One `Result` a prompt, in order.

    Raises:
        RequestError: a prompt or argument that can't be served; no prompt has been run then.
        BundleError, BackendUnavailable: the bundle can't be served here.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise RequestError("prompts", "not a list", expected="a list of prompts", found=type(prompts).__name__)
    sampling = SamplingParams(temperature, top_p, seed)
    stops, stop_ids = stop_strings(stop), token_ids("stop_token_ids", stop_token_ids)

    def request(engine: Engine, index: int, prompt: Prompt) -> Request:
        try:
            ids = prompt_ids(prompt, engine.tokenizer)
            made = Request(
                prompt_ids=ids,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                stop=stops,
                stop_token_ids=stop_ids,
                ignore_eos=ignore_eos,
                speculate=speculate,
                max_draft=max_draft,
                confidence_threshold=confidence_threshold,
                draw_stream=index,
            )
            made.check(engine.bundle.manifest.limits, engine.bundle.manifest.models.vocab_size)
        except RequestError as error:
            if error.where.startswith(("prompt", "messages")):
                raise error.at(f"prompts[{index}]") from None
            raise
        return made

    if isinstance(bundle, Engine):
        return _run(bundle, [request(bundle, i, p) for i, p in enumerate(prompts)])
    with Engine(bundle) as engine:
        return _run(engine, [request(engine, i, p) for i, p in enumerate(prompts)])


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
            handles.append(engine.submit(request))
        return [engine.result(handle) for handle in handles]
    finally:
        # Ctrl-C or an error must leave nothing running on an engine that others use.
        for handle in handles:
            engine.forget(handle)
