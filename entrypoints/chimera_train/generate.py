"""Sample text from a run's checkpoint or an exported model.

python -m chimera_train.generate --checkpoints FOLDER --tokenizer tokenizer.json --prompt "def "
python -m chimera_train.generate --export MODEL --prompt "def "
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import CheckpointError
from .command import Parser, call, integer, not_negative, unicode_text
from .config import ConfigError
from .config.contract import EXIT_FINISHED
from .data.errors import DataError
from .export import (
    ExportError,
    TokenizerFile,
    WrongArgument,
    checkpoint_arguments,
    existing_tokenizer,
    read_recipe_file,
    say,
    weights_of,
)
from .model import Decoder
from .weights import ExportedWeights, Weights, load_model

DEFAULT_NEW_TOKENS = 120
MAX_SEED = 2**64 - 1
"""The largest that torch.Generator.manual_seed takes."""


def sample(
    model: Decoder,
    prompt: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    vocab_size: int,
    end: int,
) -> Iterator[int]:
    """Token ids that follow `prompt` (not empty), up to and without `end`.

    `temperature` 0 takes the likeliest token; `top_k` 0 samples from all. Ids from `vocab_size` on, padding of the
    model's vocabulary, are never taken. Every token runs the whole window of max_position_embeddings again: no cache.
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.weight.device
    ids = list(prompt)
    for _ in range(max_new_tokens):
        window = torch.tensor([ids[-model.config.max_position_embeddings :]], device=device)
        with torch.inference_mode():
            logits_V = model(window)[0, -1, :vocab_size].float().cpu()
        token = _draw(logits_V, temperature, top_k, generator)
        if token == end:
            return
        ids.append(token)
        yield token


def _draw(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if not logits_V.isfinite().all():
        raise ExportError("the model computes no finite numbers: its training diverged, or its weights are damaged")
    if temperature == 0:
        return int(logits_V.argmax())
    if 0 < top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], float("-inf"))
    # The largest is 0, in float64, so that no temperature above 0 makes infinity of it.
    below_V = (logits_V - logits_V.max()).double()
    return int(torch.multinomial((below_V / temperature).softmax(-1), 1, generator=generator))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="chimera_train.generate", description=(__doc__ or "").split("\n")[0])
    checkpoint_arguments(parser)
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="or a model in Hugging Face format")
    parser.add_argument("--prompt", type=unicode_text, default="", help="text to go on from; empty: a new document")
    parser.add_argument(
        "--max-new-tokens",
        type=integer(1),
        metavar="N",
        help=f"default: {DEFAULT_NEW_TOKENS}, or what fits the context",
    )
    parser.add_argument("--temperature", type=not_negative, default=0.8, help="0 always takes the likeliest token")
    parser.add_argument("--top-k", type=integer(0), default=50, help="sample from the K likeliest tokens; 0: from all")
    parser.add_argument("--seed", type=integer(0, MAX_SEED), default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    options = parser.parse_args(arguments)
    if sum(x is not None for x in (options.checkpoints, options.run_root, options.export)) != 1:
        parser.error("give one of --checkpoints, --run-root and --export")
    if options.run_root is not None and options.recipe is None:
        parser.error("--run-root needs --recipe, which says where in it the checkpoints are")
    if options.export is None and options.tokenizer is None:
        parser.error("a checkpoint holds no tokenizer: give --tokenizer, the tokenizer.json of the data set")
    if options.export is not None and (options.step is not None or options.recipe is not None):
        parser.error("--step and --recipe would be ignored: --export names a whole model")
    if options.export is not None and not options.export.is_dir():
        parser.error(f"--export {options.export}: no such folder")
    try:
        if options.export is not None:
            weights: Weights = ExportedWeights(options.export)
        else:
            recipe = read_recipe_file(options.recipe) if options.recipe is not None else None
            weights = weights_of(options, recipe)
        tokenizer = existing_tokenizer(options.tokenizer or options.export / "tokenizer.json")
        tokenizer.check_against(weights.model)
        _run(options, weights, tokenizer)
    except (CheckpointError, ConfigError, DataError, ExportError) as error:
        return say(error)
    return EXIT_FINISHED


def _run(options: argparse.Namespace, weights: Weights, tokenizer: TokenizerFile) -> None:
    from tokenizers import Tokenizer

    codec = Tokenizer.from_file(str(tokenizer.path))
    prompt = codec.encode(options.prompt, add_special_tokens=False).ids or [tokenizer.eod_id]
    if len(prompt) > (context := weights.model.max_position_embeddings):
        raise WrongArgument(f"the prompt has {len(prompt)} tokens, and the model a context of {context}: shorten it")
    room = context + 1 - len(prompt)  # the last token is not read again
    if options.max_new_tokens is not None and options.max_new_tokens > room:
        raise WrongArgument(
            f"--max-new-tokens {options.max_new_tokens}: the model has a context of {context} tokens "
            f"(model.max_position_embeddings), and the prompt {len(prompt)}: at most {room}"
        )
    max_new_tokens = options.max_new_tokens or min(DEFAULT_NEW_TOKENS, room)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(weights, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    started = time.perf_counter()
    tokens: list[int] = []
    shown = ""
    if not options.json:
        print(options.prompt, end="", flush=True)
    for token in sample(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        vocab_size=tokenizer.vocab_size,
        end=tokenizer.eod_id,
    ):
        tokens.append(token)
        text = codec.decode(tokens)
        # A character of several bytes may end in the next token: hold it back until it is whole.
        if not options.json and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    text = codec.decode(tokens)
    if options.json:
        seconds = time.perf_counter() - started
        result = {
            "origin": weights.origin,
            "prompt": options.prompt,
            "text": text,
            "tokens": tokens,
            "ended": len(tokens) < max_new_tokens,
            "tokens_per_s": round(len(tokens) / seconds, 2),
        }
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(text[len(shown) :])


if __name__ == "__main__":
    call(main)
