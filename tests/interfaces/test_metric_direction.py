"""Direction of a metric (lower or higher is better), derived from its name if possible."""

import pytest

from ddpforge.interfaces.metric_direction import lower_is_better

LOWER = (
    *("loss", "cross_entropy_loss", "error", "top5_error", "word_error_rate", "perplexity", "mae", "mse", "rmse"),
    *("err", "ppl", "bits_per_byte", "bpb", "nll", "mape", "wer", "cer", "eer", "fid", "ece", "brier"),
)
HIGHER = (
    *("accuracy", "top5_accuracy", "acc", "top5", "auc", "auroc", "miou", "f1", "f1_macro", "precision", "recall"),
    *("bleu", "bleu4", "rougeL", "dice", "psnr", "ssim", "map", "ndcg", "mrr", "r2"),
)


@pytest.mark.parametrize("name", LOWER)
def test_less_is_better_for_losses_errors_and_distances(name: str) -> None:
    assert lower_is_better(f"eval/{name}") is True
    assert lower_is_better(f"eval/{name.upper()}") is True


@pytest.mark.parametrize("name", HIGHER)
def test_more_is_better_for_accuracies_and_scores(name: str) -> None:
    assert lower_is_better(f"eval/{name}") is False


@pytest.mark.parametrize("name", ["reward", "maes", "mapping", "accent", "lossless", "bits2", ""])
def test_other_names_have_no_direction(name: str) -> None:
    assert lower_is_better(f"eval/{name}") is None
