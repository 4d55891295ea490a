"""Matrix products in a fixed order, for engines that must be deterministic."""

import torch
from torch import Tensor

from octavo.errors import InvalidConfig
from octavo.kernels.fixed_matmul import fixed_matmul
from octavo.layers.decoder import CausalLM
from octavo.layers.linear import Linear
from octavo.quant.base import LinearLayer
from octavo.quant.dense import Dense


class FixedOrder(Dense):
    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        out = torch.empty(len(x), layer.out_features, dtype=x.dtype, device=x.device)
        fixed_matmul(x, layer.weight, out, bias=layer.bias)
        return out


def fix_products(model: CausalLM) -> None:
    """Let every linear layer of a loaded model multiply in one order, whatever the number of rows.

    Raises:
        InvalidConfig: weights that are kept in another form than the matrix itself.
    """
    for module in model.modules():
        if isinstance(module, Linear):
            if type(module.method) is not Dense:
                raise InvalidConfig(
                    "deterministic=True is not allowed with quantized weights: their products depend on the rows.",
                    "Run the unquantized checkpoint.",
                )
            module.method = FixedOrder()
