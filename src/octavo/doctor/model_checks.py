"""Checks of a named model against this machine, and of the settings by which models are found."""

import re
from difflib import get_close_matches

from octavo import env
from octavo.core.memory import num_parameters
from octavo.core.plan import HOST_FACTOR, Serving
from octavo.core.plan import memory as plan_memory
from octavo.doctor.facts import Facts, Model, Part
from octavo.doctor.gpu_checks import SHARE
from octavo.findings import gpu, machine, software
from octavo.findings.finding import Finding, ok, skipped
from octavo.findings.machine import gib
from octavo.model_spec import ModelSpec

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
URL = re.compile(r"(https?|socks[45]h?|socks)://[^\s/]+", re.IGNORECASE)
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TRITON_INTERPRET": "kernels are interpreted, a thousand times slower",
    "PYTHONDEVMODE": "Python checks itself, several times slower",
}
LEAST_LENGTH = 2048  # tokens of one sequence that a GPU should hold beside the weights
SLOTS, LARGE_SLOTS, LARGE = 256, 1024, 70 << 30  # as worker/limits chooses them


def settings(facts: Facts) -> Finding:
    """Variables that are misspelt, and debugging switches that were forgotten."""
    for name in facts.environment:
        # Others are no fault: Kubernetes gives every container the variables of a service that is called octavo.
        if name.startswith("OCTAVO_") and name not in env.OWN and (near := get_close_matches(name, env.OWN, 1, 0.85)):
            return software.unknown_variable(name, near[0])
    for name, what in SLOW.items():
        value = facts.environment.get(name, "").strip()
        if value not in ("", "0"):
            return software.slow_switch(name, value, what)
    given = [name for name in env.OWN if facts.environment.get(name)]
    return ok(f"Set: {', '.join(given)}" if given else "Octavo's variables are at their defaults")


def hub(facts: Facts) -> Finding:
    """How models are downloaded: the mirror, proxies, the token."""
    endpoint = facts.environment.get("HF_ENDPOINT", "").strip()
    if endpoint and not endpoint.startswith(("http://", "https://")):
        return software.endpoint_is_no_url(endpoint)
    for name in PROXIES:
        value = facts.environment.get(name, "").strip()
        if value and not URL.match(value):
            return software.proxy_is_no_url(name, value)
    for name in TOKENS:
        if re.search(r"\s", facts.environment.get(name, "").strip()):
            return software.token_is_broken(name)
    where = endpoint or "the hub itself"
    offline = facts.environment.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}
    proxies = sorted({name.upper() for name in PROXIES if facts.environment.get(name, "").strip()})
    by = f" through {', '.join(proxies)}" if proxies else ""
    return ok("HF_HUB_OFFLINE is set: only what is in the cache" if offline else f"Models come from {where}{by}")


def files(facts: Facts) -> Finding:
    return _part(_model(facts).files, "The engine could not start with it.")


def tokenizer(facts: Facts) -> Finding:
    model = _model(facts)
    if model.files.fault:
        return skipped("Not looked at: the model was not found.")
    return _part(model.tokenizer, "Texts could not be made into tokens, or into the wrong ones.")


def template(facts: Facts) -> Finding:
    model = _model(facts)
    if model.files.fault or model.tokenizer.fault:
        return skipped("Not looked at: there is no tokenizer.")
    return _part(model.template, "Requests to /v1/chat/completions are refused; /v1/completions work.")


def fits(facts: Facts) -> Finding:
    """The arithmetic of `octavo plan`, for the first GPU of this machine, or for its CPU."""
    model = _model(facts)
    if model.files.fault:
        return skipped("Not looked at: the model was not found.")
    spec = ModelSpec.from_config(dict(model.config))
    if facts.nvidia.gpus and facts.libraries.torch_gpus:
        return _fits_gpu(facts, spec, model.weight_bytes)
    element = 2 if facts.libraries.bfloat16 and spec.dtype != "float32" else 4
    needed, available = num_parameters(spec) * element, facts.limits.available_memory
    if needed > available:
        return machine.weights_too_large(needed, available)
    if HOST_FACTOR * needed > available:
        return machine.little_memory(available, int(HOST_FACTOR * needed), "loading 1.5 times the weights")
    return ok(f"Weights of {gib(needed)} in {gib(available)} of memory")


def _fits_gpu(facts: Facts, spec: ModelSpec, weight_bytes: int) -> Finding:
    first = facts.nvidia.gpus[0]
    serving = Serving(
        weight_element_bytes=2,
        cache_element_bytes=2,
        max_model_len=min(spec.max_model_len, LEAST_LENGTH),
        max_num_seqs=LARGE_SLOTS if first.total >= LARGE else SLOTS,
        max_num_batched_tokens=16384,
        utilization=SHARE,
        weight_bytes=weight_bytes or None,
    )
    room = plan_memory(spec, serving, first.total)
    if not room.fits:
        return gpu.does_not_fit(room.allowed + room.missing, room.allowed, room.missing, first.name)
    host = int(HOST_FACTOR * room.lines["weights"])
    if host > facts.limits.available_memory:
        return machine.little_memory(facts.limits.available_memory, host, "loading 1.5 times the weights")
    return ok(f"Weights of {gib(room.lines['weights'])}, and {room.kv_tokens:,} tokens of KV cache")


def _part(part: Part, why: str) -> Finding:
    return Finding(part.level, part.fault, why, part.mend) if part.fault else ok(part.says)


def _model(facts: Facts) -> Model:
    return facts.model or Model()


JUDGES = (files, tokenizer, template, fits)
"""Those that are asked only where a model is named."""
