"""How long a step would take at the chips' published rates: an estimate, and a floor more than a forecast.

    step = max(compute, HBM, asynchronous collectives) + the other collectives

- compute: the FLOPs that the model needs (as MFU counts them) and those that rematerialisation repeats, at the peak
  rate of dense bfloat16. Routers are taken to be even: every device gets the same number of token-expert pairs.
- HBM: the bytes counted by `traffic.hbm_bytes` at the peak bandwidth.
- collectives: what a device sends over the links of its group, as `collectives` says. Those that the compiler made
  asynchronous may run beside the rest, and the others stop the device.

No latencies, no launch overheads, no matrix unit that waits: a real step takes longer. The rates are in
`pallas_kernels.tpu_chips`, with their sources.
"""

import dataclasses
from collections.abc import Sequence

from upjax.config import Config
from upjax.model import DecoderConfig
from upjax.model.loss import CHUNK_TOKENS
from upjax.plan.collectives import Collective
from upjax.plan.topology import Topology
from upjax.train.flops import flops_per_token, recomputed_flops_per_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of one step by what they are spent on, and what follows from them. Estimates all."""

    compute_seconds: float
    hbm_seconds: float
    asynchronous_collective_seconds: float
    synchronous_collective_seconds: float
    model_flops_per_step: float
    """What the model needs, on all devices together."""
    recomputed_flops_per_step: float
    tokens_per_step: int
    mfu: float
    """model_flops_per_step over what all devices could do in the step."""
    num_chips: int

    @property
    def step_seconds(self) -> float:
        overlapped = max(self.compute_seconds, self.hbm_seconds, self.asynchronous_collective_seconds)
        return overlapped + self.synchronous_collective_seconds

    @property
    def bound_by(self) -> str:
        """What most of the step goes to: compute, HBM or collectives."""
        parts = {
            "compute": self.compute_seconds,
            "HBM": self.hbm_seconds,
            "collectives": self.asynchronous_collective_seconds + self.synchronous_collective_seconds,
        }
        return max(parts, key=lambda name: parts[name])

    @property
    def tokens_per_day(self) -> float:
        return self.tokens_per_step / self.step_seconds * 86400

    def chip_hours(self, tokens: float) -> float:
        """Returns the chip-hours that so many tokens take; a chip counts once, however many devices it shows."""
        return tokens / self.tokens_per_step * self.step_seconds * self.num_chips / 3600


def roofline(
    config: Config,
    decoder: DecoderConfig,
    topology: Topology,
    *,
    hbm_bytes: int,
    collectives: Sequence[Collective],
) -> Roofline:
    """Returns the estimate for one step; `hbm_bytes` and `collectives` are those of one device."""
    tokens = config.data.batch_size * config.data.sequence_length
    needed = flops_per_token(decoder, config.data.sequence_length) * tokens
    again = recomputed_flops_per_token(decoder, config.data.sequence_length, config.train.remat) * tokens
    if tokens // topology.num_devices // config.optimizer.gradient_accumulation >= 2 * CHUNK_TOKENS:
        again += 2 * decoder.embed_dim * decoder.vocab_size * tokens  # the loss makes each chunk's logits again
    seconds = {True: 0.0, False: 0.0}
    for collective in collectives:
        seconds[collective.asynchronous] += collective.seconds * collective.count
    rate = topology.device.flops_per_second * topology.num_devices
    made = Roofline(
        compute_seconds=(needed + again) / rate,
        hbm_seconds=hbm_bytes / topology.device.hbm_bytes_per_second,
        asynchronous_collective_seconds=seconds[True],
        synchronous_collective_seconds=seconds[False],
        model_flops_per_step=needed,
        recomputed_flops_per_step=again,
        tokens_per_step=tokens,
        mfu=0.0,
        num_chips=topology.num_chips,
    )
    return dataclasses.replace(made, mfu=needed / made.step_seconds / rate)


def routed_rows(config: Config, decoder: DecoderConfig, num_devices: int) -> int | None:
    """Returns the token-expert pairs of one device and microbatch when routers are even, None for a dense model."""
    if decoder.moe is None:
        return None
    tokens = config.data.batch_size * config.data.sequence_length // config.optimizer.gradient_accumulation
    return tokens * decoder.moe.experts_per_token // num_devices
