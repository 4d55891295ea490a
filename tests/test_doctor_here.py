"""`octavo doctor` as a process on this machine, with one real fault at a time: ports, limits, programs, models."""

import json
import os
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import tiny_models
import tiny_tokenizers
from octavo import env
from octavo.doctor import checks, nvidia, probe
from octavo.doctor.facts import Facts, Gpu, Limits
from octavo.doctor.gather import look_at_model
from octavo.doctor.model_checks import JUDGES
from octavo.doctor.report import EXIT_STATUS

Lines = dict[str, tuple[str, str]]
MIB = 1 << 20


def run(*args: str, preface: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "octavo", "doctor", "--host", "127.0.0.1", *args]
    if not any(arg.startswith("--port") for arg in args):
        command += ["--port", "0"]
    if preface:
        command = ["bash", "-c", f'{preface}; exec "$@"', "bash", *command]
    clean = {name: value for name, value in env.for_child(sys.path).items() if not name.startswith(("OMP_", "TRITON_"))}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean | environment, check=False)


def doctor(*args: str, preface: str = "", **environment: str) -> Lines:
    """Level and text with mend of what is not in order, by check."""
    done = run("--json", *args, preface=preface, **environment)
    assert "Traceback" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == EXIT_STATUS[found["worst"]]
    return {
        one["check"]: (one["level"], f"{one['found']} {one['mend']}") for one in found["checks"] if one["level"] != "ok"
    }


@pytest.fixture(scope="module")
def here() -> Lines:
    """What this machine has to say without any fault of ours."""
    return doctor()


@pytest.fixture
def chat_model(tiny: PreTrainedModel, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    tiny_models.save(tiny, folder)
    tiny_tokenizers.f_bpe(folder)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def the_new_line(here: Lines, found: Lines) -> tuple[str, str, str]:
    """Check, level and text of the one line that this machine did not have before."""
    new = [(check, *line) for check, line in found.items() if here.get(check) != line and line[0] != "skipped"]
    assert len(new) == 1, new
    return new[0]


@pytest.mark.parametrize(
    ("environment", "preface", "check", "level", "says"),
    [
        ({"HF_ENDPOINT": "mirror.example"}, "", "Hugging Face", "error", "Set it to https://mirror.example"),
        ({"OMP_NUM_THREADS": "4096"}, "", "CPU threads", "warning", "export OMP_NUM_THREADS="),
        ({"OCTAVO_CACHE_ROOT": "/proc/octavo"}, "", "Disk", "error", "export OCTAVO_CACHE_ROOT="),
        ({}, "ulimit -n 200", "Open files", "warning", "At most 200 files may be open. ulimit -n 4096"),
    ],
)
def test_a_fault_of_the_environment(
    here: Lines, environment: dict[str, str], preface: str, check: str, level: str, says: str
) -> None:
    found = the_new_line(here, doctor(preface=preface, **environment))
    assert found[:2] == (check, level)
    assert says in found[2]


def test_a_taken_port_and_who_has_it(here: Lines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check, level, text = the_new_line(here, doctor("--port", str(port)))
    assert (check, level) == ("Port", "error")
    assert f"Cannot listen on port {port} of 127.0.0.1: Address already in use, by " in text
    assert f"(pid {os.getpid()})" in text


@pytest.mark.parametrize(
    ("code", "check", "says"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "PyTorch", "libcudart.so.13"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "PyTorch", "was killed by SIGSEGV"),
    ],
)
def test_a_broken_pytorch(here: Lines, tmp_path: Path, code: str, check: str, says: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code)
    found = the_new_line(here, doctor(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])))
    assert found[0] == check and says in found[2]


def test_scikit_learn_of_another_numpy(here: Lines, tmp_path: Path) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text(
        "raise ValueError('numpy.dtype size changed, may indicate binary incompatibility. Expected 96, got 88')"
    )
    found = the_new_line(here, doctor(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])))
    assert found[:2] == ("NumPy", "warning")
    assert "pip install --force-reinstall --no-deps scikit-learn" in found[2]


