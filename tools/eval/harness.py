"""lm-evaluation-harness on local models, on served models, and on task files (README.md).

The harness is imported on use, so that --help and errors of arguments need no
installation.
"""

import contextlib
import json
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))
from server import request, serve

INSTALL = "python3 -m venv .venv && .venv/bin/pip install -r tools/eval/requirements.txt"


class Failure(Exception):
    """The problem, the place, and the remedy, in a sentence."""


def offline():
    """Keeps Hugging Face's libraries from the network. They read these settings when they are imported."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"


def require():
    """Checks that the harness is installed, and reduces its output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import lm_eval  # noqa: F401
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise Failure(f"{error.name or error}: is not installed: {INSTALL}") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def read_lines(path):
    """Returns the objects of a file of JSON lines."""
    objects = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    objects.append(json.loads(line))
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise Failure(f"{path}: line {number}: {error}") from error
    if not objects or not all(isinstance(found, dict) for found in objects):
        raise Failure(f"{path}: must contain JSON objects, one on each line")
    return objects


def write_local_task(path, name, folder):
    """Writes a task of the harness, YAML and data, for a task file."""
    examples = read_lines(path)
    delimiters = {example.get("target_delimiter", " ") for example in examples}
    if len(delimiters) > 1:
        raise Failure(f"{path}: has several target_delimiter, a task of the harness has one: split it")
    (delimiter,) = delimiters
    is_choice = "choices" in examples[0]
    try:
        if is_choice:
            rows = [{key: example[key] for key in ("context", "choices", "answer")} for example in examples]
        else:
            # The harness adds no delimiter to the targets of this kind.
            rows = [{"context": e["context"], "target": delimiter + e["answer"]} for e in examples]
    except (KeyError, TypeError) as error:
        raise Failure(f"{path}: an example has no valid {error}: tools/eval/README.md has the fields") from error
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "context",
    }
    if is_choice:
        metrics = {"acc": "mean", "acc_norm": "mean", "acc_bytes": "mean"}
        task |= {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": delimiter,
        }
    else:
        metrics = {"acc": "mean", "perplexity": "perplexity"}
        task |= {"output_type": "loglikelihood", "doc_to_target": "target"}
    task["metric_list"] = [
        {"metric": metric, "aggregation": way, "higher_is_better": metric != "perplexity"}
        for metric, way in metrics.items()
    ]
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")


def load_model(model, dtype="float32", device="cpu", batch_size=8, max_length=None):
    """Loads a model of the harness from a directory or a hub id that transformers can load. It reads up to
    `max_length` tokens."""
    require()
    import transformers
    from lm_eval.models.huggingface import HFLM

    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise Failure(f"{model}: has no config.json, expected the directory of a model")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=True)
        leave_texts_open(tokenizer)
        return HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            dtype=dtype,
            device=device,
            batch_size=batch_size,
            max_length=max_length,
            trust_remote_code=True,
        )
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise Failure(f"{model}: transformers cannot load it: {reason}") from error


@contextlib.contextmanager
def served_model(program, directory, *options):
    """Yields a model of the harness for a directory that moh-serve serves in f32 in the meantime."""
    require()
    import transformers
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    transformers.utils.logging.set_verbosity_error()
    with serve(program, directory, "--served-model-name", "model", "--dtype", "f32", *options) as (_, address):
        model = LocalCompletionsAPI(
            model="model",
            base_url=f"{address}v1/completions",
            tokenizer=str(directory),
            tokenizer_backend="huggingface",
            add_bos_token=True,
            # The harness reserves a place for the token that it has generated and does not use.
            max_length=request(address, "v1/models")["data"][0]["max_model_len"],
            batch_size=16,
        )
        leave_texts_open(model.tokenizer)
        yield model


def leave_texts_open(tokenizer):
    """Removes the tokens that a tokenizer adds after texts, which the harness would keep between context and choice."""
    from tokenizers.processors import TemplateProcessing

    framed, plain = (tokenizer.encode("a", add_special_tokens=added) for added in (True, False))
    begin = len(framed) - len(plain)
    while begin > 0 and framed[begin : begin + len(plain)] != plain:
        begin -= 1
    if begin + len(plain) == len(framed):
        return
    tokens = list(dict.fromkeys(zip(tokenizer.convert_ids_to_tokens(framed[:begin]), framed)))
    template = " ".join([*(token for token, _ in tokens), "$A"])
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=tokens)


def evaluate(model, tasks, folder=None, limit=None, num_fewshot=None):
    """Returns the results of the harness on tasks by name. `folder` has the tasks of `write_local_task`."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder) if folder else None)
    try:
        return lm_eval.simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=folder is not None,
            bootstrap_iters=0 if folder else 100000,
            confirm_run_unsafe_code=False,
        )
    except (ConnectionError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise Failure(
            f"{', '.join(tasks)}: the data set cannot be reached ({reason}): connect to huggingface.co, or "
            "name local task files with --tasks-dir"
        ) from error


def run(main):
    """Runs a program. A failure is a line on standard error and exit code 1."""
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"error: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
