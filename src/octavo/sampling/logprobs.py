"""Logprobs of a token and of the most likely ones at its position."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.sampling.blocks import top
from octavo.types import TokenLogprobs

LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
WHOLE_VOCABULARY = -1


def token_logprobs(logits: Tensor, tokens: Tensor, ks: Sequence[int], as_logits: bool = False) -> list[TokenLogprobs]:
    """What is reported for `tokens` [N] drawn from `logits` [N, V] float32: each token, then the ks[i] most likely.

    ks[i] = -1 asks for the whole vocabulary. The rank of a token is 1 + the number of larger logits.
    `as_logits` reports logits in place of log(softmax(logits)).
    """
    if not ks:
        return []
    vocab_size = logits.shape[1]
    lengths = [vocab_size if k == WHOLE_VOCABULARY else min(k, vocab_size) for k in ks]
    chosen = logits.gather(1, tokens[:, None])
    # As float32, which sums several times faster than a truth value and is exact up to 2**24.
    ranks = torch.gt(logits, chosen, out=torch.empty_like(logits)).sum(-1).long() + 1
    ids = tokens[:, None]
    if max(lengths):
        ids = torch.cat([ids, top(logits, max(lengths))[1]], dim=1)
    values = (logits if as_logits else logits.log_softmax(-1)).gather(1, ids)
    return [
        TokenLogprobs(tuple(row_ids[: length + 1]), tuple(row_values[: length + 1]), rank)
        for row_ids, row_values, rank, length in zip(
            ids.tolist(), values.tolist(), ranks.tolist(), lengths, strict=True
        )
    ]
