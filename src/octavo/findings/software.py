"""Texts about Python, its packages, and the settings of the environment."""

from octavo.findings.finding import Finding
from octavo.findings.redact import Redactor


def python_too_old(version: str) -> Finding:
    return Finding(
        "error",
        f"This is Python {version}; Octavo needs 3.11 or newer.",
        "It is written in the language of that version.",
        "python3.12 -m venv .venv && .venv/bin/pip install octavo",
    )


def python_of_32_bits() -> Finding:
    return Finding(
        "error",
        "This Python has 32 bits.",
        "A process of it cannot hold a model, and PyTorch has no build for it.",
        "Install a 64-bit Python: sudo apt-get install python3.12-venv on a 64-bit system.",
    )


def wrong_packages(unmet: tuple[str, ...]) -> Finding:
    """`unmet` holds sentences such as "numpy 1.26.4 is installed, and numpy>=2.0 is needed" without full stops."""
    wanted = [sentence.rsplit(", and ", 1)[-1].removesuffix(" is needed") for sentence in unmet]
    return Finding(
        "error",
        f"{'; '.join(unmet)}.",
        "Other versions lack what Octavo calls, or behave otherwise.",
        f"pip install {' '.join(repr(one) for one in wanted)}",
    )


DISTRIBUTIONS = {"zmq": "pyzmq", "yaml": "pyyaml", "multipart": "python-multipart", "sklearn": "scikit-learn"}
"""Packages that are installed under another name than they are imported by."""


def missing(module: str) -> Finding:
    package = DISTRIBUTIONS.get(module, module)
    return Finding(
        "error",
        f"The Python package {package} is missing.",
        "Octavo cannot start without it.",
        f"pip install {package}",
    )


def torch_broken(detail: str) -> Finding:
    return Finding(
        "error",
        f"PyTorch cannot be imported: {detail.rstrip('.')}.",
        "It computes everything.",
        "pip install --force-reinstall torch",
    )


def numpy_broken(detail: str) -> Finding:
    return Finding(
        "error",
        f"NumPy cannot be imported: {detail.rstrip('.')}.",
        "Weights are read through it.",
        "pip install --force-reinstall 'numpy>=2.0'",
    )


def library_missing(detail: str) -> Finding:
    return Finding(
        "error",
        f"A compiled library cannot be loaded: {detail.rstrip('.')}.",
        "A package was installed in part, or for another system.",
        "`octavo doctor` names the package it belongs to; pip install --force-reinstall PACKAGE mends it.",
    )


def numpy_mismatch(package: str, detail: str) -> Finding:
    return Finding(
        "warning",
        f"{package} does not fit the installed NumPy: {detail.rstrip('.')}.",
        "It was compiled for another NumPy; programs that import both (transformers does) stop at once.",
        f"pip install --force-reinstall --no-deps {package}",
    )


def no_compiler(what: str) -> Finding:
    return Finding(
        "warning",
        f"There is no {what}.",
        "Octavo's CPU kernels are compiled with g++ and ninja; without them PyTorch's slower operators compute.",
        "sudo apt-get install g++ ninja-build (OCTAVO_CPU_KERNELS=0 silences this)",
    )


def endpoint_is_no_url(endpoint: str) -> Finding:
    endpoint = Redactor()(endpoint)  # it may hold a password, and this goes into logs
    return Finding(
        "error",
        f"HF_ENDPOINT={endpoint} is not a URL.",
        "No model can be downloaded.",
        f"Set it to https://{endpoint} or unset it.",
    )


def proxy_is_no_url(variable: str, value: str) -> Finding:
    value = Redactor()(value)
    return Finding(
        "error",
        f"{variable}={value} is not the URL of a proxy.",
        "Downloads fail before they begin.",
        f"export {variable}=http://{value}",
    )


def token_is_broken(variable: str) -> Finding:
    return Finding(
        "error",
        f"{variable} has blanks or line breaks in it.",
        "It travels in a header, which cannot hold them; private and gated models are refused.",
        f"export {variable}=$(tr -d '[:space:]' < your-token-file)",
    )


def unknown_variable(name: str, near: str) -> Finding:
    return Finding(
        "warning",
        f"{name} is no variable that Octavo reads. Did you mean {near}?",
        "What was meant by it does not happen.",
        f'export {near}="${name}"; unset {name}',
    )


def slow_switch(name: str, value: str, what: str) -> Finding:
    return Finding("warning", f"{name}={value}: {what}.", "It is meant for debugging.", f"unset {name}")


def probe_failed(what: str, reason: str) -> Finding:
    return Finding(
        "warning",
        f"{what} could not be found out: {reason.rstrip('.')}.",
        "What depends on it was not looked at.",
        "Run `octavo doctor` again; if it stays so, `octavo doctor --bundle report.zip` and file an issue.",
    )


def unexpected(detail: str) -> Finding:
    return Finding(
        "error",
        f"{detail.rstrip('.')}.",
        "This is nothing that Octavo foresees.",
        "`octavo doctor` looks for causes; `octavo doctor --bundle report.zip` writes what an issue needs.",
    )
