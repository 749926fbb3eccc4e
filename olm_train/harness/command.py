"""The command that is lm_eval's own, with our models known to it by the name `olm`.

words -> lm_eval's command line -> tasks, prompts, metrics, results: all its own
"""

from __future__ import annotations

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

        import olm_train.harness.model  # noqa: F401  its import makes the name known

        before = sys.argv
        sys.argv = ["lm_eval", *arguments]
        try:
            cli_evaluate()
        finally:
            sys.argv = before
