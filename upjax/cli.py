"""The `upjax` command: one verb a public function of the same name. Exit code 2 is for what the user can mend."""

import contextlib
import dataclasses
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import typer
from rich.markup import escape

import upjax
from upjax.checkpoint import tokenizer_directory
from upjax.compilation_cache import enable_compilation_cache
from upjax.config import mesh_sizes, parse_mesh
from upjax.errors import InputError
from upjax.evaluate.passage import passage_tokens
from upjax.hf import convert_gguf
from upjax.plan import PlanError, planning, report
from upjax.provenance import software
from upjax.terminal import errors, show, stages, working

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Upcycle a dense Hugging Face checkpoint into a Mixture-of-Experts model, train it, and hand it back.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output where it exists.")]
MeshSizes = Annotated[
    str,
    typer.Option("--mesh", help="Devices along each axis, such as [bold]fsdp=4,expert=2[/]; by default one device."),
]
ONE_DEVICE = ""


@app.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(help="A Hugging Face directory, or a .gguf file of the llama architecture.")
    ],
    output: Annotated[Path, typer.Argument(help="The model directory to write.")],
    parameters: Annotated[str | None, typer.Option(help="float32 or bfloat16; by default as in the source.")] = None,
    mesh: MeshSizes = ONE_DEVICE,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Read a Hugging Face checkpoint into an upjax model.

    Example: [bold]upjax import ~/models/SmolLM2-135M runs/dense[/]
    """

    dtypes = _checked(lambda: upjax.Dtypes(parameters, parameters)) if parameters else None
    with _mesh(mesh), tempfile.TemporaryDirectory() as scratch, working(f"importing {source}"):
        directory = source
        if source.suffix == ".gguf":
            directory = Path(scratch) / "hf"
            convert_gguf(source, directory)
        decoder = upjax.import_hf(directory, dtypes=dtypes)
        provenance = {"source": str(source.resolve()), "method": "import", **software()}
        upjax.save_model(output, decoder, provenance=provenance, tokenizer_from=directory, overwrite=overwrite)
    _show_model(output, json)


@app.command()
def upcycle(
    model: Annotated[
        Path, typer.Argument(help="A dense model: of upjax import, of a run, or a Hugging Face directory.")
    ],
    output: Annotated[Path, typer.Argument(help="The model directory to write.")],
    num_experts: Annotated[int, typer.Option(help="Experts in each routed layer.")] = 8,
    experts_per_token: Annotated[int, typer.Option(help="Experts that a token goes to.")] = 2,
    router: Annotated[
        Literal["softmax_topk_renormalized", "softmax_topk", "topk_softmax"],
        typer.Option(help="How router logits become gates; softmax_topk does not keep the model's function."),
    ] = "softmax_topk_renormalized",
    moe_layers: Annotated[str, typer.Option(help="all, every:N (each Nth, the last of N), or numbers: 1,3,5")] = "all",
    method: Annotated[str, typer.Option(help="How experts are made of the dense MLP.")] = "copy",
    seed: Annotated[int, typer.Option(help="Draws the routers.")] = 0,
    mesh: MeshSizes = ONE_DEVICE,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make a Mixture-of-Experts model of a dense one.

    Example: [bold]upjax upcycle runs/dense runs/moe --num-experts 8 --experts-per-token 2[/]
    """

    with _mesh(mesh), working(f"upcycling {model}"):
        dense = upjax.load(model)
        moe = upjax.upcycle(
            dense,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            router=router,
            moe_layers=_layers(moe_layers, dense.config.num_layers),
            method=method,
            seed=seed,
        )
        made = {"num_experts": num_experts, "experts_per_token": experts_per_token, "router": router, "seed": seed}
        provenance = {"source": str(model.resolve()), "method": f"upcycle:{method}", **made, **software()}
        upjax.save_model(output, moe, provenance=provenance, tokenizer_from=model, overwrite=overwrite)
    _show_model(output, json)