NVIDIA_SMI = """#!/bin/sh
case "$*" in
*query-gpu*) {gpus} ;;
*query-compute-apps*) echo "/usr/bin/python3, 4711" ;;
*nvlink*) printf 'GPU 0: NVIDIA H200\\n\\t Link 0: 26.562 GB/s\\n\\t Link 1: <inactive>\\n' ;;
*) echo "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0 |" ;;
esac
"""
ONE = "NVIDIA H200, 143771, 35000, 9.0, 580.95.05"


def fake_nvidia_smi(folder: Path, gpus: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(gpus=gpus))
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, f"echo '{ONE}'; echo '{ONE}'")["PATH"])
    found = nvidia.look()
    assert found.gpus == (Gpu("NVIDIA H200", 143771 * MIB, 35000 * MIB, (9, 0)),) * 2
    assert (found.driver, found.cuda, found.holders) == ("580.95.05", "13.0", ("python3 (pid 4711)",))
    assert found.links == (True, False)


@pytest.mark.parametrize(
    ("gpus", "level", "says"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "error", "sudo reboot"),
        ("echo '[N/A], what'", "warning", "nvidia-smi said '[N/A], what'"),
        ("kill -SEGV $$", "error", "nvidia-smi ended with status -11"),
    ],
)
def test_a_broken_driver(here: Lines, tmp_path: Path, gpus: str, level: str, says: str) -> None:
    found = the_new_line(here, doctor(**fake_nvidia_smi(tmp_path, gpus)))
    assert found[:2] == ("NVIDIA driver", level)
    assert says in found[2]


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    program = tmp_path / "hangs"
    program.write_text("#!/bin/sh\nsleep 60 &\nsleep 60\n")
    program.chmod(0o755)
    begin = time.monotonic()
    with pytest.raises(probe.ProbeFailed, match="hangs did not answer in 0.5 seconds"):
        probe.ask([str(program)], 0.5)
    assert time.monotonic() - begin < 20
    with pytest.raises(probe.ProbeFailed, match="nowhere cannot be started"):
        probe.ask([str(tmp_path / "nowhere")], 0.5)


def test_a_good_model_is_in_order(here: Lines, chat_model: Path) -> None:
    assert doctor(str(chat_model)) == here
    assert model_lines(chat_model) == {}


NO_TEMPLATE = "(folder / 'chat_template.jinja').unlink(); (folder / 'tokenizer_config.json').unlink()"


def model_lines(folder: Path) -> Lines:
    """What the checks of a model say, on a machine that has no other fault."""
    facts = Facts(model=look_at_model(str(folder)), limits=Limits(available_memory=8 << 30))
    judged = {check.name: check.judge(facts) for check in checks.CHECKS if check.judge in JUDGES}
    return {name: (one.level, f"{one.found} {one.mend}") for name, one in judged.items() if one.level != "ok"}


def edit(name: str, **values: object) -> str:
    """Python that changes fields of a JSON file of the model."""
    return f"p = folder / {name!r}; p.write_text(json.dumps(json.loads(p.read_text()) | {values!r}))"


@pytest.mark.parametrize(
    ("fault", "check", "level", "says"),
    [
        ("(folder / 'config.json').unlink()", "Model", "error", "Copy the model's config.json into it."),
        ("(folder / 'model.safetensors').unlink()", "Model", "error", "a config.json and no weights"),
        ("(folder / 'model.safetensors').write_bytes(b'x' * 30)", "Model", "error", "model.safetensors"),
        (edit("config.json", architectures=["GPT2LMHeadModel"]), "Model", "error", "GPT2LMHeadModel is not served"),
        ("(folder / 'tokenizer.json').unlink()", "Tokenizer", "error", "There is no tokenizer.json"),
        ("(folder / 'tokenizer.json').write_text('{')", "Tokenizer", "error", "tokenizer.json"),
        (NO_TEMPLATE, "Chat template", "warning", "--chat-template FILE.jinja"),
        ("(folder / 'chat_template.jinja').write_text('{% for %}')", "Chat template", "error", "not valid Jinja"),
    ],
)
def test_a_fault_of_the_model(chat_model: Path, fault: str, check: str, level: str, says: str) -> None:
    exec(fault, {"folder": chat_model, "json": json})
    found = the_new_line({}, model_lines(chat_model))
    assert found[:2] == (check, level)
    assert says in found[2]


