"""The tokenizer of a GGUF file as the files that transformers and tokenizers read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from upjax.errors import Problems
from upjax.hf.files import GENERATION

CONTROL = 3
"""The token type of markers such as <|im_end|>, which text never turns into by merging."""

PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
}
"""How text is split before merging, by llama.cpp's name for it."""

SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""llama.cpp's names of the special tokens, and those of transformers."""


def write_tokenizer(directory: Path, fields: Mapping[str, Any], max_length: int, problems: Problems) -> dict[str, int]:
    """Writes the tokenizer's files and returns the ids of its special tokens by the names of config.json."""
    given = {name.removeprefix("tokenizer."): f for name, f in fields.items() if name.startswith("tokenizer.")}
    for key, supported in (("ggml.model", ("gpt2",)), ("ggml.pre", tuple(PRE_TOKENIZERS))):
        value = given[key].contents() if key in given else None
        if value not in supported:
            problems.add(f"tokenizer.{key} is {value!r}; supported: {', '.join(supported)}")
    missing = [key for key in ("ggml.tokens", "ggml.merges", "ggml.token_type") if key not in given]
    for key in missing:
        problems.add(f"tokenizer.{key} is missing")
    if problems.found:
        return {}
    tokens, types = given["ggml.tokens"].contents(), given["ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in given["ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[given["ggml.pre"].contents()]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    )
    tokenizer.save(str(directory / "tokenizer.json"))

    ids = {
        name: given[f"ggml.{key}_token_id"].contents()
        for key, name in SPECIAL.items()
        if f"ggml.{key}_token_id" in given
    }
    names = {f"{name}_token": tokens[i] for name, i in ids.items()}
    settings = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if "chat_template" in given:
        settings["chat_template"] = given["chat_template"].contents()
    special = {f"{name}_token_id": i for name, i in ids.items() if name != "unk"}
    for file, values in (
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", names),
        (GENERATION, special),
    ):
        (directory / file).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return special
