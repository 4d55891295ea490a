"""What an attention backend is: it plans once a step and runs once a layer."""

from typing import Any, Protocol

from torch import Tensor

from octavo.batch import Batch
from octavo.model_spec import ModelSpec

# K and V, each [num_blocks, block_size, kv_heads, head_dim]. How positions and heads lie inside a block is the
# backend's business: everybody else clears, copies and moves whole blocks only.
Cache = tuple[Tensor, Tensor]


class Backend(Protocol):
    """One object serves all layers of a model; the worker chooses it and calls `plan` before the model.

    Causal attention of each row over its sequence's cached positions up to and including its own. With
    a sliding window w a row at position p sees (p - w, p].
    """

    def refuses(self, spec: ModelSpec) -> str | None:
        """Why this backend cannot run the model, in words, or None."""
        ...

    def plan(self, batch: Batch, window: int | None) -> Any:
        """What `forward` needs and is the same for all layers of this window; goes to `batch.plans[window]`."""
        ...

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Cache,
        plan: Any,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Write key and value to the cache at the batch's slots, then attend.

        query [T, heads, head_dim], key and value [T, kv_heads, head_dim] -> [T, heads, head_dim].
        Scores are query . key * scale, then softcap * tanh(scores / softcap) where there is a soft-cap.
        """
        ...
