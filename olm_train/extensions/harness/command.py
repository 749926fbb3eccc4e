"""The command that is lm_eval's own, with our models known to it by the name `olm`.

words -> lm_eval's command line -> tasks, prompts, metrics, results: all its own
"""

from __future__ import annotations

import inspect
import sys

import click

from olm_data.extras import needs


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(arguments: tuple[str, ...]) -> None:
    """Run tasks of lm-evaluation-harness on a checkpoint, without an export.

    \b
    olm-train lm-eval --model olm --model_args checkpoint=runs/first --tasks mine --include_path .

    The arguments are those of its command lm_eval, which knows the model `olm` here.
    """
    with needs("the tasks of lm-evaluation-harness"):
        from lm_eval.__main__ import cli_evaluate

        import olm_train.extensions.harness.model  # its import makes the name known

        if {"-h", "--help"} & set(arguments):
            click.echo(_of_ours(olm_train.extensions.harness.model.OlmLM))
        before = sys.argv
        sys.argv = ["lm_eval", *arguments]
        try:
            cli_evaluate()
        finally:
            sys.argv = before


def _of_ours(model: type) -> str:
    """Return how a checkpoint of ours is named, before the help that is lm_eval's own."""
    arguments = (inspect.getdoc(model) or "").partition("Args:\n")[2].partition("\n\n")[0]
    return (
        "A checkpoint of this program:\n\n"
        "    olm-train lm-eval --model olm --model_args checkpoint=runs/first --tasks TASK\n\n"
        f"--model_args of the model olm, as NAME=VALUE,...:\n\n{arguments}\n\n"
        "What follows is the help of lm_eval.\n"
    )
