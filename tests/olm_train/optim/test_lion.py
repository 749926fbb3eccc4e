"""Lion: the paper's update, exactly; state from the start."""

from __future__ import annotations

import torch

from olm_train.optim.lion import LionConfig


def test_a_step_is_the_papers() -> None:
    model = torch.nn.Linear(5, 3, bias=False)
    optimizer = LionConfig(lr=0.01, betas=(0.9, 0.98), weight_decay=0.1).build(model)
    weight, mean = model.weight.detach().clone(), torch.zeros(3, 5)
    for seed in range(3):
        gradient = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
        model.weight.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(0.9 * mean + 0.1 * gradient)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * update
        mean = 0.98 * mean + 0.02 * gradient
        torch.testing.assert_close(model.weight.detach(), weight)
        torch.testing.assert_close(optimizer.state[model.weight]["exp_avg"], mean)
