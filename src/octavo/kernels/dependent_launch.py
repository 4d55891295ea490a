"""Programmatic dependent launch (Hopper): a kernel of a chain starts while the one before it still runs."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def await_predecessor(dependent: tl.constexpr):
    """Wait until the kernel before this one is complete, then let the next one start.

    In this order a kernel that starts knows that everything before its predecessor is complete, so ahead of
    its own wait it may read all but the predecessor's results. Letting the next one start first would allow
    the chain to run several kernels ahead. At least one program of every kernel of a chain must wait, also
    when it has nothing to do: that is what makes completion transitive.
    """
    if dependent:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch_options(dependent: bool) -> dict[str, bool]:
    """Keyword arguments of a launch; `dependent` needs compute capability 9.0."""
    return {"dependent": True, "launch_pdl": True} if dependent else {"dependent": False}
