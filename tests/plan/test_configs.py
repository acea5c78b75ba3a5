"""The configs that come along: the models have the sizes that their makers publish, and the pods can carry them."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from upjax import load_config
from upjax.errors import Problems
from upjax.model import num_params
from upjax.plan.planning import check
from upjax.plan.topology import parse_topology

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("plan_all", ROOT / "tools" / "plan_all.py")
plan_all = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plan_all)

# The parameters of the dense checkpoints, tied weights counted once.
PUBLISHED = {
    "mixtral_8x7b_v5p": 7_241_732_096,
    "qwen3_8x8b_v5p": 8_190_735_360,
    "qwen3_64x1b7_v5p": 1_720_574_976,
    "llama32_8x1b_v5e": 1_235_814_400,
    "llama32_8x1b_v6e": 1_235_814_400,
    "smollm2_8x135m_v5p": 134_515_008,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_dense_model_has_its_published_size(name):
    decoder = load_config(ROOT / "configs" / f"{name}.yaml").model.decoder
    dense = dataclasses.replace(decoder, moe=None, moe_layers=())
    assert num_params(dense) == PUBLISHED[name]
    moe = decoder.moe
    assert moe.hidden_dim * moe.experts_per_token in (decoder.hidden_dim, 2 * decoder.hidden_dim)
    assert len(decoder.moe_layers) == decoder.num_layers


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_pod_can_carry_the_run(name):
    config, problems = load_config(ROOT / "configs" / f"{name}.yaml"), Problems("")
    check(config, config.model.decoder, parse_topology(plan_all.PODS[name]), problems)
    assert problems.found == []


def test_every_pod_config_is_planned():
    pods = {path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith("quickstart")}
    assert pods == plan_all.PODS.keys() == PUBLISHED.keys()


def test_a_table_replaces_what_stands_between_its_markers(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("a\n<!-- plan_all: pods -->\nold\n<!-- end -->\nb\n<!-- plan_all: megablox -->\n<!-- end -->\n")
    plan_all.write_between(path, "plan_all: pods", plan_all.markdown(("x", "y"), [("1", "2")]))
    assert path.read_text() == (
        "a\n<!-- plan_all: pods -->\n| x | y |\n| --- | --- |\n| 1 | 2 |\n<!-- end -->\nb\n"
        "<!-- plan_all: megablox -->\n<!-- end -->\n"
    )
    with pytest.raises(SystemExit, match="nothing"):
        plan_all.write_between(path, "nothing", "")
