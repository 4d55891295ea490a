"""Makers of tiny random models with transformers, the oracle of the tests."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

F_BPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 600,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": [1, 2],
}


def oracle(seed: int = 0, scale: float = 0.3, **overrides: Any) -> PreTrainedModel:
    """A float32 transformers model: F_BPE with some keys changed.

    Weights are normal with deviation `scale`, far above training's 0.02: logits are then well apart and
    greedy text is varied. Norm weights stay near their own start value.
    """
    config = AutoConfig.for_model(**{**F_BPE, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, scale)
    return model


def config_of(model: PreTrainedModel) -> dict[str, Any]:
    """What config.json would hold."""
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The checkpoint's tensors under the names that a file would have."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Write config.json and safetensors as transformers does."""
    model.save_pretrained(folder, **options)
    return folder


def chain_model(successors: dict[int, int], vocab_size: int, max_position_embeddings: int = 2048) -> PreTrainedModel:
    """F-SCRIPT: a Llama whose greedy text walks `successors`, token by token, whatever came before.

    The embedding is one-hot, attention and MLP add nothing, and the head's row of a token points at its
    predecessor. A token without a successor is followed by token 0.
    """
    size = vocab_size + vocab_size % 2
    model = oracle(
        hidden_size=size,
        vocab_size=vocab_size,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=size,
        intermediate_size=8,
        num_hidden_layers=1,
        max_position_embeddings=max_position_embeddings,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.get_input_embeddings().weight.fill_diagonal_(1.0)
        head = model.get_output_embeddings().weight
        for token in range(vocab_size):
            head[successors.get(token, 0), token] = 10.0
    return model


def greedy(model: PreTrainedModel, prompt: Iterable[int], num_tokens: int) -> list[int]:
    """The oracle's greedy continuation; end-of-sequence tokens do not stop it."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, ids.shape[1] :].tolist()
