"""Optional packages: which extra of the distribution brings them, and what to type for it.

with needs("s3", "s3://"):
    import s3fs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from olm_data.errors import UsageError

DISTRIBUTION = "olm-data"
"""Its name on a package index. With it installed, in whatever way, `pip install 'NAME[extra]'` adds
the packages of the extra and fetches nothing by this name."""

EXTRAS = {
    "adlfs": "azure",
    "aiohttp": "http",
    "awkward": "fast",
    "comet_ml": "comet",
    "datasets": "hub",
    "fastwarc": "warc",
    "gcsfs": "gcs",
    "gigatoken": "fast",
    "jinja2": "report",
    "lm_eval": "eval",
    "markupsafe": "report",
    "matplotlib": "report",
    "pypdf": "pdf",
    "ray": "ray",
    "rensa": "dedup",
    "resiliparse": "html",
    "s3fs": "s3",
    "safetensors": "train",
    "tensorboard": "track",
    "torch": "train",
    "torchao": "float8",
    "trackio": "trackio",
    "transformers": "hf",
    "wandb": "wandb",
}
"""Extra by the name of the package as it is imported."""


class MissingExtra(UsageError, ImportError):
    """A package of an extra is not installed: exit 2."""


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    assert extra in EXTRAS.values(), extra
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing_extra(
    error: ImportError, what: str = "this", *, where: str | None = None
) -> ImportError:
    """Return the error to raise instead, or `error` itself where no extra brings the package."""
    package = error.name or ""
    if isinstance(error, MissingExtra) or package not in EXTRAS:
        return error
    return MissingExtra(
        f"{what} needs the package {package}, which is not installed",
        where=where,
        fix=install(EXTRAS[package]),
    )


@contextmanager
def needs(what: str, *, where: str | None = None) -> Iterator[None]:
    """Explain an import in the body that fails for want of an extra.

    Args:
        what: what cannot be done without it; begins the message.
        where: the option that asks for it.

    Raises:
        MissingExtra: a package of an extra is not installed.
    """
    try:
        yield
    except ImportError as error:
        explained = missing_extra(error, what, where=where)
        if explained is error:
            raise
        raise explained from error
