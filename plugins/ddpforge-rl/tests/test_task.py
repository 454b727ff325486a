"""Episodes and their loss, without ddpforge's training loop."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from ddpforge_rl import ActorCritic, Episodes, PolicyGradient


def policy(seed: int = 0) -> ActorCritic:
    torch.manual_seed(seed)
    model = ActorCritic(inputs=4, outputs=2, width=16)
    torch.nn.init.normal_(model.policy[-1].weight, std=0.1)
    torch.nn.init.normal_(model.value[-1].weight, std=0.1)
    return model


def task(model: ActorCritic, **options: Any) -> PolicyGradient:
    made = PolicyGradient(**{"env": "CartPole-v1", "max_steps": 60, **options})
    made.check(model, Episodes(split="train"))
    return made


def test_seeds_come_from_the_generator_and_differ_between_splits() -> None:
    drawn = {}
    for split in ("train", "eval"):
        torch.manual_seed(5)
        drawn[split] = int(Episodes(split=split, count=3)[0])
    torch.manual_seed(5)
    assert int(Episodes(split="train", count=3)[2]) == drawn["train"] != drawn["eval"]


def test_loss_of_one_episode_equals_the_formula() -> None:
    model = policy()
    loss, outcome = task(model, gamma=0.9, value_weight=0.25, entropy=0.01).loss(model, torch.tensor([11]))

    env, draw = gymnasium.make("CartPole-v1"), np.random.default_rng(11)
    observation, _ = env.reset(seed=11)
    rewards, terms, over = [], [], False
    while not over and len(rewards) < 60:
        logits, value = model(torch.from_numpy(observation)[None])
        chances = logits[0].softmax(dim=0)
        action = int(draw.random() > chances[0].item())
        entropy = -(chances * chances.log()).sum()
        terms.append((chances[action].log(), value[0], entropy))
        observation, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        over = terminated or truncated
    expected = torch.tensor(0.0)
    for step, (log, value, entropy) in enumerate(terms):
        togo = 0.1 * sum(0.9**ahead * reward for ahead, reward in enumerate(rewards[step:]))
        expected = expected - log * (togo - value.detach()) + 0.25 * (togo - value) ** 2 - 0.01 * entropy
    assert outcome.returns.tolist() == [sum(rewards)]
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


def test_episode_does_not_depend_on_the_other_episodes() -> None:
    model = policy()
    mine = task(model)
    together, outcome = mine.loss(model, torch.tensor([1, 2, 3]))
    alone = [mine.loss(model, torch.tensor([seed])) for seed in (3, 1, 2)]
    assert outcome.returns.tolist() == [alone[n][1].returns.item() for n in (1, 2, 0)]
    assert len(set(outcome.returns.tolist())) > 1
    torch.testing.assert_close(together, sum(loss for loss, _ in alone))


def test_evaluation_takes_the_likeliest_action_and_computes_no_gradients() -> None:
    model = policy().eval()
    with torch.no_grad():
        model.policy[-1].bias[1] = 100.0
        loss, outcome = task(model).loss(model, torch.tensor([4, 5]))
    env = gymnasium.make("CartPole-v1")
    for seed, length in zip((4, 5), outcome.lengths.tolist(), strict=True):
        env.reset(seed=seed)
        steps = 1
        while not env.step(1)[2]:
            steps += 1
        assert length == steps
    assert not loss.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "CartPol-v1"}, "cannot make `CartPol-v1`"),
        ({"env": "CartPole-v1", "env_options": {"gravity": 1}}, "cannot make"),
        ({"env": "Pendulum-v1"}, "expected a Box of observations and Discrete actions"),
        ({"env": "Acrobot-v1"}, r"set model.inputs = 6"),
    ],
)
def test_unsuitable_environment_or_model_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(policy(), **options)
