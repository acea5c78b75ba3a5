"""Slices by name: what each generation shows, and what is no slice."""

import pytest

from upjax.config import MeshConfig, parse_mesh
from upjax.errors import InputError
from upjax.plan.topology import mesh_shapes, parse_topology


@pytest.mark.parametrize(
    ("name", "chips", "devices", "hbm_gib", "wraps"),
    [
        ("v5p:4x4x4", 64, 64, 95, (True,) * 3),
        ("v5p:2x2x1", 4, 4, 95, (False,) * 3),
        ("v4:2x2x1", 4, 8, 32, (False,) * 3),
        ("tpu7x:2x2x1", 4, 8, 192, (False,) * 3),
        ("v5e:4x4", 16, 16, 16, (False, False)),
        ("v5e:16x16", 256, 256, 16, (True, True)),
        ("v6e:8x16", 128, 128, 32, (False, True)),
    ],
)
def test_a_slice_knows_its_chips_and_devices(name, chips, devices, hbm_gib, wraps):
    topology = parse_topology(name)
    assert (topology.num_chips, topology.num_devices) == (chips, devices)
    assert topology.hbm_bytes_per_chip == hbm_gib * 2**30
    assert topology.wraps == wraps
    assert 0.9 < topology.available_bytes_per_device * topology.devices_per_chip / topology.hbm_bytes_per_chip < 1.01


@pytest.mark.parametrize("name", ["v5q:2x2", "v5p", "v5p:4x4", "v5e:4x4x4", "v5e:0x4", "v5p:3x3x1", "v6e:32x32", "4x4"])
def test_what_is_no_slice_is_refused_with_names_that_work(name):
    with pytest.raises(InputError, match="names that work: v4:2x2x1, .*v5p:4x4x4") as caught:
        parse_topology(name)
    assert len(caught.value.problems) == 1


def test_meshes_are_read_and_enumerated():
    assert parse_mesh("fsdp=8, expert=4") == MeshConfig(fsdp=8, expert=4)
    for text in ("fsdp", "fsdp=0", "model=2", "fsdp=2,fsdp=4", ""):
        with pytest.raises(InputError, match="is not of the form"):
            parse_mesh(text)
    shapes = list(mesh_shapes(4))
    assert len(shapes) == len(set(shapes)) == 6
    assert all(mesh.data * mesh.fsdp * mesh.expert == 4 for mesh in shapes)
