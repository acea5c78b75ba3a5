"""A tokenizer.json as training needs it: whole documents, no added tokens, and a known end-of-text id."""

import dataclasses
import hashlib
import json
from pathlib import Path

import tokenizers

from upjax.errors import InputError

TOKENIZER_FILE = "tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A tokenizer with the facts a dataset records of it."""

    tokenizer: tokenizers.Tokenizer
    sha256: str
    vocab_size: int
    end_of_text: int

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Returns the token ids of each text, without the end-of-text id."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def load_tokenizer(path: Path | str, end_of_text: str | int | None = None) -> TextTokenizer:
    """Returns the tokenizer of `path`: a tokenizer.json, or a directory with one in it or in its `tokenizer/`.

    The end-of-text id is `end_of_text` (a token or an id), else what the tokenizer_config.json, config.json or
    generation_config.json beside the file says.
    """
    file = _find(Path(path))
    try:
        content = file.read_bytes()
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # The library raises bare Exception for a file that it cannot read.
        raise InputError(f"cannot read the tokenizer {file}: {error}") from error
    # A file may carry the truncation and padding of whoever saved it; either would change documents silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A text that spells out "<|endoftext|>" stays text; only the end of a document is an end of text.
    tokenizer.encode_special_tokens = True
    ids = tokenizer.get_vocab()
    return TextTokenizer(
        tokenizer=tokenizer,
        sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=max(ids.values(), default=-1) + 1,
        end_of_text=_end_of_text(ids, file.parent, end_of_text),
    )


def _find(path: Path) -> Path:
    candidates = [path / TOKENIZER_FILE, path / "tokenizer" / TOKENIZER_FILE] if path.is_dir() else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise InputError("no tokenizer", [f"{candidate} is not a file" for candidate in candidates])


def _end_of_text(ids: dict[str, int], directory: Path, wanted: str | int | None) -> int:
    """Returns the id of the end-of-text token, which must be one of `ids`."""
    place, token = ("end_of_text", wanted) if wanted is not None else _configured(directory)
    number = ids.get(token) if isinstance(token, str) else token
    if number not in ids.values():
        raise InputError(f"{place} is {token!r}, which the tokenizer does not have")
    return number


def _configured(directory: Path) -> tuple[str, str | int]:
    """Returns the end-of-text token that the files of a Hugging Face directory name, and where."""
    for name, key in (
        ("tokenizer_config.json", "eos_token"),
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
    ):
        file = directory / name
        if not file.is_file():
            continue
        try:
            token = json.loads(file.read_bytes()).get(key)
        except (ValueError, AttributeError) as error:
            raise InputError(f"{file} is not a JSON object: {error}") from error
        if isinstance(token, dict):  # an added token with its settings
            token = token.get("content")
        if isinstance(token, list):  # of several ways to end, the first counts
            token = token[0] if token else None
        if token is not None:
            return f"{key} of {file}", token
    raise InputError(
        "no end-of-text token: name it with end_of_text",
        [f"no tokenizer_config.json, config.json or generation_config.json in {directory} names one"],
    )
