"""What is fuzzed: every kind of file, setting and number that the commands take."""

import gzip
import hashlib
import json
import random
import tomllib
from collections.abc import Callable
from typing import Any

from dist import config as run_file
from tests.fuzz import mutate
from tests.fuzz.world import RUN, TEXT, Input, World
from tokenizer import fileformat

Kind = Callable[[random.Random, World], Input]

CHECK, TRAIN = ["pack", "--check", "data/train"], ["train", "run.toml"]
ANEW = [*TRAIN, "--set", "run.out=new"]
EVAL = ["eval", "run", "--windows", "1", "--backend", "reference"]
GENERATE = ["generate", "run", "--backend", "reference", "--tokens", "2", "--prompt", "a"]
SCORE = ["score", "run", "the fox", "--backend", "reference"]
INSPECT = ["inspect", "run", "-o", "new.html", "--text"]
PACK = "pack in.jsonl --tokenizer t.tok -o new --processes 1".split()


def small(tables: Any) -> bool:
    """Whether a run may be tried, which ends soon: large ones and cold kernels are no fault."""
    try:
        run = run_file.from_tables(tables)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return True  # ends before it starts, one way or the other
    model = run.model
    sizes = (model.vocab_size, model.d_model, model.d_ff, model.context_length)
    if run.run.backend == "cpu":
        return False
    heads = (model.n_heads, model.n_kv_heads, model.d_head, model.n_layers)
    return max(sizes) <= 4000 and max(heads) <= 64 and run.steps * run.train.global_batch <= 64


def run_files(rng: random.Random, world: World) -> Input:
    """Mutated run files, planned and, if small, trained."""
    tables = json.loads(json.dumps(RUN))
    tables["run"]["out"] = "new"
    if rng.random() < 0.2:
        del tables["data"]["train"], tables["train"]["steps"]
        tables["data"]["phases"] = [{"tokens": 60, "sources": [{"path": "data/train"}]}]
    tables = mutate.tree(rng, tables)
    text = mutate.toml(tables).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        text = mutate.data(rng, text)
    elif rng.random() < 0.03:
        text = f"x = {rng.choice(mutate.DEEP)}".encode()
    try:
        read: Any = tomllib.loads(text.decode())
    except (ValueError, RecursionError):
        read = None
    commands = [["plan", "run.toml"], *([TRAIN] if small(read) else [])]
    return Input("run_files", {"run.toml": text}, commands)


def settings(rng: random.Random, world: World) -> Input:
    """``--set`` with keys and values of all sorts."""
    tables = json.loads(json.dumps(RUN))
    keys = [f"{table}.{key}" for table, keys in RUN.items() for key in keys]
    keys += ["optim.clip", "optim.beta1", "optim.eps", "run.keep", "run.patience", "run.compute"]
    keys += ["model.window", "model.rope_base", "model.norm_eps", "model.position", "data.phases"]
    keys += [
        "train.schedule",
        "train.init",
        "train.decay_steps",
        "train.final_fraction",
        "train.seed",
        "x",
        ".",
    ]
    words = []
    for _ in range(rng.choice([1, 1, 2])):
        key = rng.choice(keys)
        junk = rng.choice(mutate.JUNK)
        value = mutate.toml_value(junk) if rng.random() < 0.7 else f"{junk}"
        if rng.random() < 0.02:
            value = rng.choice(mutate.DEEP)[:20_000]
        words.append(f"--set={key}{rng.choice(['=', '=', '=', '', '=='])}{value}")
        table, _, name = key.partition(".")
        tables.setdefault(table, {})
        try:
            tables[table][name] = tomllib.loads(f"x = {value}")["x"]
        except (ValueError, RecursionError):
            tables[table][name] = value
    words = [word.replace("\0", "") for word in words]
    commands = [["plan", "run.toml", *words], *([[*ANEW, *words]] if small(tables) else [])]
    return Input("settings", {}, commands)


def sealed(tree: Any) -> Any:
    """Return a manifest with the checksum that it ought to have."""
    if isinstance(tree, dict) and "checksum" in tree:
        from dist import manifest

        try:
            tree["checksum"] = manifest._checksum(tree)
        except (TypeError, ValueError, OverflowError, RecursionError):
            pass  # msgspec knows no such number
    return tree