@app.command()
def verify(
    first: Annotated[Path, typer.Argument(help="A model, a run, or a Hugging Face directory; its tokenizer is used.")],
    second: Annotated[Path, typer.Argument(help="The one to compare with it.")],
    text: Annotated[
        Path | None, typer.Option(help="A text file to read; by default a passage that comes along.")
    ] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens to compare on, at most.")] = 512,
    max_diff: Annotated[float | None, typer.Option(help="Exit with 1 when a logit differs by more.")] = None,
    mesh: MeshSizes = ONE_DEVICE,
    json: Json = False,
) -> None:
    """Compare two models' predictions of the same text, in float32.

    Example: [bold]upjax verify runs/dense runs/moe --max-diff 1e-3[/]
    """

    with _mesh(mesh) as num_devices, working(f"comparing {first} with {second}"):
        tokens_BT = passage_tokens(first, text, num_rows=num_devices, num_tokens=num_tokens)
        models = [upjax.load(path, compute="float32") for path in (first, second)]
        agreement = upjax.verify(*models, tokens_BT, batch_size=num_devices)
    show(dataclasses.asdict(agreement), as_json=json, title=f"{first} against {second}")
    # Not `diff > max_diff`: NaN is a difference too.
    if max_diff is not None and not agreement.max_abs_logit_diff <= max_diff:
        raise typer.Exit(1)


@app.command()
def tokenize(
    inputs: Annotated[list[Path], typer.Argument(help="Files and directories: text, or .jsonl with a text key.")],
    output: Annotated[Path, typer.Option("--output", help="The dataset directory to write.")],
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json, or the directory of a model.")],
    held_out: Annotated[float, typer.Option(help="Share of the files that training never sees.")] = 0.05,
    suffix: Annotated[list[str] | None, typer.Option(help="Only files with this ending; may be repeated.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave out paths like this glob; may be repeated.")] = None,
    end_of_text: Annotated[
        str | None, typer.Option(help="The token that ends a document; default: the tokenizer's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the held-out files.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse files that are not UTF-8 instead of listing them.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Turn text files into a dataset to train on.

    Example: [bold]upjax tokenize docs/ src/ --suffix .md --suffix .py --output runs/data --tokenizer runs/dense[/]
    """

    info = upjax.tokenize(
        inputs,
        output,
        tokenizer=tokenizer,
        held_out=held_out,
        seed=seed,
        suffixes=suffix or None,
        exclude=exclude or (),
        end_of_text=end_of_text,
        strict=strict,
        overwrite=overwrite,
    )
    show(dataclasses.asdict(info), as_json=json, title=str(output))


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A YAML file, such as those in configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Values to replace: train.steps=100")] = None,
    branch_from: Annotated[
        str | None, typer.Option(help="Decay from this step of the run (or RUN/checkpoints/STEP) in a run of its own.")
    ] = None,
    json: Json = False,
) -> None:
    """Train to the end of the schedule; a run that was stopped goes on.

    Example: [bold]upjax train configs/quickstart_moe.yaml train.steps=100[/]
    """

    result = upjax.train(upjax.load_config(config, overrides or ()), branch_from=branch_from)
    show(dataclasses.asdict(result), as_json=json, title=str(result.run))


@app.command("eval")
def eval_(
    model: Annotated[Path, typer.Argument(help="A model, a run, or a Hugging Face directory.")],
    dataset: Annotated[Path, typer.Argument(help="A dataset of upjax tokenize.")],
    split: Annotated[Literal["held_out", "train"], typer.Option(help="Which documents to score.")] = "held_out",
    sequence_length: Annotated[int, typer.Option(help="Tokens a row.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Rows at a time.")] = 4,
    max_tokens: Annotated[int | None, typer.Option(help="Stop at whole documents of so many tokens.")] = None,
    compute: Annotated[str | None, typer.Option(help="float32 or bfloat16; by default the parameters' dtype.")] = None,
    mesh: MeshSizes = ONE_DEVICE,
    json: Json = False,
) -> None:
    """Score a model on held-out documents: loss, perplexity, bits per byte.

    Example: [bold]upjax eval runs/moe runs/data --max-tokens 20000[/]
    """

    with _mesh(mesh), working(f"evaluating {model}"):
        score = upjax.evaluate(
            _checked(lambda: upjax.load(model, compute=compute)),
            dataset,
            split=split,
            sequence_length=sequence_length,
            batch_size=batch_size,
            max_tokens=max_tokens,
        )
    show(dataclasses.asdict(score), as_json=json, title=f"{model} on {dataset}")


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="A model or a run.")],
    output: Annotated[Path, typer.Argument(help="The Hugging Face directory to write.")],
    family: Annotated[
        str | None, typer.Option(help="mixtral, qwen2_moe, qwen3_moe, llama, ...; by default the first that fits.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a model as a Hugging Face checkpoint that transformers and vLLM load.

    Example: [bold]upjax export runs/quickstart/moe_trained hf_moe --family mixtral[/]
    """

    with working(f"exporting {model}"):
        files = tokenizer_directory(model)
        upjax.export_hf(upjax.load(model), output, family=family, tokenizer_files=files, overwrite=overwrite)
    _show_model(output, json)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A model, a run, a dataset, or a Hugging Face directory.")],
    json: Json = False,
) -> None:
    """Say what lies at a path: architecture, parameters, where it came from.

    Example: [bold]upjax inspect runs/moe[/]
    """
    _show_model(path, json)


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="A YAML file, such as those in configs/.")],
    topology: Annotated[
        str, typer.Option(help="A slice: [bold]v5p:4x4x4[/], v5e:4x4, v6e:8x8, v4:2x2x1, tpu7x:4x4x4.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Values to replace: train.remat=full")] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Instead of the config's: [bold]fsdp=8,expert=8[/]; all devices of the slice.")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="Tokens to give chip-hours for: 1e12.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try every mesh of the slice and rank them.")] = False,
    schedule_only: Annotated[
        bool, typer.Option("--schedule-only", help="Stop before code is made: sooner, the same numbers.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a PNG of what fills the memory (of a sweep: the best).")
    ] = None,
    json: Json = False,
) -> None:
    """Compile a run's step for a slice of TPUs that is not here: does it fit, what moves, how long may it take.

    Exit code 1 when it does not fit (with --sweep: when no mesh does).

    Example: [bold]upjax plan configs/mixtral_8x7b_v5p.yaml --topology v5p:4x4x4 --tokens 1e11[/]
    """

    loaded = upjax.load_config(config, overrides or ())
    with stages() as progress:
        if sweep:
            if mesh is not None:
                raise InputError(f"--sweep tries every mesh; --mesh {mesh} asks for one")
            plans = planning.sweep(loaded, topology, tokens=tokens, progress=progress)
        else:
            asked = {"mesh": mesh, "tokens": tokens, "schedule_only": schedule_only}
            plans = [upjax.plan(loaded, topology, progress=progress, **asked)]
    if plot is not None:
        report.plot(plans[0], plot)
    if json:
        made = [of.to_dict() for of in plans]
        show({"meshes": made} if sweep else made[0], as_json=True)
    elif sweep:
        report.show_sweep(plans)
    else:
        report.show(plans[0])
    if not plans[0].fits:
        raise typer.Exit(1)


