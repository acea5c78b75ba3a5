"""The model types of transformers that upjax reads and writes: one module a family."""

from pathlib import Path
from typing import Any

from upjax.errors import InputError, Problems
from upjax.hf.families.common import Family
from upjax.hf.families.llama import LLAMA
from upjax.hf.families.mistral import MISTRAL
from upjax.hf.families.mixtral import MIXTRAL
from upjax.hf.families.qwen2 import QWEN2
from upjax.hf.families.qwen2_moe import QWEN2_MOE
from upjax.hf.families.qwen3 import QWEN3
from upjax.hf.families.qwen3_moe import QWEN3_MOE
from upjax.hf.families.settings import Settings
from upjax.model.config import DecoderConfig, MoEConfig

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, QWEN2_MOE)
}
"""In the order in which `choose_family` prefers them."""


def family_named(model_type: str) -> Family:
    """Returns the family; InputError with the known ones where there is none of that name."""
    if model_type not in FAMILIES:
        raise InputError(f"family {model_type!r} is unknown; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def choose_family(config: DecoderConfig) -> str:
    """Returns the first family whose format can say all of `config`; InputError with what each lacks if none can."""
    lacks = {name: family.lacks(config) for name, family in FAMILIES.items()}
    fitting = [name for name, lacking in lacks.items() if not lacking]
    if not fitting:
        raise InputError(
            "no supported format can express this model",
            [f"{name} cannot express: {'; '.join(lacking)}" for name, lacking in lacks.items()],
        )
    return fitting[0]


def decoder_config(values: dict[str, Any], file: Path | str, problems: Problems) -> tuple[DecoderConfig, Family] | None:
    """Returns what a config.json describes; None, with each fault added to `problems`, where it has any."""
    name = values.get("model_type")
    if name not in FAMILIES:
        problems.add(f"{file}: model_type is {name!r}; supported: {', '.join(FAMILIES)}")
        return None
    family, before = FAMILIES[name], len(problems.found)
    settings = Settings(values, str(file), problems)
    fields = family.read(settings)
    settings.finish()
    if len(problems.found) > before:
        return None
    try:
        if "moe" in fields:
            fields["moe"] = MoEConfig(**fields["moe"])
        return DecoderConfig(**fields), family
    except ValueError as error:
        problems.add(f"{file}: {error}")
        return None


def hf_config(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Returns the config.json of `config`; InputError naming each thing that the format cannot express."""
    lacks = family.lacks(config)
    if lacks:
        raise InputError(f"the {family.model_type} format cannot express this model", lacks)
    return {"architectures": [family.architecture], "model_type": family.model_type, **family.write(config)}