def _manifest(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.6:
        return mutate.dumped(sealed(mutate.tree(rng, json.loads(data))))
    return mutate.json_text(rng, json.loads(data))


def shard_manifests(rng: random.Random, world: World) -> Input:
    """The manifest of a packed folder."""
    name = rng.choice(["data/train/manifest.json", "data/heldout/manifest.json"])
    commands = rng.choice([[CHECK, ANEW], [ANEW], [EVAL], [TRAIN]])
    return Input("shard_manifests", {name: _manifest(rng, world.read(name))}, commands)


def shards(rng: random.Random, world: World) -> Input:
    """Headers and tokens of shards."""
    name = rng.choice(world.files("data/*/*.bin"))
    whole = bytearray(world.read(name))
    how = rng.random()
    if how < 0.5:
        at = 4 * rng.choice([0, 1, 2, 2, 3, 255])
        number = rng.choice([0, -1, 1, 2**31 - 1, -(2**31), 20240520, 20240801, len(whole) // 2])
        whole[at : at + 4] = number.to_bytes(4, "little", signed=True)
    elif how < 0.7:
        whole = bytearray(mutate.data(rng, bytes(whole[:1024])) + whole[1024:])
    else:
        whole = bytearray(mutate.data(rng, bytes(whole)))
    bare = [*ANEW, "--set", f"data.train={name}"]
    commands = [rng.choice([CHECK, ANEW, bare, EVAL])]
    return Input("shards", {name: bytes(whole)}, commands)


def checkpoints(rng: random.Random, world: World) -> Input:
    """Manifests and arrays of checkpoints."""
    name = rng.choice(world.files("run/checkpoints/step-*/*"))
    data = world.read(name)
    data = _manifest(rng, data) if name.endswith(".json") else mutate.data(rng, data)
    uses = [TRAIN, [*TRAIN, "--changed"], EVAL, GENERATE, SCORE, [*INSPECT, "the fox"]]
    uses += [[*ANEW, "--set", "train.init=run"]]
    uses += [["export", "run", out] for out in ("new", "new.gguf")]
    return Input("checkpoints", {name: data}, [rng.choice(uses)])


def imports(rng: random.Random, world: World) -> Input:
    """What an imported checkpoint keeps."""
    name = rng.choice(["kept/manifest.json"] * 2 + ["kept/kept.bin"])
    data = world.read(name)
    if name.endswith(".bin"):
        data = mutate.data(rng, data)
    elif rng.random() < 0.5:
        tree = json.loads(data)
        kinds = tree["kinds"]
        for parameter in rng.sample([*kinds, "final_norm.gain", "none"], 2):
            kinds[parameter] = rng.choice(["F32", "F16", "BF16", "Q8_0", "Q8_0T", "Q4_0", ""])
        data = mutate.dumped(sealed(tree))
    else:
        data = _manifest(rng, data)
    uses = [["generate", "kept", *GENERATE[2:]], ["score", "kept", *SCORE[2:]]]
    uses += [[*ANEW, "--set", "train.init=kept"]]
    uses += [["export", "kept", out] for out in ("new", "new.gguf")]
    return Input("imports", {name: data}, [rng.choice(uses)])


def folders(rng: random.Random, world: World) -> Input:
    """Hugging Face's folder of a model."""
    name = rng.choice(["config.json"] * 3 + ["model.safetensors"] * 3 + ["tokenizer.json"])
    whole = world.read(f"hf/{name}")
    if name == "model.safetensors":
        end = 8 + int.from_bytes(whole[:8], "little")
        header, tensors = whole[8:end], whole[end:]
        if rng.random() < 0.7:
            header = mutate.json_text(rng, json.loads(header))
            whole = len(header).to_bytes(8, "little") + header + tensors
        else:
            whole = mutate.data(rng, whole[: end + 200]) + whole[end + 200 :]
    else:
        whole = mutate.json_text(rng, json.loads(whole))
    files = {f"hf/{name}": whole}
    if rng.random() < 0.1:
        index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
        files = {"hf/model.safetensors.index.json": mutate.json_text(rng, index)}
    use = [["generate", "new", *GENERATE[2:]]]
    return Input("folders", files, [["import", "hf", "-o", "new"], *use])


def ggufs(rng: random.Random, world: World) -> Input:
    """Metadata, places and tensors of GGUF files."""
    name = rng.choice(["m.gguf", "m.gguf", "g.gguf"])
    whole = bytearray(world.read(name))
    if rng.random() < 0.5:  # a number, wherever it may lie
        at = rng.randrange(4, min(len(whole) - 8, 12_000 if rng.random() < 0.5 else 400))
        number = rng.choice([0, 1, 2, 7, 8, 9, 255, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 64) - 1])
        width = rng.choice([1, 4, 8])
        whole[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    else:
        cut = rng.choice([200, 2000, 12_000, len(whole)])
        whole = bytearray(mutate.data(rng, bytes(whole[:cut]))) + whole[cut:]
    extra = rng.choice([[], [], ["--without-tokenizer"]])
    return Input("ggufs", {name: bytes(whole)}, [["import", name, "-o", "new", *extra]])


def llm_c(rng: random.Random, world: World) -> Input:
    """llm.c's checkpoints."""
    whole = bytearray(world.read("g.bin"))
    at = 4 * rng.randrange(9)
    number = rng.choice([0, -1, 1, 3, 5, 33, 128, 2**20, 2**31 - 1, -(2**31)])
    whole[at : at + 4] = number.to_bytes(4, "little", signed=True)
    if rng.random() < 0.4:
        whole = bytearray(mutate.data(rng, bytes(whole)))
    return Input("llm_c", {"g.bin": bytes(whole)}, [["import", "g.bin", "-o", "new"]])


def pointers(rng: random.Random, world: World) -> Input:
    """``latest`` and ``best``, and the resolved run file."""
    name = rng.choice(["latest", "best"])
    texts = ["step-00000001", "step-00000002\n", "step-00000002/../step-00000001", "step-00000099"]
    data = rng.choice([*texts, *map(str, mutate.TEXTS)]).encode("utf-8", "surrogatepass")
    if rng.random() < 0.4:
        data = mutate.data(rng, data)
    files = {f"run/checkpoints/{name}": data}
    if rng.random() < 0.2:
        files = {"run/config.toml": mutate.data(rng, world.read("run/config.toml"))}
    return Input("pointers", files, [rng.choice([TRAIN, EVAL, GENERATE])])


def journals(rng: random.Random, world: World) -> Input:
    """The journal of a packing that was interrupted."""
    data = _manifest(rng, world.read("half/journal.json"))
    command = "pack in.jsonl --tokenizer t.tok -o half --heldout 0.3 --processes 1".split()
    return Input("journals", {"half/journal.json": data}, [command])


def metrics(rng: random.Random, world: World) -> Input:
    """The log of a run."""
    lines = [json.loads(line) for line in world.read("run/metrics.jsonl").splitlines()]
    written = [
        mutate.dumped(mutate.tree(rng, x)) if rng.random() < 0.5 else mutate.dumped(x)
        for x in lines
    ]
    data = b"\n".join(written) + b"\n"
    if rng.random() < 0.3:
        data = mutate.data(rng, data)
    elif rng.random() < 0.03:
        data = rng.choice(mutate.DEEP).encode() + b"\n" + data
    plot = ["plot", "run", "-o", "p.svg"]
    commands = [plot if rng.random() < 0.3 else [*TRAIN, "--set", "train.steps=3", "--changed"]]
    return Input("metrics", {"run/metrics.jsonl": data}, commands)


def tokenizers(rng: random.Random, world: World) -> Input:
    """Our tokenizer file, most times with a right hash at its end."""
    whole = world.read("t.tok")
    name, header, sections = whole[:-32].split(b"\n", 2)
    how = rng.random()
    if how < 0.5:
        header = mutate.json_text(rng, json.loads(header)).replace(b"\n", b" ")
    elif how < 0.8:
        sections = mutate.data(rng, sections)
    body = b"\n".join([name, header, sections])
    if how >= 0.8:
        body = mutate.data(rng, body)
    seal = hashlib.sha256(body).digest() if rng.random() < 0.95 else whole[-32:]
    command = rng.choice(
        [
            ["tokenizer", "info", "t.tok", "in.txt"],
            ["tokenizer", "encode", "t.tok", "--text", "Hello wörld 123 <|eos|>"],
            ["tokenizer", "export", "t.tok", "-o", rng.choice(["new.json", "new.tiktoken"])],
            PACK,
        ]
    )
    assert (fileformat.PLAIN, fileformat.NFC) == (b"1", b"2")
    return Input("tokenizers", {"t.tok": body + seal}, [command])


def huggingface(rng: random.Random, world: World) -> Input:
    """Hugging Face's tokenizer.json."""
    tree = json.loads(world.read("hf.json"))
    if rng.random() < 0.3:
        spelled = rng.choice(list(tree["model"]["vocab"]))
        tree["model"]["vocab"][spelled] = rng.choice(mutate.JUNK)
        data = mutate.dumped(tree)
    elif rng.random() < 0.4:
        part = rng.choice(["pre_tokenizer", "added_tokens", "normalizer", "decoder"])
        tree[part] = mutate.tree(rng, [tree[part]])
        tree[part] = tree[part][0] if isinstance(tree[part], list) and tree[part] else tree[part]
        data = mutate.dumped(tree)
    else:
        data = mutate.json_text(rng, tree)
    commands = ["tokenizer import hf.json -o new.tok".split()]
    commands += ["tokenizer encode new.tok --text Hello!".split()]
    return Input("huggingface", {"hf.json": data}, commands)


def tiktokens(rng: random.Random, world: World) -> Input:
    """OpenAI's ranks."""
    data = mutate.data(rng, world.read("t.tiktoken"))
    special = f"--special={rng.choice(mutate.TEXTS)}={mutate.word(rng)}".replace("\0", "")
    extra = [special] if rng.random() < 0.3 else []
    commands = [["tokenizer", "import", "t.tiktoken", "-o", "new.tok", *extra]]
    commands += ["tokenizer export new.tok -o new.json".split()]
    return Input("tiktokens", {"t.tiktoken": data}, commands)


def _text(rng: random.Random) -> str:
    if rng.random() < 0.4:
        points = [rng.randrange(128), rng.randrange(0x300), rng.randrange(0x110000), 0xD800]
        return "".join(chr(rng.choice(points)) for _ in range(rng.randrange(40)))
    texts = ["\udfff\ud800", "\n\n", "<|eos|>", "<|pad|><|user|>", " " * 3000, "e\u0301" * 500]
    return str(rng.choice([*texts, *mutate.TEXTS, TEXT]))


def _record(rng: random.Random, depth: int = 0) -> Any:
    how = rng.random()
    if depth > 3 or how < 0.2:
        return rng.choice([*mutate.JUNK, _text(rng)])
    if how < 0.5:
        return {"text": rng.choice([_text(rng), _record(rng, depth + 1)])}
    if how < 0.65:
        return {key: _record(rng, 4) for key in ("prompt", "completion")}
    roles = ["user", "assistant", "system", "x", None, 1]
    return {
        "messages": [
            {
                "role": rng.choice(roles),
                "content": rng.choice([_text(rng), _record(rng, depth + 1)]),
            }
            for _ in range(rng.randrange(4))
        ]
    }


def json_lines(rng: random.Random, world: World) -> Input:
    """Lines of JSON, also packed, also under another name."""
    lines = []
    for _ in range(rng.randrange(1, 6)):
        line = json.dumps(_record(rng), ensure_ascii=rng.random() < 0.5)
        data = line.encode("utf-8", "surrogatepass")
        how = rng.random()
        if how < 0.2:
            data = mutate.data(rng, data)
        elif how > 0.97:
            data = rng.choice(mutate.DEEP).encode()
        elif how > 0.94:
            data = b'{"text": ' + b"9" * 6000 + b"}"
        lines.append(data)
    data = rng.choice([b"\n", b"\r\n", b"\n\n"]).join(lines) + rng.choice([b"", b"\n"])
    ending = rng.choice(["jsonl"] * 6 + ["jsonl.gz", "txt.gz", "jsonl.zst", "parquet", "txt"])
    if ending.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
        data = mutate.data(rng, data) if rng.random() < 0.5 else data
    elif rng.random() < 0.05:
        data = data.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-8-sig"]))
    name = f"new.{ending}"
    options = [*rng.choice([[], ["--skip-bad-lines"]]), *rng.choice([[], ["--field", "x"]])]
    packing = ["pack", name, *PACK[2:], "--heldout", rng.choice(["0", "0.5"]), *options]
    packing += rng.choice([[], ["--bos"], ["--layout", "truncate", "--window", "8"]])
    packing += rng.choice([[], [], ["--shard-tokens", "8"]])
    training = ["tokenizer", "train", name, "--vocab-size", "280", "-o", "new.tok", *options]
    encoding = ["tokenizer", "encode", "t.tok", name, *options]
    check = ["pack", "--check", "new/train"]
    commands = rng.choice([[packing, check], [packing, check], [training], [encoding]])
    return Input("json_lines", {name: data}, commands)


ROWS: list[dict[str, Any]] = [  # a question of each form
    {"context": "2 and 2 make", "choices": [" four", " five"], "answer": 0},
    {"ctx": "the fox", "endings": ["jumps", "is lazy"], "label": "1"},
    {
        "question": "Who?",
        "choices": {"text": ["fox", "dog"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    {"question": {"stem": "Who?", "choices": [{"text": "x", "label": "1"}]}, "answerKey": "1"},
    {"goal": "jump", "sol1": "over", "sol2": "under", "label": 0},
]


def tasks(rng: random.Random, world: World) -> Input:
    """Questions with choices, of every form."""
    rows = [rng.choice(ROWS) for _ in range(rng.randrange(1, 4))]
    rows[-1] = (
        {**rows[-1], rng.choice(list(rows[-1])): _text(rng)} if rng.random() < 0.2 else rows[-1]
    )
    data = b"\n".join([*(mutate.dumped(row) for row in rows[:-1]), mutate.json_text(rng, rows[-1])])
    limit = ["--limit", mutate.word(rng)] if rng.random() < 0.2 else []
    return Input("tasks", {"q.jsonl": data}, [[*EVAL, "--tasks", "q.jsonl", *limit]])


def texts(rng: random.Random, world: World) -> Input:
    """What a trained model is asked to read, and the names of new tokens."""
    text = _text(rng).replace("\0", "")
    names = [f"--special={_text(rng)}".replace("\0", "") for _ in range(rng.randrange(3))]
    extend = ["tokenizer", "extend", "t.tok", "-o", "new.tok", *names]
    uses = [[[*SCORE[:2], text, *SCORE[3:]]], [[*INSPECT, text]]]
    encode = ["tokenizer", "encode", "new.tok", f"--text={text}"]
    return Input("texts", {}, rng.choice([*uses, [extend, encode]]))


def archives(rng: random.Random, world: World) -> Input:
    """Packed texts and columns, which libraries read."""
    name = rng.choice(world.files("in.*.gz") + world.files("in.*.zst") + world.files("in.parquet"))
    command = rng.choice([["pack", name, *PACK[2:]], ["tokenizer", "info", "t.tok", name]])
    return Input("archives", {name: mutate.data(rng, world.read(name))}, [command])


def prompts(rng: random.Random, world: World) -> Input:
    """Prompts, and the numbers that choose what is written."""
    words = [*GENERATE[:4], f"--prompt={_text(rng)}".replace("\0", "")]
    for option, likely in (
        ("tokens", 0.3),
        ("temperature", 0.4),
        ("top-k", 0.3),
        ("top-p", 0.3),
        ("seed", 0.3),
    ):
        value = mutate.word(rng)
        many = option == "tokens" and value.isdigit() and float(value) > 1000  # asked, and written
        if rng.random() < likely and not many:
            words.append(f"--{option}={value}")
    return Input("prompts", {}, [[*words, *rng.choice([[], ["--chat"]])]])


# a command, and the option that takes a number; none of these starts ranks or processes
_NUMBERS = [
    ("tokenizer train in.txt -o new.tok", "vocab-size"),
    ("tokenizer train in.txt -o new.tok --vocab-size 280", "min-count"),
    ("tokenizer train in.txt -o new.tok --vocab-size 280", "threads"),
    ("tokenizer info t.tok in.txt", "longest"),
    ("tokenizer compare in.txt --vocab-size 290", "limit"),
    ("pack in.jsonl --tokenizer t.tok -o new --processes 1", "heldout"),
    ("pack in.jsonl --tokenizer t.tok -o new --processes 1", "shard-tokens"),
    ("pack in.jsonl --tokenizer t.tok -o new --processes 1 --layout truncate", "window"),
    ("eval run --backend reference", "windows"),
    ("plan run.toml", "ranks"),
    ("train run.toml --set", "train.steps"),
]


def numbers(rng: random.Random, world: World) -> Input:
    """Numbers on command lines and in the environment."""
    words, option = rng.choice(_NUMBERS)
    number = mutate.word(rng)
    environment = {}
    command = [*words.split(), f"--{option}={number}"]
    if option == "train.steps":
        environment = {"MYLLM_THREADS": number}
        command = ["tokenizer", "train", "in.txt", "-o", "new.tok", "--vocab-size", "280"]
    elif option in ("limit", "shard-tokens") and rng.random() < 0.5:
        command = ["tokenizer", "decode", "t.tok", "ids.txt"]
        return Input("numbers", {"ids.txt": f"5 {number} 6\n".encode()}, [command])
    return Input("numbers", {}, [command], environment)


def regexes(rng: random.Random, world: World) -> Input:
    """Patterns that cut text."""
    parts = [
        r"\p{L}+",
        r"\s",
        "(a|aa)+",
        "(",
        ")",
        "|",
        "$",
        "*",
        "+",
        "?",
        "++",
        "{3,}",
        "[a-",
        "]",
    ]
    parts += [
        r"(?R)",
        r"(?<n>a)",
        r"\g<n>",
        r"(?i:",
        r"\N{x}",
        "{99999999999}",
        r"(?=",
        r"(?<=",
        ".",
    ]
    parts += [
        "a",
        "(.*)*",
        r"\1",
        "(?e)",
        "{e<=3}",
        "\ud800",
        "é",
        "^",
        r"\X",
        r"(?V1)[[a]--[b]]",
        "[^",
    ]
    pattern = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 7)))
    if rng.random() < 0.03:
        pattern = rng.choice(["(", "(?:", "["]) * 3000 + pattern
    files = {
        "new.txt": (rng.choice(["a", "ab", "aé "]) * rng.randrange(60)).encode()
        + b"b"
        + TEXT.encode()
    }
    command = ["tokenizer", "train", "new.txt", "--vocab-size", "280", "-o", "new.tok"]
    commands = [[*command, f"--pattern={pattern}"], "tokenizer encode new.tok in.txt".split()]
    return Input("regexes", files, commands)


def kernel_caches(rng: random.Random, world: World) -> Input:
    """Index and machine code of a compiled kernel."""
    name = rng.choice(world.files("cache/kernels/*/*.nb?"))
    return Input("kernel_caches", {name: mutate.data(rng, world.read(name))}, [["kernel"]])


KINDS: dict[Kind, int] = {  # how often, in parts
    **dict.fromkeys([run_files, settings, tokenizers, huggingface, json_lines], 3),
    **dict.fromkeys([shard_manifests, shards, checkpoints, pointers, journals, prompts], 2),
    **dict.fromkeys([metrics, tiktokens, numbers, regexes, folders, ggufs, tasks, texts], 2),
    **dict.fromkeys([archives, kernel_caches, llm_c, imports], 1),
}


def drawn(rng: random.Random, world: World) -> Input:
    """Return a random input of any kind."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    return kind(rng, world)