def _show_model(path: Path, as_json: bool) -> None:

    show(upjax.inspect(path), as_json=as_json, title=str(path))


@contextlib.contextmanager
def _mesh(text: str) -> Iterator[int]:
    """Sets the mesh that `--mesh` asks for and yields its number of devices; without one, the first device is used."""

    if text == ONE_DEVICE:
        yield 1
        return
    sizes = mesh_sizes(parse_mesh(text))
    mesh = _checked(lambda: upjax.make_mesh(**sizes))
    with jax.set_mesh(mesh):
        yield mesh.size


def _layers(text: str, num_layers: int) -> Sequence[int] | None:
    """Returns the layers that `--moe-layers` names, None for all."""
    if text == "all":
        return None
    every, _, step = text.partition(":")
    if every == "every" and step.isdecimal() and int(step):
        return range(int(step) - 1, num_layers, int(step))
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise InputError(f"--moe-layers {text!r} is not all, every:N, or numbers such as 1,3,5")
    return [int(number) for number in numbers]


def _checked(make: Any) -> Any:
    """Returns what `make` makes of the user's arguments, their mistakes turned to InputError."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, InputError) else InputError(str(error)) from error


def main() -> None:
    """Runs the command; a mistake of the user ends it with exit code 2 and every problem named, without a traceback."""
    _prepare_process()
    try:
        app()
    except InputError as error:
        errors.print(f"[bold red]error:[/] {escape(error.summary)}", highlight=False, soft_wrap=True)
        for problem in error.problems:
            errors.print(f"  - {escape(problem)}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except RuntimeError as error:
        if not isinstance(error, upjax.TrainingError | PlanError):
            raise
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)


def _prepare_process() -> None:
    """Keeps compiled programs for the next command, and sets what must be set where there is no TPU.

    libtpu, which the tests compile with, would look for one for seconds and warn. And a step on CPUs fills gigabytes of
    fresh memory, which the C library is asked to back with huge pages; that only a new process can be told.
    """
    enable_compilation_cache()
    if [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]:
        return
    if "JAX_PLATFORMS" not in os.environ and importlib.util.find_spec("libtpu"):
        jax.config.update("jax_platforms", "cpu")
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ and sys.argv[1:2] == ["train"]:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, "-m", "upjax", *sys.argv[1:]])
