"""The one door of every configuration: YAML and options in, typed frozen dataclasses out.

    recipe.yaml --strict_yaml--> Values <--override-- --a.b[0].c=value
                                   |
                    parse(Recipe, values) -> Recipe            as_dict(Recipe) -> JSON values

A configuration is a frozen dataclass; its annotations are the checks, written once:

    @dataclass(frozen=True, kw_only=True)
    class Recipe(Config):                                   # Config: checked in Python, too
        \"""What to tokenise.

        Attributes:
            output: folder of the dataset.                  # the reference page says this
        \"""

        output: FilePath                                    # counts from the file's folder
        workers: Annotated[int, Meta(ge=1)] = 4             # msgspec's Meta: ge, gt, pattern, ...
        mode: Literal["strict", "lenient"] = "strict"
        source: Jsonl | Parquet = field(default_factory=Jsonl)   # by their `name: Literal[...]`;
                                                            # `parquet` is `{name: parquet}`
        lines: Annotated[int, Needs("mode", value="lenient")] = 3   # refused without; in the docs

    values = Values.read("recipe.yaml")
    values.override_all(["--workers=8", "--source.text_key", "body"])
    recipe = parse(Recipe, values)

An integer may be written `1e6` or `95B`. What no annotation says goes into `__post_init__` as a
`UsageError` whose `where` is the field. Each refusal names `file:line` or the option, the expected
type, and the nearest known name.

    strict_yaml   YAML with line numbers: a spelling has one meaning
    path          a.b[2].c as a key path
    hints         what may annotate a field
    values        plain values, the place each came from, overrides, differences
    convert       parse, as_dict, Config
    docs          what docstrings and annotations say of a field, for pages and help

A section is a dataclass or a msgspec Struct. msgspec.convert checks the type of single values; it
does not walk the configuration, as it takes no union of dataclasses, and its errors leave out the
key of a mapping.
"""
