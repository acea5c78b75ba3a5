"""Models on disk: the same from any mesh to any other, strict about what they hold, whole or not there."""

import dataclasses
import json
import resource
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upjax.checkpoint import (
    ModelRecord,
    RunRecord,
    checkpoint_directory,
    list_steps,
    load_model,
    read_model,
    read_model_config,
    read_run,
    save_model,
    start_saving,
    tokenizer_directory,
)
from upjax.errors import InputError
from upjax.mesh import make_mesh
from upjax.model import DecoderConfig, Dtypes, MoEConfig, abstract_params, build, flat_params

CONFIG = DecoderConfig(
    vocab_size=48,
    embed_dim=16,
    hidden_dim=32,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_sequence_length=32,
    moe=MoEConfig(num_experts=8, experts_per_token=2, hidden_dim=16),
    moe_layers=(1, 2),
)
EXPERTS = ("gate", "up", "down")


def make_arrays(config=CONFIG):
    """Random parameters, but each expert's are the number of its layer and its own."""
    rng = np.random.default_rng(0)
    arrays = {
        path: rng.normal(0, 1, leaf.shape).astype(np.float32)
        for path, leaf in abstract_params(config, Dtypes()).items()
    }
    for path, array in arrays.items():
        if "/moe/" in path and path.endswith(EXPERTS):
            layer, expert = np.indices(array.shape[:2])
            array[...] = (100 * layer + expert)[..., None, None]
    return arrays


def make_decoder(dtypes=Dtypes()):  # noqa: B008 (it is frozen)
    abstract = abstract_params(CONFIG, dtypes)
    arrays = make_arrays()
    return build(
        CONFIG, dtypes, {p: jax.device_put(arrays[p].astype(a.dtype), a.sharding) for p, a in abstract.items()}
    )


def assert_holds(decoder, arrays):
    for path, parameter in flat_params(decoder).items():
        np.testing.assert_array_equal(parameter, arrays[path], err_msg=path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model"
    with jax.set_mesh(make_mesh(2, 2, 2)):
        save_model(path, make_decoder(), provenance={"method": "made up", "seed": 3})
    return path


def test_eight_devices_to_one_and_back(saved, tmp_path):
    alone = load_model(saved)
    assert all(len(p.devices()) == 1 for p in flat_params(alone).values())
    assert_holds(alone, make_arrays())
    save_model(tmp_path / "again", alone, provenance={})
    with jax.set_mesh(make_mesh(1, 1, 8)):
        spread = load_model(tmp_path / "again")
        assert_holds(spread, make_arrays())
        for path, abstract in abstract_params(CONFIG, Dtypes()).items():
            assert flat_params(spread)[path].sharding == abstract.sharding, path


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 2, 2), (1, 2, 4)])
def test_each_device_holds_the_experts_that_are_its_own(saved, shape):
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        params = flat_params(load_model(saved))
    place = {device: np.argwhere(mesh.devices == device)[0][2] for device in mesh.devices.flat}
    per_device = 8 // shape[2]
    for path in params:
        if "/moe/" in path and path.endswith(EXPERTS):
            for shard in params[path].addressable_shards:
                first = place[shard.device] * per_device
                fingerprints = np.asarray(shard.data)[:, :, 0, 0]
                layers, experts = np.indices(fingerprints.shape)
                np.testing.assert_array_equal(fingerprints, 100 * layers + first + experts, err_msg=path)


def test_the_record_says_what_it_was_made_from(saved):
    record = read_model(saved)
    assert record.config == read_model_config(saved) == CONFIG
    assert record.parameters_dtype == "float32"
    assert record.provenance == {"method": "made up", "seed": 3}


def test_parameters_are_read_in_the_dtype_asked_for_but_routers(saved):
    decoder = load_model(saved, dtypes=Dtypes("bfloat16", "bfloat16"))
    for path, parameter in flat_params(decoder).items():
        dtype = jnp.float32 if path.endswith("/router") else jnp.bfloat16
        np.testing.assert_array_equal(parameter, make_arrays()[path].astype(dtype), err_msg=path)
        assert parameter.dtype == dtype


def test_bfloat16_stays_bfloat16(tmp_path):
    save_model(tmp_path / "model", make_decoder(Dtypes("bfloat16", "float32")), provenance={})
    loaded = load_model(tmp_path / "model")
    assert loaded.dtypes == Dtypes("bfloat16", "bfloat16")
    wanted = flat_params(make_decoder(Dtypes("bfloat16")))
    assert_holds(loaded, wanted)


