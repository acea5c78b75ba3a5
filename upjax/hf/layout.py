"""Where each tensor of a checkpoint lives in our parameters: a family's table laid out over a model's layers."""

import dataclasses
from collections.abc import Mapping, Sequence

from upjax.hf.families.common import Row
from upjax.model.config import DecoderConfig

Shape = tuple[int, ...]
Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor `name` of `shape`, which is the part `index` of our parameter `path`.

    Its last two dims are swapped in ours where `transposed`. Where it holds two of our parameters, ours begins at
    `offset` of its outputs, which are its second to last dim.
    """

    name: str
    shape: Shape
    path: str
    index: tuple[int, ...]
    transposed: bool
    offset: int = 0

    def source(self, slices: Slices) -> Slices:
        """Returns the slices of the tensor that hold `slices` of our parameter past `index`."""
        if self.transposed:
            slices = (*slices[:-2], slices[-1], slices[-2])
        if self.offset:
            rows = slices[-2]
            slices = (*slices[:-2], slice(rows.start + self.offset, rows.stop + self.offset), slices[-1])
        return slices


def lay_out(rows: Sequence[Row], config: DecoderConfig, shapes: Mapping[str, Shape], prefix: str) -> list[Entry]:
    """Returns an entry for each tensor of a checkpoint of `config`, in the order of the layers.

    `shapes` are those of our parameters by path; a row applies where its path is one of them.
    """
    places = [config.place(layer) for layer in range(config.num_layers)]
    before, layers, after = [], [[] for _ in places], []
    for row in rows:
        if "{layer}" not in row.name:
            if row.path in shapes:
                # Tables list what follows the layers after them.
                outer = after if layers[0] else before
                outer.append(_entry(row, row.name.format(prefix=prefix), row.path, (), shapes[row.path]))
            continue
        for layer, (segment, position, repeat) in enumerate(places):
            path = f"segments/{segment}/{position}/{row.path}"
            if path not in shapes:
                continue
            experts = range(shapes[path][1]) if "{expert}" in row.name else [None]
            for expert in experts:
                index = (repeat,) if expert is None else (repeat, expert)
                name = row.name.format(prefix=prefix, layer=layer, expert=expert)
                layers[layer].append(_entry(row, name, path, index, shapes[path]))
    return [*before, *(entry for layer in layers for entry in layer), *after]


def uncovered(entries: Sequence[Entry], shapes: Mapping[str, Shape]) -> list[str]:
    """Returns the paths of `shapes` that `entries` do not write exactly once, element by element."""
    written: dict[str, list[tuple[int, ...]]] = {path: [] for path in shapes}
    for entry in entries:
        written[entry.path].append(entry.index)
    return [path for path, indices in written.items() if not _covers(indices, shapes[path])]


def _covers(indices: list[tuple[int, ...]], shape: Shape) -> bool:
    if not indices:
        return False
    leading = shape[: len(indices[0])]
    count = 1
    for size in leading:
        count *= size
    return len(set(indices)) == len(indices) == count


def _entry(row: Row, name: str, path: str, index: tuple[int, ...], shape: Shape) -> Entry:
    tensor = shape[len(index) :]
    if row.transposed:
        tensor = (*tensor[:-2], tensor[-1], tensor[-2])
    offset = 0
    if row.part is not None:
        offset = row.part * tensor[-2]
        tensor = (*tensor[:-2], 2 * tensor[-2], tensor[-1])
    return Entry(name=name, shape=tensor, path=path, index=index, transposed=row.transposed, offset=offset)
