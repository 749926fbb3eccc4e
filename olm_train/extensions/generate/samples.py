"""Texts that the model writes while it is trained: the same prompts after chosen steps.

    prompts, dealt over the ranks -> Engine on the weights as they are -> RUN/samples.jsonl

A callback of its own beside `lm_evaluator`: prompts need no held-out data, and what is looked at by
a person may come more rarely, or more often, than losses. Its default is the same interval.

The ranks take part in the exchange of sharded weights for each token: one that has no text left
calls the model along, until all have ended. Neither losses nor random numbers of the run change.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta
from torch.nn.parallel import DistributedDataParallel

from olm_data.config.hints import NonNegativeInt, PositiveInt
from olm_data.errors import UsageError
from olm_data.run_log.run_folder import (
    SAMPLES,
    StepSamples,
    WrittenText,
    forget_samples,
    read_samples,
    write_samples,
)
from olm_train.callbacks.evaluations import EvaluationSteps
from olm_train.checkpoint.documents import open_tokenizer, tokenizer_of_data
from olm_train.checkpoint.text_rules import TextRules
from olm_train.data.base import require_lock
from olm_train.extensions.generate.engine import Engine, TextRequest
from olm_train.extensions.generate.loaded import PromptIds
from olm_train.extensions.generate.runner import runner_of
from olm_train.extensions.generate.sampling import MAX_SEED, Sampling
from olm_train.model.decoder import Decoder
from olm_train.model.shards import tensor_cut
from olm_train.parallel.compiling import uncompiled

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NEEDS = "the callback samples"


@dataclass(kw_only=True)
class SamplesCallback(EvaluationSteps):
    """Continues the same prompts after chosen steps.

    Attributes:
        enabled: write texts, where `samples` is given at all.
        prompts: texts to continue; an empty one begins a document.
        max_new_tokens: of each text.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the k most likely tokens; 0: all.
        seed: of the draws of each text, the same after each step.
        eval_interval: steps between texts.
        fixed_steps: further steps after which to write some.
        eval_on_startup: also before the first step.
        eval_on_finish: also after the last step.
    """

    whole_model: ClassVar[bool] = True

    prompts: Annotated[list[str], Meta(min_length=1)]
    max_new_tokens: PositiveInt = 64
    temperature: Annotated[float, Meta(ge=0)] = 0.8
    top_k: NonNegativeInt = 50
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._requests: list[TextRequest] = []
        self._tokenizer: Tokenizer | None = None

    def pending(self) -> list[str]:
        return ["samples"] if self._due() else []

    def pre_train(self) -> None:
        trainer, world = self.trainer, self.trainer.world
        decoder, lock = self._decoder(), require_lock(trainer.data_loader, NEEDS)
        data = world.on_main(lambda: tokenizer_of_data(lock))
        self._tokenizer = open_tokenizer(data, lock, lock.folder)
        self._rules = rules = TextRules.of_lock(self._tokenizer, lock, None)
        size = decoder.config.vocab_size
        ids_of = PromptIds(self._tokenizer, rules.begins, rules.first, size, lock.folder)
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, seed=self.seed)
        self._requests = [
            TextRequest(prompt=ids_of(text), sampling=sampling, max_new_tokens=self.max_new_tokens)
            for text in self.prompts
        ]
        engine = self._engine(decoder)
        for request in self._requests:  # one that is too long is refused before the first step
            engine.add(request)
        world.on_main(lambda: forget_samples(trainer.work_dir, trainer.step))

    def evaluate(self) -> None:
        if not self._due():
            return
        trainer = self.trainer
        with trainer.pause():
            texts = self._write(ignore_stop=trainer.step >= trainer.stop_step)
        if texts is None:
            return  # a signal came: they are written after the restart
        samples = StepSamples(
            step=trainer.step,
            time=time.time(),
            texts=tuple(texts),
            temperature=self.temperature,
            top_k=self.top_k,
            seed=self.seed,
        )

        def keep() -> None:
            try:
                write_samples(trainer.work_dir, samples)
            except OSError as error:
                trainer.say(f"warning: {SAMPLES} could not be written: {error}")

        trainer.world.on_main(keep)

    def _due(self) -> bool:
        """Whether texts are to be written after this step and have not been."""
        trainer, step = self.trainer, self.trainer.step

        def made() -> bool:
            return any(each.step == step for each in read_samples(trainer.work_dir))

        return self.is_due() and not trainer.world.on_main(made)

    def _write(self, *, ignore_stop: bool) -> list[WrittenText] | None:
        """Return the text of each prompt on every rank, or None when a signal came."""
        trainer, world = self.trainer, self.trainer.world
        decoder = self._decoder()
        own = self._requests[world.rank :: world.size]
        engine = self._engine(decoder)
        writings = [engine.add(request) for request in own]
        with uncompiled(decoder.blocks):
            while world.any(engine.busy):
                if not ignore_stop and trainer.ask_to_stop():
                    return None
                engine.step(idle=True)
        texts = [(writing.text, writing.finish or "length") for writing in writings]
        parts = world.gather(texts)
        size = world.size
        return [
            WrittenText(prompt, *parts[number % size][number // size])
            for number, prompt in enumerate(self.prompts)
        ]

    def _engine(self, decoder: Decoder) -> Engine:
        """Return an engine whose ranks call the model as often as each other."""
        return Engine(
            runner_of(decoder, self.trainer.world.device, None),
            self._tokenizer,
            ends=self._rules.ends,
            context=self._rules.context,
            max_rows=len(self._requests),
            prefill_tokens=None,
        )

    def _decoder(self) -> Decoder:
        model = self.trainer.train_module.model
        if isinstance(model, DistributedDataParallel):
            model = model.module
        if not isinstance(model, Decoder):
            raise UsageError(
                f"{NEEDS} needs a model of this program, not {type(model).__name__}",
                where="trainer.callbacks.samples",
                fix="leave it out",
            )
        if any(tensor_cut(parameter) is not None for parameter in model.parameters()):
            raise UsageError(
                f"{NEEDS} needs all logits on a rank",
                where="trainer.callbacks.samples",
                why="with train_module.tp_config the vocabulary is cut over ranks",
                fix="leave one of the two out",
            )
        return model
