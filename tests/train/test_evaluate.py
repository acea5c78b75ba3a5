"""The held-out score against the log-probabilities of documents one by one."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from conftest import VOCAB, write_documents

from upjax.errors import InputError
from upjax.evaluate.perplexity import evaluate
from upjax.mesh import make_mesh
from upjax.model import Dtypes, abstract_params, build

LENGTH, NUM_DOCUMENTS = 16, 11  # with the end of text; two fill a sequence, and the last one leaves padding


@pytest.fixture
def documents():
    return np.random.default_rng(0).integers(1, VOCAB, (NUM_DOCUMENTS, LENGTH - 1))


@pytest.fixture
def held_out(documents, tmp_path):
    return write_documents(tmp_path, held_out=documents.tolist())


def make_decoder(config):
    rng = np.random.default_rng(0)
    abstract = abstract_params(config, Dtypes())
    arrays = {path: rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype) for path, leaf in abstract.items()}
    return build(config, Dtypes(), {path: jax.device_put(x, abstract[path].sharding) for path, x in arrays.items()})


def test_the_loss_is_that_of_documents_one_by_one(moe, documents, held_out):
    decoder = make_decoder(moe)
    got = evaluate(decoder, held_out, sequence_length=2 * LENGTH, batch_size=4)
    tokens = np.pad(documents, ((0, 0), (1, 0)))  # the end-of-text token stands before a document
    targets = np.pad(documents, ((0, 0), (0, 1)))
    output = jax.jit(lambda decoder, tokens: decoder(tokens))(decoder, tokens.astype(np.int32))
    logits = np.asarray(output.logits, np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_probs, targets[..., None], axis=-1).sum()
    assert (got.num_tokens, got.num_bytes) == (NUM_DOCUMENTS * LENGTH, NUM_DOCUMENTS * (LENGTH - 1) * 3)
    np.testing.assert_allclose(got.loss, nats / targets.size, rtol=1e-5)
    np.testing.assert_allclose(got.bits_per_byte, nats / math.log(2) / (documents.size * 3), rtol=1e-5)
    np.testing.assert_allclose(got.perplexity, math.exp(nats / targets.size), rtol=1e-5)
    counts = np.asarray(output.router.expert_counts)
    np.testing.assert_allclose(got.expert_load, counts / counts.sum(1, keepdims=True), rtol=1e-6)


@pytest.mark.slow
def test_a_mesh_scores_the_same(moe, held_out):
    wanted = evaluate(make_decoder(moe), held_out, sequence_length=LENGTH, batch_size=8)
    with jax.set_mesh(make_mesh(2, 2, 2)):
        got = evaluate(make_decoder(moe), held_out, sequence_length=LENGTH, batch_size=8)
    np.testing.assert_allclose(got.loss, wanted.loss, rtol=1e-6)
    np.testing.assert_allclose(got.expert_load, wanted.expert_load)


def test_what_cannot_be_scored_is_refused(dense, held_out):
    small = dataclasses.replace(dense, vocab_size=VOCAB - 1)
    with pytest.raises(InputError, match=f"holds token id {VOCAB - 1}"):
        evaluate(make_decoder(small), held_out, sequence_length=LENGTH, batch_size=4)
    with jax.set_mesh(make_mesh(2, 1, 1)), pytest.raises(InputError, match="batch_size 3 is not a multiple"):
        evaluate(make_decoder(dense), held_out, sequence_length=LENGTH, batch_size=3)
