"""Direction of a metric, derived from its name if the metric does not declare it (e.g. a task's loss)."""

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
    """Returns True for losses and errors, False for accuracies and scores, and None for any other name.

    The last known word in the name decides: a `top5_error` is an error.
    """
    for word in reversed(re.findall(r"[a-z0-9]+", metric.casefold())):
        if _LOWER.fullmatch(word):
            return True
        if _HIGHER.fullmatch(word):
            return False
    return None
