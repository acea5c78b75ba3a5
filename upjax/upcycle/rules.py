"""Rules: which parameter of the target comes from which of the source, by which function. Strict about leftovers.

Parameters are named by layer here, `layers/3/mlp/gate`, whatever segments their stacks form: a dense model is one
stack where its MoE may be several. Each rule's function sees one layer's parameter and knows nothing of stacks.
"""

import dataclasses
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from upjax.errors import Problems
from upjax.mesh import has_mesh
from upjax.model import Decoder, DecoderConfig, abstract_params, build, flat_params

Make = Callable[[jax.Array | None, jax.ShapeDtypeStruct, jax.Array], jax.Array]
"""make(source, target, key) -> the target parameter of one layer: `source` is None for a rule without one, `target` has
the shape and dtype to return, `key` is the parameter's own."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The target parameter that `target` names is `make` of the source parameter that matches `source`.

    `source` is a regular expression for a whole name and `target` its replacement (`\\1` for its first group). With
    `source` None the rule is for parameters that the source has nothing for, and `target` is the expression itself.
    """

    source: str | None
    target: str
    make: Make


def layer_names(config: DecoderConfig, paths: Sequence[str]) -> dict[str, tuple[str, int | None]]:
    """Returns each parameter by layer, `layers/L/...`, with its stack and its index there (None for no stack)."""
    names: dict[str, tuple[str, int | None]] = {}
    layers = defaultdict(list)
    for layer in range(config.num_layers):
        segment, position, repeat = config.place(layer)
        layers[f"segments/{segment}/{position}"].append((layer, repeat))
    for path in paths:
        match = re.fullmatch(r"(segments/\d+/\d+)/(.+)", path)
        if match is None:
            names[path] = (path, None)
        else:
            names |= {f"layers/{layer}/{match[2]}": (path, repeat) for layer, repeat in layers[match[1]]}
    return names


def match_rules(
    rules: Sequence[Rule], sources: Sequence[str], targets: Sequence[str]
) -> dict[str, tuple[Rule, str | None]]:
    """Returns the rule and the source of every target.

    Raises InputError that lists every source that no rule takes, every target that no rule makes, and every target
    that two make.
    """
    wanted = set(targets)
    makers: dict[str, list[tuple[Rule, str | None]]] = {target: [] for target in targets}
    problems = Problems("the rules do not take this source to this target")
    for source in sources:
        taken = False
        for rule in rules:
            if rule.source is not None and (match := re.fullmatch(rule.source, source)):
                target = match.expand(rule.target)
                if target in wanted:
                    makers[target].append((rule, source))
                    taken = True
        if not taken:
            problems.add(f"{source}: no rule takes it to a parameter of the target")
    for target in targets:
        makers[target] += [(rule, None) for rule in rules if rule.source is None and re.fullmatch(rule.target, target)]
        if not makers[target]:
            problems.add(f"{target}: no rule makes it")
        if len(makers[target]) > 1:
            problems.add(
                f"{target}: made by {len(makers[target])} rules, from {[source for _, source in makers[target]]}"
            )
    problems.raise_if_any()
    return {target: made[0] for target, made in makers.items()}


def apply_rules(rules: Sequence[Rule], source: Decoder, config: DecoderConfig, *, seed: int) -> Decoder:
    """Returns the model of `config` that the rules make of `source`, built sharded: each device makes its own part.

    A parameter's key depends on `seed` and its name alone, so every mesh draws the same numbers. Raises InputError
    as `match_rules` does.
    """
    given = flat_params(source)
    wanted = abstract_params(config, source.dtypes)
    from_names, to_names = layer_names(source.config, list(given)), layer_names(config, list(wanted))
    made_by = match_rules(rules, list(from_names), list(to_names))
    layers_of = defaultdict(list)
    for name, (path, index) in to_names.items():
        layers_of[path].append((index, name))

    made = {}
    for path, leaf in wanted.items():
        steps = [(name, *made_by[name]) for _, name in sorted(layers_of[path], key=lambda place: place[0] or 0)]
        stacked = path.startswith("segments/")
        made[path] = _make_leaf(leaf, steps, given, from_names, jax.random.key(seed), stacked)
    return build(config, source.dtypes, made)


def _make_leaf(leaf, steps, given, from_names, key, stacked: bool) -> jax.Array:
    """Returns one stack of the target (or one parameter without layers), made under jit in its own sharding."""
    shape = leaf.shape[1:] if stacked else leaf.shape
    target = jax.ShapeDtypeStruct(shape, leaf.dtype)
    paths = sorted({from_names[source][0] for _, _, source in steps if source is not None})

    def make(stacks: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        layers = []
        for name, rule, source in steps:
            own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            layers.append(rule.make(_pick(stacks, from_names, source), target, own_key))
        made = jnp.stack(layers) if stacked else layers[0]
        assert (made.shape, made.dtype) == (leaf.shape, leaf.dtype), f"{steps[0][0]}: made {made.shape} {made.dtype}"
        return jax.sharding.reshard(made, leaf.sharding.spec) if has_mesh() else made

    return jax.jit(make)({path: given[path] for path in paths}, key)


def _pick(stacks, from_names, source: str | None) -> jax.Array | None:
    if source is None:
        return None
    path, index = from_names[source]
    return stacks[path] if index is None else stacks[path][index]
