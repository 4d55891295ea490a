"""What lm-eval found, checked: `python lm_eval_client.py write FOLDER`, then `... check FOLDER` after the run.

The task is a choice between endings, scored by the log-likelihoods of endings given as prompts (echo, logprobs), and
generation until a stop string. A model of this size knows these.
"""

import json
import sys
from pathlib import Path

QUESTIONS = [
    ("The capital of France is", [" Paris", " Banana", " Seven"]),
    ("The sun rises in the", [" east", " keyboard", " carrot"]),
    ("One, two, three, four,", [" five", " giraffe", " window"]),
    ("The opposite of hot is", [" cold", " pencil", " Tuesday"]),
    ("Monday, Tuesday,", [" Wednesday", " potato", " blue"]),
    ("A cat is an", [" animal", " integer", " ocean"]),
]
CHOICE = """task: octavo_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{begin}}}}"
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
GENERATE = """task: octavo_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{begin}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 8, do_sample: false}}
filter_list: [{{name: first, filter: [{{function: regex, regex_pattern: "^ ?([A-Za-z]+)"}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match, ignore_case: true}}]
"""


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "questions.jsonl", "w") as file:
        for begin, choices in QUESTIONS:
            file.write(json.dumps({"begin": begin, "choices": choices, "answer": choices[0].strip()}) + "\n")
    (folder / "choice.yaml").write_text(CHOICE.format(folder=folder.resolve()))
    (folder / "generate.yaml").write_text(GENERATE.format(folder=folder.resolve()))


def check(folder: Path) -> None:
    (path,) = (folder / "results").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    choice = results["octavo_choice"]["acc,none"]
    generated = results["octavo_generate"]["exact_match,first"]
    print(f"loglikelihood accuracy {choice:.2f}, generation exact match {generated:.2f}, of {len(QUESTIONS)} questions")
    if choice < 0.8 or generated < 0.5:
        sys.exit("FAILED: a real model answers more of these")


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](Path(sys.argv[2]))