def test_a_config_that_the_parameters_do_not_fit_is_refused_in_full(tmp_path):
    save_model(tmp_path / "model", make_decoder(), provenance={})
    file = tmp_path / "model" / "model.json"
    record = json.loads(file.read_text())
    record["config"] |= {"vocab_size": 50, "qk_norm": True}
    file.write_text(json.dumps(record))
    with pytest.raises(InputError) as caught:
        load_model(tmp_path / "model")
    problems = "\n".join(caught.value.problems)
    assert "embedding: [48, 16] where the config needs [50, 16]" in problems
    assert "segments/0/0/attention/query_norm: missing" in problems
    assert len(caught.value.problems) == 2 + 2 * len(CONFIG.segments)


def test_an_unknown_or_damaged_record_is_refused(tmp_path):
    save_model(tmp_path / "model", make_decoder(), provenance={})
    file = tmp_path / "model" / "model.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(InputError, match="format"):
        load_model(tmp_path / "model")
    with pytest.raises(InputError, match="neither an upjax model"):
        load_model(tmp_path)


def test_a_damaged_array_is_refused(tmp_path):
    save_model(tmp_path / "model", make_decoder(), provenance={})
    largest = max((tmp_path / "model" / "params").rglob("*"), key=lambda f: f.stat().st_size if f.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(InputError, match=r"cannot read .*model"):
        load_model(tmp_path / "model")


def test_what_is_there_is_not_overwritten_unasked(saved, tmp_path):
    decoder = load_model(saved)
    save_model(tmp_path / "model", decoder, provenance={"first": True})
    with pytest.raises(InputError, match="exists already"):
        save_model(tmp_path / "model", decoder, provenance={})
    assert read_model(tmp_path / "model").provenance == {"first": True}
    save_model(tmp_path / "model", decoder, provenance={"second": True}, overwrite=True)
    assert read_model(tmp_path / "model").provenance == {"second": True}


def test_a_full_disk_leaves_nothing(saved, tmp_path):
    decoder = load_model(saved)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # writes beyond it fail as on a full disk
    try:
        with pytest.raises(InputError, match="cannot write"):
            save_model(tmp_path / "model", decoder, provenance={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_goes_along_from_a_source_and_from_model_to_model(saved, tmp_path):
    source = tmp_path / "hub"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": 0}')
    (source / "model.safetensors").write_text("no tokenizer")
    decoder = load_model(saved)
    save_model(tmp_path / "first", decoder, provenance={}, tokenizer_from=source)
    save_model(tmp_path / "second", decoder, provenance={}, tokenizer_from=tmp_path / "first")
    files = {file.name for file in tokenizer_directory(tmp_path / "second").iterdir()}
    assert files == {"tokenizer.json", "generation_config.json"}
    assert tokenizer_directory(tmp_path / "second").parent == tmp_path / "second"


def test_layers_of_other_kinds_are_kept_apart(tmp_path):
    config = dataclasses.replace(CONFIG, moe_layers=(0, 2))
    arrays = make_arrays(config)
    save_model(tmp_path / "model", build(config, Dtypes(), jax.tree.map(jnp.asarray, arrays)), provenance={})
    assert_holds(load_model(tmp_path / "model"), arrays)


def test_a_checkpoint_holds_what_was_saved_whatever_becomes_of_the_arrays_meanwhile(tmp_path):
    model = ModelRecord(config=CONFIG, parameters_dtype="float32", provenance={})
    record = RunRecord(model=model, config={}, data_state={"next_index": 7})
    add_one = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with jax.set_mesh(make_mesh(2, 2, 2)):
        params, training = flat_params(make_decoder()), {"count": jnp.int32(3)}
        save = partial(start_saving, tmp_path, training=training, record=record, keep=lambda steps: set(steps[-1:]))
        finish_first = save(1, params=params)
        for _ in range(5):  # each writes over the memory of the one before
            params = add_one(params)
        finish_first()
        assert_holds(load_model(tmp_path), make_arrays())
        save(2, params=params)()
    assert list_steps(tmp_path) == [2]
    assert_holds(load_model(tmp_path), {path: x + 1 + 1 + 1 + 1 + 1 for path, x in make_arrays().items()})
    assert read_run(checkpoint_directory(tmp_path, 2)) == record
