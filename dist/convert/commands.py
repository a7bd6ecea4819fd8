"""``myllm export`` and ``myllm import``."""

import time
from collections.abc import Sequence
from pathlib import Path

from accel.help import parser
from accel.system import keep_memory
from dist.convert import gguf, huggingface, llmc
from dist.convert.mapping import DROPOUT
from dist.convert.transfer import parameters
from dist.monitor import bytes_text, duration
from dist.use import add_checkpoint
from dist.weights import Weights, write_weights

KINDS = {"float32": "F32", "bf16": "BF16", "float16": "F16", "q8_0": "Q8_0"}
READERS = {".gguf": gguf.read, ".bin": llmc.read}


def export(argv: Sequence[str]) -> int:
    """``myllm export``."""
    args = parser(
        "export",
        "Write a trained model for others: a folder as Hugging Face's transformers loads it, a "
        "GGUF file for llama.cpp, or a checkpoint of llm.c.",
        "myllm export runs/laptop mine-hf --dtype bf16\n"
        "  myllm export runs/laptop mine.gguf --dtype q8_0",
    )
    add_checkpoint(args)
    args.add_argument("out", metavar="OUT", help="a new folder, FILE.gguf or FILE.bin")
    args.add_argument("--dtype", choices=KINDS, default="float32", help="float32 (default)")
    given = args.parse_args(argv)
    out, kind = Path(given.out), KINDS[given.dtype]
    suffix = out.suffix.lower()
    if kind == "Q8_0" and suffix != ".gguf":
        raise ValueError("--dtype q8_0 is for GGUF: name the output FILE.gguf")
    if suffix in (".safetensors", ".json"):
        raise ValueError(f"{out}: such files lie in a folder with others; name the folder")
    keep_memory()
    weights = Weights(given.checkpoint)
    started = time.perf_counter()
    write = {".gguf": gguf.export, ".bin": llmc.export}.get(suffix, huggingface.export)
    family, notes = write(weights, out, kind)
    size = sum(f.stat().st_size for f in ([*out.iterdir()] if out.is_dir() else [out]))
    print(
        f"{weights.path} -> {out}: {family.name}, {weights.layout.size:,} parameters as "
        f"{given.dtype}, {bytes_text(size)} in {duration(time.perf_counter() - started)}"
    )
    for note in notes:
        print(note)
    if weights.tokenizer is None:
        print("there is no tokenizer beside these weights, so none was written")
    for name in sorted(DROPOUT):
        rate = getattr(weights.config, name)
        if rate and not any(key.ours == name for key in family.keys):
            print(f"{name} = {rate} matters in training alone, and was left out")
    return 0


def import_(argv: Sequence[str]) -> int:
    """``myllm import``."""
    args = parser(
        "import",
        "Make a checkpoint of a model of others: a Hugging Face folder with a Llama, Mistral, "
        "Qwen2, Qwen3 or GPT-2 (and what is built like them, such as SmolLM), a GGUF file of one, "
        "or llm.c's checkpoint of a GPT-2.",
        "myllm import SmolLM2-135M -o smollm && myllm generate smollm --prompt Hello",
    )
    args.add_argument(
        "source", metavar="SOURCE", help="a folder with a config.json, FILE.gguf or FILE.bin"
    )
    args.add_argument("-o", "--out", metavar="CHECKPOINT", required=True, help="a new folder")
    args.add_argument("--without-tokenizer", action="store_true", help="import the weights alone")
    given = args.parse_args(argv)
    source, out = Path(given.source), Path(given.out)
    suffix = source.suffix.lower()
    if not source.exists():
        raise FileNotFoundError(f"there is no {source}")
    if source.is_file() and suffix not in READERS:
        raise ValueError(
            f"{source} is no FILE.gguf or FILE.bin; of Hugging Face's, give the folder"
        )
    keep_memory()
    started = time.perf_counter()
    reader = huggingface.read if source.is_dir() else READERS[suffix]
    found = reader(source, with_tokenizer=not given.without_tokenizer)
    fill, whole, kinds = parameters(found, source)
    write_weights(out, found.config, fill, found.tokenizer, whole, kinds)
    weights = Weights(out)
    print(
        f"{source} -> {out}: {found.family.name}, {weights.layout.size:,} parameters in "
        f"{duration(time.perf_counter() - started)}"
    )
    if found.tokenizer is None:
        print("without a tokenizer: the model can be trained, but reads and writes no text")
    elif found.tokenizer.loss:
        print(found.tokenizer.loss)
    for note in found.notes:
        print(note)
    return 0