def test_a_tokenizer_of_another_model(chat_model: Path) -> None:
    path = chat_model / "tokenizer.json"
    content = json.loads(path.read_text())
    shift = 100_000
    content["model"]["vocab"] = {token: number + shift for token, number in content["model"]["vocab"].items()}
    for added in content.get("added_tokens", []):
        added["id"] += shift
    path.write_text(json.dumps(content))
    check, level, text = the_new_line({}, model_lines(chat_model))
    assert (check, level) == ("Tokenizer", "error")
    assert "It is another model's" in text


@pytest.mark.case("ENV-01")
def test_a_missing_model_is_one_line_and_no_network(here: Lines) -> None:
    begin = time.monotonic()
    check, level, text = the_new_line(here, doctor("nobody/nothing", HF_HUB_OFFLINE="1"))
    assert (check, level) == ("Model", "error")
    assert "HF_HUB_OFFLINE is set" in text
    assert time.monotonic() - begin < 60


SECRETS = {
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOp",
    "OCTAVO_API_KEY": "opensesame-9000",
    "HTTPS_PROXY": "http://someone:pr0xyw0rd@proxy.example:3128",
    "NCCL_PASSWORD": "correct horse",
}


def test_the_bundle_has_everything_but_secrets(chat_model: Path, tmp_path: Path) -> None:
    log, options, bundle = tmp_path / "s.log", tmp_path / "o.yaml", tmp_path / "bundle.zip"
    log.write_text(
        "INFO serving\n"
        * 3000
        + "Authorization: Bearer abc.def.ghi\nGET https://u:hunter22@host/x?api_key=qwertz&n=1\n"
        "a client sent opensesame-9000 and hf_ZyXwVuTsRqPo\noctavo: the last line\n"
    )
    options.write_text(
        "port: 8000\napi_key:\n  - first-key\n  - second-key\nadmin_api_key: third-key\nmax_num_seqs: 64\n"
    )
    done = run(str(chat_model), "--bundle", str(bundle), "--log", str(log), "--options", str(options), **SECRETS)
    assert "Secrets were removed" in done.stderr
    with zipfile.ZipFile(bundle) as archive:
        contents = {name: archive.read(name).decode() for name in archive.namelist()}
    assert set(contents) == {
        "report.txt", "findings.json", "packages.txt", "environment.txt", "server.log", "options.yaml",
    }  # fmt: skip
    everything = "\n".join(contents.values()) + done.stdout + done.stderr
    secrets = [*SECRETS.values(), "pr0xyw0rd", "abc.def.ghi", "hunter22", "qwertz", "hf_ZyXwVuTsRqPo"]
    for secret in [*secrets, "first-key", "second-key", "third-key"]:
        assert secret not in everything, secret
    assert "octavo: the last line" in contents["server.log"] and contents["server.log"].count("\n") == 2000
    assert "max_num_seqs: 64" in contents["options.yaml"] and "port: 8000" in contents["options.yaml"]
    assert "HTTPS_PROXY=http://<removed>@proxy.example:3128" in contents["environment.txt"]
    assert "torch==" in contents["packages.txt"]
    assert json.loads(contents["findings.json"])["checks"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--bundle", "/no/such/folder/b.zip"), "There is no folder /no/such/folder"),
        (("--log", "x"), "--bundle FILE"),
        (("--port=70000",), "port=70000"),
    ],
)
def test_bad_input_is_named(args: tuple[str, ...], says: str) -> None:
    done = run(*args)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]


def test_collect_env_is_the_same_command() -> None:
    help_of = [
        subprocess.run(
            [sys.executable, "-m", "octavo", name, "--help"], capture_output=True, text=True, check=True, timeout=60
        ).stdout.replace(f"octavo {name}", "")
        for name in ("doctor", "collect-env")
    ]
    assert help_of[0] == help_of[1] and "--bundle" in help_of[0]
