"""Text to compare models on when the user names none."""

from pathlib import Path

import numpy as np

from upjax.checkpoint import tokenizer_directory
from upjax.data.tokenizer import load_tokenizer
from upjax.errors import InputError

PASSAGE = """\
A ship's carpenter, asked why he kept every plank he had ever replaced, said that two boats were better than one. \
def replace(planks, index, new): return planks[:index] + [new] + planks[index + 1:]
In 1897 the harbour at Gothenburg froze for 43 days; 17 vessels waited outside. "How long?" asked the mate. "Until \
it thaws," said the pilot, and went below. Das Eis hielt bis März. La glace a tenu jusqu'en mars. 氷は三月まで残った。
| year | days | vessels |
| 1897 | 43 | 17 |
"""


def passage_tokens(model: Path | str, text: Path | None, *, num_rows: int, num_tokens: int) -> np.ndarray:
    """Returns `num_rows` rows of token ids, int32, at most `num_tokens` in all, by the model's own tokenizer.

    The text (by default a short one of prose, code, numbers and other scripts) is cut into consecutive rows. Raises
    InputError when it is too short for two tokens a row.
    """
    try:
        content = PASSAGE if text is None else text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the text {text}: {error}") from error
    [ids] = load_tokenizer(tokenizer_directory(model)).encode([content])
    length = min(len(ids), num_tokens) // num_rows
    if length < 2:
        raise InputError(f"a text of {len(ids)} tokens, at most {num_tokens}, has not two for each of {num_rows} rows")
    return np.asarray(ids[: length * num_rows], np.int32).reshape(num_rows, length)
