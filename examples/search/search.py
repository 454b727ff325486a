"""Searches a learning rate and a width with Optuna: each trial is a run in this process.

python examples/search/search.py
"""

import sys

import optuna

import ddpforge
from ddpforge.errors import Diverged

STUDY = "runs/search"


def objective(trial: optuna.Trial, *sets: str) -> float:
    """The accuracy of a trial, which three evaluations without a better one end; one that diverges is pruned."""
    chosen = [
        f"optimizer.lr={trial.suggest_float('lr', 1e-4, 1e-1, log=True)}",
        f"model.width={trial.suggest_categorical('width', [8, 16])}",
        f"name=trial-{trial.number}",
    ]
    ends = "callbacks.early_stopping={ metric = 'eval/accuracy', patience = 3 }"
    try:
        outcome = ddpforge.run("digits", sets=[*chosen, ends, *sets], out=STUDY)
    except Diverged as error:
        raise optuna.TrialPruned from error
    return outcome.status["metrics"]["eval/accuracy"] or 0.0


def search(trials: int, *sets: str) -> optuna.Study:
    """`sets` change the recipe of every trial."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(lambda trial: objective(trial, *sets), n_trials=trials)
    return study


if __name__ == "__main__":
    best = search(20, *sys.argv[1:]).best_trial
    print(f"trial {best.number}: accuracy {best.value:.4f} with {best.params}")
    model = ddpforge.load(f"{STUDY}/trial-{best.number}", best=True).model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
