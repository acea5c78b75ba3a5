"""The reader of schedules counts what is in a listing, the walker of grids what a grid moves, the tool says both."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from schedule_bundles import Span, read_schedules
from schedule_traffic import kernels

TOOL = Path(__file__).parents[2] / "tools" / "kernel_schedule.py"

LISTING = """
= control target key start
     0   :  { %s1 = smov.u32 0 }
   0x1 LB: > { %v2 = vld [vmem:[%s1] sm:$0xff]  ;;  %14 = sbr.rel (%p3) target = $region4 }
   0x2   : > { %v3 = vmatmul.bf16.gmra.mxu0 %v2 /* a comment
 over two lines with { and vmatmuls }
 */ }
   0x3   : >> { %v4 = vmatmul.bf16.gmra.mxu1 %v2  ;;  %v5 = vmatmul.bf16.gmra.mxu2 %v2 }
   0x4   : > { vst [vmem:[#allocation7_spill] sm:$0xff] %v4 }
   0x5 PF: > { %s6 = sadd.s32 1, %s1 } /* Start/End empty region 4 */
   0x6   : > { %16 = sbr.rel (!%p7) target = $region2  ;;  %v8 = vld [vmem:[#allocation7_spill] sm:$0xff] }
   0x7   :  { %s9 = smov.u32 1 }
"""


def test_a_listing_is_read_by_its_structure(tmp_path):
    text = LISTING.replace("   0x1 LB: > { %v2", "   0x1 LB: > { /* Start region 2 */ %v2")
    (tmp_path / "17-some_kernel.1-72-final_bundles.txt").write_text(text)
    (tmp_path / "17-some_kernel.1-02-original.txt").write_text(
        "#a1 [shape = 'f32[8]', space=vmem, size = 0x200, scoped]"
    )
    (tmp_path / "17-some_kernel.1-71-schedule-analysis_final_bundles.txt").write_text("no listing")
    schedule = read_schedules(tmp_path)["some_kernel"]
    assert schedule.products == (0, 0, 1, 2, 0, 0, 0, 0)
    assert schedule.loops == (Span(1, 7),) and schedule.branches == (Span(2, 5),)
    assert schedule.num_products(Span(2, 5)) == 3
    assert schedule.branches_with_products(schedule.grid_loop) == [Span(2, 5)]
    assert schedule.spills == 2
    assert schedule.vmem_bytes == 0x200 + 4096  # and one register that was spilled


def test_bytes_of_megablox_are_those_of_a_closed_form():
    M, K, N, G, tile = 1024, 512, 384, 2, 128
    lhs, rhs = jax.ShapeDtypeStruct((M, K), jnp.bfloat16), jax.ShapeDtypeStruct((G, K, N), jnp.bfloat16)
    multiply = lambda *args: gmm.__wrapped__(*args, preferred_element_type=jnp.bfloat16, tiling=(tile,) * 3)
    (kernel,) = kernels(multiply, lhs, rhs, jnp.array([512, 512], jnp.int32), cores=1)
    row_tiles, tiles_n = M // tile, N // tile
    assert kernel.grid == (tiles_n, row_tiles, K // tile)
    # With K in the grid every visit reads its rows and its weights anew.
    assert kernel.read_bytes == 2 * tiles_n * (M * K + row_tiles * K * tile)
    assert kernel.written_bytes == 2 * M * N


@pytest.mark.parametrize("cores", [1, 2])
def test_a_block_counts_when_it_changes_or_another_core_begins(cores):
    def double(scale, x, out):
        out[...] = x[:, :100] * scale[0]

    def call(scale, x):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4, 3),
            in_specs=[pl.BlockSpec((8, 128), lambda i, j, scale: (0, scale[0]))],  # the same block at every step
            out_specs=pl.BlockSpec((8, 100), lambda i, j, scale: (i, j)),  # the last along j reaches past the array
        )
        return pl.pallas_call(double, grid_spec=spec, out_shape=jax.ShapeDtypeStruct((32, 250), x.dtype))(scale, x)

    (kernel,) = kernels(call, jnp.array([1], jnp.int32), jax.ShapeDtypeStruct((8, 256), jnp.float32), cores=cores)
    assert kernel.read_bytes == cores * 8 * 128 * 4
    assert kernel.written_bytes == 32 * 250 * 4


@pytest.mark.slow
@pytest.mark.parametrize("kernel, parts", [("grouped_matmul_drhs", 1), ("swiglu_experts", 2)])
def test_the_tool_prints_what_scripts_rely_on(kernel, parts):
    command = [sys.executable, TOOL, kernel, "--topology", "v5p:2x2x1", "--case", "smollm2", "--groups", "skewed"]
    done = subprocess.run([*command, "--against", "megablox", "--json"], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert len(report["kernels"]) == parts
    for figures in (report, report["against"]["megablox"]):
        assert 0 < figures["static_mxu_efficiency"] <= 1 and 0 < figures["roofline_efficiency"] <= 1
        assert figures["hbm_bytes"] >= figures["hbm_bytes_minimum"] > 0
        assert figures["loop_bundles"] > 0 and figures["vmem_bytes"] > 0 and figures["spills"] >= 0
        assert figures["bound_by"] in ("hbm", "matrix units", "hbm and matrix units")
