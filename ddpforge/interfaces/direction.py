"""Tells by its name if less or more of a metric is better, where the metric does not declare it: a task's loss, say."""

import re

__all__ = ["lower_is_better"]

_LOWER = re.compile(
    r"\w*(loss|error|perplexity|mae|mse)|err|ppl|bits|bp[bcd]|nll|mape|smape|wer|cer|ter|eer|fid|kid|ece|brier"
)
_HIGHER = re.compile(
    r"\w*(accuracy|auc|auroc|auprc|iou)|acc|top\d+|f1|f2|fbeta|precision|recall|specificity|sensitivity|bleu\d*|chrf|rouge\w*"
    r"|meteor|dice|psnr|ssim|map|ndcg|mrr|r2"
)


def lower_is_better(metric: str) -> bool | None:
    """True for losses and errors, False for accuracies and scores; None where the name does not tell.

    The last word that says anything decides: a `top5_error` is an error.
    """
    for word in reversed(re.findall(r"[a-z0-9]+", metric.casefold())):
        if _LOWER.fullmatch(word):
            return True
        if _HIGHER.fullmatch(word):
            return False
    return None
