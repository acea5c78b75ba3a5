"""The bytes that a step moves between HBM and the cores: an estimate, counted over the scheduled program."""

import re
from collections.abc import Mapping

from upjax.plan.hlo import Array, Instruction, Module

_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "partition-id",
    "replica-id", "after-all", "async-update", "async-done", "copy-done", "opt-barrier",
}  # fmt: skip
"""What moves nothing, or is counted where it starts or within what it calls."""


_ROWS = re.compile(
    r"(?:bf16|f32)\[(\d+),\d+\]"
)  # also those of operand_layout_constraints: a gradient's result has none
_EXPERT_KERNELS = re.compile(r"expert_mlp|grouped_matmul|gmm")


def hbm_bytes(module: Module, *, routed_rows: int | None = None) -> int:
    """Returns the bytes that a step reads from and writes to a device's HBM.

    Each instruction that runs reads its operands and writes its results, once for each time that it runs; what lies in
    vector memory is free, a slice of an operand counts as the slice, and an update in place as the update. XLA's own
    `bytes accessed` counts a loop's body once. A Pallas kernel counts as its author's estimate where that is more than
    its operands and results.

    `routed_rows` are the token-expert pairs that a device's experts have when the routers are even. The kernels of the
    experts take buffers of all that could come, and skip the rows that did not: they count in that proportion.
    """
    return round(
        sum(
            times * _moved(module, i, module.computations[of]) * _filled(i, routed_rows)
            for i, of, times in module.executed()
        )
    )


def _filled(instruction: Instruction, routed_rows: int | None) -> float:
    """Returns the share of an expert kernel's rows that hold tokens, 1 for all other instructions."""
    if not routed_rows or instruction.opcode != "custom-call" or not _EXPERT_KERNELS.search(instruction.op_name):
        return 1.0
    shapes = _ROWS.findall(instruction.result_text + instruction.attributes)
    return min(1.0, routed_rows / max(int(rows) for rows in shapes)) if shapes else 1.0


def _moved(module: Module, instruction: Instruction, computation: list[Instruction]) -> int:
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    within = {i.name: i for i in computation}
    operands = [within[name] for name in instruction.operands if name in within]
    match instruction.opcode:
        case "dynamic-slice" | "gather" | "slice":
            return 2 * _in_hbm(instruction.results)
        case "dynamic-update-slice":
            return 2 * _in_hbm(operands[1].results)
        case "fusion":
            return _moved_by_fusion(module, instruction, operands)
        case "async-start":
            return sum(
                _moved(module, i, module.computations[called])
                for called in instruction.called("calls")
                for i in module.computations[called]
            )
        case "custom-call":
            told = re.search(r'bytes_accessed"?:\s*"?(\d+)', instruction.attributes)
            return max(_in_and_out(instruction, operands), int(told[1]) if told else 0)
        case opcode if opcode.endswith("-start"):  # its result repeats its operands
            result = instruction.results[:1] if opcode == "copy-start" else instruction.results[len(operands) :]
            return _in_hbm(result) + sum(_in_hbm(operand.results) for operand in operands)
        case _:
            return _in_and_out(instruction, operands)


def _in_and_out(instruction: Instruction, operands: list[Instruction]) -> int:
    return _in_hbm(instruction.results) + sum(_in_hbm(operand.results) for operand in operands)


def _moved_by_fusion(module: Module, fusion: Instruction, operands: list[Instruction]) -> int:
    """Returns what a fusion moves: of an operand that it only slices the slices, of one that it updates the update."""
    (called,) = fusion.called("calls")
    inside = module.computations[called]
    names = {i.name: i for i in inside}
    parameters = {int(i.operand_text): i for i in inside if i.opcode == "parameter"}
    moved = 0
    for number, operand in enumerate(operands):
        if number in parameters and _in_hbm(operand.results):
            moved += min(_in_hbm(operand.results), _read(parameters[number], inside, names))
    root = next(i for i in inside if i.is_root)
    roots = [names[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(roots) != len(fusion.results):
        return moved + _in_hbm(fusion.results)
    for result, made in zip(fusion.results, roots, strict=True):
        made = _behind_bitcasts(made, names)
        size = _size(names[made.operands[1]].results) if made.opcode == "dynamic-update-slice" else result.num_bytes
        moved += size if result.in_hbm else 0
    return moved


def _read(parameter: Instruction, inside: list[Instruction], names: Mapping[str, Instruction]) -> int:
    """Returns the bytes that a fusion reads of one of its operands."""
    total = 0
    for user in (i for i in inside if parameter.name in i.operands):
        if user.opcode == "bitcast":
            total += _read(user, inside, names)
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == parameter.name:
            total += _size(user.results)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            total += 0
        else:
            return _size(parameter.results)
    return total


def _behind_bitcasts(instruction: Instruction, names: Mapping[str, Instruction]) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = names[instruction.operands[0]]
    return instruction


def _size(arrays: tuple[Array, ...]) -> int:
    return sum(array.num_bytes for array in arrays)


def _in_hbm(arrays: tuple[Array, ...]) -> int:
    return sum(array.num_bytes for array in arrays if array.in_hbm)
