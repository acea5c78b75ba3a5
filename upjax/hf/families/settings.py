"""Strict reading of a config.json: each key is understood, known to change nothing, or reported."""

import logging
from typing import Any

from upjax.errors import Problems

log = logging.getLogger(__name__)

REQUIRED: Any = object()

HARMLESS = frozenset(
    """_attn_implementation_autoset _name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id
    id2label initializer_range is_llama_config label2id model_type num_labels output_attentions output_hidden_states
    output_router_logits pad_token_id pretraining_tp problem_type return_dict router_aux_loss_coef task_specific_params
    tokenizer_class torch_dtype torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version
    use_bfloat16 use_cache""".split()
)
"""Keys that change nothing of what the model computes, or only how transformers trains, generates or reports."""

TRAINING_NOISE = ("attention_dropout", "router_jitter_noise")
"""Keys that transformers applies in training only; upjax has no such noise, which is said when they are not 0."""

MUST_BE: dict[str, tuple] = {
    "add_cross_attention": (False,),
    "attn_logit_softcapping": (None,),
    "auto_map": (None,),
    "final_logit_softcapping": (None,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (None, 1.0),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "tie_encoder_decoder": (False,),
    "use_mrope": (None, False),
}
"""Keys of features that no supported family has: fine when they are off."""


class Settings:
    """The keys of one config.json; each read says what it expects, and problems gather until the end."""

    def __init__(self, values: dict[str, Any], file: str, problems: Problems):
        self.values, self.file, self.problems = values, file, problems
        self.read: set[str] = set()
        self.faulty: set[str] = set()

    def problem(self, key: str, supported: str) -> None:
        self.faulty.add(key)
        self.problems.add(f"{self.file}: {key} is {self.values.get(key)!r}; supported: {supported}")

    def whole(self, key: str, default: Any = REQUIRED, least: int = 1) -> Any:
        """Returns the whole number at `key`; `default` where it is absent or null."""
        return self._value(key, default, lambda v: type(v) is int and v >= least, f"a whole number of at least {least}")

    def real(self, key: str, default: Any = REQUIRED) -> Any:
        """Returns the positive number at `key` as a float; `default` where it is absent or null."""
        value = self._value(key, default, lambda v: type(v) in (int, float) and v > 0, "a positive number")
        return float(value) if type(value) is int else value

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        """Returns the boolean at `key`; `default` where it is absent or null."""
        return self._value(key, default, lambda v: type(v) is bool, "true or false")

    def mapping(self, key: str) -> dict[str, Any] | None:
        """Returns the mapping at `key`, or None where it is absent or null."""
        return self._value(key, None, lambda v: type(v) is dict, "a mapping")

    def listing(self, key: str) -> list | None:
        """Returns the list at `key`, or None where it is absent or null."""
        return self._value(key, None, lambda v: type(v) is list, "a list")

    def choice(self, key: str, allowed: tuple, default: Any) -> Any:
        """Returns the value at `key`, one of `allowed`; `default` where it is absent or null."""
        return self._value(key, default, lambda v: v in allowed, " or ".join(repr(v) for v in allowed))

    def finish(self) -> None:
        """Reports the keys that nobody read and that are not known to be harmless."""
        for key in sorted(self.values.keys() - self.read):
            value = self.values[key]
            if key in TRAINING_NOISE:
                if value:
                    log.warning("%s: %s is %s; upjax does not apply it in training", self.file, key, value)
            elif key in MUST_BE:
                if value not in MUST_BE[key]:
                    self.problem(key, " or ".join(repr(v) for v in MUST_BE[key]))
            elif key not in HARMLESS:
                self.problems.add(
                    f"{self.file}: {key} is {value!r}; unknown for model_type {self.values.get('model_type')!r}: "
                    "remove the key if it changes nothing of what the model computes"
                )

    def _value(self, key: str, default: Any, fits, expected: str) -> Any:
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            if default is not REQUIRED:
                return default
            self.faulty.add(key)
            self.problems.add(f"{self.file}: {key} is missing; expected {expected}")
        elif fits(value):
            return value
        else:
            self.problem(key, expected)
        # Reading goes on so that every problem is listed; the 1 stands in until the problem stops the import.
        return 1 if default is REQUIRED else default
